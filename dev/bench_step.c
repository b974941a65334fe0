// A training step on the CPU by parts, each as a fraction of the peak that the machine really has:
// multiply-adds that stay in registers, with the vectors of the instruction set that matmul uses,
// measured every 20 ms between the kernels of the step, so that clock changes and neighbours hit
// both alike.
//
//   make build/cpu/bench_step && nice -n -10 build/cpu/bench_step --threads 1
//   build/cpu/bench_step --model demo --lengths 4096
//
// Two columns: of the peak per second of CPU time, which other programs hardly change, and of the
// peak of all threads by the clock on the wall, in which waiting counts and which needs idle cores.
// Counted are the multiply-adds that the model needs, two FLOPs each: 2 T K N of a matmul; 4 D H
// (forward) or 10 D H (backward) per pair of a query and a key that it sees; nothing else. A step
// is what the trainer does: zero gradients, forward, backward, clip, AdamW.
//
// With --turns it measures no peak, does a step for each line on its standard input, and answers
// with seconds and loss: dev/peers/pytorch_cpu.py takes turns with it.
#include <assert.h>
#include <math.h>
#include <omp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../data/base/error.h"
#include "../data/base/hash.h"
#include "../data/base/memory.h"
#include "../data/base/options.h"
#include "../data/batches/batch.h"
#include "../data/models/config.h"
#include "../kernels/cpu/common.h"

static struct {
    const char *model, *lengths, *set;
    const char *weights;
    int steps, threads;
    bool bf16_matmul, turns;
} o;

// -------------------------------------------------------------------------------------------------
// Clocks and parts. llama.h's calls are counted by the macros below.

enum { FORWARD, DINP, DWEIGHT, ATTENTION, DATTENTION, LOSS, ELEMENTWISE, OPTIMIZER, NUM_PARTS };
enum { PEAK = NUM_PARTS, MAX_STEPS = 101 };
static const char *const part_names[NUM_PARTS] = {
    "matmul forward", "matmul dinp",   "matmul dweight",      "attention forward",
    "and backward",   "cross-entropy", "norms, SwiGLU, rope", "AdamW, norm, zeroing",
};

typedef struct {
    double cpu_s, wall_s, gflop;
} Cost;

static Cost costs[NUM_PARTS + 1], start;
static double pairs;  // of a query and a key that it sees
static double last_peak_s;

