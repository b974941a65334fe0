// Figures that neither a test nor the trainer prints. Medians; inputs are random, since zeros cost
// a GPU less.
//
//   bench facts                                     the device, a kernel's answer, copies, launches
//   bench hold                                      keeps the driver loaded until it is killed
//   bench attention DOCS H HKV D [KERNELS [once]]   DOCS: 220,217 or 16x4096; KERNELS: sm90,sm80
#include <cublasLt.h>
#include <unistd.h>
#include <algorithm>
#include <string>
#include <vector>

#include "../../kernels/cuda/attention.cuh"
extern "C" {
#include "../../data/base/clock.h"
}

static bool emulated;  // one run of each, and small sizes

// Milliseconds on the GPU of what `work` enqueues: the median of 3 to 15 runs after two others
template <class Work>
static double measure(Work work) {
    static char any, *const byte = (char *)cuda_allocate("a byte", 1);
    std::vector<double> ms;
    double sum = 0;
    for (int r = emulated ? 0 : -2; r < (emulated ? 1 : 15) && (r < 3 || sum < 500); r++) {
        device_timer_start();
        work();
        device_timer_stop();
        device_download(&any, byte, 1);  // waits
        if (r >= 0) ms.push_back((double)device_timer_ms()), sum += ms.back();
    }
    return std::max(median_ms(ms.data(), (int)ms.size()), 1e-6);
}

template <class T>
static T *allocate(int64_t n) {
    return (T *)cuda_allocate("a buffer of the benchmark", (size_t)n * sizeof(T));
}

template <class T>
static T *to_device(const std::vector<T> &host) {
    T *p = allocate<T>((int64_t)host.size());
    device_upload(p, host.data(), host.size() * sizeof(T));
    return p;
}

// Uniform in +-1.7, so that their variance is 1; they repeat after a million
static floatX *numbers(int64_t n) {
    static uint64_t state = 1;
    std::vector<float> host((size_t)std::min<int64_t>(n, 1 << 20));
    for (float &x : host) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        x = (float)(int32_t)(state >> 32) * 0x1p-31f * 1.73f;
    }
    floatX *p = allocate<floatX>(n);
    for (int64_t i = 0, many = (int64_t)host.size(); i < n; i += many)
        weights_from_host(p + i, NULL, host.data(), (size_t)std::min(many, n - i));
    return p;
}

__global__ void answer_kernel(int *x) { x[threadIdx.x] = 7 * (int)threadIdx.x + 3; }

static void facts() {
    int *x = allocate<int>(32), got[32];
    printf("device     %s\n", device_describe());
    answer_kernel<<<1, 32, 0, cuda_stream()>>>(x);
    LAUNCH_CHECK("answer_kernel");
    device_download(got, x, sizeof got);
    for (int i = 0; i < 32; i++)
        if (got[i] != 7 * i + 3) fprintf(stderr, "error: a kernel answers %d\n", got[i]), exit(1);
    printf("kernel     answers; Hopper's attention: %s; cuBLASLt %zu; %.1f GiB free\n",
           attention_has_sm90() ? "yes" : "no", cublasLtGetVersion(),
           (double)device_memory_free(1) / 0x1p30);
    const int64_t n = emulated ? 1 << 15 : 1 << 30;
    floatX *from = numbers(n), *to = allocate<floatX>(n);
    const double copy_ms = measure([&] { device_copy(to, from, (size_t)n * sizeof *to); });
    printf("copy       %.0f GB/s, read and written\n", 4e-6 * (double)n / copy_ms);
    const int launches = emulated ? 2 : 2000;
    double host_ms = 0;
    const double ms = measure([&] {
        const double began = now_ms();
        for (int i = 0; i < launches; i++) answer_kernel<<<1, 32, 0, cuda_stream()>>>(x);
        host_ms = now_ms() - began;
    });
    printf("launch     %.2f us a kernel, %.2f us of the host\n", ms / launches * 1e3,
           host_ms / launches * 1e3);
}

typedef std::vector<float> Floats;

// 0 and the end of each document
static std::vector<int32_t> ends_of(const char *docs) {
    std::vector<int32_t> ends = {0};
    for (std::string rest = docs; !rest.empty();) {
        const size_t comma = std::min(rest.find(','), rest.size()), x = rest.find('x');
        const int length = atoi(rest.c_str() + (x < comma ? x + 1 : 0));
        for (int i = x < comma ? atoi(rest.c_str()) : 1; i > 0; i--)
            ends.push_back(ends.back() + length);
        rest.erase(0, comma + 1);
    }
    return ends;
}

struct Batch {
    HeadShape heads;
    std::vector<int32_t> ends, ids, list;
    int64_t T, out_n, qkv_n;
    int longest = 0;
    double gflop = 0;  // of forward; backward has 2.5 times as many
    int32_t *cu, *positions, *work = NULL;
    floatX *qkv, *dout, *out, *dqkv;
    real *lse, *delta, *angles;
    VarlenInfo info;

