// The CPU backend beside a CUDA one in the same test: every operation of kernels.h again, on host
// memory and in fp32, from the library build/twin/cpu_kernels.so. `twin.rope_forward(...)` is the
// twin of `rope_forward(...)`.
#ifndef UNPAD_TESTS_TWIN_H
#define UNPAD_TESTS_TWIN_H

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "../kernels/kernels.h"

struct Twin {
    const char *(*device_init)(const DeviceOptions *);
    size_t (*attention_plan_size)(int64_t, int64_t);
    size_t (*attention_plan)(int32_t *, const int32_t *, int, HeadShape);
    void (*embedding_forward)(float *, const int32_t *, const float *, int64_t, int);
    void (*embedding_backward)(float *, const float *, const int32_t *, const int32_t *, int64_t,
                               int);
    void (*add_rmsnorm_forward)(float *, float *, float *, const float *, const float *,
                                const float *, float, int64_t, int);
    void (*rmsnorm_backward)(float *, float *, const float *, const float *, const float *,
                             const float *, int64_t, int);
    void (*rmsnorm_apply)(float *, const float *, const float *, const float *, int64_t, int);
    void (*rope_forward)(float *, const int32_t *, const float *, int64_t, HeadShape);
    void (*attention_forward)(float *, float *, const float *, const Documents *, HeadShape);
    void (*attention_backward)(float *, float *, const float *, const float *, const float *,
                               const float *, const int32_t *, const float *, const Documents *,
                               HeadShape);
    void (*matmul_forward)(float *, const float *, const float *, int64_t, int64_t, int64_t);
    void (*matmul_backward_input)(float *, const float *, const float *, int64_t, int64_t, int64_t);
    void (*matmul_backward_weight)(float *, const float *, const float *, int64_t, int64_t,
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
static inline Twin twin_open() {
    Twin t;
    void *library = dlopen("build/twin/cpu_kernels.so", RTLD_NOW | RTLD_LOCAL);
    if (!library) fprintf(stderr, "%s\n", dlerror()), exit(2);
#define TWIN(op_)                                                           \
    if (!(t.op_ = reinterpret_cast<decltype(t.op_)>(dlsym(library, #op_)))) \
    fprintf(stderr, "build/twin/cpu_kernels.so: no %s\n", #op_), exit(2)
    TWIN(device_init);
    TWIN(attention_plan_size);
    TWIN(attention_plan);
    TWIN(embedding_forward);
    TWIN(embedding_backward);
    TWIN(add_rmsnorm_forward);
    TWIN(rmsnorm_backward);
    TWIN(rmsnorm_apply);
    TWIN(rope_forward);
    TWIN(attention_forward);
    TWIN(attention_backward);
    TWIN(matmul_forward);
    TWIN(matmul_backward_input);
    TWIN(matmul_backward_weight);
    TWIN(swiglu_forward);
    TWIN(swiglu_backward);
    TWIN(cross_entropy_forward);
    TWIN(cross_entropy_forward_backward);
    TWIN(losses_sum);
    TWIN(gather_rows);
    TWIN(scatter_rows);
    TWIN(global_norm_squared);
    TWIN(grads_add);
    TWIN(clip_scale);
    TWIN(adamw_update);
#undef TWIN
    DeviceOptions options = {2, 0};
    t.device_init(&options);
    return t;
}

#endif
