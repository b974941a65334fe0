// Device communication over NCCL. A single process makes a communicator of one rank, so that one
// GPU suffices; tests/test_cuda_ranks.sh starts the same program as several ranks. A formula gives
// the data of every rank, and sums are of integers: exact in any order.

#include <unistd.h>

#include "../data/base/hash.h"
#include "../llama.h"
#include "test.h"

const char *comm_connect_alone(void);  // kernels/comm/nccl.cu

enum { N = 4992 };
static const char *missing;
static int rank, ranks;
static size_t first[65];
static real host[N], other[N];

static void start() {
    if (missing) SKIP("%s", missing);
    rank = comm_rank();
    ranks = comm_num_ranks();
}

// Shards of n elements: 0 equal, 1 growing, 2 all on rank 0, 3 all on the last rank
enum { SPLITS = 4 };
static void split(int kind, size_t n) {
    const size_t r = (size_t)ranks;
    for (size_t i = 0; i <= r; i++)
        first[i] = kind == 0   ? n * i / r
                   : kind == 1 ? n * i * i / (r * r)
                   : kind == 2 ? (i == 0 ? 0 : n)
                               : (i == r ? n : 0);
}

static bool in_share(int r, size_t i) { return i >= first[r] && i < first[r + 1]; }
static int owner(size_t i) {
    int r = 0;
    while (!in_share(r, i)) r++;
    return r;
}

static real part(int r, size_t i) { return (real)((size_t)(r + 1) * (i % 97 + 1)); }
static real total(size_t i) {
    real sum = 0;
    for (int r = 0; r < ranks; r++) sum += part(r, i);
    return sum;
}

static real *upload_parts() {
    real *x = (real *)device_malloc(N * sizeof *x);
    for (size_t i = 0; i < N; i++) host[i] = part(rank, i);
    device_upload(x, host, N * sizeof *x);
    return x;
}

static const size_t ranges[][2] = {{0, N}, {0, 1}, {1000, 1003}, {1234, 4321}, {N - 1, N}, {7, 7}};
enum { RANGES = sizeof ranges / sizeof *ranges };

TEST(a_reduced_range_is_the_sum_in_its_shards_and_nothing_else_changes) {
    start();
    real *x = upload_parts();
    for (int kind = 0; kind < SPLITS; kind++) {
        for (int k = 0; k < RANGES; k++) {
            const size_t from = ranges[k][0], to = ranges[k][1];
            split(kind, N);
            for (size_t i = 0; i < N; i++) host[i] = part(rank, i);
            device_upload(x, host, N * sizeof *x);
            comm_wait(comm_reduce_begin(x, first, from, to));
            device_download(other, x, N * sizeof *x);
            for (size_t i = 0; i < N; i++) {
                if (i >= from && i < to && !in_share(rank, i)) continue;  // left undefined
                const real expected = i >= from && i < to ? total(i) : part(rank, i);
                CHECK_MSG(other[i] == expected, "split %d range %d: [%zu] is %g, expected %g", kind,
                          k, i, (double)other[i], (double)expected);
            }
        }
    }
    device_free(x);
}

// The bf16 of a weight: its fp32 master rounded, halves up
static float bf16(float master) {
    uint32_t bits;
    memcpy(&bits, &master, sizeof bits);
    bits = (bits + 0x8000u) & 0xffff0000u;
    memcpy(&master, &bits, sizeof master);
    return master;
}

TEST(gathered_weights_are_their_owners) {
    start();
    floatX *w = (floatX *)device_malloc(N * sizeof *w);
    for (int kind = 0; kind < SPLITS; kind++) {
        for (int k = 0; k < RANGES; k++) {
            const size_t from = ranges[k][0], to = ranges[k][1];
            split(kind, N);
            for (size_t i = 0; i < N; i++) host[i] = part(rank, i) + 1.0f / 4096;
            weights_from_host(w, NULL, host, N);
            comm_wait(comm_gather_begin(w, first, from, to));
            weights_to_host(other, w, NULL, N);
            for (size_t i = 0; i < N; i++) {
                const int r = i >= from && i < to ? owner(i) : rank;
                const float expected = bf16(part(r, i) + 1.0f / 4096);
                CHECK_MSG(other[i] == expected, "split %d range %d: [%zu] is %g, expected %g", kind,
                          k, i, other[i], expected);
            }
        }
    }
    device_free(w);
}

