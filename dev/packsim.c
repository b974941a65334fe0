// Simulates the step plan for your documents at any number of ranks, before you rent GPUs: fill,
// splits, padding, steps per epoch, and the imbalance of the ranks' work, against simpler packers.
// Reads document lengths only, no tokens.
//
//   make packsim
//   build/cpu/packsim --train shards --max-seqlen 2048 --micro-batch-tokens 16384 --ranks 1,8,64
//   build/cpu/packsim --lengths web --max-seqlen 8192 --micro-batch-tokens 32768
//
// imbalance  the busiest rank's work in a step over the mean of all ranks. Work is predicted, see
//            --work-cost and dev/calibrate.c; --true-cost shows the loss of a plan by wrong costs.
// planned    the trainer's plan; deterministic: with --deterministic, where each rank has
//            consecutive micro-batches
// arrival    the same documents in arrival order, each to the micro-batch with the most room
// next-fit   documents in arrival order, a new micro-batch when one does not fit, across steps
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../data/base/error.h"
#include "../data/base/memory.h"
#include "../data/base/options.h"
#include "../data/batches/batch.h"
#include "../data/batches/distribute.h"
#include "../data/batches/loader.h"
#include "../data/batches/plan.h"
#include "../data/shards/dataset.h"
#include "lengths.h"

static struct {
    const char *train, *ranks, *work_cost, *true_cost;
    int law, long_docs, max_seqlen, micro_batch_tokens, boundary_token;
    bool boundary_ends;
    int64_t docs, seed, steps, batch_tokens;
    float fill;
} o;

static const Option table[] = {
    OPTION_GROUP("documents"),
    TEXT("train", o.train, NULL, "shards; without them see --lengths"),
    NUMBER("boundary-token", o.boundary_token, "-1", -1, 1 << 30, "as the trainer's"),
    FLAG("boundary-ends", o.boundary_ends, "as the trainer's"),
    CHOICE("lengths", o.law, "r65", LENGTHS_LAWS, "drawn lengths, see lengths.h"),
    NUMBER("docs", o.docs, "400000", 1, 1e9, "how many of them"),
    OPTION_GROUP("plan, as the trainer's"),
    TEXT("ranks", o.ranks, "1,2,4,8,64", "numbers of ranks"),
    NUMBER("max-seqlen", o.max_seqlen, "2048", 1, 1 << 24, "longest segment"),
    NUMBER("micro-batch-tokens", o.micro_batch_tokens, "16384", 1, 1 << 29,
           "capacity of the 1D token buffer"),
    NUMBER("batch-tokens", o.batch_tokens, "0", 0, 1e12,
           "capacity of a step; 0: one micro-batch per rank, for the most ranks"),
    NUMBER("fill", o.fill, "0", 0, 1, "0: 1 for one micro-batch, else 0.97"),
    CHOICE("long-docs", o.long_docs, "split", "split|truncate|drop|error", "longer documents"),
    TEXT("work-cost", o.work_cost, "100:745", "TOKEN:TILE or TOKEN:TILE:SIDE, see calibrate.c"),
    TEXT("true-cost", o.true_cost, NULL,
         "measure the ranks' work by these costs: shows the loss of a plan by others"),
    NUMBER("seed", o.seed, "1", 0, 1e15, "of the order of documents"),
    NUMBER("steps", o.steps, "300", 1, 1e9, "simulated, at most one epoch"),
    OPTION_END,
};

// -------------------------------------------------------------------------------------------------
// Statistics

enum { MAX_ROWS = 16, MAX_RANKS = 1 << 16 };
typedef enum { PLANNED, DETERMINISTIC, ARRIVAL, NEXT_FIT, NUM_PACKERS } Packer;

typedef struct {
    double sum, most;
    int64_t n;
} Spread;

typedef struct {
    int32_t ranks;
    Spread of[NUM_PACKERS];
} Row;

typedef struct {
    int64_t steps, tokens, segments, micros;
} Packed;

static struct {
    Row rows[MAX_ROWS];
    int num_rows;
    Packed plan, next_fit;
    int64_t docs_split, docs_truncated, docs_dropped, tokens_left_out;
    int64_t work[MAX_RANKS];
} sim;

