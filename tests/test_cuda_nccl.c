// Device communication over NCCL. A single process makes a communicator of one rank, so that one
// GPU suffices; tests/test_cuda_ranks.sh starts the same program as several ranks. A formula gives
// the data of every rank, and sums are of integers: exact in any order.

#include "../kernels/comm/comm.h"
#include "../kernels/kernels.h"
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
static real total(size_t i) { return (real)(ranks * (ranks + 1) / 2) * part(0, i); }

static real *upload_parts() {
    real *x = (real *)device_malloc(N * sizeof *x);
    for (size_t i = 0; i < N; i++) host[i] = part(rank, i);
    device_upload(x, host, N * sizeof *x);
    return x;
}

// The bf16 of a weight: its fp32 master rounded, halves up
static float bf16(float master) {
    uint32_t bits;
    memcpy(&bits, &master, sizeof bits);
    bits = (bits + 0x8000u) & 0xffff0000u;
    memcpy(&master, &bits, sizeof master);
    return master;
}

// In the range sums of gradients, elsewhere than in the own shard left undefined, or the owners'
// weights; outside of it nothing changes.
static void check_range(bool weights, int kind, size_t from, size_t to) {
    const float low = weights ? 1.0f / 4096 : 0;  // rounded off
    real *x = upload_parts();
    split(kind, N);
    for (size_t i = 0; i < N; i++) host[i] += low;
    if (weights) {
        weights_from_host((floatX *)x, NULL, host, N);
        comm_wait(comm_gather_begin((floatX *)x, first, from, to));
        weights_to_host(other, (floatX *)x, NULL, N);
    } else {
        comm_wait(comm_reduce_begin(x, first, from, to));
        device_download(other, x, N * sizeof *x);
    }
    for (size_t i = 0; i < N; i++) {
        const bool inside = i >= from && i < to;
        if (!weights && inside && !in_share(rank, i)) continue;
        const real expected = weights  ? bf16(part(inside ? owner(i) : rank, i) + low)
                              : inside ? total(i)
                                       : part(rank, i);
        CHECK_MSG(other[i] == expected, "%s, split %d, %zu to %zu: [%zu] is %g, expected %g",
                  weights ? "weights" : "gradients", kind, from, to, i, (double)other[i],
                  (double)expected);
    }
    device_free(x);
}

TEST(reduced_and_gathered_ranges_are_sums_and_their_owners) {
    static const size_t ranges[][2] = {{0, N},       {0, 1},     {1000, 1003},
                                       {1234, 4321}, {N - 1, N}, {7, 7}};
    start();
    for (int i = 0; i < 2 * SPLITS * 6; i++)
        check_range(i % 2, i / 2 % SPLITS, ranges[i / 2 / SPLITS][0], ranges[i / 2 / SPLITS][1]);
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

int main(int argc, char **argv) {
    const DeviceOptions options = {0};
    comm_init();
    missing = device_init(&options);
    if (!missing && comm_num_ranks() == 1) missing = comm_connect_alone();
    comm_heartbeat(20);
    if (argc > 1 && strcmp(argv[1], "--beyond") == 0) {  // a rank of another program: exit code 8
        first[1] = 64, first[2] = comm_rank() ? 256 : 128;
        comm_merge(host, first, 0, 256);
    }
    const int failed = comm_max(test_main(argc, argv));
    comm_finalize();
    return failed;
}
