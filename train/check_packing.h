// --check-packing: the documents of one micro-batch, packed and each alone.
#ifndef UNPAD_CHECK_PACKING_H
#define UNPAD_CHECK_PACKING_H

#include "../data/loader.h"  // defines: Loader's settings, Dataset, Batch
#include "../llama.h"        // defines: LlamaModel

typedef struct {
    double max_loss, max_logit, max_grad, grad_error2, grad_norm2;
} PackingDelta;

// Loss of every row and logits of every row into host buffers, for one batch.
static inline void forward_to_host(LlamaModel *m, const Batch *b, float *losses, float *logits) {
    const int64_t T = b->total_tokens, V = m->config.vocab_size;
    llama_set_batch(m, b);
    llama_forward(m);
    int32_t *rows = (int32_t *)host_calloc((size_t)m->head_chunk, sizeof(int32_t), "rows");
    for (int64_t t = 0; t < T; t += m->head_chunk) {
        int32_t n = (int32_t)(T - t < m->head_chunk ? T - t : m->head_chunk);
        for (int32_t i = 0; i < n; i++) rows[i] = (int32_t)t + i;
        llama_logits(m, logits + t * V, rows, n);
    }
    free(rows);
    llama_head_eval(m);
    device_download(losses, m->scratch.losses, (size_t)T * sizeof(real));
}

static inline void add_gradients(LlamaModel *m, const Batch *b) {
    llama_set_batch(m, b);
    llama_forward(m);
    llama_head_train(m);
    llama_backward(m);
}

// A NaN counts as infinite, fmax would drop it.
static inline double larger_difference(double so_far, double difference) {
    return isnan(difference) ? INFINITY : fmax(so_far, fabs(difference));
}

static inline double max_difference(const float *a, const float *b, int64_t n, double so_far) {
    for (int64_t i = 0; i < n; i++)
        so_far = larger_difference(so_far, (double)a[i] - (double)b[i]);
    return so_far;
}

// Document d of the packed batch as a batch of its own.
static inline void batch_alone(Batch *alone, const Batch *packed, int d) {
    int32_t first = packed->cu_seqlens[d], n = packed->cu_seqlens[d + 1] - first;
    DocView doc = {packed->tokens + first, n, n ? packed->targets[first + n - 1] : -1};
    batch_pack(alone, &doc, 1);
}

static inline PackingDelta packing_delta(LlamaModel *m, const Batch *packed) {
    const size_t T = (size_t)packed->total_tokens, V = (size_t)m->config.vocab_size,
                 n = m->num_elements;
    float *logits = (float *)host_calloc(2 * T * V, sizeof(float), "logits"),
          *logits_alone = logits + T * V;
    float *losses = (float *)host_calloc(2 * T, sizeof(float), "losses"),
          *losses_alone = losses + T;
    real *grads = (real *)host_calloc(2 * n, sizeof(real), "gradients"), *grads_alone = grads + n;
    Batch alone;
    PackingDelta delta = {0, 0, 0, 0, 0};
    batch_init(&alone, packed->total_tokens, 1);
    forward_to_host(m, packed, losses, logits);
    llama_zero_grads(m, packed->num_targets);
    add_gradients(m, packed);
    device_download(grads, m->grads, n * sizeof(real));
    llama_zero_grads(m, packed->num_targets);
    for (int d = 0; d < packed->num_docs; d++) {
        int64_t first = packed->cu_seqlens[d], rows = packed->cu_seqlens[d + 1] - first;
        if (rows == 0) continue;
        batch_alone(&alone, packed, d);
        forward_to_host(m, &alone, losses_alone, logits_alone);
        delta.max_loss = max_difference(losses + first, losses_alone, rows, delta.max_loss);
        delta.max_logit = max_difference(logits + first * (int64_t)V, logits_alone,
                                         rows * (int64_t)V, delta.max_logit);
        add_gradients(m, &alone);
    }
    device_download(grads_alone, m->grads, n * sizeof(real));
    for (size_t i = 0; i < n; i++) {
        double difference = (double)grads[i] - (double)grads_alone[i];
        delta.max_grad = larger_difference(delta.max_grad, difference);
        delta.grad_error2 += difference * difference;
        delta.grad_norm2 += (double)grads_alone[i] * (double)grads_alone[i];
    }
    batch_free(&alone);
    free(logits);
    free(losses);
    free(grads);
    return delta;
}

static inline double packing_grad_error(const PackingDelta *d) {
    return sqrt(d->grad_error2 / (d->grad_norm2 > 0 ? d->grad_norm2 : 1));
}

// Losses and logits must agree to rounding of one row's sums, gradients to that of a sum over T
// rows. In bf16 a matmul of another T may add in another order, and every layer rounds to 2^-9.
static inline bool packing_is_rounding(const PackingDelta *d) {
    const bool bf16 = sizeof(floatX) == 2;
    const double row_bound = bf16 ? 0x1p-4 : 1e-4, grad_bound = bf16 ? 0x1p-5 : 1e-5;
    return d->max_loss <= row_bound && d->max_logit <= row_bound &&
           packing_grad_error(d) <= grad_bound;
}

static inline bool check_packing(LlamaModel *m, Dataset *dataset, LoaderSettings settings) {
    Error err = {0, "", ""};
    StepData data;
    PlanState start = {0, 0, 0, 0};
    memset(&data, 0, sizeof data);
    settings.layout = LAYOUT_PACKED;
    must(loader_load_step(&data, dataset, &settings, start, &err), &err);
    const Batch *b = &data.micro[0];
    PackingDelta d = packing_delta(m, b);
    const bool good = packing_is_rounding(&d);
    printf("\n%d documents, %d tokens, packed against each alone:\n", b->num_docs, b->total_tokens);
    printf("  max |delta| of a token's loss  %.3g%s\n", d.max_loss,
           d.max_loss == 0 ? "  (bit for bit)" : "");
    printf("  max |delta| of a logit         %.3g%s\n", d.max_logit,
           d.max_logit == 0 ? "  (bit for bit)" : "");
    printf("  max |delta| of a gradient      %.3g, relative L2 %.3g\n", d.max_grad,
           packing_grad_error(&d));
    printf("%s\n", good ? "packing does not change the result" : "PACKING CHANGES THE RESULT");
    step_data_free(&data);
    return good;
}

#endif
