#include "features.h"

#include <omp.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __x86_64__
#include <cpuid.h>
static bool processor_has_amx(void) {
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
    unsigned a, b, c, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) && (d & AMX_TILE);
}
#endif

bool cpu_has(const char *set) {
#ifdef __x86_64__
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
    if (strcmp(set, "avx512_bf16") == 0) return avx512 && __builtin_cpu_supports("avx512bf16");
    // Linux saves tile registers only for a process that has asked: ARCH_REQ_XCOMP_PERM
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    if (strcmp(set, "amx_bf16") == 0)
        return cpu_has("avx512_bf16") && processor_has_amx() &&
               syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    if (strcmp(set, "avx512") == 0) return avx512;
    if (strcmp(set, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return strcmp(set, "portable") == 0;
}

const char *cpu_bf16_note(bool bf16_matmul) {
#ifdef __x86_64__
    // by more than 1.3 times; Intel's vdpbf16ps runs at half the rate of its multiply-adds
    const bool amx = cpu_has("amx_bf16"),
               is_faster = amx || (cpu_has("avx512_bf16") && __builtin_cpu_is("amd"));
    if (!bf16_matmul && is_faster) return " (--bf16-matmul is faster here)";
    if (bf16_matmul && processor_has_amx() && !amx) return " (the kernel refuses AMX)";
#endif
    (void)bf16_matmul;
    return "";
}

static int num_threads;

int cpu_set_threads(int threads) {
    num_threads = threads > 0 ? threads : omp_get_num_procs();
    omp_set_num_threads(num_threads);
    return num_threads;
}

int cpu_threads(void) { return num_threads > 0 ? num_threads : omp_get_max_threads(); }