static void observe(Spread *s, double x) {
    s->sum += x;
    if (x > s->most) s->most = x;
    s->n++;
}

static void count_step(Packed *p, int64_t tokens, int64_t segments, int64_t micros) {
    p->steps++;
    p->tokens += tokens;
    p->segments += segments;
    p->micros += micros;
}

static void parse_ranks(void) {
    const char *at = o.ranks;
    while (*at) {
        char *end;
        const long n = strtol(at, &end, 10);
        if (end == at || n < 1 || n > MAX_RANKS || sim.num_rows == MAX_ROWS ||
            (*end && (*end != ',' || !end[1])))
            exit_with(EXIT_USAGE, "for example --ranks 1,2,4,8,64",
                      "--ranks: expected up to 16 numbers from 1 to 65536 with commas");
        sim.rows[sim.num_rows++].ranks = (int32_t)n;
        at = *end ? end + 1 : end;
    }
    if (sim.num_rows == 0)
        exit_with(EXIT_USAGE, "for example --ranks 1,2,4,8,64", "--ranks: none given");
}

// -------------------------------------------------------------------------------------------------
// One step of each packer

// Work by the costs of `s`; the plan may have been made with other costs.
static void weigh(StepPlan *p, const PlanSettings *s) {
    for (int32_t m = 0; m < p->num_micro; m++) {
        p->micro_work[m] = 0;
        for (int64_t i = p->micro_start[m]; i < p->micro_start[m + 1]; i++)
            p->micro_work[m] += plan_work(s, p->segments[i].length);
    }
}

// Micro-batch m to rank m % ranks, as packers without a cost model do.
static double dealt_in_turn(const int64_t *micro_work, int32_t num_micro, int32_t ranks) {
    memset(sim.work, 0, (size_t)ranks * sizeof *sim.work);
    for (int32_t m = 0; m < num_micro; m++) sim.work[m % ranks] += micro_work[m];
    return plan_imbalance(sim.work, ranks);
}

static double dealt_by(const int64_t *micro_work, const int32_t *micros, const int32_t *owner,
                       int32_t num_micro, int32_t ranks) {
    memset(sim.work, 0, (size_t)ranks * sizeof *sim.work);
    for (int32_t i = 0; i < num_micro; i++) sim.work[owner[i]] += micro_work[micros[i]];
    return plan_imbalance(sim.work, ranks);
}

// The plan uses its own costs; `truth` measures the result.
static void observe_planned(StepPlan *p, const PlanSettings *s, const PlanSettings *truth) {
    const size_t micros = (size_t)p->num_micro;
    int32_t *order = (int32_t *)host_calloc(2 * micros, sizeof(int32_t), "micro-batches");
    int32_t *owner = order + micros;
    for (Row *row = sim.rows; row < sim.rows + sim.num_rows; row++) {
        if (row->ranks > p->num_micro) continue;
        weigh(p, s);
        plan_assign_ranks(p, 0, row->ranks, order, owner);
        weigh(p, truth);
        observe(&row->of[PLANNED], dealt_by(p->micro_work, order, owner, p->num_micro, row->ranks));
        plan_rank_work(p, s->num_micro, row->ranks, sim.work);
        observe(&row->of[DETERMINISTIC], plan_imbalance(sim.work, row->ranks));
    }
    free(order);
}

static void step_planned(StepPlan *p, const DocIndex *index, const PlanSettings *s,
                         const PlanSettings *truth, const PlanState *at) {
    Error err = {0};
    must(plan_step(p, index, s, LAYOUT_PACKED, at, &err), &err);
    count_step(&sim.plan, p->real_tokens, p->num_stream, p->num_micro);
    sim.docs_split += p->long_docs.docs_split;
    sim.docs_truncated += p->long_docs.docs_truncated;
    sim.docs_dropped += p->long_docs.docs_dropped;
    sim.tokens_left_out += p->long_docs.tokens_left_out;
    observe_planned(p, s, truth);
}