TEST(collected_rows_are_each_ranks_part_of_this_shard) {
    start();
    enum { CHUNK = 300 };
    real *x = upload_parts(), *out = (real *)device_malloc((size_t)ranks * CHUNK * sizeof *x);
    real *rows = (real *)malloc((size_t)ranks * CHUNK * sizeof *rows);
    for (int kind = 0; kind < SPLITS; kind++) {
        split(kind, N);
        const size_t own = first[rank + 1] - first[rank];
        for (size_t at = 0; at < N; at += CHUNK) {
            comm_collect(out, x, first, at, CHUNK);
            device_download(rows, out, (size_t)ranks * CHUNK * sizeof *rows);
            for (int r = 0; r < ranks; r++)
                for (size_t i = 0; i < CHUNK && at + i < own; i++)
                    CHECK(rows[(size_t)r * CHUNK + i] == part(r, first[rank] + at + i));
        }
    }
    free(rows);
    device_free(x);
    device_free(out);
}

TEST(parts_are_summed_in_their_order_and_others_only_over_ranks) {
    start();
    enum { SKIP_PARTS = 5, PARTS = 300, ALL = SKIP_PARTS + PARTS };
    const double before = 0.125;
    double own[ALL], sum = 0, result[ALL + 1];
    double *device = (double *)device_malloc((ALL + 1) * sizeof *device);
    for (int i = 0; i < ALL; i++) {
        const double value = 1 / (double)(i * i + 3) * (i % 2 ? 1 : -1e3);
        own[i] = i < SKIP_PARTS ? rank + 1 : i % ranks == rank ? value : 0;
        if (i >= SKIP_PARTS) sum += value;
    }
    device_upload(device, own, sizeof own);
    device_upload(device + ALL, &before, sizeof before);
    comm_sum_in_order(device + ALL, device, SKIP_PARTS, PARTS);
    device_download(result, device, sizeof result);
    CHECK_MSG(result[ALL] == before + sum, "%.17g, expected %.17g", result[ALL], before + sum);
    for (int i = 0; i < SKIP_PARTS; i++) CHECK(result[i] == ranks * (ranks + 1) / 2);
    device_free(device);
}

// Asynchronous communication starts after earlier device work and is complete after comm_wait, with
// other work in between, on more ranges than there are events.
TEST(asynchronous_calls_follow_earlier_work_and_precede_their_wait) {
    start();
    enum { PIECE = 16, PIECES = N / PIECE };
    uint64_t handles[PIECES];
    split(1, N);
    real *x = upload_parts(), *y = upload_parts(), *sum = (real *)device_malloc(N * sizeof *x);
    device_zero(sum, N * sizeof *x);
    for (size_t i = 0; i < PIECES; i++) {
        grads_add(x + i * PIECE, y + i * PIECE, PIECE);  // 2 parts
        handles[i] = comm_reduce_begin(x, first, i * PIECE, (i + 1) * PIECE);
    }
    for (size_t i = 0; i < PIECES; i++) {
        comm_wait(handles[i]);
        grads_add(sum + i * PIECE, x + i * PIECE, PIECE);
        grads_add(x + i * PIECE, y + i * PIECE, PIECE);
    }
    device_download(other, sum, N * sizeof *sum);
    for (size_t i = 0; i < N; i++)
        if (in_share(rank, i))
            CHECK_MSG(other[i] == 2 * total(i), "[%zu] is %g, expected %g", i, (double)other[i],
                      2 * (double)total(i));
    device_free(x);
    device_free(y);
    device_free(sum);
}

TEST(host_memory) {
    start();
    int32_t mine[3] = {rank, 10 * rank, -rank}, all[3 * 64];
    unsigned char bytes[1000] = {0};
    CHECK(comm_max(100 - rank) == 100);
    CHECK(comm_max(rank) == ranks - 1);
    comm_all_gather_host(all, mine, sizeof mine);
    for (int r = 0; r < ranks; r++) CHECK(all[3 * r] == r && all[3 * r + 2] == -r);
    const size_t n = sizeof bytes / (size_t)ranks, at = (size_t)rank * n;
    for (size_t i = at; i < at + n; i++) bytes[i] = (unsigned char)(i + 1);
    comm_merge(bytes, sizeof bytes, at, n);
    comm_broadcast(bytes, sizeof bytes);
    for (size_t i = 0; i < n * (size_t)ranks; i++) CHECK(bytes[i] == (unsigned char)(i + 1));
    comm_barrier();
}

// ------------------------------------------------------------------------------------------------
// A step of a model: gradients reduced layer by layer during the backward pass of the last
// micro-batch have the same bits as gradients reduced after it.

