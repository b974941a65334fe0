// The CPU as a device: counted allocations, memcpy for copies, and the calling thread as the only
// "stream".

#include <assert.h>
#include <omp.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../data/base/clock.h"
#include "../../data/base/error.h"
#include "../../data/base/machine.h"
#include "../../data/base/memory.h"
#include "common.h"

enum { HEADER_BYTES = 64 };  // stores the size; keeps the payload aligned for AVX-512

static DeviceMemory memory;
static char description[160];

// When libgomp gets no memory or thread it ends the program with exit code 1, which none of our
// errors use.
static void openmp_failed(int code, void *unused) {
    Error err = {0};
    (void)unused;
    if (code != 1) return;
    error_set(&err, EXIT_HOST_MEMORY, "close other programs, or choose fewer --threads",
              "host memory: refused to OpenMP, which says more above");
    error_print(&err);
    _exit(EXIT_HOST_MEMORY);
}

// OMP_PROC_BIND and OMP_PLACES bind this thread before main: what it starts or executes would have
// only that place's cores, and OpenMP's threads of several ranks the same ones. Instead, all may
// use all cores of the places. Returns whether it has changed the environment.
static bool unbind(void) {
    int ids[CPU_SETSIZE];
    cpu_set_t cores = {0};
    const bool is_second = strcmp(getenv("OMP_PROC_BIND") ?: "", "false") == 0;
    if (is_second || omp_get_proc_bind() == omp_proc_bind_false) return false;
    for (int p = 0; p < omp_get_num_places() && omp_get_place_num_procs(p) <= CPU_SETSIZE; p++) {
        omp_get_place_proc_ids(p, ids);
        for (int i = 0; i < omp_get_place_num_procs(p); i++) CPU_SET(ids[i], &cores);
    }
    return CPU_COUNT(&cores) > 0 && sched_setaffinity(0, sizeof cores, &cores) == 0 &&
           setenv("OMP_PROC_BIND", "false", 1) == 0;
}

// When other programs run, OpenMP threads that spin while waiting take the CPU from the threads
// they wait for: steps were up to ten times slower on a busy machine, and no faster on an idle one.
// Spinning for about 15 us pays: waking a thread takes longer than a small operation, and decoding
// has hundreds of those for each token. The OpenMP library reads its policy before main, hence the
// re-exec, which valgrind and other tools cannot follow: OMP_WAIT_POLICY=passive valgrind ...
void device_prepare_process(char **argv) {
    on_exit(openmp_failed, NULL);
    const bool unbound = unbind(), waits = getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT");
    if (waits && !unbound) return;
    if (waits ||
        (setenv("OMP_WAIT_POLICY", "passive", 1) == 0 && setenv("GOMP_SPINCOUNT", "1000", 1) == 0))
        execv("/proc/self/exe", argv);
}

const char *device_init(const DeviceOptions *options) {
    char threads[80];
    cpu_set_threads(options->threads, threads, sizeof threads);
    if (!matmul_select(NULL, options->bf16_matmul))
        return "--bf16-matmul: this CPU has no bf16 dot products (amx_bf16, avx512_bf16)";
    snprintf(description, sizeof description, "cpu, %s, matmul %s%s", threads, matmul_describe(),
             cpu_bf16_note(options->bf16_matmul));
    return NULL;
}

const char *device_refuses(int C, int F, int D) {
    (void)C, (void)F, (void)D;
    return NULL;
}

// CPU errors are unsupported shapes and do not depend on the batch: no context to add.
void device_on_error(void (*describe)(void *context, char *text, size_t capacity), void *context) {
    (void)describe, (void)context;
}

void device_fail(const char *hint, const char *format, ...) {
    Error err = {0};
    va_list args;
    va_start(args, format);
    error_fill(&err, EXIT_DEVICE_ERROR, hint, format, args);
    va_end(args);
    error_exit(&err);
}

const char *device_describe(void) { return description; }

void *device_malloc(size_t bytes) {
    if (bytes > SIZE_MAX - 2 * HEADER_BYTES) return NULL;
    size_t total = HEADER_BYTES + (bytes + HEADER_BYTES - 1) / HEADER_BYTES * HEADER_BYTES;
    char *block = aligned_alloc(HEADER_BYTES, total);
    if (!block) return NULL;
    *(size_t *)block = bytes;
    if (bytes >= (4u << 20)) {  // fewer TLB misses in the big arenas; advice only
        size_t page = (size_t)sysconf(_SC_PAGESIZE);
        char *first = (char *)(((uintptr_t)block + page - 1) / page * page);
        madvise(first, (size_t)(block + total - first) / page * page, MADV_HUGEPAGE);
    }
#ifdef POISON
    memset(block + HEADER_BYTES, 0xff, bytes);
#endif
    memory.count++;
    memory.bytes_now += bytes;
    if (memory.bytes_now > memory.bytes_peak) memory.bytes_peak = memory.bytes_now;
    return block + HEADER_BYTES;
}

void device_free(void *p) {
    if (!p) return;
    char *block = (char *)p - HEADER_BYTES;
    assert(*(size_t *)block <= memory.bytes_now);
    memory.bytes_now -= *(size_t *)block;
    free(block);
}

void device_zero(void *p, size_t bytes) { memset(p, 0, bytes); }
void device_upload(void *dst, const void *src_host, size_t bytes) {
    if (bytes) memcpy(dst, src_host, bytes);
}
void device_download(void *dst_host, const void *src, size_t bytes) {
    if (bytes) memcpy(dst_host, src, bytes);
    memory.waits++;
}
void device_copy(void *dst, const void *src, size_t bytes) {
    if (bytes) memcpy(dst, src, bytes);
}

static double timer_start_ms, timer_ms;
void device_timer_leave_out(double ms) { timer_start_ms += ms; }
void device_timer_start(void) { timer_start_ms = now_ms(); }
void device_timer_stop(void) { timer_ms = now_ms() - timer_start_ms; }
float device_timer_ms(void) { return (float)timer_ms; }

DeviceMemory device_memory(void) { return memory; }

int device_memory_code(void) { return EXIT_HOST_MEMORY; }

size_t device_memory_free(int local_ranks) { return host_memory_free() / (size_t)local_ranks; }

size_t master_lo_bytes(void) { return 0; }

void weights_from_host(floatX *weights, uint16_t *master_lo, const float *src_host, size_t n) {
    (void)master_lo;
    for (size_t i = 0; i < n; i++) weights[i] = (floatX)src_host[i];
}

void weights_to_host(float *dst_host, const floatX *weights, const uint16_t *master_lo, size_t n) {
    (void)master_lo;
    for (size_t i = 0; i < n; i++) dst_host[i] = (float)weights[i];
}