static void step_arrival(StepPlan *p, const DocIndex *index, const PlanSettings *s,
                         const PlanState *at) {
    Error err = {0};
    PlanSettings no_cost = *s;
    no_cost.work_token = no_cost.work_tile = 0;
    must(plan_step(p, index, &no_cost, LAYOUT_PACKED, at, &err), &err);
    weigh(p, s);
    for (Row *row = sim.rows; row < sim.rows + sim.num_rows; row++)
        if (row->ranks <= p->num_micro)
            observe(&row->of[ARRIVAL], dealt_in_turn(p->micro_work, p->num_micro, row->ranks));
}

// Fills num_micro micro-batches from *at on; a document that does not fit into the last starts the
// next step.
static void step_next_fit(int64_t *micro_work, const DocIndex *index, const PlanSettings *s,
                          PlanState *at) {
    Error err = {0};
    LongCounts counts;
    memset(&counts, 0, sizeof counts);
    int64_t tokens = 0, segments = 0, left = 0;
    int32_t num_micro = 0;
    for (;;) {
        PlanState after = *at;
        Segment segment = {0};
        must(plan_next_segment(index, s, &after, &segment, &counts, &err), &err);
        if (segment.length > left) {
            if (num_micro == s->num_micro) break;
            micro_work[num_micro++] = 0;
            left = s->micro_batch_tokens;
        }
        left -= segment.length;
        micro_work[num_micro - 1] += plan_work(s, segment.length);
        tokens += segment.length;
        segments++;
        *at = after;
    }
    count_step(&sim.next_fit, tokens, segments, num_micro);
    for (Row *row = sim.rows; row < sim.rows + sim.num_rows; row++)
        if (row->ranks <= num_micro)
            observe(&row->of[NEXT_FIT], dealt_in_turn(micro_work, num_micro, row->ranks));
}

// -------------------------------------------------------------------------------------------------
// The simulation

static void parse_cost(const char *text, PlanSettings *s) {
    Error err = {0};
    if (!plan_work_cost_parse(text, s) || s->work_token == 0)
        exit_with(EXIT_USAGE, "for example --work-cost 100:745",
                  "costs: expected TOKEN:TILE or TOKEN:TILE:SIDE, the first not 0");
    must(plan_settings_check(s, &err), &err);
}

static PlanSettings make_settings(void) {
    PlanSettings s = plan_settings();
    int32_t most = 1;
    for (int i = 0; i < sim.num_rows; i++)
        if (sim.rows[i].ranks > most) most = sim.rows[i].ranks;
    if (o.batch_tokens % o.micro_batch_tokens != 0)
        exit_with(EXIT_USAGE, "", "--batch-tokens: expected a multiple of --micro-batch-tokens");
    s.seed = (uint64_t)o.seed;
    s.max_seqlen = o.max_seqlen;
    s.micro_batch_tokens = o.micro_batch_tokens;
    s.num_micro = o.batch_tokens ? (int32_t)(o.batch_tokens / o.micro_batch_tokens) : most;
    const float fill = o.fill > 0 ? o.fill : s.num_micro == 1 ? 1 : 0.97f;
    s.fill_ppm = (int32_t)lrintf(fill * 1e6f);
    s.long_docs = (LongDocs)o.long_docs;
    parse_cost(o.work_cost, &s);
    return s;
}

static double simulate(const DocIndex *index, const PlanSettings *s, const PlanSettings *truth) {
    PlanState at = {0, 0, 0, 0}, next_fit_at = at;
    StepPlan plan, arrival;
    memset(&plan, 0, sizeof plan);
    memset(&arrival, 0, sizeof arrival);
    int64_t *work = (int64_t *)host_calloc((size_t)s->num_micro, sizeof(int64_t), "micro-batches");
    while (at.epoch == 0 && sim.plan.steps < o.steps) {
        step_planned(&plan, index, s, truth, &at);
        step_arrival(&arrival, index, truth, &at);
        step_next_fit(work, index, truth, &next_fit_at);
        at = plan.cursor_after;
    }
    free(work);
    plan_free(&plan);
    plan_free(&arrival);
    return (double)at.epoch + (double)at.doc_pos / (double)index->num_docs;
}