static void make_model(LlamaModel *m, bool tied) {
    Error err = {0};
    LlamaConfig c;
    const LlamaSettings settings = {.micro_batch_tokens = 64,
                                    .max_seqlen = 32,
                                    .train = true,
                                    .rank = rank,
                                    .num_ranks = ranks,
                                    .num_losses = ranks};
    memset(&c, 0, sizeof c);
    c.vocab_size = 40, c.hidden_size = 64, c.intermediate_size = 72, c.num_layers = 3;
    c.num_heads = 2, c.num_kv_heads = 1, c.head_dim = 64, c.max_position_embeddings = 64;
    c.rms_norm_eps = 1e-5f, c.rope_theta = 10000, c.initializer_range = 0.05f;
    c.tie_word_embeddings = tied;
    llama_plan(m, &c, settings);
    CHECK_MSG(llama_allocate(m, &err), "%s", err.what);
    llama_init(m, 7);
}

static void step(LlamaModel *m, const Batch *b, bool overlapped, int64_t t) {
    const AdamW hyper = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, t};
    llama_begin_step(m, 64);
    for (int micro = 0; micro < 2; micro++) {
        llama_set_batch(m, &b[micro]);
        if (overlapped && micro == 1) llama_last_micro_batch(m);
        llama_forward(m);
        llama_head_train(m);
        llama_backward(m);
        llama_add_losses(m);
    }
    llama_reduce_grads(m);
    llama_update(m, hyper, 1);
}

static void check_overlap(bool tied) {
    static int32_t tokens[2][64];
    static LlamaModel models[2];
    Batch b[2];
    for (int micro = 0; micro < 2; micro++) {
        DocView docs[2] = {0};
        for (int i = 0; i < 64; i++) tokens[micro][i] = (i * (rank + 3) + 11 * micro + i / 5) % 40;
        docs[0].tokens = tokens[micro], docs[0].length = 32 - rank, docs[0].next_token = -1;
        docs[1].tokens = tokens[micro] + 32, docs[1].length = 20, docs[1].next_token = 3;
        batch_init(&b[micro], 64, 2);
        batch_pack(&b[micro], docs, 2);
    }
    for (int k = 0; k < 2; k++) {
        make_model(&models[k], tied);
        for (int64_t t = 1; t <= 3; t++) step(&models[k], b, k == 1, t);
        llama_await_all_weights(&models[k]);
    }
    const size_t n = models[0].num_elements;
    float *w = (float *)calloc(2 * n, sizeof *w);
    for (size_t k = 0; k < 2; k++) weights_to_host(w + k * n, models[k].weights, NULL, n);
    uint32_t own = crc32c(0, w, n * sizeof *w), all[64];
    const size_t held = models[0].held_first;  // only the low bits of the rank's own shard exist
    for (size_t k = 0; k < 2; k++)
        weights_to_host(w + k * n + held, models[k].weights + held, models[k].master_lo,
                        models[k].held_count);
    const StepScalars a = llama_read_step(&models[0]), c = llama_read_step(&models[1]);
    CHECK(a.scale > 0 && a.grad_norm == c.grad_norm && a.loss_sum == c.loss_sum);
    CHECK_MSG(memcmp(w, w + n, n * sizeof *w) == 0, "weights differ");
    // every rank has the same weights, and they have changed
    comm_all_gather_host(all, &own, sizeof own);
    for (int r = 0; r < ranks; r++) CHECK_MSG(all[r] == own, "rank %d has other weights", r);
    free(w);
    for (int k = 0; k < 2; k++) llama_free(&models[k]), batch_free(&b[k]);
}

TEST(overlapped_steps_have_the_bits_of_others_tied) {
    start();
    check_overlap(true);
}
TEST(overlapped_steps_have_the_bits_of_others_untied) {
    start();
    check_overlap(false);
}

int main(int argc, char **argv) {
    const DeviceOptions options = {0, 0};
    comm_init();
    missing = device_init(&options);
    if (!missing && comm_num_ranks() == 1) missing = comm_connect_alone();
    comm_heartbeat(20);
    if (argc > 1 && strcmp(argv[1], "--beyond") == 0)  // a rank of another program: exit code 9
        comm_merge(host, comm_rank() ? sizeof host : 64, comm_rank() ? 128 : 0, 64);
    const int failed = comm_max(test_main(argc, argv));
    comm_finalize();
    return failed;
}