    Batch(const char *docs, HeadShape h) : heads(h), ends(ends_of(docs)), T(ends.back()) {
        for (size_t i = 1; i < ends.size(); i++) {
            const int n = ends[i] - ends[i - 1];
            for (int p = 0; p < n; p++) ids.push_back(p);
            longest = std::max(longest, n);
            gflop += 2e-9 * n * (n + 1.0) * h.num_heads * h.head_dim;
        }
        out_n = T * h.num_heads * h.head_dim;
        qkv_n = out_n + 2 * T * h.num_kv_heads * h.head_dim;
        cu = to_device(ends), positions = to_device(ids);
        angles = to_device(Floats((size_t)(longest * h.head_dim), sqrtf(0.5f)));  // cos and sin
        qkv = numbers(qkv_n), dout = numbers(out_n);
        out = allocate<floatX>(out_n), dqkv = allocate<floatX>(qkv_n);
        lse = allocate<real>(T * h.num_heads), delta = allocate<real>(T * h.num_heads);
    }
    void prepare() {  // for the kernels that are selected
        const int docs = (int)ends.size() - 1;
        list.resize(attention_work_list_size(T, docs));
        list.resize(attention_work_list(list.data(), ends.data(), NULL, NULL, docs, heads));
        device_free(work);
        work = to_device(list);
        info = {cu, work, (int32_t)T, docs, longest, NULL, NULL};
        device_zero(dqkv, (size_t)qkv_n * sizeof *dqkv);
    }
    void forward() { attention_forward(out, lse, qkv, &info, heads); }
    void backward() {
        attention_backward(dqkv, delta, NULL, dout, qkv, out, lse, positions, angles, &info, heads);
    }
    Floats results() {  // the first of many
        const size_t o = (size_t)std::min<int64_t>(out_n, 1 << 23),
                     g = (size_t)std::min<int64_t>(qkv_n, 1 << 23);
        Floats r(o + g);
        forward(), backward();
        activations_to_host(r.data(), out, o), activations_to_host(r.data() + o, dqkv, g);
        return r;
    }
};

static double difference(const Floats &a, const Floats &b) {  // relative; NaN shows
    double error = 0, norm = 0;
    for (size_t i = 0; i < a.size(); i++)
        error += pow((double)a[i] - (double)b[i], 2), norm += pow((double)b[i], 2);
    return sqrt(error / norm);
}

// 0: each of the kernels gives the same bits twice, and both the same results but for rounding
static int attention(const char *docs, HeadShape heads, const char *kernels, bool once) {
    Batch b(docs, heads);
    std::vector<Floats> results;
    bool good = true;
    printf("attention  %zu documents of at most %d tokens, %lld tokens, heads %d/%d x %d\n",
           b.ends.size() - 1, b.longest, (long long)b.T, heads.num_heads, heads.num_kv_heads,
           heads.head_dim);
    for (const char *path : {"sm90", "sm80"}) {
        if (!strstr(kernels, path)) continue;
        if (attention_select(path) != 0) {
            printf("attention  %s: not on this GPU\n", path);
            continue;
        }
        b.prepare();
        results.push_back(b.results());
        if (once) continue;
        const bool again = results.back() == b.results();
        const double f = measure([&] { b.forward(); }), g = measure([&] { b.backward(); });
        printf("attention  %s  forward %8.3f ms %6.1f TFLOP/s  backward %8.3f ms %6.1f TFLOP/s  "
               "%s\n", path, f, b.gflop / f, g, 2.5 * b.gflop / g,
               again ? "the same bits twice" : "NOT THE SAME BITS TWICE");
        good &= again;
    }
    if (results.size() < 2) return !good || results.empty();
    const double error = difference(results[0], results[1]);
    printf("attention  sm90 against sm80: relative difference %.2e, %s\n", error,
           error < 0x1p-6 ? "as rounding" : "MORE THAN ROUNDING");
    return !(good && error < 0x1p-6);
}

int main(int argc, char **argv) {
    const DeviceOptions options = {};
    const std::string what = argc > 1 ? argv[1] : "";
    const char *missing = device_init(&options);
    if (missing) return fprintf(stderr, "error: %s\n", missing), 11;
    setvbuf(stdout, NULL, _IOLBF, 0);
    emulated = strstr(device_describe(), "emulated") != NULL;
    if (what == "facts") return facts(), 0;
    if (what == "hold") return pause(), 0;
    if (what == "attention" && argc >= 6)
        return attention(argv[2], {atoi(argv[3]), atoi(argv[4]), atoi(argv[5])},
                         argc > 6 ? argv[6] : "sm90,sm80", argc > 7);
    return fprintf(stderr, "usage: see the head of dev/gpu_day/bench.cu\n"), 2;
}