static void print_documents(const DocIndex *index) {
    int64_t tokens = 0, longest = 0, num_long = 0, beyond = 0;
    for (int64_t i = 0; i < index->num_docs; i++) {
        const int64_t length = index->length(index->context, i);
        tokens += length;
        if (length > longest) longest = length;
        if (length <= o.max_seqlen) continue;
        num_long++;
        beyond += length - o.max_seqlen;
    }
    printf("documents  %lld, %lld tokens, mean %.0f, longest %lld\n", (long long)index->num_docs,
           (long long)tokens, (double)tokens / (double)index->num_docs, (long long)longest);
    printf(
        "longer     %.3f %% of the documents than %d tokens, with %.3f %% of all tokens beyond\n",
        100.0 * (double)num_long / (double)index->num_docs, o.max_seqlen,
        100.0 * (double)beyond / (double)tokens);
}

static double fill_of(const Packed *p) {
    return 100.0 * (double)p->tokens / ((double)p->micros * o.micro_batch_tokens);
}

static void print_plan(const PlanSettings *s, double epochs) {
    const double padded = (double)sim.plan.segments * s->max_seqlen;
    printf("plan       %d micro-batches of %d tokens a step, segments up to %d, work %d:%d:%d\n",
           s->num_micro, s->micro_batch_tokens, s->max_seqlen, s->work_token, s->work_tile,
           s->work_side);
    printf("simulated  %lld steps; an epoch has %.1f\n", (long long)sim.plan.steps,
           (double)sim.plan.steps / epochs);
    printf("long       %lld documents split, %lld truncated, %lld dropped, %lld tokens left out\n",
           (long long)sim.docs_split, (long long)sim.docs_truncated, (long long)sim.docs_dropped,
           (long long)sim.tokens_left_out);
    printf("fill       planned %.1f %%, next-fit %.1f %%\n", fill_of(&sim.plan),
           fill_of(&sim.next_fit));
    printf("padding    none; in padded rows of %d tokens %.1f %%\n", s->max_seqlen,
           100.0 * (1 - (double)sim.plan.tokens / padded));
}

static void print_imbalance(const PlanSettings *s) {
    printf("\nimbalance: work of the busiest rank over the mean; mean over steps / worst step\n");
    printf(
        "  ranks    micro-batches/rank        planned  deterministic        arrival"
        "       next-fit\n");
    for (const Row *row = sim.rows; row < sim.rows + sim.num_rows; row++) {
        printf("%7d  %20.2f", row->ranks, (double)s->num_micro / row->ranks);
        if (row->ranks > s->num_micro) {
            printf("  more ranks than micro-batches: raise --batch-tokens\n");
            continue;
        }
        for (int k = 0; k < NUM_PACKERS; k++)
            printf("  %6.4f/%6.4f", row->of[k].sum / (double)row->of[k].n, row->of[k].most);
        printf("\n");
    }
}

int main(int argc, char **argv) {
    Error err = {0};
    Dataset shards;
    DocLengths drawn = {NULL, 0};
    options_parse_or_exit(table, argc, argv, "build/cpu/packsim [options]");
    parse_ranks();
    const PlanSettings s = make_settings();
    PlanSettings truth = s;
    if (o.true_cost) parse_cost(o.true_cost, &truth);
    DocIndex index;
    if (o.train) {
        DatasetOptions options = dataset_options();
        options.boundary_token = o.boundary_token;
        options.boundary_ends = o.boundary_ends;
        must(dataset_open(&shards, o.train, &options, &err), &err);
        index = dataset_doc_index(&shards);
    } else {
        drawn = lengths_draw((LengthsLaw)o.law, o.docs, (uint64_t)o.seed);
        index = lengths_index(&drawn);
    }
    print_documents(&index);
    const double epochs = simulate(&index, &s, &truth);
    print_plan(&s, epochs);
    print_imbalance(&s);
    if (o.train) dataset_close(&shards);
    free(drawn.lengths);
    return EXIT_DONE;
}
