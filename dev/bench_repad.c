// What the repad layout's gather and scatter cost: the copies of llama_attention_forward and
// llama_attention_backward in llama.h, without attention itself, in milliseconds of all layers.
//   make build/cpu/bench_repad && build/cpu/bench_repad ROW_LEN QKV_DIM Q_DIM LAYERS RUNS LENGTH...
// One row of ROW_LEN tokens for each document of LENGTH tokens.
#include <stdio.h>
#include <stdlib.h>

#include "../data/base/clock.h"
#include "../data/base/memory.h"
#include "../kernels/kernels.h"

typedef struct {
    floatX *padded_qkv, *padded_out, *real_qkv, *real_out;
    int32_t *rows;  // (n): places of real tokens in the padded buffer of T tokens
    int64_t T, n, qkv_dim, q_dim;
} Layer;

static void *allocate(int64_t n, size_t size) {
    void *p = device_malloc((size_t)n * size);
    if (!p) exit((fprintf(stderr, "error: out of memory\nhint: shorter rows\n"), 5));
    device_zero(p, (size_t)n * size);
    return p;
}

static Layer make_layer(int64_t row_len, int64_t qkv_dim, int64_t q_dim, char **lengths, int docs) {
    Layer l = {.T = docs * row_len, .qkv_dim = qkv_dim, .q_dim = q_dim};
    int32_t *rows = host_calloc((size_t)l.T, sizeof(int32_t), "rows");
    for (int d = 0; d < docs; d++)
        for (int64_t i = 0; i < atoll(lengths[d]) && i < row_len; i++)
            rows[l.n++] = (int32_t)(d * row_len + i);
    l.rows = allocate(l.T, sizeof(int32_t));
    device_upload(l.rows, rows, (size_t)l.n * sizeof(int32_t));
    free(rows);
    l.padded_qkv = allocate(l.T * qkv_dim, sizeof(floatX));
    l.padded_out = allocate(l.T * q_dim, sizeof(floatX));
    l.real_qkv = allocate(l.n * qkv_dim, sizeof(floatX));
    l.real_out = allocate(l.n * q_dim, sizeof(floatX));
    return l;
}

static void forward_copies(const Layer *l) {
    gather_rows(l->real_qkv, l->padded_qkv, l->rows, l->n, l->qkv_dim);
    scatter_rows(l->padded_out, l->real_out, l->rows, l->n, l->T, l->q_dim);
}

static void backward_copies(const Layer *l) {
    gather_rows(l->real_qkv, l->padded_qkv, l->rows, l->n, l->qkv_dim);
    gather_rows(l->real_out, l->padded_out, l->rows, l->n, l->q_dim);  // attn
    gather_rows(l->real_out, l->padded_out, l->rows, l->n, l->q_dim);  // dattn
    scatter_rows(l->padded_qkv, l->real_qkv, l->rows, l->n, l->T, l->qkv_dim);
}

static double time_ms(const Layer *l, int layers, void (*copies)(const Layer *)) {
    device_synchronize();
    const double start_ms = now_ms();
    for (int i = 0; i < layers; i++) copies(l);
    device_synchronize();
    return now_ms() - start_ms;
}

static int by_value(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static void report(const char *pass, const Layer *l, int layers, int runs,
                   void (*copies)(const Layer *)) {
    double *ms = host_calloc((size_t)runs, sizeof(double), "times");
    time_ms(l, layers, copies);  // warm-up
    for (int r = 0; r < runs; r++) ms[r] = time_ms(l, layers, copies);
    qsort(ms, (size_t)runs, sizeof(double), by_value);
    printf("%-8s  %2d layers: median %.3f ms [%.3f-%.3f]\n", pass, layers, ms[runs / 2], ms[0],
           ms[runs - 1]);
    free(ms);
}

int main(int argc, char **argv) {
    device_prepare_process(argv);
    if (argc < 7)
        return fprintf(stderr, "usage: bench_repad ROW_LEN QKV_DIM Q_DIM LAYERS RUNS LENGTH...\n"),
               2;
    const char *missing = device_init(&(DeviceOptions){0});
    if (missing) return fprintf(stderr, "error: %s\n", missing), 11;
    const int layers = atoi(argv[4]), runs = atoi(argv[5]);
    const Layer l = make_layer(atoll(argv[1]), atoll(argv[2]), atoll(argv[3]), argv + 6, argc - 6);
    printf("%s: %lld real tokens of %lld\n", device_describe(), (long long)l.n, (long long)l.T);
    report("forward", &l, layers, runs, forward_copies);
    report("backward", &l, layers, runs, backward_copies);
    return 0;
}
