// One rank: a GPU of its own and nobody to wait for. Being started as one of several is an error.

#include "../ranks.h"

#include "common.cuh"

const char *comm_init(void) {
    return ranks_launched() > 1
               ? "started as one of several ranks, but the CUDA backend trains on one GPU"
               : nullptr;
}
int comm_rank(void) { return 0; }
int comm_num_ranks(void) { return 1; }
int comm_local_rank(void) { return 0; }

void comm_reduce_scatter(real *, const size_t *) {}
void comm_all_gather(real *, const size_t *) {}
void comm_all_gather_weights(floatX *, uint16_t *, const size_t *) {}
void comm_collect(real *out, const real *x, const size_t *first, size_t at, size_t chunk) {
    device_copy(out, x + at, (first[1] - at < chunk ? first[1] - at : chunk) * sizeof(real));
}

// One thread: a few hundred numbers, and their order is the point.
__global__ void sum_parts_kernel(double *sum, const double *__restrict__ parts, size_t n) {
    double s = 0;
    for (size_t i = 0; i < n; i++) s += parts[i];
    *sum += s;
}

void comm_sum_parts(double *sum, double *parts, size_t n) {
    if (n == 0) return;
    sum_parts_kernel<<<1, 1, 0, cuda_stream()>>>(sum, parts, n);
    LAUNCH_CHECK("sum_parts_kernel");
}

int comm_max(int value) { return value; }
void comm_broadcast(void *, size_t) {}
void comm_all_gather_host(void *out_host, const void *data_host, size_t bytes) {
    memcpy(out_host, data_host, bytes);
}
void comm_merge(void *, size_t) {}
void comm_barrier(void) {}
void comm_phase(const char *, int64_t) {}
void comm_heartbeat(double) {}
void comm_finalize(void) {}
