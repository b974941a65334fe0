// Measures the cost of a token and of an attention tile on this machine with this model: the two
// numbers of --work-cost. Times forward and backward of micro-batches of equal documents, from
// short to long, and fits
//
//   time = token * T + tile * sum of n(n+1)/2 + constant        n = ceil(length / side)
//
// by least squares of relative errors, for tiles of several sides: large for a kernel that computes
// whole tiles, small for one that skips masked work. The best fit is then tested on mixes of
// documents that were not fitted.
//
//   make calibrate
//   build/cpu/calibrate --model demo --max-seqlen 2048 --micro-batch-tokens 4096
//
// A time is the minimum of --runs rounds over all micro-batches: other programs only add to it. The
// constant is the fixed cost of a micro-batch; a plan does not need it.
#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>

#include "../data/base/error.h"
#include "../data/base/hash.h"
#include "../data/base/memory.h"
#include "../data/base/options.h"
#include "../data/batches/batch.h"
#include "../data/batches/permute.h"
#include "../data/batches/plan.h"
#include "../data/models/config.h"
#include "../kernels/kernels.h"
#include "../llama.h"
#include "lengths.h"

static struct {
    const char *model;
    int max_seqlen, micro_batch_tokens, runs, threads;
    bool bf16_matmul;
} o;

static const Option table[] = {
    OPTION_GROUP("as the trainer's"),
    TEXT("model", o.model, "demo", "directory with config.json, or a name"),
    NUMBER("max-seqlen", o.max_seqlen, "2048", 128, 1 << 24, "longest document"),
    NUMBER("micro-batch-tokens", o.micro_batch_tokens, "4096", 128, 1 << 29,
           "tokens of the largest micro-batch"),
    NUMBER("threads", o.threads, "0", 0, 4096, "CPU threads of a rank; 0: all cores"),
    FLAG("bf16-matmul", o.bf16_matmul, "CPU: inputs in bf16"),
    OPTION_GROUP("measurement"),
    NUMBER("runs", o.runs, "9", 1, 1000, "rounds over all micro-batches"),
    OPTION_END,
};

// -------------------------------------------------------------------------------------------------
// Micro-batches

enum { MAX_MIXES = 64, MAX_DOCS = 1 << 16 };
enum { NUM_SIDES = 4 };
static const int32_t sides[NUM_SIDES] = {128, 64, 32, 16};

typedef struct {
    char name[32];
    bool fitted;  // false: only predicted
    Batch batch;
    double tokens, tiles[NUM_SIDES];
    double ms;
} Mix;

static Mix mixes[MAX_MIXES];
static int num_mixes;

static double tiles(int64_t length, int64_t tile) {
    const int64_t n = (length + tile - 1) / tile;
    return (double)n * (double)(n + 1) / 2;
}

// Documents of these lengths, as many as fit into `tokens`.
static void add_mix(const char *name, bool fitted, const int32_t *lengths, int n, int64_t tokens,
                    int32_t vocab_size) {
    static DocView docs[MAX_DOCS];
    assert(num_mixes < MAX_MIXES);
    Mix *mix = &mixes[num_mixes++];
    int32_t *ids = (int32_t *)host_calloc((size_t)tokens, sizeof(int32_t), "tokens"), *at = ids;
    int num_docs = 0;
    for (int64_t i = 0; i < tokens; i++)
        ids[i] = (int32_t)(splitmix64((uint64_t)i) % (uint64_t)vocab_size);
    while (num_docs < MAX_DOCS && at - ids + lengths[num_docs % n] <= tokens) {
        const int32_t length = lengths[num_docs % n];
        const DocView doc = {at, length, -1, NULL};
        for (int side = 0; side < NUM_SIDES; side++) mix->tiles[side] += tiles(length, sides[side]);
        docs[num_docs++] = doc;
        at += length;
    }
    snprintf(mix->name, sizeof mix->name, "%s", name);
    mix->fitted = fitted;
    mix->tokens = (double)(at - ids);
    mix->ms = INFINITY;
    batch_init(&mix->batch, (int32_t)tokens, num_docs);
    batch_pack(&mix->batch, docs, num_docs);
    free(ids);
}

static void add_law(const char *name, LengthsLaw law, uint64_t seed, int32_t vocab_size) {
    DocLengths drawn = lengths_draw(law, 4096, seed);
    for (int64_t i = 0; i < drawn.n; i++)
        if (drawn.lengths[i] > o.max_seqlen) drawn.lengths[i] = o.max_seqlen;
    add_mix(name, false, drawn.lengths, (int)drawn.n, o.micro_batch_tokens, vocab_size);
    free(drawn.lengths);
}

