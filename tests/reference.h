// The CPU backend next to a CUDA one in the same test: every operation of kernels.h again, on host
// memory and in fp32, from the library build/reference/cpu_kernels.so. reference.rope_forward(...)
// computes what rope_forward(...) must return.
#ifndef UNPAD_TESTS_REFERENCE_H
#define UNPAD_TESTS_REFERENCE_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "../kernels/kernels.h"

struct CpuReference {
    const char *(*device_init)(const DeviceOptions *);
    size_t (*attention_plan_size)(int64_t, int64_t);
    size_t (*attention_plan)(int32_t *, const int32_t *, int, HeadShape);
    void (*embedding_forward)(float *, const int32_t *, const float *, int64_t, int);
    void (*embedding_backward)(float *, const float *, const int32_t *, const int32_t *, int64_t,
                               int);
    void (*rmsnorm_forward)(float *, float *, const float *, const float *, float, int64_t, int);
    void (*rmsnorm_backward)(float *, float *, const float *, const float *, const float *,
                             const float *, int64_t, int);
    void (*qk_norm_forward)(float *, const float *, const float *, float, int64_t, HeadShape);
    void (*qk_norm_backward)(float *, float *, const float *, const float *, float, int64_t,
                             HeadShape);
    void (*bias_forward)(float *, const float *, int64_t, int64_t);
    void (*bias_backward)(float *, const float *, int64_t, int64_t);
    void (*rope_forward)(float *, const int32_t *, const float *, int64_t, HeadShape);
    void (*attention_forward)(float *, float *, const float *, const VarlenInfo *, HeadShape);
    void (*attention_backward)(float *, float *, const float *, const float *, const float *,
                               const float *, const int32_t *, const float *, const VarlenInfo *,
                               HeadShape);
    void (*kv_store)(float *, const float *, const int32_t *, const int32_t *, int64_t, HeadShape);
    void (*attention_decode)(float *, const float *, const float *, const int32_t *,
                             const int32_t *, int64_t, HeadShape);
    void (*matmul_forward)(float *, const float *, const float *, int64_t, int64_t, int64_t);
    void (*matmul_forward_add)(float *, const float *, const float *, const float *, int64_t,
                               int64_t, int64_t);
    void (*matmul_backward_input)(float *, const float *, const float *, int64_t, int64_t, int64_t);
    void (*matmul_backward_weight)(float *, const float *, const float *, bool, int64_t, int64_t,
                                   int64_t);
    void (*swiglu_forward)(float *, const float *, int64_t, int64_t);
    void (*swiglu_backward)(float *, const float *, const float *, int64_t, int64_t);
    void (*cross_entropy_forward)(float *, const float *, const int32_t *, int64_t, int64_t);
    void (*cross_entropy_forward_backward)(float *, float *, const int32_t *, const float *,
                                           int64_t, int64_t);
    void (*losses_sum)(double *, const float *, int64_t);
    void (*gather_rows)(float *, const float *, const int32_t *, int64_t, int64_t);
    void (*scatter_rows)(float *, const float *, const int32_t *, int64_t, int64_t, int64_t);
    void (*global_norm_squared)(double *, const float *, size_t);
    void (*grads_add)(float *, const float *, size_t);
    void (*clip_scale)(StepScalars *, float);
    void (*adamw_update)(float *, uint16_t *, float *, float *, const float *, const StepScalars *,
                         AdamW, size_t);
};

// The working directory is the repository's root, as for every test.
static inline CpuReference reference_open() {
    CpuReference t;
    // lazily: it lacks kernels/comm, which only calls that no test makes need
    void *library = dlopen("build/reference/cpu_kernels.so", RTLD_LAZY | RTLD_LOCAL);
    if (!library) fprintf(stderr, "%s\n", dlerror()), exit(2);
#define OPERATION(op_)                                                      \
    if (!(t.op_ = reinterpret_cast<decltype(t.op_)>(dlsym(library, #op_)))) \
    fprintf(stderr, "build/reference/cpu_kernels.so: no %s\n", #op_), exit(2)
    OPERATION(device_init);
    OPERATION(attention_plan_size);
    OPERATION(attention_plan);
    OPERATION(embedding_forward);
    OPERATION(embedding_backward);
    OPERATION(rmsnorm_forward);
    OPERATION(rmsnorm_backward);
    OPERATION(qk_norm_forward);
    OPERATION(qk_norm_backward);
    OPERATION(bias_forward);
    OPERATION(bias_backward);
    OPERATION(rope_forward);
    OPERATION(attention_forward);
    OPERATION(attention_backward);
    OPERATION(kv_store);
    OPERATION(attention_decode);
    OPERATION(matmul_forward);
    OPERATION(matmul_forward_add);
    OPERATION(matmul_backward_input);
    OPERATION(matmul_backward_weight);
    OPERATION(swiglu_forward);
    OPERATION(swiglu_backward);
    OPERATION(cross_entropy_forward);
    OPERATION(cross_entropy_forward_backward);
    OPERATION(losses_sum);
    OPERATION(gather_rows);
    OPERATION(scatter_rows);
    OPERATION(global_norm_squared);
    OPERATION(grads_add);
    OPERATION(clip_scale);
    OPERATION(adamw_update);
#undef OPERATION
    DeviceOptions options = {2, 0};
    t.device_init(&options);
    return t;
}

#endif
