// --compare: every layout on the same documents, weights and kernels, in one table.
#ifndef UNPAD_COMPARE_H
#define UNPAD_COMPARE_H

#include "step.h"  // defines: train_step, StepData, LlamaModel

typedef struct {
    const LlamaConfig *config;
    Dataset *dataset;
    LoaderSettings loader;  // its layout is each one in turn
    AdamW hyper;            // lr 0: a full step that moves nothing
    float grad_clip;
    int steps;  // timed, after one that is not
    void (*init_weights)(LlamaModel *m);
} Comparison;

static inline int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

typedef struct {
    double median_ms;
    StepScalars scalars;
} TimedSteps;

static inline TimedSteps time_steps(const Comparison *c, LlamaModel *m, const StepData *data) {
    TimedSteps t;
    PassGraph none = {0, 0, false, NULL, 0, 0};
    double *ms = (double *)host_calloc((size_t)c->steps, sizeof(double), "timings");
    t.scalars = train_step(m, data, c->hyper, c->grad_clip, &none);  // warm-up
    for (int i = 0; i < c->steps; i++) {
        const double start_ms = now_ms();
        t.scalars = train_step(m, data, c->hyper, c->grad_clip, &none);
        ms[i] = now_ms() - start_ms;
    }
    qsort(ms, (size_t)c->steps, sizeof(double), compare_doubles);
    t.median_ms = ms[c->steps / 2];
    free(ms);
    return t;
}

static inline void compare_print_row(Layout layout, const LlamaModel *m, const StepData *data,
                                     TimedSteps t, int64_t packed_pairs) {
    const double real_tokens = (double)data->real_tokens;
    const double flops = llama_useful_flops(&m->config, data->real_tokens, packed_pairs);
    printf("%-7s %10.1f %12.0f %9.3f %10.1f %15lld %12.1f %11.6f\n", layout_name(layout),
           t.median_ms, real_tokens / t.median_ms * 1e3, flops / t.median_ms * 1e-9,
           100.0 * (1.0 - real_tokens / (double)data->local_tokens),
           (long long)data->attention_pairs, (double)llama_memory_total(&m->memory) / 1048576.0,
           t.scalars.loss_sum / (double)data->num_targets);
    fflush(stdout);
}

// One row of the table: its own model, sized for this layout's largest micro-batch, so that the
// memory is its own. Returns the attention pairs of the packed layout, which come first.
static inline int64_t compare_layout(const Comparison *c, Layout layout, int64_t packed_pairs) {
    Error err = {0, "", ""};
    LoaderSettings settings = c->loader;
    StepData data;
    PlanState start = {0, 0, 0, 0};
    memset(&data, 0, sizeof data);
    settings.layout = layout;
    must(loader_load_step(&data, c->dataset, &settings, start, &err), &err);
    LlamaSizes sizes = {0, settings.plan.max_seqlen, layout == LAYOUT_REPAD, true, 0, 0};
    for (int i = 0; i < data.num_micro; i++)
        if (data.micro[i].total_tokens > sizes.capacity)
            sizes.capacity = data.micro[i].total_tokens;
    static LlamaModel m;
    llama_plan(&m, c->config, sizes);
    must(llama_allocate(&m, &err), &err);
    c->init_weights(&m);
    const TimedSteps t = time_steps(c, &m, &data);
    if (layout == LAYOUT_PACKED) packed_pairs = data.attention_pairs;
    compare_print_row(layout, &m, &data, t, packed_pairs);
    llama_free(&m);
    step_data_free(&data);
    return packed_pairs;
}

static inline void compare_layouts(const Comparison *c) {
    printf(
        "\nlayout     step ms   real tok/s   TFLOP/s  padding %%  attention pairs   memory MiB"
        "        loss\n");
    int64_t packed_pairs = 0;
    for (int layout = LAYOUT_PACKED; layout <= LAYOUT_REPAD; layout++)
        packed_pairs = compare_layout(c, (Layout)layout, packed_pairs);
    printf(
        "The same documents, weights and kernels in every row; the median of %d steps. TFLOP/s "
        "counts useful work:\n"
        "real tokens, and pairs inside documents. rows differs in loss because there attention "
        "crosses documents.\n",
        c->steps);
}

#endif