// Half as many tokens separate the constant from the cost of a token.
static void make_mixes(int32_t vocab_size) {
    char name[32];
    for (int32_t length = o.max_seqlen; length >= 16; length /= 2)
        for (int half = 1; half <= 2; half++) {
            if (length > o.micro_batch_tokens / half) continue;
            const int32_t n = o.micro_batch_tokens / half / length;
            snprintf(name, sizeof name, "%d x %d", n, length);
            add_mix(name, true, &length, 1, (int64_t)n * length, vocab_size);
        }
    add_law("seed batch", LENGTHS_SEED, 1, vocab_size);
    add_law("r65", LENGTHS_R65, 1, vocab_size);
    add_law("r65, others", LENGTHS_R65, 2, vocab_size);
    add_law("web", LENGTHS_WEB, 3, vocab_size);
    add_law("web, others", LENGTHS_WEB, 4, vocab_size);
}

static void time_mix(LlamaModel *m, Mix *mix) {
    llama_zero_grads(m, mix->batch.num_targets);
    device_timer_start();
    llama_set_batch(m, &mix->batch);
    llama_forward(m);
    llama_head_train(m);
    llama_backward(m);
    device_timer_stop();
    device_synchronize();
    mix->ms = fmin(mix->ms, (double)device_timer_ms());
}

// Times all of them, in another order each round, so that a slow phase of the machine does not
// always hit the same ones. Round -1 warms up.
static void time_round(LlamaModel *m, int round) {
    for (int k = 0; k < num_mixes; k++)
        time_mix(m, &mixes[plan_permute(1, round + 1, num_mixes, k)]);
    for (int k = 0; round < 0 && k < num_mixes; k++) mixes[k].ms = INFINITY;
}

// -------------------------------------------------------------------------------------------------
// Least squares: time = x[0] * column 0 + ..., each row divided by its time

enum { MAX_COLUMNS = 3 };

typedef struct {
    double x[MAX_COLUMNS], rms, worst, r_squared;
} Fit;

// Columns of the rows that are fitted, (num_mixes, n).
static void solve(const double *column, int n, double *x) {
    double a[MAX_COLUMNS][MAX_COLUMNS + 1];
    memset(a, 0, sizeof a);
    for (int k = 0; k < num_mixes; k++)
        for (int i = 0; mixes[k].fitted && i < n; i++) {
            const double weight = 1 / (mixes[k].ms * mixes[k].ms), c = column[k * n + i];
            for (int j = 0; j < n; j++) a[i][j] += weight * c * column[k * n + j];
            a[i][n] += weight * c * mixes[k].ms;
        }
    for (int i = 0; i < n; i++)  // symmetric and positive: no pivots needed
        for (int r = 0; r < n; r++) {
            const double factor = a[r][i] / a[i][i];
            for (int j = i; r != i && j <= n; j++) a[r][j] -= factor * a[i][j];
        }
    for (int i = 0; i < n; i++) x[i] = a[i][n] / a[i][i];
}

static double predict(const double *row, const double *x, int n) {
    double ms = 0;
    for (int i = 0; i < n; i++) ms += x[i] * row[i];
    return ms;
}

// Relative errors, of the fitted rows or of the others.
static void residuals(const double *column, int n, bool fitted, Fit *f) {
    double sum = 0, squares = 0, left = 0, rows = 0;
    f->rms = f->worst = 0;
    for (int k = 0; k < num_mixes; k++) {
        if (mixes[k].fitted != fitted) continue;
        const double ms = mixes[k].ms, off = predict(column + k * n, f->x, n) / ms - 1;
        rows++;
        sum += ms;
        squares += ms * ms;
        left += off * ms * off * ms;
        f->rms += off * off;
        f->worst = fmax(f->worst, fabs(off));
    }
    f->rms = sqrt(f->rms / rows);
    f->r_squared = 1 - left / (squares - sum * sum / rows);
}

static Fit fit(const double *column, int n) {
    Fit f;
    memset(&f, 0, sizeof f);
    solve(column, n, f.x);
    residuals(column, n, true, &f);
    return f;
}

// -------------------------------------------------------------------------------------------------
// Report

static void print_table(const double *column, const Fit *f, int side) {
    printf("\n%-24s %9s %9s %11s %11s %8s\n", "documents", "tokens", "tiles", "measured ms",
           "fit ms", "off");
    for (int k = 0; k < num_mixes; k++) {
        const Mix *mix = &mixes[k];
        if (k > 0 && mixes[k - 1].fitted && !mix->fitted) printf("not part of the fit:\n");
        const double ms = predict(column + k * 3, f->x, 3);
        printf("%-24s %9.0f %9.0f %11.3f %11.3f %+7.1f%%\n", mix->name, mix->tokens,
               mix->tiles[side], mix->ms, ms, 100 * (ms / mix->ms - 1));
    }
}

