// The instruction sets of this CPU, and the threads that its kernels use.
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../../data/base/error.h"
#include "../../data/base/hash.h"
#include "../../data/base/machine.h"
#include "../comm/comm.h"
#include "common.h"

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

// Ranks with the same cores are not bound, and divide them. Others have their own, or share a part
// of the machine, of which they take no more than if they were not bound.
void cpu_set_threads(int asked, char *text, size_t capacity) {
    cpu_set_t mask = {0};
    sched_getaffinity(0, sizeof mask, &mask);
    const int cores = machine_cores(), ranks = comm_local_ranks(), fair_share = cores / ranks,
              allowed = cores_allowed(), hash = (int)(crc32c(0, &mask, sizeof mask) >> 1);
    const bool alike = comm_max(hash) == -comm_max(-hash);
    const int share = (int)at_least(alike ? allowed / ranks : at_most(allowed, fair_share), 1);
    const char *limit, *remedy = comm_unbind_hint();
    num_threads = machine_threads(asked, share, ranks, &limit);
    omp_set_num_threads(num_threads);
    if (comm_max(remedy && num_threads >= share && 2 * share <= fair_share))
        warning("a rank may use less than its share of the machine's cores; for more: %s", remedy);
    const int n = snprintf(text, capacity, "%d thread%s of %d core%s", num_threads,
                           text_plural(num_threads), cores, text_plural(cores));
    if (num_threads != cores) snprintf(text + n, capacity - (size_t)n, " (%s)", limit);
}

int cpu_threads(void) { return num_threads > 0 ? num_threads : omp_get_max_threads(); }
