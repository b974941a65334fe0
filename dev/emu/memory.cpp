// Device memory: each allocation in pages of its own, between two pages that may not be touched.
// Its end lies at the upper one, so that reading past a tensor faults at the first element; it
// starts out as NaN. Freed memory stays mapped as forbidden, so that using it is reported.
#include "engine.h"

#include <mutex>
#include <signal.h>
#include <sys/mman.h>

namespace emu {
constexpr size_t PAGE = 4096;

struct Allocation {
    size_t bytes, mapped_bytes;
    char *mapped;
    const char *file;
    int line;
    bool freed;
};
static std::map<uintptr_t, Allocation> allocations;
static std::mutex mutex;
static size_t in_use;

bool is_device_ptr(const void *p) {
    std::lock_guard<std::mutex> lock(mutex);
    auto it = allocations.upper_bound((uintptr_t)p);
    if (it == allocations.begin()) return false;
    --it;
    return !it->second.freed && (uintptr_t)p <= it->first + it->second.bytes;
}

size_t device_memory_in_use() {
    std::lock_guard<std::mutex> lock(mutex);
    return in_use;
}

// ---- Faults -------------------------------------------------------------------------------------

// How far an address lies outside a block; 0 inside.
static size_t distance(uintptr_t a, uintptr_t p, const Allocation &x) {
    if (a < p) return p - a;
    return a < p + x.bytes ? 0 : a - (p + x.bytes) + 1;
}

static void explain(char *text, size_t size, uintptr_t a, uintptr_t p, const Allocation &x) {
    if (distance(a, p, x) > 2 * PAGE) return;
    if (a < p)
        snprintf(text, size, "%zu bytes before the %zu-byte block from %s:%d", (size_t)(p - a),
                 x.bytes, x.file, x.line);
    else if (a >= p + x.bytes)
        snprintf(text, size, "%zu bytes past the end of the %zu-byte block from %s:%d",
                 (size_t)(a - p - x.bytes), x.bytes, x.file, x.line);
    else if (x.freed)
        snprintf(text, size, "use after cudaFree of the %zu-byte block from %s:%d", x.bytes, x.file,
                 x.line);
}

static void on_fault(int signal, siginfo_t *info, void *) {
    if (signal == SIGALRM)
        fail(
            "time-out: still running after EMU_TIMEOUT seconds (a spin loop without an emulated "
            "wait?)");
    uintptr_t a = (uintptr_t)info->si_addr;
    char text[400] = "address not near any cudaMalloc block";
    // Blocks may be neighbours: the nearer one is meant
    auto nearest = allocations.upper_bound(a);
    if (nearest != allocations.begin()) {
        auto below = std::prev(nearest);
        if (nearest == allocations.end() || distance(a, below->first, below->second) <=
                                                distance(a, nearest->first, nearest->second))
            nearest = below;
    }
    if (nearest != allocations.end())
        explain(text, sizeof text, a, nearest->first, nearest->second);
    fail("illegal address %p: %s", info->si_addr, text);
}

// Handlers run on a stack of their own: the fault may be a fiber's stack overflow.
void catch_faults() {
    static bool done = false;
    if (done) return;
    done = true;
    stack_t stack{};
    stack.ss_size = 1 << 16;
    stack.ss_sp = malloc(stack.ss_size);
    sigaltstack(&stack, nullptr);
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
#if !defined(ASAN)
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
#endif
    sigaction(SIGALRM, &action, nullptr);
}

// ---- Allocating ---------------------------------------------------------------------------------

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// The bytes between the end of a block and its guard page, when its size is no multiple of the
// alignment. Nobody may have written them (AddressSanitizer sees to that by itself).
[[maybe_unused]] static void check_slack(uintptr_t p, const Allocation &x) {
    if (!opt.poison || x.freed) return;
    for (size_t i = x.bytes; i < round_up(x.bytes, opt.align); i++)
        if (((unsigned char *)p)[i] != 0xff)
            fail("byte %zu past the end of the %zu-byte block from %s:%d was written", i - x.bytes,
                 x.bytes, x.file, x.line);
}

static char *map_block(Allocation *a) {
#if defined(ASAN)
    size_t size = std::max<size_t>(round_up(a->bytes, 256), 256);
    char *p = (char *)aligned_alloc(256, size);
    if (p) __asan_poison_memory_region(p + a->bytes, size - a->bytes);
    return p;
#else
    size_t size = round_up(a->bytes, opt.align);
    a->mapped_bytes = round_up(size, PAGE) + 2 * PAGE;
    a->mapped = (char *)mmap(nullptr, a->mapped_bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (a->mapped == MAP_FAILED) return nullptr;
    char *end = a->mapped + a->mapped_bytes - PAGE;
    if (opt.guard) {
        mprotect(a->mapped, PAGE, PROT_NONE);
        mprotect(end, PAGE, PROT_NONE);
    }
    if (opt.poison) memset(end - size + a->bytes, 0xff, size - a->bytes);
    return end - size;
#endif
}

char *device_allocate(size_t bytes, const char *file, int line) {
    catch_faults();
    std::lock_guard<std::mutex> lock(mutex);
    if (bytes > opt.memory - std::min(in_use, opt.memory)) return nullptr;
    Allocation a{bytes, 0, nullptr, file, line, false};
    char *p = map_block(&a);
    if (!p) return nullptr;
    // page faults would be most of a start's time
    madvise((void *)round_up((uintptr_t)p, PAGE), bytes, MADV_HUGEPAGE);
    if (opt.poison) memset(p, 0xff, bytes);  // NaN in bf16 and in fp32
    allocations[(uintptr_t)p] = a;
    in_use += bytes;
    return p;
}

void device_release(void *p) {
    std::lock_guard<std::mutex> lock(mutex);
    auto it = allocations.find((uintptr_t)p);
    if (it == allocations.end() || it->second.freed)
        fail("cudaFree of %p, which is not an allocation", p);
    Allocation &a = it->second;
    in_use -= a.bytes;
#if defined(ASAN)
    __asan_unpoison_memory_region(p, round_up(a.bytes, 256));
    free(p);
    allocations.erase(it);
#else
    check_slack(it->first, a);
    a.freed = true;
    mprotect(a.mapped, a.mapped_bytes, PROT_NONE);
    madvise(a.mapped, a.mapped_bytes, MADV_DONTNEED);
#endif
}

#if !defined(ASAN)
static struct CheckAtExit {
    ~CheckAtExit() {
        for (auto &[p, a] : allocations) check_slack(p, a);
    }
} check_at_exit;
#endif
}  // namespace emu