static double clock_s(clockid_t id) {
    struct timespec t;
    clock_gettime(id, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void part_begin(void) {
    start.cpu_s = clock_s(CLOCK_PROCESS_CPUTIME_ID), start.wall_s = clock_s(CLOCK_MONOTONIC);
}

static void part_add(int part, double gflop) {
    costs[part].cpu_s += clock_s(CLOCK_PROCESS_CPUTIME_ID) - start.cpu_s;
    costs[part].wall_s += clock_s(CLOCK_MONOTONIC) - start.wall_s;
    costs[part].gflop += gflop;
}

// -------------------------------------------------------------------------------------------------
// The peak: 12 or 24 independent sums, `n` multiply-adds each

typedef double Burst(int64_t n);
#define BURST(name, attribute, width, sums, fma)                                    \
    attribute static double name(int64_t n) {                                       \
        typedef float vec __attribute__((vector_size(4 * (width))));                \
        vec sum[sums], a = (vec){0} + 0.999f, b = (vec){0} + 1e-3f;                 \
        for (int i = 0; i < (sums); i++) sum[i] = (vec){0} + (float)i;              \
        for (int64_t k = 0; k < n; k++) {                                           \
            _Pragma("GCC unroll 32") for (int i = 0; i < (sums); i++) sum[i] = fma; \
        }                                                                           \
        for (int i = 1; i < (sums); i++) sum[0] += sum[i];                          \
        return (double)sum[0][0];                                                   \
    }
BURST(burst_portable, , 4, 12, sum[i] * a + b)
#if defined(__x86_64__)
BURST(burst_avx2, __attribute__((target("avx2,fma"))), 8, 12,
      (vec)_mm256_fmadd_ps((__m256)sum[i], (__m256)a, (__m256)b))
BURST(burst_avx512, __attribute__((target("avx512f"))), 16, 24,
      (vec)_mm512_fmadd_ps((__m512)sum[i], (__m512)a, (__m512)b))
BURST(burst_bf16, __attribute__((target("avx512f,avx512bf16"))), 16, 24,
      (vec)_mm512_dpbf16_ps((__m512)sum[i], (__m512bh)a, (__m512bh)b))
#endif

static struct {
    const char *set;
    Burst *burst;
    double flop;  // of n = 1
} const peaks[] = {
#if defined(__x86_64__)
    {"avx512_bf16", burst_bf16, 24 * 16 * 4},
    {"avx512", burst_avx512, 24 * 16 * 2},
    {"avx2", burst_avx2, 12 * 8 * 2},
#endif
    {"portable", burst_portable, 12 * 4 * 2},
};
static int peak;

// All threads at once, as in the step; each reads its own clock, after warming up
static void measure_peak(void) {
    const int64_t n = 1 << 16;
    double cpu_s = 0, sum = 0;
    if (o.turns || clock_s(CLOCK_MONOTONIC) - last_peak_s < 0.02) return;
#pragma omp parallel reduction(+ : cpu_s, sum)
    {
        sum += peaks[peak].burst(n / 8);
        const double begin_s = clock_s(CLOCK_THREAD_CPUTIME_ID);
        sum += peaks[peak].burst(n);
        cpu_s += clock_s(CLOCK_THREAD_CPUTIME_ID) - begin_s;
    }
    assert(sum == sum);  // used: the bursts cannot be left out
    costs[PEAK].cpu_s += cpu_s;
    costs[PEAK].gflop += 1e-9 * peaks[peak].flop * (double)n * cpu_threads();
    last_peak_s = clock_s(CLOCK_MONOTONIC);
}

static void part_end(int part, double gflop) {
    part_add(part, gflop);
    measure_peak();
}

#define TIMED(part, flop, call) (part_begin(), call, part_end(part, 1e-9 * (double)(flop)))
#define matmul_forward(o, i, w, T, K, N) \
    TIMED(FORWARD, 2 * (T) * (K) * (N), matmul_forward(o, i, w, T, K, N))
#define matmul_forward_add(o, r, i, w, T, K, N) \
    TIMED(FORWARD, 2 * (T) * (K) * (N), matmul_forward_add(o, r, i, w, T, K, N))
#define matmul_backward_input(di, d, w, T, K, N) \
    TIMED(DINP, 2 * (T) * (K) * (N), matmul_backward_input(di, d, w, T, K, N))
#define matmul_backward_weight(dw, d, i, sum, T, K, N) \
    TIMED(DWEIGHT, 2 * (T) * (K) * (N), matmul_backward_weight(dw, d, i, sum, T, K, N))
#define HEADS_FLOP (pairs * m->heads.num_heads * m->heads.head_dim)
#define attention_forward(...) TIMED(ATTENTION, 4 * HEADS_FLOP, attention_forward(__VA_ARGS__))
#define attention_backward(...) TIMED(DATTENTION, 10 * HEADS_FLOP, attention_backward(__VA_ARGS__))
#define cross_entropy_forward_backward(...) \
    TIMED(LOSS, 0, cross_entropy_forward_backward(__VA_ARGS__))
#define rmsnorm_forward(...) TIMED(ELEMENTWISE, 0, rmsnorm_forward(__VA_ARGS__))
#define rmsnorm_backward(...) TIMED(ELEMENTWISE, 0, rmsnorm_backward(__VA_ARGS__))
#define swiglu_forward(...) TIMED(ELEMENTWISE, 0, swiglu_forward(__VA_ARGS__))
#define swiglu_backward(...) TIMED(ELEMENTWISE, 0, swiglu_backward(__VA_ARGS__))
#define rope_forward(...) TIMED(ELEMENTWISE, 0, rope_forward(__VA_ARGS__))
#define embedding_forward(...) TIMED(ELEMENTWISE, 0, embedding_forward(__VA_ARGS__))
#define embedding_backward(...) TIMED(ELEMENTWISE, 0, embedding_backward(__VA_ARGS__))
#define device_zero(...) TIMED(OPTIMIZER, 0, device_zero(__VA_ARGS__))
#define global_norm_squared(...) TIMED(OPTIMIZER, 0, global_norm_squared(__VA_ARGS__))
#define adamw_update(...) TIMED(OPTIMIZER, 0, adamw_update(__VA_ARGS__))
#include "../llama.h"

// -------------------------------------------------------------------------------------------------
// Steps

static const Option table[] = {
    OPTION_GROUP("options"),
    TEXT("model", o.model, "smollm2-135m", "directory with config.json, or a name"),
    TEXT("lengths", o.lengths, "220,217,295,183,130,350", "of the documents, or NxLENGTH"),
    NUMBER("steps", o.steps, "3", 1, MAX_STEPS, "measured after one that warms up"),
    NUMBER("threads", o.threads, "0", 0, 4096, "0: all cores"),
    TEXT("set", o.set, NULL, "avx512, avx2 or portable (default: best)"),
    TEXT("weights", o.weights, NULL, "directory with model.safetensors (default: random)"),
    FLAG("turns", o.turns, "a step for each line on standard input"),
    FLAG("bf16-matmul", o.bf16_matmul, "inputs of matmul in bf16"),
    OPTION_END,
};

// "220,217" or "200x32": 200 documents of 32 tokens
static int parse_lengths(const char *text, int32_t *lengths, int most) {
    int repeats = 0, length = 0, n = 0;
    if (sscanf(text, "%dx%d", &repeats, &length) == 2) {
        while (n < repeats && n < most) lengths[n++] = length;
        return n;
    }
    for (char *end; *text && n < most; text = *end == ',' ? end + 1 : end) {
        lengths[n++] = (int32_t)strtol(text, &end, 10);
        if (end == text) break;
    }
    return n;
}

static void pack_batch(Batch *batch, const int32_t *lengths, int n, int32_t vocab_size) {
    DocView *docs = host_calloc((size_t)n, sizeof(DocView), "documents");
    int64_t tokens = 0;
    for (int i = 0; i < n; i++) tokens += lengths[i], pairs += lengths[i] * (lengths[i] + 1.0) / 2;
    int32_t *ids = host_calloc((size_t)tokens, sizeof(int32_t), "tokens");
    for (int64_t i = 0; i < tokens; i++)
        ids[i] = (int32_t)(splitmix64((uint64_t)i) % (uint64_t)vocab_size);
    for (int64_t i = 0, at = 0; i < n; at += lengths[i++])
        docs[i] = (DocView){ids + at, lengths[i], -1, NULL};
    batch_init(batch, (int32_t)tokens, n);
    batch_pack(batch, docs, n);
    free(ids), free(docs);
}

static void one_step(LlamaModel *m, const Batch *batch, int64_t t) {
    const AdamW hyper = {1e-6f, 0.9f, 0.95f, 1e-8f, 0.1f, t};
    memset(costs, 0, sizeof costs);
    measure_peak();
    llama_zero_grads(m, batch->num_targets);
    llama_set_batch(m, batch);
    llama_forward(m);
    llama_head_train(m);
    llama_backward(m);
    llama_add_losses(m);
    llama_update(m, hyper, 1);
}

static void take_turns(LlamaModel *m, const Batch *batch) {
    for (int64_t t = 1; getchar() == '\n'; t++) {
        const double begin_s = clock_s(CLOCK_MONOTONIC);
        one_step(m, batch, t);
        const double loss = llama_read_step(m).loss_sum / batch->num_targets;
        printf("%.6f %.7f\n", clock_s(CLOCK_MONOTONIC) - begin_s, loss);
        fflush(stdout);
    }
}

static void print_line(const char *name, Cost part, Cost all, double peak_gflops) {
    printf("%-22s %8.1f %7.3f %7.1f%%", name, part.gflop, part.cpu_s, 100 * part.cpu_s / all.cpu_s);
    if (part.gflop > 0)
        printf(" %9.3f %9.3f", part.gflop / part.cpu_s / peak_gflops,
               part.gflop / part.wall_s / peak_gflops / cpu_threads());
    printf("\n");
}

static void print_step(int64_t tokens) {
    Cost all = {0};
    for (int i = 0; i < NUM_PARTS; i++)
        all.cpu_s += costs[i].cpu_s, all.wall_s += costs[i].wall_s, all.gflop += costs[i].gflop;
    const double peak_gflops = costs[PEAK].gflop / costs[PEAK].cpu_s;
    printf("\n%-22s %8s %7s %8s %9s %9s\n", "part", "GFLOP", "CPU s", "of CPU", "of peak",
           "by wall");
    for (int i = 0; i < NUM_PARTS; i++) print_line(part_names[i], costs[i], all, peak_gflops);
    print_line("step", all, all, peak_gflops);
    printf("peak %.1f GFLOP/s of one core, %.0f tokens/s\n", peak_gflops,
           (double)tokens / all.wall_s);
}

int main(int argc, char **argv) {
    enum { MAX_DOCS = 1 << 16 };
    static int32_t lengths[MAX_DOCS];
    static LlamaModel m;
    Error err = {0};
    LlamaConfig config;
    Batch batch;
    device_prepare_process(argv);
    options_parse_or_exit(table, argc, argv, "bench_step [options]");
    const DeviceOptions device = {.threads = o.threads, .bf16_matmul = o.bf16_matmul};
    const char *missing = device_init(&device);
    if (missing) exit_with(EXIT_USAGE, "leave --bf16-matmul out", "%s", missing);
    if (o.set && (!matmul_select(o.set, false) || attention_select(o.set) != 0))
        exit_with(EXIT_USAGE, "avx512, avx2 or portable", "--set: not on this CPU: %s", o.set);
    const size_t name = strcspn(matmul_describe(), " ");
    while (strncmp(peaks[peak].set, matmul_describe(), name) != 0 || peaks[peak].set[name]) peak++;
    must(llama_config_find(&config, o.model, &err), &err);
    const int n = parse_lengths(o.lengths, lengths, MAX_DOCS);
    for (int i = 0; i < n; i++)
        if (lengths[i] < 2)
            exit_with(EXIT_USAGE, "e.g. 220,217 or 200x32", "--lengths: %s", o.lengths);
    pack_batch(&batch, lengths, n, config.vocab_size);
    const LlamaSizes sizes = {batch.total_tokens, batch.max_seqlen, false, true, 0, 0};
    llama_plan(&m, &config, sizes);
    must(llama_allocate(&m, &err), &err);
    if (o.weights)
        must(llama_load(&m, o.weights, &err), &err);
    else
        llama_init(&m, 1);
    if (o.turns) {
        take_turns(&m, &batch);
        return EXIT_DONE;
    }
    if (!o.turns)
        printf("%s, %d documents of %s tokens, %d threads, matmul %s, attention %s\n", o.model, n,
               o.lengths, cpu_threads(), matmul_describe(), attention_describe());
    for (int step = 0; step <= o.steps; step++) {
        one_step(&m, &batch, step + 1);
        if (step > 0) print_step(batch.total_tokens);
    }
    llama_free(&m);
    batch_free(&batch);
    return EXIT_DONE;
}
