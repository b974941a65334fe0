// The emulator: memory is guarded and starts as NaN, violations end the program with a report, the
// host API behaves like the real one.
#include "cuda_test.h"

#ifndef CUDA_EMU
TEST(emulator) { SKIP("this is a CUDA build"); }
#else
#include <atomic>
#include <math.h>
#include <string>

#include "../kernels/cuda/ptx.cuh"

constexpr unsigned ALL = 0xffffffffu;

// Runs some cases of this program with a setting of the emulator; returns its exit code
static int with_setting(const char *setting, const char *filter) {
    const int status =
        system(printed("%s '%s' --filter %s > /dev/null 2>&1", setting, test_self(), filter));
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
static bool set_to(const char *variable, const char *value) {
    const char *v = getenv(variable);
    return v && strcmp(v, value) == 0;
}

__global__ void read_at(float *out, const float *in, long i) { out[0] = in[i]; }
__global__ void write_at(char *p, long i) { p[i] = 1; }
__global__ void fill(float *p, float value) { p[threadIdx.x] = value; }

static float *floats(size_t n) {
    float *p = nullptr;
    cudaMalloc(&p, n * sizeof(float));
    return p;
}

static int *ints() { return (int *)floats(1024); }

TEST(memory_starts_as_nan) {
    float *p = floats(1000);
    for (float x : to_host(p, 1000)) CHECK(isnan(x));
    CHECK((uintptr_t)p % 64 == 0);
    float *pinned;
    CUDA_OK(cudaMallocHost(&pinned, 4000));
    CHECK(isnan(pinned[999]));
    CUDA_OK(cudaFreeHost(pinned));
    CHECK(cudaFreeHost(pinned) == cudaErrorInvalidValue && cudaGetLastError() != cudaSuccess);
}

__global__ void wrong_barrier_count(int *out) {
    if (threadIdx.x < 64) emu::bar(1, 96, true, __FILE__, __LINE__);
    out[threadIdx.x] = 1;
}
__global__ void divergent_shuffle(int *out) {
    int v = threadIdx.x;
    if (threadIdx.x < 16)
        v = __shfl_xor_sync(ALL, v, 1);
    else
        v = __shfl_xor_sync(ALL, v, 2);
    out[threadIdx.x] = v;
}
__global__ void uninitialised_shared(float *out) {
    __shared__ float s[32];
    if (threadIdx.x != 7) s[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = s[threadIdx.x];
}
__global__ void past_dynamic_shared(float *out) {
    extern __shared__ __align__(1024) unsigned char smem[];
    ((float *)smem)[threadIdx.x + 1] = 1;
    __syncthreads();
    out[threadIdx.x] = ((float *)smem)[threadIdx.x];
}
__global__ void copy_never_waited_for(float *p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    cp_async16(smem_u32(smem) + threadIdx.x * 16, p + threadIdx.x * 4, true);
    cp_async_commit();
}
__global__ void barrier_never_set_up(int *out) {
    __shared__ __align__(8) uint64_t bar;
    mbar_arrive(smem_u32(&bar));
    out[0] = 1;
}
__global__ void operand_after_fence(int) {
    extern __shared__ __align__(1024) unsigned char smem[];
    uint32_t a[4] = {0, 0, 0, 0};
    float d[32];
    wgmma_fence();
    wgmma_rs<0>(d, a, wgmma_desc_sw128(smem_u32(smem), 16, 1024), 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence();
    a[0] = threadIdx.x;
    wgmma_rs<0>(d, a, wgmma_desc_sw128(smem_u32(smem), 16, 1024), 0);
    wgmma_commit();
    wgmma_wait<0>();
}
__global__ void trap(int) { __trap(); }

TEST(shared_memory_starts_as_nan) {
    float *out = floats(32);
    uninitialised_shared<<<1, 32>>>(out);
    const std::vector<float> f = to_host(out, 32);
    for (int t = 0; t < 32; t++) CHECK(isnan(f[t]) == (t == 7));
}

// 10 KB of static shared memory, and dynamic
__global__ void static_and_dynamic(float *p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ float s[2][1280];
    s[1][threadIdx.x] = 1;
    smem[threadIdx.x] = 1;
    p[threadIdx.x] = s[1][threadIdx.x];
}
static int optin_bytes() {
    int bytes = 0;
    CUDA_OK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    return bytes;
}
template <class Kernel>
static cudaError_t ask_for(Kernel *kernel, int bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}
TEST(launches_are_checked) {
    static const struct {
        int asked_for, blocks, threads, bytes;
        bool good;
    } launches[] = {{0, 1, 2048, 0, false},
                    {0, 0, 32, 0, false},
                    {0, 1, 32, 49 << 10, false},
                    {49 << 10, 1, 32, 49 << 10, true}};
    float *p = floats(2048);
    for (auto &l : launches) {
        if (l.asked_for) CUDA_OK(ask_for(fill, l.asked_for));
        fill<<<l.blocks, l.threads, l.bytes>>>(p, 1.0f);
        CHECK((cudaGetLastError() == cudaSuccess) == l.good && cudaGetLastError() == cudaSuccess);
    }
}

__global__ void add_one(float *p) { p[threadIdx.x] += 1; }

// With EMU_STREAMS=1 a result exists only after the stream has executed the work.
static std::atomic<bool> released;
TEST(streams_run_concurrently_with_the_host) {
    if (!set_to("EMU_STREAMS", "1")) {
        CHECK(with_setting("EMU_STREAMS=1", "streams_run_concurrently") == 0);
        return;
    }
    cudaStream_t stream;
    float *p = floats(32), *host;
    auto hold = [](void *) {
        while (!released) usleep(100);
    };
    CUDA_OK(cudaMallocHost(&host, 128));
    CUDA_OK(cudaStreamCreate(&stream));
    CUDA_OK(cudaLaunchHostFunc(stream, hold, nullptr));
    fill<<<1, 32, 0, stream>>>(p, 7.0f);
    CUDA_OK(cudaMemcpyAsync(host, p, 128, cudaMemcpyDeviceToHost, stream));
    CHECK(isnan(host[31]) && cudaStreamQuery(stream) == cudaErrorNotReady);
    released = true;
    CUDA_OK(cudaStreamSynchronize(stream));
    CHECK(host[31] == 7);
}

static float *used_by_host_function;
static void in_a_host_function(cudaHostFn_t fn) {
    cudaStream_t stream;
    used_by_host_function = floats(32);
    cudaStreamCreate(&stream);
    cudaLaunchHostFunc(stream, fn, stream);
    cudaStreamSynchronize(stream);
}
static void calls_malloc(void *) { cudaMalloc(&used_by_host_function, 64); }
static void calls_a_kernel(void *stream) {
    add_one<<<1, 32, 0, (cudaStream_t)stream>>>(used_by_host_function);
}
static void calls_nothing(void *) {}

__global__ void exponentials(float *p) { p[threadIdx.x] = __expf(-(float)threadIdx.x / 12); }

// CUDA allows __expf 2 + 1.173 |x| ulp: up to a hundred here. EMU_FAST_MATH=1 takes them.
TEST(expf_like_a_gpu) {
    float *p = floats(1024);
    double worst = 0;
    exponentials<<<1, 1024>>>(p);
    const std::vector<float> host = to_host(p, 1024);
    for (int i = 0; i < 1024; i++) {
        const double x = (double)(-(float)i / 12), ulp = ldexp(1, ilogb(exp(x)) - 23);
        worst = fmax(worst, fabs(host[i] - exp(x)) / ulp / (3 + 1.173 * fabs(x)));
    }
    CHECK_MSG(worst <= 1 && (worst > 0.9) == set_to("EMU_FAST_MATH", "1"), "%.2f", worst);
    if (!getenv("EMU_FAST_MATH")) CHECK(with_setting("EMU_FAST_MATH=1", "expf_like_a_gpu") == 0);
}

static float on_host[64];
static float *freed() {
    float *p = floats(64);
    cudaFree(p);
    return p;
}
static const struct {
    void (*run)(void);
    int code;
    const char *text;
} errors[] = {
    {[] { read_at<<<1, 1>>>(floats(64), floats(64), 64); }, 97,
     "0 bytes past the end of the 256-byte block from tests/test_emu.cu"},
    {[] { read_at<<<1, 1>>>(floats(1024), floats(1024), -1); }, 97,
     "4 bytes before the 4096-byte block"},
    {[] { printf("%g", floats(64)[64]); }, 97, "past the end of the 256-byte block"},
    {[] { printf("%g", freed()[0]); }, 97, "use after cudaFree of the 256-byte block"},
    {[] {
         char *p;
         cudaMalloc(&p, 100);
         write_at<<<1, 1>>>(p, 101);
         cudaFree(p);
     },
     97, "byte 1 past the end of the 100-byte block"},
    {[] { cudaFree(freed()); }, 97, "which is not an allocation"},
    {[] { cudaMemcpy(on_host, floats(64), 256, cudaMemcpyHostToDevice); }, 97,
     "does not match the pointers (dst host, src device)"},
    {[] { cudaMemset(on_host, 0, 4); }, 97, "cudaMemset of a host pointer"},
    {[] { fill<<<1, 32>>>(on_host, 1.0f); }, 97,
     "launch of fill: argument 0 is not a device pointer"},
    {[] { wrong_barrier_count<<<1, 128>>>(ints()); }, 98, "named barrier (id 1, 64 arrived of 96)"},
    {[] { divergent_shuffle<<<1, 32>>>(ints()); }, 97, "divergent warp collective"},
    {[] { past_dynamic_shared<<<1, 32, 128>>>(floats(32)); }, 97,
     "write past dynamic shared memory: byte 128 of 128"},
    {[] { copy_never_waited_for<<<1, 32, 512>>>(floats(1024)); }, 97,
     "cp.async copies never waited for"},
    {[] { barrier_never_set_up<<<1, 32>>>(ints()); }, 97, "no initialised mbarrier"},
    {[] { operand_after_fence<<<1, 128, 8192>>>(0); }, 97,
     "registers of A were written after the last wgmma.fence"},
    {[] { trap<<<1, 1>>>(0); }, 97, "__trap()"},
    {[] { static_and_dynamic<<<1, 32, (38 << 10) + 1>>>(floats(32)); }, 97,
     "10240 bytes of static shared memory beside 38913 dynamic ones"},
    {[] {
         ask_for(static_and_dynamic, optin_bytes());
         static_and_dynamic<<<1, 32, 64 << 10>>>(floats(32));
     },
     97, "has room for 0"},
    {[] { in_a_host_function(calls_malloc); }, 97, "cudaMalloc in a host function of a stream"},
    {[] { in_a_host_function(calls_a_kernel); }, 97, "add_one in a host function of a stream"},
    {[] { in_a_host_function(calls_nothing); }, 0, ""},
    {[] {
         floatX *p = (floatX *)floats(1 << 12);
         const DeviceOptions options = {};
         device_init(&options);
         matmul_forward(p, NULL, p, p + 1, 1, 64, 64);
     },
     97, "A at 0x"}};

// Each runs in a child process: its exit code and standard error
TEST(broken_rules_are_reported) {
    for (auto &e : errors) {
        const char *text;
        const int code = exit_code_of([](int i) { errors[i].run(); }, (int)(&e - errors), &text);
        CHECK_MSG(code == e.code && strstr(text, e.text),
                  "exit code %d, not %d, or no \"%s\" in: %s", code, e.code, e.text, text);
    }
}

// Behind the two rows above, which need the limit that a kernel has at first
TEST(static_shared_memory_counts_with_the_dynamic) {
    float *p = floats(32);
    static_and_dynamic<<<1, 32, 38 << 10>>>(p);
    CUDA_OK(cudaGetLastError());
    CUDA_OK(ask_for(static_and_dynamic, optin_bytes() - (10 << 10)));
    static_and_dynamic<<<1, 32, 64 << 10>>>(p);
    CUDA_OK(cudaGetLastError());
}

#endif

TEST_MAIN()
