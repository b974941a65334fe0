// At the start of a run on Hopper, runs one batch through its attention kernels and through
// sm_80's, in a separate process, because a kernel that hangs or faults takes its process with it.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "attention.cuh"

extern "C" {
#include "../../data/base/error.h"
}

enum { TOKENS = 195, START_S = 120, LIMIT_S = 30, DIFFER = 1, NOT_PROBED = EXIT_DEVICE_MEMORY };
static const int32_t cu_seqlens[] = {0, 65, TOKENS};
static const char *const DEVICE = "UNPAD_PROBE_DEVICE";

template <class T>
static T *upload(const T *x, size_t n) {
    T *p = (T *)device_malloc(n * sizeof(T));
    if (!p) _exit(NOT_PROBED);
    device_upload(p, x, n * sizeof(T));
    return p;
}

// out (T,H,D), then dqkv (T,H+2*Hkv,D), of numbers from -1 to 1; all at position 0, not rotated
static float *attend(const char *kernels, HeadShape heads) {
    const size_t D = (size_t)heads.head_dim, n_out = TOKENS * D * (size_t)heads.num_heads,
                 n = n_out + 2 * TOKENS * D * (size_t)heads.num_kv_heads;
    const size_t most = attention_work_list_size(TOKENS, 2) + n;
    float *x = (float *)calloc(n + n_out, sizeof *x);
    int32_t *ints = (int32_t *)calloc(most, sizeof *ints);
    if (!x || !ints || attention_select(kernels) != 0) _exit(NOT_PROBED);
    for (size_t i = 0; i < n; i++) x[i] = (float)((uint32_t)i * 2654435761u >> 24) / 128 - 1;
    floatX *qkv = (floatX *)upload(x, n), *dout = (floatX *)upload(x, n), *out = qkv + n,
           *dqkv = dout + n;  // has room for fp32
    weights_from_host(qkv, NULL, x, n);
    weights_from_host(dout, NULL, x, n_out);
    int32_t *position_ids = upload(ints, TOKENS);
    float *lse = (float *)upload(x, n), *delta = (float *)upload(x, n);
    for (size_t i = 0; i < D; i++) x[i] = i % 2 == 0;
    float *angles = upload(x, D);
    const size_t used = attention_work_list(ints, cu_seqlens, NULL, NULL, 2, heads);
    const VarlenInfo docs = {
        upload(cu_seqlens, 3), upload(ints, used), TOKENS, 2, TOKENS - 65, NULL, NULL};
    attention_forward(out, lse, qkv, &docs, heads);
    attention_backward(dqkv, delta, NULL, dout, qkv, out, lse, position_ids, angles, &docs, heads);
    activations_to_host(x, out, n_out);
    activations_to_host(x + n_out, dqkv, n);
    free(ints);
    return x;
}

static bool agree(const float *a, const float *b, size_t n) {
    float largest = 0;
    for (size_t i = 0; i < n; i++) largest = fmaxf(largest, fabsf(b[i]));
    for (size_t i = 0; i < n; i++)
        if (!(fabsf(a[i] - b[i]) <= largest / 64)) return false;  // bf16: 1 / 128 at most
    return true;
}

int probed_device() { return getenv(DEVICE) ? atoi(getenv(DEVICE)) : -1; }

void probe_if_asked() {
    const DeviceOptions options = {};
    if (probed_device() < 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    // The parent may own the GPU exclusively (compute mode EXCLUSIVE_PROCESS)
    if (cudaSetDevice(probed_device()) != cudaSuccess || cudaFree(0) != cudaSuccess)
        _exit(NOT_PROBED);
    if (device_init(&options)) _exit(NOT_PROBED);
    if (write(STDOUT_FILENO, "", 1) != 1) _exit(NOT_PROBED);  // the sign that LIMIT_S begins
    const int groups = (cuda_num_sms() - 1) / 2;              // more items than SMs: some take two
    for (int D = 64; D <= 128; D += 64) {
        const HeadShape heads = {3 * groups, groups, D};
        const size_t n_out = TOKENS * 3 * (size_t)D * groups, n_qkv = n_out / 3 * 5;
        const float *a = attend("sm90", heads), *b = attend("sm80", heads);
        if (!agree(a, b, n_out) || !agree(a + n_out, b + n_out, n_qkv)) _exit(DIFFER);
    }
    _exit(0);
}

// nsys, ncu and compute-sanitizer, under which kernels may take longer than LIMIT_S
static bool profiled() {
    const char *preload = getenv("LD_PRELOAD");
    return getenv("CUDA_INJECTION64_PATH") || (preload && strstr(preload, "Injection"));
}

static const char *unprobed(const char *why) {
    warning("the attention kernels of sm90 run without having been probed: %s", why);
    return NULL;
}

const char *probe_attention() {
    char name[] = "probe", program[] = "/proc/self/exe", device[16];
    char *argv[] = {name, NULL};
    int index = 0, status = 0, limit_ms = START_S * 1000, sign[2];
    pid_t child;
    posix_spawn_file_actions_t quiet;
    if (profiled()) return unprobed("a profiler watches");
    if (pipe2(sign, O_CLOEXEC | O_NONBLOCK) != 0) return NULL;
    CUDA_CHECK(cudaGetDevice(&index));
    snprintf(device, sizeof device, "%d", index);
    setenv(DEVICE, device, 1);
    posix_spawn_file_actions_init(&quiet);
    posix_spawn_file_actions_adddup2(&quiet, sign[1], STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&quiet, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    const int failed = posix_spawn(&child, program, &quiet, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&quiet);
    unsetenv(DEVICE);
    close(sign[1]);
    for (int ms = 0; !failed && waitpid(child, &status, WNOHANG) == 0; ms += 10) {
        char byte;
        if (read(sign[0], &byte, 1) == 1) ms = 0, limit_ms = LIMIT_S * 1000;
        if (ms > limit_ms) {
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            close(sign[0]);
            return limit_ms == LIMIT_S * 1000 ? "do not return"
                                              : unprobed("the probe did not start");
        }
        usleep(10000);
    }
    close(sign[0]);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    if (code == NOT_PROBED || code == -SIGINT || code == -SIGTERM || code == -SIGUSR1) return NULL;
    if (code != 0 && code != DIFFER) return "fail";
    return code == DIFFER ? "give other results than those of sm80" : NULL;
}