static void print_errors(const char *name, const double *column, int n, Fit f) {
    printf("%-32s %7.1f %% %7.1f %%", name, 100 * f.rms, 100 * f.worst);
    residuals(column, n, false, &f);
    printf("     %7.1f %% %7.1f %%\n", 100 * f.rms, 100 * f.worst);
}

// The trainer's default: only its unit of time and the constant are fitted.
static void print_default(void) {
    const PlanSettings usual = plan_settings();
    double column[MAX_MIXES * 2];
    char name[32];
    for (int k = 0; k < num_mixes; k++) {
        column[k * 2] = mixes[k].tokens * usual.work_token + mixes[k].tiles[0] * usual.work_tile;
        column[k * 2 + 1] = 1;
    }
    assert(usual.work_side == sides[0]);
    snprintf(name, sizeof name, "default %d:%d:%d", usual.work_token, usual.work_tile,
             usual.work_side);
    print_errors(name, column, 2, fit(column, 2));
}

static void print_result(const Fit *f, int32_t side) {
    enum { TOKEN = 10000 };
    const double token_us = f->x[0] * 1e3, tile_us = f->x[1] * 1e3;
    printf("\ntoken %.4f us, tile %.4f us, micro-batch %.3f ms; R^2 %.5f\n", token_us, tile_us,
           f->x[2], f->r_squared);
    if (!(token_us > 0) || !(tile_us > 0) || tile_us / token_us * TOKEN > PLAN_MAX_WORK)
        exit_with(EXIT_USAGE,
                  "try again on a quiet machine, with more --runs or a larger --max-seqlen",
                  "calibrate: expected times that grow with tokens and tiles, found %.4f us per "
                  "token and %.4f us per tile",
                  token_us, tile_us);
    if (f->rms > 0.05)
        fprintf(stderr,
                "warning: times are off by %.1f %%; on a quiet machine, or with more --runs, the "
                "fit is closer\n",
                100 * f->rms);
    printf("attention costs as much as the linear layers in documents of %.0f tokens\n",
           fmax(2.0 * side * side * token_us / tile_us - side, 1));
    printf("--work-cost %d:%.0f:%d\n", TOKEN, tile_us / token_us * TOKEN, side);
}

static void report(void) {
    static double columns[NUM_SIDES][MAX_MIXES * 3];
    Fit fits[NUM_SIDES];
    char name[32];
    int best = 0;
    for (int side = 0; side < NUM_SIDES; side++) {
        for (int k = 0; k < num_mixes; k++) {
            columns[side][k * 3] = mixes[k].tokens;
            columns[side][k * 3 + 1] = mixes[k].tiles[side];
            columns[side][k * 3 + 2] = 1;
        }
        fits[side] = fit(columns[side], 3);
        if (fits[side].rms < fits[best].rms) best = side;
    }
    print_table(columns[best], &fits[best], best);
    printf("\nerror of the time            fitted: rms, worst       others: rms, worst\n");
    for (int side = 0; side < NUM_SIDES; side++) {
        snprintf(name, sizeof name, "tiles of %d x %d", sides[side], sides[side]);
        print_errors(name, columns[side], 3, fits[side]);
    }
    print_default();
    print_result(&fits[best], sides[best]);
}

int main(int argc, char **argv) {
    Error err = {0};
    LlamaConfig config;
    static LlamaModel m;
    device_prepare_process(argv);
    options_parse_or_exit(table, argc, argv, "calibrate [options]");
    if (o.max_seqlen > o.micro_batch_tokens)
        exit_with(EXIT_USAGE, "raise --micro-batch-tokens",
                  "--max-seqlen: longer than a micro-batch");
    const DeviceOptions device = {.threads = o.threads, .bf16_matmul = o.bf16_matmul};
    const char *missing = device_init(&device);
    if (missing) exit_with(EXIT_USAGE, "leave --bf16-matmul out", "%s", missing);
    must(llama_config_find(&config, o.model, &err), &err);
    make_mixes(config.vocab_size);
    const LlamaSizes sizes = {o.micro_batch_tokens, o.max_seqlen, false, true, 0, 0};
    llama_plan(&m, &config, sizes);
    must(llama_allocate(&m, &err), &err);
    llama_init(&m, 1);
    printf("model %s on %s\n", o.model, device_describe());
    for (int run = -1; run < o.runs; run++) time_round(&m, run);
    report();
    llama_free(&m);
    return EXIT_DONE;
}
