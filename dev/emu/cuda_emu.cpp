// cuda_emu.cpp - runtime of the CUDA emulation: fibers, scheduler, barriers, tensor-core and TMA emulation, host API.
#include "emu_ptx.h"
#include <link.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <unistd.h>
#include <map>
#include <memory>
#include <atomic>
#include <mutex>
#include <thread>
#include <set>
#if defined(__SANITIZE_ADDRESS__) || defined(EMU_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define ASAN 1
#endif
#ifdef EMU_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void *);
void __tsan_switch_to_fiber(void *, unsigned);
void __tsan_set_fiber_name(void *, const char *);
void __tsan_read_range(void *, unsigned long);
void __tsan_write_range(void *, unsigned long);
}
extern "C" {
void AnnotateIgnoreReadsBegin(const char *, int);
void AnnotateIgnoreReadsEnd(const char *, int);
void AnnotateIgnoreWritesBegin(const char *, int);
void AnnotateIgnoreWritesEnd(const char *, int);
}
#define TSAN(x) x
struct Quiet {
    Quiet() {
        AnnotateIgnoreReadsBegin(__FILE__, 0);
        AnnotateIgnoreWritesBegin(__FILE__, 0);
    }
    ~Quiet() {
        AnnotateIgnoreReadsEnd(__FILE__, 0);
        AnnotateIgnoreWritesEnd(__FILE__, 0);
    }
};  // hides the runtime's own bookkeeping
#else
#define TSAN(x)
struct Quiet {
    Quiet() {}
};
#endif

// the program's one dynamic shared memory array: "extern __shared__ __align__(1024) unsigned char smem[];"
constexpr size_t SMEM_MAX = 232448;  // 227 KB, the sm_90 opt-in limit
alignas(1024) thread_local unsigned char smem[SMEM_MAX];

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;
namespace emu {
__thread Cursor cur;

// ------------------------------------------------------------------------------------------ options
enum Sched { FIFO, RANDOM, PRIO };
struct Opt {
    int sched = FIFO, async = 0 /*0 lazy 1 eager 2 random*/, threads = 1, proxy = 0, trunc = 0,
        timeout = 0, guard = 1, poison = 1;
    uint64_t seed = 1;
    Opt() {
        auto e = [](const char *n) {
            const char *v = getenv(n);
            return v ? std::string(v) : std::string();
        };
        if (e("EMU_SCHED") == "random") sched = RANDOM;
        if (e("EMU_SCHED") == "prio") sched = PRIO;
        async = sched == FIFO ? 0 : 2;
        if (e("EMU_ASYNC") == "eager") async = 1;
        if (e("EMU_ASYNC") == "lazy") async = 0;
        if (e("EMU_ASYNC") == "random") async = 2;
        if (!e("EMU_SEED").empty()) seed = strtoull(e("EMU_SEED").c_str(), 0, 10);
        if (!e("EMU_THREADS").empty()) threads = atoi(e("EMU_THREADS").c_str());
        proxy = atoi(e("EMU_PROXY").c_str());
        trunc = atoi(e("EMU_TRUNC").c_str());
        timeout = atoi(e("EMU_TIMEOUT").c_str());
        if (e("EMU_GUARD") == "0") guard = 0;
        if (e("EMU_POISON") == "0") poison = 0;
    }
};
static Opt opt;
static uint64_t splitmix(uint64_t &s) {
    uint64_t z = (s += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// ------------------------------------------------------------------------------------------ engine state
struct CpOp {
    void *dst;
    const void *src;
    int n, valid;
};
struct Fiber {
    void *sp = nullptr;
    char *stack = nullptr;
    uint3 tid;
    int idx, lane, warp;
    State st = DONE;
    const char *what = "";
    const char *file = "";
    int line = 0;
    void *wait_obj = nullptr;
    uint32_t wait_arg = 0;
    std::vector<CpOp> cp;
    std::vector<int> cp_end;
    int bulk_groups = 0;
    void *fake = nullptr, *tsan = nullptr;
    uint32_t prio = 0;
};
struct Coll {
    uint32_t mask = 0, arrived = 0;
    CollFn fn;
    const char *name, *file;
    int line;
    void *slot[32];
};
struct WgOp {
    int n, group, scale;
    bool ta, tb, rs;
    uint64_t da, db;
    float *d[32];
    uint32_t a[32][4];
    const char *file;
    int line;
};
struct Warp {
    Coll c[32];
    int nc = 0;
    uint32_t exited = 0, exists = 0;
    std::vector<WgOp> wg;
    int wg_groups = 0;
    bool wg_fence = false;
    size_t wg_seq = 0;
    void *tsan_async = nullptr;
    char t_issue, t_done;
};
struct Bar {
    int arrived = 0, expect = 0;
    uint32_t gen = 0;
    std::vector<Fiber *> waiters;
    const char *file = "";
    int line = 0;
    uint64_t warps = 0;
    char tag[2];
};
struct AsyncOp {
    enum Kind { LOAD, STORE, BLOAD, RADD } kind;
    Fiber *owner;
    int group;
    CUtensorMap map;
    int rank, c[3];
    uint32_t smem, bytes, bar;
    void *g;
    const char *file;
    int line;
};
struct Stats {
    uint64_t blocks = 0, switches = 0, mma = 0, ldm = 0, ldm_conflict = 0, wgmma = 0, cp_bytes = 0,
             tma_bytes = 0;
    void add(const Stats &o) {
        blocks += o.blocks;
        switches += o.switches;
        mma += o.mma;
        ldm += o.ldm;
        ldm_conflict += o.ldm_conflict;
        wgmma += o.wgmma;
        cp_bytes += o.cp_bytes;
        tma_bytes += o.tma_bytes;
    }
};
struct WgSig {
    uint64_t da, db;
    int n, flags;
    int line;
};
struct Block {
    std::vector<std::unique_ptr<Fiber>> f;
    std::vector<std::unique_ptr<Warp>> w;
    Bar bars[16];
    std::vector<AsyncOp> async;
    std::vector<std::vector<WgSig>> wgsig;
    std::vector<Fiber *> ready;
    size_t head = 0;
    int n = 0, live = 0;
    uint64_t rng = 0;
    size_t dyn = 0;
    void *sched_sp = nullptr;
    void (*call)(void *) = nullptr;
    void *ctx = nullptr;
    const char *name = "";
    char *tls_lo = nullptr, *tls_hi = nullptr, *base = nullptr;
    std::vector<char> view;
    std::set<std::pair<void *, uint32_t>> mbars;
    void *sched_fake = nullptr, *tsan_main = nullptr;
    const void *os_bottom = nullptr;
    size_t os_size = 0;
    char t_start = 0, t_end = 0;
    Stats st;
    float wA[16][16], wB[16][256], wD[16][256];
};
static std::map<std::string, Stats>
    stats;  // per kernel; tests can assert on the work done (tiles skipped, bytes moved)
#if defined(ASAN) || defined(EMU_TSAN)
constexpr size_t STACK = 256 << 10;
#else
constexpr size_t STACK = 64 << 10;
#endif
static inline uint32_t rnd(Block *b) { return (uint32_t)(splitmix(b->rng) >> 32); }

void fail(const char *fmt, ...) {
    char buf[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(buf, sizeof buf, fmt, ap);
    va_end(ap);
    fflush(stdout);
    if (cur.self)
        fprintf(stderr, "EMU ERROR: %s: block (%u,%u,%u) thread (%u,%u,%u): %s\n", cur.blk->name,
                blockIdx.x, blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, buf);
    else
        fprintf(stderr, "EMU ERROR: %s%s%s\n", cur.blk ? cur.blk->name : "", cur.blk ? ": " : "",
                buf);
    _exit(97);
}
int lane_id() { return cur.self->lane; }
// Asynchronous operations (cp.async, TMA, wgmma) run in a TSan context of their own: ordered after the issue, and ordered before
// other threads only by the matching wait. Their footprint is touched at issue and again at completion.
#ifdef EMU_TSAN
struct Async {
    Warp *w;
    void *back;
    Async(Warp *w_, bool issue, const char *what = "async", const char *file = "", int line = 0)
        : w(w_), back(__tsan_get_current_fiber()) {
        char nm[64];
        const char *s = strrchr(file, '/');
        snprintf(nm, sizeof nm, "%s %s:%d", what, s ? s + 1 : file, line);
        __tsan_set_fiber_name(w->tsan_async, nm);
        if (issue) __tsan_release(&w->t_issue);
        __tsan_switch_to_fiber(w->tsan_async, 1);
        if (issue) __tsan_acquire(&w->t_issue);
    }
    ~Async() {
        __tsan_release(&w->t_done);
        __tsan_switch_to_fiber(back, 1);
    }
};
#else
struct Async {
    Async(Warp *, bool, const char * = "", const char * = "", int = 0) {}
};
#endif
static Warp *my_warp();
static void async_done() { TSAN(__tsan_acquire(&my_warp()->t_done);) }

// ------------------------------------------------------------------------------------------ context switch
#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
extern "C" void emu_switch(void **save, void *load);
asm(R"(.text
.globl emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");
#else
#include <ucontext.h>  // portable fallback, about 20x slower (system calls for the signal mask)
static void emu_switch(void **save, void *load) {
    ucontext_t u;
    *save = &u;
    swapcontext(&u, (ucontext_t *)load);
}
#endif
static void to_fiber(Block *b, Fiber *f) {
    threadIdx = f->tid;
    cur.self = f;
    f->st = RUNNING;
    b->st.switches++;
#ifdef ASAN
    __sanitizer_start_switch_fiber(&b->sched_fake, f->stack, STACK);
#endif
    TSAN(__tsan_switch_to_fiber(f->tsan, 1);)
    emu_switch(&b->sched_sp, f->sp);
#ifdef ASAN
    __sanitizer_finish_switch_fiber(b->sched_fake, nullptr, nullptr);
#endif
    cur.self = nullptr;
}
static void to_sched(Fiber *f) {
    Block *b = cur.blk;
#if !defined(ASAN) && !defined(EMU_TSAN) && defined(__x86_64__) && !defined(EMU_UCONTEXT)
    if (opt.sched == FIFO && b->head < b->ready.size() &&
        b->head < 4096) {  // common case: straight to the next ready thread
        Fiber *n = b->ready[b->head++];
        if (n == f) {
            f->st = RUNNING;
            return;
        }
        threadIdx = n->tid;
        cur.self = n;
        n->st = RUNNING;
        b->st.switches++;
        emu_switch(&f->sp, n->sp);
        return;
    }
#endif
#ifdef ASAN
    __sanitizer_start_switch_fiber(&f->fake, b->os_bottom, b->os_size);
#endif
    TSAN(__tsan_switch_to_fiber(b->tsan_main, 1);)
    emu_switch(&f->sp, b->sched_sp);
#ifdef ASAN
    __sanitizer_finish_switch_fiber(f->fake, &b->os_bottom, &b->os_size);
#endif
}
static void make_ready(Block *b, Fiber *f) {
    f->st = READY;
    b->ready.push_back(f);
}
static void block_on(State s, const char *what, void *obj, uint32_t arg, const char *file,
                     int line) {
    Fiber *f = cur.self;
    f->st = s;
    f->what = what;
    f->wait_obj = obj;
    f->wait_arg = arg;
    f->file = file;
    f->line = line;
    to_sched(f);
}
static void requeue() {
    Fiber *f = cur.self;
    make_ready(cur.blk, f);
    to_sched(f);
}
void yield_point() {
    if (cur.self && opt.sched != FIFO && (rnd(cur.blk) & 7) == 0) requeue();
}
static void thread_exit(Fiber *f);
static void fiber_main() {
#ifdef ASAN
    __sanitizer_finish_switch_fiber(nullptr, &cur.blk->os_bottom, &cur.blk->os_size);
#endif
    for (;;) {
        Fiber *f = cur.self;
        Block *b = cur.blk;
        TSAN(__tsan_acquire(&b->t_start);)
        b->call(b->ctx);
        TSAN(__tsan_release(&b->t_end);)
        thread_exit(f);
        f->st = DONE;
        to_sched(f);
    }
}
static void make_fiber(Fiber *f) {
    size_t pg = 4096;
    char *m = (char *)mmap(nullptr, STACK + pg, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m == MAP_FAILED) fail("no memory for fiber stacks");
    mprotect(m, pg, PROT_NONE);
    f->stack = m + pg;
#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
    void **s =
        (void **)(f->stack + STACK - 64 * (f->idx % 32)) - 2;  // stagger stacks over cache sets
    s = (void **)((uintptr_t)s & ~(uintptr_t)15);
    *--s = nullptr;
    *--s = (void *)fiber_main;  // return address slot keeps rsp = 8 mod 16 at entry
    for (int i = 0; i < 6; i++) *--s = nullptr;
    f->sp = s;
#else
    ucontext_t *u = new ucontext_t;
    getcontext(u);
    u->uc_stack.ss_sp = f->stack;
    u->uc_stack.ss_size = STACK;
    u->uc_link = nullptr;
    makecontext(u, fiber_main, 0);
    f->sp = u;
#endif
    TSAN(f->tsan = __tsan_create_fiber(0);)
}

// ------------------------------------------------------------------------------------------ warp collectives
static void coll_run(Block *b, Warp *w, int i, Fiber *self) {
    Coll c = w->c[i];
    w->c[i] = w->c[--w->nc];
    TSAN({
        char nm[64];
        const char *s = strrchr(c.file, '/');
        snprintf(nm, sizeof nm, "thread %u.%u %s %s:%d", self->warp, self->lane, c.name,
                 s ? s + 1 : c.file, c.line);
        __tsan_set_fiber_name(self->tsan, nm);
    })
    c.fn(c.slot, c.arrived);
    for (uint32_t m = c.arrived; m; m &= m - 1) {
        Fiber *f = b->f[self->warp * 32 + __builtin_ctz(m)].get();
        if (f != self) make_ready(b, f);
    }
}
void warp_coll(uint32_t mask, CollFn fn, const char *name, void *arg, const char *file, int line,
               bool aligned) {
    Fiber *f = cur.self;
    Block *b = cur.blk;
    Warp *w = b->w[f->warp].get();
    if (!(mask >> f->lane & 1))
        fail("%s:%d %s: calling lane %d is not in its own mask %08x", file, line, name, f->lane,
             mask);
    if (aligned && ((w->exited & mask) || (w->exists & mask) != mask))
        fail("%s:%d %s needs all 32 lanes, exited %08x missing %08x", file, line, name, w->exited,
             mask & ~w->exists);
    mask &= w->exists;
    int i = 0;
    while (i < w->nc && w->c[i].mask != mask) {
        if (w->c[i].mask & mask & ~w->exited)
            fail("%s:%d %s mask %08x overlaps pending %s mask %08x at %s:%d", file, line, name,
                 mask, w->c[i].name, w->c[i].mask, w->c[i].file, w->c[i].line);
        i++;
    }
    if (i == w->nc) {
        Coll &c = w->c[w->nc++];
        c.mask = mask;
        c.arrived = 0;
        c.fn = fn;
        c.name = name;
        c.file = file;
        c.line = line;
    }
    Coll &c = w->c[i];
    if (c.fn != fn || c.line != line)
        fail(
            "divergent warp collective: lane %d is at %s %s:%d, lanes %08x of warp %d wait at %s "
            "%s:%d",
            f->lane, name, file, line, c.arrived, f->warp, c.name, c.file, c.line);
    c.slot[f->lane] = arg;
    c.arrived |= 1u << f->lane;
    TSAN(bool sync = fn == fn_sync;
         if (sync) __tsan_release(w);)  // shuffles, votes and mma order no memory
    if (c.arrived == (mask & ~w->exited)) {
        coll_run(b, w, i, f);
        TSAN(if (sync) __tsan_release(w);) if (opt.sched != FIFO) requeue();
    } else
        block_on(W_WARP, name, w, mask, file, line);
    TSAN(if (sync) __tsan_acquire(w);)
}
void fn_sync(void **, uint32_t) {}
void fn_shfl(void **s, uint32_t m) {
    for (int l = 0; l < 32; l++)
        if (m >> l & 1) {
            ShflArg *a = (ShflArg *)s[l];
            a->out = (m >> (a->src & 31) & 1) ? ((ShflArg *)s[a->src & 31])->v : ~0ull;
        }  // reading an absent lane: poison
}
void fn_vote(void **s, uint32_t m) {
    uint32_t r = 0;
    for (int l = 0; l < 32; l++)
        if ((m >> l & 1) && ((ShflArg *)s[l])->pred) r |= 1u << l;
    for (int l = 0; l < 32; l++)
        if (m >> l & 1) ((ShflArg *)s[l])->ball = r;
}
static void fn_elect(void **s, uint32_t m) {
    Block *b = cur.blk;
    int k = opt.sched == FIFO ? __builtin_ctz(m) : (int)(rnd(b) % 32);
    while (!(m >> k & 1)) k = (k + 1) % 32;
    for (int l = 0; l < 32; l++)
        if (m >> l & 1) *(int *)s[l] = l == k;
}
bool elect(const char *file, int line) {
    int r = 0;
    warp_coll(~0u, fn_elect, "elect.sync", &r, file, line, true);
    return r;
}

// ------------------------------------------------------------------------------------------ CTA barriers
static bool bar_try_release(Block *b, Bar &r, Fiber *self) {
    int target = r.expect < 0 ? b->live : r.expect;
    if (!r.arrived || r.arrived < target) return false;
    for (Fiber *f : r.waiters)
        if (f != self) make_ready(b, f);
    r.waiters.clear();
    r.arrived = 0;
    r.expect = 0;
    r.warps = 0;
    r.gen++;
    return true;
}
void bar(int id, int count, bool wait, const char *file, int line) {
    Fiber *f = cur.self;
    Block *b = cur.blk;
    if (id < 0 || id > 15) fail("%s:%d barrier id %d", file, line, id);
    Bar &r = b->bars[id];
    if (count > 0 && count % 32)
        fail("%s:%d barrier %d: thread count %d is not a multiple of 32", file, line, id, count);
    if (r.arrived && r.expect != count)
        fail("%s:%d barrier %d: count %d, earlier arrivals at %s:%d used %d", file, line, id, count,
             r.file, r.line, r.expect);
    if (r.arrived && r.line != line && !(r.waiters.empty()))
        for (Fiber *o : r.waiters)
            if (o->warp == f->warp && o->line != line)
                fail("divergent barrier %d: lane %d of warp %d is at %s:%d, lane %d at %s:%d", id,
                     f->lane, f->warp, file, line, o->lane, o->file, o->line);
    r.expect = count;
    r.arrived++;
    r.file = file;
    r.line = line;
    TSAN(char *tag = &r.tag[r.gen & 1]; __tsan_release(tag);)
    if (wait) {
        f->file = file;
        f->line = line;
        r.waiters.push_back(f);
    }
    if (bar_try_release(b, r, f)) {
        if (wait && opt.sched != FIFO) requeue();
    } else if (wait)
        block_on(W_BAR, id == 0 && count < 0 ? "__syncthreads" : "named barrier", &r, id, file,
                 line);
    TSAN(if (wait) __tsan_acquire(tag);)
}
static void thread_exit(Fiber *f) {
    Block *b = cur.blk;
    Warp *w = b->w[f->warp].get();
    if (!f->cp.empty()) fail("thread exits with cp.async copies never waited for");
    for (auto &a : b->async)
        if (a.owner == f && (a.kind == AsyncOp::STORE || a.kind == AsyncOp::RADD))
            fail("thread exits with an unfinished TMA store from %s:%d (no bulk wait)", a.file,
                 a.line);
    if (!w->wg.empty())
        fail("thread exits with wgmma in flight (%s:%d, no wgmma_wait<0>)", w->wg[0].file,
             w->wg[0].line);
    b->live--;
    w->exited |= 1u << f->lane;
    for (int i = 0; i < w->nc;) {
        Coll &c = w->c[i];
        if (c.arrived && c.arrived == (c.mask & ~w->exited)) {
            coll_run(b, w, i, f);
            i = 0;
        } else
            i++;
    }
    for (Bar &r : b->bars)
        if (r.expect < 0) bar_try_release(b, r, nullptr);
}

// ------------------------------------------------------------------------------------------ shared memory window
uint32_t smem_addr(const void *p) {
    Block *b = cur.blk;
    if ((char *)p < b->tls_lo || (char *)p >= b->tls_hi)
        fail("__cvta_generic_to_shared: %p is not shared memory", p);
    return (uint32_t)((char *)p - b->base);
}
void *smem_ptr(uint32_t a, size_t n, const char *what) {
    Block *b = cur.blk;
    char *p = b->base + a;
    if (p < b->tls_lo || p + n > b->tls_hi)
        fail("%s: shared address 0x%x is outside the shared window", what, a);
    if (p >= (char *)smem && p + n > (char *)smem + b->dyn)
        fail("%s: %zu bytes at dynamic shared offset %zd run past the %zu bytes given at launch",
             what, n, p - (char *)smem, b->dyn);
    return p;
}
static char *async_view(uint32_t a, char *p) { return opt.proxy ? cur.blk->view.data() + a : p; }
static inline uint32_t swz(uint32_t a, int mode) {
    return mode == 1   ? a ^ ((a >> 7 & 7) << 4)
           : mode == 2 ? a ^ ((a >> 7 & 3) << 4)
           : mode == 3 ? a ^ ((a >> 7 & 1) << 4)
                       : a;
}
void fence_proxy() {  // publishes everything written so far to the asynchronous proxy (coarser than hardware: other threads' writes too)
    Block *b = cur.blk;
    TSAN(__tsan_release(b->view.data());)
    if (opt.proxy) memcpy(b->view.data() + ((char *)smem - b->base), smem, b->dyn);
    yield_point();
}
void fence_mbar() {}

// ------------------------------------------------------------------------------------------ cp.async
static Warp *my_warp() { return cur.blk->w[cur.self->warp].get(); }
static inline void cp_do(const CpOp &o) {
    if (o.valid) memcpy(o.dst, o.src, o.valid);
    if (o.valid < o.n) memset((char *)o.dst + o.valid, 0, o.n - o.valid);
}
void cp_async(uint32_t dst, const void *src, int n, int valid, const char *file, int line) {
    Fiber *f = cur.self;
    if (dst % n || (valid && (uintptr_t)src % n))
        fail("%s:%d cp.async misaligned: dst 0x%x src %p", file, line, dst, src);
    CpOp o{smem_ptr(dst, n, "cp.async"), src, n, valid};
    TSAN({
        Async a(my_warp(), true, "cp.async", file, line);
        __tsan_write_range(o.dst, n);
        if (valid) __tsan_read_range((void *)src, valid);
    })
    if (opt.async == 1 || (opt.async == 2 && (rnd(cur.blk) & 1))) {
        cp_do(o);
        o.valid = -1;
    }
    cur.blk->st.cp_bytes += valid;
    f->cp.push_back(o);
    yield_point();
}
void cp_commit() {
    Fiber *f = cur.self;
    f->cp_end.push_back((int)f->cp.size());
}
void cp_wait(int n) {
    Fiber *f = cur.self;
    int g = (int)f->cp_end.size() - n;
    if (g > 0) {
        int end = f->cp_end[g - 1];
        {
            Async a(my_warp(), false);
            for (int i = 0; i < end; i++)
                if (f->cp[i].valid >= 0) cp_do(f->cp[i]);
        }
        async_done();
        f->cp.erase(f->cp.begin(), f->cp.begin() + end);
        f->cp_end.erase(f->cp_end.begin(), f->cp_end.begin() + g);
        for (int &e : f->cp_end) e -= end;
    }
    yield_point();
}

// ------------------------------------------------------------------------------------------ mbarrier, stored in place in 64 bits
// [63:48] magic  [47] phase  [46:35] pending  [34:23] count  [22:0] tx-count (signed)
constexpr uint64_t MAGIC = 0xB5B5;
struct Mb {
    uint64_t *p;
    uint32_t phase, pending, count;
    int32_t tx;
};
static Mb mb_get(uint32_t a, const char *op, const char *file, int line) {
    if (a & 7) fail("%s:%d %s: mbarrier address 0x%x is not 8-byte aligned", file, line, op, a);
    Mb m;
    m.p = (uint64_t *)smem_ptr(a, 8, op);
    uint64_t v = *m.p;
    if (v >> 48 != MAGIC)
        fail("%s:%d %s: no initialised mbarrier at shared 0x%x (content %016llx)", file, line, op,
             a, (unsigned long long)v);
    m.phase = v >> 47 & 1;
    m.pending = v >> 35 & 4095;
    m.count = v >> 23 & 4095;
    m.tx = (int32_t)((uint32_t)v << 9) >> 9;
    return m;
}
static void mb_put(Mb &m) {
    Block *b = cur.blk;
    bool done = m.pending == 0 && m.tx == 0;
    if (done) {
        m.phase ^= 1;
        m.pending = m.count;
    }
    *m.p = MAGIC << 48 | (uint64_t)m.phase << 47 | (uint64_t)m.pending << 35 |
           (uint64_t)m.count << 23 | ((uint32_t)m.tx & 0x7fffff);
    if (done)
        for (int i = 0; i < b->n; i++) {
            Fiber *f = b->f[i].get();
            if (f->st == W_MBAR && f->wait_obj == m.p && f->wait_arg != m.phase) make_ready(b, f);
        }
}
void mbar_init(uint32_t a, uint32_t n, const char *file, int line) {
    if (a & 7) fail("%s:%d mbarrier.init misaligned", file, line);
    if (!n || n > 4095) fail("%s:%d mbarrier.init count %u", file, line, n);
    uint64_t *p = (uint64_t *)smem_ptr(a, 8, "mbarrier.init");
    *p = MAGIC << 48 | (uint64_t)n << 35 | (uint64_t)n << 23;
    Quiet quiet;
    cur.blk->mbars.insert({p, a});
}
void mbar_arrive(uint32_t a, uint32_t n, uint32_t tx, const char *file, int line) {
    Mb m = mb_get(a, "mbarrier.arrive", file, line);
    TSAN(__tsan_release(m.p);)
    if (m.pending < n)
        fail("%s:%d mbarrier at shared 0x%x: more arrivals than its count %u in one phase", file,
             line, a, m.count);
    m.tx += (int)tx;
    m.pending -= n;
    mb_put(m);
    yield_point();
}
static void mbar_complete_tx(uint32_t a, uint32_t bytes, const char *file, int line) {
    Mb m = mb_get(a, "complete_tx", file, line);
    TSAN(__tsan_release(m.p);) m.tx -= (int)bytes;
    mb_put(m);
}
bool mbar_try_wait(uint32_t a, uint32_t parity, bool block, const char *file, int line) {
    Mb m = mb_get(a, "mbarrier.try_wait", file, line);
    if (m.phase == (parity & 1)) {
        if (opt.sched != FIFO && (rnd(cur.blk) & 3) == 0) {
            requeue();
            return false;
        }  // spurious time-out, as the ISA allows
        block_on(W_MBAR, "mbarrier wait", m.p, parity & 1, file, line);
    } else
        yield_point();
    TSAN(__tsan_acquire(m.p);)
    return true;
}

// ------------------------------------------------------------------------------------------ ldmatrix, mma.sync
struct LdArg {
    uint32_t *r;
    uint32_t addr;
};
template <int N, bool T>
static void fn_ld(void **s, uint32_t) {
    for (int m = 0; m < N; m++) {
        const uint16_t *row[8];
        uint32_t banks = 0;
        cur.blk->st.ldm += m == 0;
        for (int i = 0; i < 8; i++) {
            uint32_t a = ((LdArg *)s[m * 8 + i])->addr;
            if (a & 15)
                fail("ldmatrix row address 0x%x (lane %d) is not 16-byte aligned", a, m * 8 + i);
            row[i] = (const uint16_t *)smem_ptr(a, 16, "ldmatrix");
            banks |= 1u << (a >> 4 & 7);
            TSAN(__tsan_read_range((void *)row[i], 16);)
        }
        cur.blk->st.ldm_conflict += banks != 0xff;
        for (int l = 0; l < 32; l++) {
            int g = l >> 2, t = (l & 3) * 2;
            ((LdArg *)s[l])->r[m] = T ? (uint32_t)row[t][g] | (uint32_t)row[t + 1][g] << 16
                                      : (uint32_t)row[g][t] | (uint32_t)row[g][t + 1] << 16;
        }
    }
}
void ldmatrix(uint32_t *r, int n, bool trans, uint32_t addr, const char *file, int line) {
    LdArg a{r, addr};
    CollFn fn = n == 4   ? (trans ? fn_ld<4, true> : fn_ld<4, false>)
                : n == 2 ? (trans ? fn_ld<2, true> : fn_ld<2, false>)
                         : (trans ? fn_ld<1, true> : fn_ld<1, false>);
    warp_coll(~0u, fn, trans ? "ldmatrix.trans" : "ldmatrix", &a, file, line, true);
}
static inline float bf(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline float lo(uint32_t v) { return bf((uint16_t)v); }
static inline float hi(uint32_t v) { return bf((uint16_t)(v >> 16)); }
static float rz(double x) {
    float f = (float)x;
    return std::fabs((double)f) > std::fabs(x) ? std::nextafterf(f, 0.0f) : f;
}
struct MmaArg {
    float *d;
    const uint32_t *a, *b;
};
static void fn_mma(void **s, uint32_t) {
    cur.blk->st.mma++;
    float A[16][16], B[16][8], D[16][8];
    for (int l = 0; l < 32; l++) {
        MmaArg *x = (MmaArg *)s[l];
        int g = l >> 2, t = (l & 3) * 2;
        for (int i = 0; i < 4; i++) {
            int r = g + (i & 1) * 8, k = t + (i >> 1) * 8;
            A[r][k] = lo(x->a[i]);
            A[r][k + 1] = hi(x->a[i]);
        }
        for (int i = 0; i < 2; i++) {
            B[t + i * 8][g] = lo(x->b[i]);
            B[t + 1 + i * 8][g] = hi(x->b[i]);
        }
        for (int i = 0; i < 4; i++) D[g + (i >> 1) * 8][t + (i & 1)] = x->d[i];
    }
    if (opt.trunc)
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                double v = D[i][j];
                for (int k = 0; k < 16; k++) v += (double)A[i][k] * B[k][j];
                D[i][j] = rz(v);
            }
    else
        for (int i = 0; i < 16; i++)
            for (int k = 0; k < 16; k++) {
                float a = A[i][k];
                for (int j = 0; j < 8; j++) D[i][j] += a * B[k][j];
            }
    for (int l = 0; l < 32; l++) {
        MmaArg *x = (MmaArg *)s[l];
        int g = l >> 2, t = (l & 3) * 2;
        for (int i = 0; i < 4; i++) x->d[i] = D[g + (i >> 1) * 8][t + (i & 1)];
    }
}
void mma16816(float *d, const uint32_t *a, const uint32_t *b, const char *file, int line) {
    MmaArg x{d, a, b};
    warp_coll(~0u, fn_mma, "mma.sync", &x, file, line, true);
}

// ------------------------------------------------------------------------------------------ wgmma
struct WgArg {
    WgOp op;
    float *d;
    const uint32_t *a;
};
static inline uint32_t desc_off(uint64_t d, int mn, int k, bool t, int &mode) {
    uint32_t st = (d & 0x3fff) << 4, lbo = (d >> 16 & 0x3fff) << 4, sbo = (d >> 32 & 0x3fff) << 4;
    mode = (int)(d >> 62);
    uint32_t W = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16, E = W / 2, o;
    if (!t)
        o = mode ? (mn % 8) * W + (mn / 8) * sbo + k * 2
                 : (mn % 8) * 16 + (mn / 8) * sbo + (k / 8) * lbo + (k % 8) * 2;
    else
        o = mode ? (mn / E) * lbo + (mn % E) * 2 + (k % 8) * W + (k / 8) * sbo
                 : (mn / 8) * sbo + (mn % 8) * 2 + (k % 8) * 16 + (k / 8) * lbo;
    return st + o;
}
static float wg_elem(uint64_t d, int mn, int k, bool t) {
    int mode;
    uint32_t a = desc_off(d, mn, k, t, mode);
    a = swz(a, mode);
    char *p = (char *)smem_ptr(a, 2, "wgmma operand");
    TSAN(__tsan_read_range(p, 2);)
    uint16_t v;
    memcpy(&v, async_view(a, p), 2);
    return bf(v);
}
static void wg_touch(const WgOp &o, int warp) {
    TSAN(Async a(my_warp(), true, "wgmma", o.file, o.line); for (int k = 0; k < 16; k++) {
        for (int n = 0; n < o.n; n++) wg_elem(o.db, n, k, o.tb);
        if (!o.rs)
            for (int r = 0; r < 16; r++) wg_elem(o.da, (warp & 3) * 16 + r, k, o.ta);
    })
}
static void wg_exec(const WgOp &o, int warp) {
    Async actx(my_warp(), false, "wgmma", o.file, o.line);
    auto &A = cur.blk->wA;
    auto &B = cur.blk->wB;
    auto &D = cur.blk->wD;
    int N = o.n, w = warp & 3;
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < N; n++) B[k][n] = wg_elem(o.db, n, k, o.tb);
    if (!o.rs)
        for (int r = 0; r < 16; r++)
            for (int k = 0; k < 16; k++) A[r][k] = wg_elem(o.da, w * 16 + r, k, o.ta);
    for (int l = 0; l < 32; l++) {
        int g = l >> 2, t = (l & 3) * 2;
        if (o.rs)
            for (int i = 0; i < 4; i++) {
                int r = g + (i & 1) * 8, k = t + (i >> 1) * 8;
                A[r][k] = lo(o.a[l][i]);
                A[r][k + 1] = hi(o.a[l][i]);
            }
        for (int j = 0; j < N / 8; j++)
            for (int i = 0; i < 4; i++)
                D[g + (i >> 1) * 8][j * 8 + t + (i & 1)] = o.scale ? o.d[l][j * 4 + i] : 0.0f;
    }
    if (opt.trunc)
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < N; j++) {
                double v = D[i][j];
                for (int k = 0; k < 16; k++) v += (double)A[i][k] * B[k][j];
                D[i][j] = rz(v);
            }
    else
        for (int i = 0; i < 16; i++)
            for (int k = 0; k < 16; k++) {
                float a = A[i][k];
                for (int j = 0; j < N; j++) D[i][j] += a * B[k][j];
            }
    for (int l = 0; l < 32; l++) {
        int g = l >> 2, t = (l & 3) * 2;
        for (int j = 0; j < N / 8; j++)
            for (int i = 0; i < 4; i++)
                o.d[l][j * 4 + i] = D[g + (i >> 1) * 8][j * 8 + t + (i & 1)];
    }
}
static WgOp wg_make(void **s) {
    Quiet quiet;
    Block *b = cur.blk;
    int warp = cur.self->warp;
    Warp *w = b->w[warp].get();
    WgOp o = ((WgArg *)s[0])->op;
    for (int l = 0; l < 32; l++) {
        WgArg *x = (WgArg *)s[l];
        if (x->op.da != o.da || x->op.db != o.db || x->op.scale != o.scale)
            fail("%s:%d wgmma: descriptors differ between the lanes of a warp", o.file, o.line);
        o.d[l] = x->d;
        if (o.rs) memcpy(o.a[l], x->a, 16);
    }
    if (!w->wg_fence)
        fail(
            "%s:%d wgmma.mma_async without a preceding wgmma.fence since the accumulators were "
            "last accessible",
            o.file, o.line);
    if (b->n < (warp / 4 + 1) * 128)
        fail("%s:%d wgmma: warp %d has no complete warpgroup", o.file, o.line, warp);
    for (int q = 0; q < 2; q++) {
        uint64_t d = q ? o.db : o.da;
        if (q == 0 && o.rs) continue;
        if (d >> 49 & 7) fail("%s:%d wgmma: base_offset not emulated", o.file, o.line);
        if (d >> 62 == 1 && (((d & 0x3fff) << 4) & 0x380))
            fail("%s:%d wgmma: 128B-swizzle operand %c starts off the 1024-byte pattern (0x%x)",
                 o.file, o.line, "AB"[q], (unsigned)((d & 0x3fff) << 4));
    }
    auto &sig = b->wgsig[warp / 4];
    WgSig me{o.da, o.db, o.n, o.ta | o.tb << 1 | o.rs << 2 | o.scale << 3, o.line};
    if (w->wg_seq < sig.size()) {
        auto &q = sig[w->wg_seq];
        if (q.da != me.da || q.db != me.db || q.n != me.n || q.flags != me.flags)
            fail(
                "%s:%d wgmma: warp %d issues another operation than an earlier warp of its "
                "warpgroup (line %d)",
                o.file, o.line, warp, q.line);
    } else
        sig.push_back(me);
    w->wg_seq++;
    bool all = true;
    for (int i = 0; i < 4; i++) all &= b->w[(warp / 4) * 4 + i]->wg_seq == sig.size();
    if (all) {
        sig.clear();
        for (int i = 0; i < 4; i++) b->w[(warp / 4) * 4 + i]->wg_seq = 0;
    }
    o.group = w->wg_groups;
    b->st.wgmma++;
    return o;
}
static void fn_wgmma(void **s, uint32_t) {
    WgOp o = wg_make(s);
    Warp *w = my_warp();
    int warp = cur.self->warp;
    wg_touch(o, warp);
    if (opt.async == 1 || (opt.async == 2 && (rnd(cur.blk) & 1) && w->wg.empty()))
        wg_exec(o, warp);
    else {
        Quiet quiet;
        w->wg.push_back(o);
    }
}
void wgmma(float *d, int n, const uint32_t *areg, uint64_t da, uint64_t db, int sd, bool ta,
           bool tb, const char *file, int line) {
    WgArg x;
    x.op.n = n;
    x.op.scale = sd != 0;
    x.op.ta = ta;
    x.op.tb = tb;
    x.op.rs = areg != nullptr;
    x.op.da = da;
    x.op.db = db;
    x.op.file = file;
    x.op.line = line;
    x.d = d;
    x.a = areg;
    warp_coll(~0u, fn_wgmma, "wgmma.mma_async", &x, file, line, true);
}
static void fn_wgfence(void **, uint32_t) { cur.blk->w[cur.self->warp]->wg_fence = true; }
static void fn_wgcommit(void **, uint32_t) { cur.blk->w[cur.self->warp]->wg_groups++; }
static void fn_wgwait(void **s, uint32_t) {
    int warp = cur.self->warp;
    Warp *w = cur.blk->w[warp].get();
    int n = *(int *)s[0];
    size_t i = 0;
    for (; i < w->wg.size() && w->wg[i].group < w->wg_groups - n; i++) wg_exec(w->wg[i], warp);
    Quiet quiet;
    w->wg.erase(w->wg.begin(), w->wg.begin() + i);
    if (n == 0) {
        w->wg_fence = false;
        if (!w->wg.empty())
            fail("wgmma_wait<0> with uncommitted wgmma from %s:%d", w->wg[0].file, w->wg[0].line);
    }
}
void wgmma_fence(const char *f, int l) {
    warp_coll(~0u, fn_wgfence, "wgmma.fence", nullptr, f, l, true);
}
void wgmma_commit(const char *f, int l) {
    warp_coll(~0u, fn_wgcommit, "wgmma.commit_group", nullptr, f, l, true);
}
void wgmma_wait(int n, const char *f, int l) {
    warp_coll(~0u, fn_wgwait, "wgmma.wait_group", &n, f, l, true);
    async_done();
}
void setmaxnreg(int n, bool, const char *f, int l) {
    if (n % 8 || n < 24 || n > 256) fail("%s:%d setmaxnreg %d", f, l, n);
    warp_coll(~0u, fn_sync, "setmaxnreg", nullptr, f, l, true);
}

// ------------------------------------------------------------------------------------------ TMA
static void async_exec(Block *b, size_t i) {
    AsyncOp o;
    {
        Quiet quiet;
        o = b->async[i];
        b->async.erase(b->async.begin() + i);
    }
    Async actx(b->w[o.owner->warp].get(), false, "TMA", o.file, o.line);
    if (o.kind == AsyncOp::BLOAD || o.kind == AsyncOp::RADD) {
        char *p = (char *)smem_ptr(o.smem, o.bytes, "bulk copy");
        if (o.kind == AsyncOp::BLOAD) {
            memcpy(p, o.g, o.bytes);
            if (opt.proxy) memcpy(async_view(o.smem, p), o.g, o.bytes);
        } else {
            const float *s = (const float *)async_view(o.smem, p);
            float *d = (float *)o.g;
            for (uint32_t k = 0; k < o.bytes / 4; k++) {
                float v;
                memcpy(&v, s + k, 4);
                emu_rmw(d + k, [&](float x) { return x + v; });
            }
        }
    } else {
        const CUtensorMap &m = o.map;
        bool load = o.kind == AsyncOp::LOAD;
        int es = m.elt, B[3] = {m.box[0], o.rank > 1 ? m.box[1] : 1, o.rank > 2 ? m.box[2] : 1};
        uint32_t row = B[0] * es;
        for (int z = 0; z < B[2]; z++)
            for (int y = 0; y < B[1]; y++) {
                int64_t cy = o.rank > 1 ? (int64_t)o.c[1] + y : 0,
                        cz = o.rank > 2 ? (int64_t)o.c[2] + z : 0;
                bool in = (o.rank < 2 || (cy >= 0 && cy < m.dim[1])) &&
                          (o.rank < 3 || (cz >= 0 && cz < m.dim[2]));
                char *g = (char *)m.base + (o.rank > 1 ? cy * (int64_t)m.stride[0] : 0) +
                          (o.rank > 2 ? cz * (int64_t)m.stride[1] : 0);
                for (uint32_t ch = 0; ch < row; ch += 16) {
                    uint32_t a = swz(o.smem + (z * B[1] + y) * row + ch, m.swz);
                    char *p = (char *)smem_ptr(a, 16, "TMA tile");
                    for (uint32_t e = 0; e < 16; e += es) {
                        int64_t cx = (int64_t)o.c[0] + (ch + e) / es;
                        bool ok = in && cx >= 0 && cx < m.dim[0];
                        if (load) {
                            char tmp[16] = {0};
                            if (ok) memcpy(tmp, g + cx * es, es);
                            memcpy(p + e, tmp, es);
                            if (opt.proxy) memcpy(async_view(a, p) + e, tmp, es);
                        } else if (ok)
                            memcpy(g + cx * es, async_view(a, p) + e, es);
                    }
                }
            }
    }
    if (o.kind == AsyncOp::LOAD || o.kind == AsyncOp::BLOAD)
        mbar_complete_tx(o.bar, o.bytes, o.file, o.line);
}
static void issue(AsyncOp o) {
    Block *b = cur.blk;
    o.owner = cur.self;
    o.group = cur.self->bulk_groups;
    {
        Quiet quiet;
        b->async.push_back(o);
    }
    TSAN({
        Async a(my_warp(), true, "TMA", o.file, o.line);
        void *p = smem_ptr(o.smem, o.bytes, "TMA");
        if (o.kind == AsyncOp::LOAD || o.kind == AsyncOp::BLOAD)
            __tsan_write_range(p, o.bytes);
        else
            __tsan_read_range(p, o.bytes);
    })
    b->st.tma_bytes += o.bytes;
    if (opt.async == 1) async_exec(b, b->async.size() - 1);
    yield_point();
}
static AsyncOp tile_op(AsyncOp::Kind k, const CUtensorMap *m, uint32_t s, uint32_t bar, int rank,
                       int c0, int c1, int c2, const char *file, int line) {
    Quiet quiet;
    if (m->magic != 0x7e45) fail("%s:%d TMA: not an encoded tensor map", file, line);
    if (m->rank != rank)
        fail("%s:%d TMA: rank %d instruction with a rank %d map", file, line, rank, m->rank);
    if (s & 127) fail("%s:%d TMA: shared address 0x%x is not 128-byte aligned", file, line, s);
    if (m->swz == 1 && (s & 1023))
        fail("%s:%d TMA: 128B-swizzled tile at 0x%x is not 1024-byte aligned (lint)", file, line,
             s);
    AsyncOp o{};
    o.kind = k;
    o.map = *m;
    o.rank = rank;
    o.c[0] = c0;
    o.c[1] = c1;
    o.c[2] = c2;
    o.smem = s;
    o.bar = bar;
    o.file = file;
    o.line = line;
    o.bytes = m->box[0] * m->elt;
    for (int i = 1; i < rank; i++) o.bytes *= m->box[i];
    smem_ptr(s, o.bytes, "TMA tile");
    return o;
}
void tma_load(uint32_t dst, const CUtensorMap *m, uint32_t bar, int rank, int c0, int c1, int c2,
              const char *file, int line) {
    mb_get(bar, "TMA load", file, line);
    issue(tile_op(AsyncOp::LOAD, m, dst, bar, rank, c0, c1, c2, file, line));
}
void tma_store(const CUtensorMap *m, uint32_t src, int rank, int c0, int c1, int c2,
               const char *file, int line) {
    issue(tile_op(AsyncOp::STORE, m, src, 0, rank, c0, c1, c2, file, line));
}
static AsyncOp bulk_op(AsyncOp::Kind k, uint32_t s, const void *g, uint32_t bytes, const char *file,
                       int line) {
    if (s & 15 || (uintptr_t)g & 15 || bytes & 15)
        fail("%s:%d bulk copy: 16-byte alignment (shared 0x%x, global %p, %u bytes)", file, line, s,
             g, bytes);
    AsyncOp o{};
    o.kind = k;
    o.smem = s;
    o.g = (void *)g;
    o.bytes = bytes;
    o.file = file;
    o.line = line;
    smem_ptr(s, bytes, "bulk copy");
    return o;
}
void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar, const char *file,
               int line) {
    mb_get(bar, "bulk copy", file, line);
    AsyncOp o = bulk_op(AsyncOp::BLOAD, dst, src, bytes, file, line);
    o.bar = bar;
    issue(o);
}
void bulk_reduce_add(float *dst, uint32_t src, uint32_t bytes, const char *file, int line) {
    issue(bulk_op(AsyncOp::RADD, src, dst, bytes, file, line));
}
void bulk_commit() { cur.self->bulk_groups++; }
void bulk_wait(int n) {
    Block *b = cur.blk;
    Fiber *f = cur.self;
    for (size_t i = 0; i < b->async.size();) {
        auto &o = b->async[i];
        if (o.owner == f && (o.kind == AsyncOp::STORE || o.kind == AsyncOp::RADD) &&
            o.group < f->bulk_groups - n)
            async_exec(b, i);
        else
            i++;
    }
    async_done();
    yield_point();
}

// ------------------------------------------------------------------------------------------ scheduler
static void deadlock(Block *b) {
    fflush(stdout);
    fprintf(stderr, "EMU DEADLOCK: %s: block (%u,%u,%u): %d of %d threads live, none can run\n",
            b->name, blockIdx.x, blockIdx.y, blockIdx.z, b->live, b->n);
    std::map<std::string, std::pair<int, std::string>> grp;
    for (int i = 0; i < b->n; i++) {
        Fiber *f = b->f[i].get();
        if (f->st == DONE) continue;
        char k[400];
        int o = snprintf(k, sizeof k, "%s", f->what);
        if (f->st == W_BAR) {
            Bar &r = *(Bar *)f->wait_obj;
            o += snprintf(k + o, sizeof k - o, " (id %u, %d arrived of %d)", f->wait_arg, r.arrived,
                          r.expect < 0 ? b->live : r.expect);
        }
        if (f->st == W_MBAR) {
            uint64_t v = *(uint64_t *)f->wait_obj;
            o += snprintf(k + o, sizeof k - o,
                          " (shared 0x%x, waits for parity %u, phase %d, %d of %d arrivals "
                          "pending, tx-count %d)",
                          (unsigned)((char *)f->wait_obj - b->base), f->wait_arg,
                          (int)(v >> 47 & 1), (int)(v >> 35 & 4095), (int)(v >> 23 & 4095),
                          (int32_t)((uint32_t)v << 9) >> 9);
        }
        if (f->st == W_WARP) o += snprintf(k + o, sizeof k - o, " (mask %08x)", f->wait_arg);
        snprintf(k + o, sizeof k - o, " at %s:%d", f->file, f->line);
        auto &e = grp[k];
        char t[16];
        if (e.first++ < 6) {
            snprintf(t, sizeof t, "%s%d.%d", e.second.empty() ? "" : " ", f->warp, f->lane);
            e.second += t;
        } else if (e.first == 7)
            e.second += " ...";
    }
    for (auto &e : grp)
        fprintf(stderr, "  %4d threads: %s   [warp.lane %s]\n", e.second.first, e.first.c_str(),
                e.second.second.c_str());
    _exit(98);
}
static void find_tls(Block *b) {
    struct Q {
        char *lo, *hi;
    } q{nullptr, nullptr};
    dl_iterate_phdr(
        [](dl_phdr_info *i, size_t, void *d) {
            Q *q = (Q *)d;
            for (int k = 0; k < i->dlpi_phnum; k++)
                if (i->dlpi_phdr[k].p_type == PT_TLS && i->dlpi_tls_data) {
                    char *lo = (char *)i->dlpi_tls_data;
                    if ((char *)&cur >= lo && (char *)&cur < lo + i->dlpi_phdr[k].p_memsz) {
                        q->lo = lo;
                        q->hi = lo + i->dlpi_phdr[k].p_memsz;
                        return 1;
                    }
                }
            return 0;
        },
        &q);
    if (!q.lo || (uintptr_t)smem % 1024)
        fail("cannot locate the TLS block that backs shared memory");
    b->tls_lo = q.lo;
    b->tls_hi = q.hi;
    b->base = (char *)(((uintptr_t)q.lo - 1024) & ~(uintptr_t)1023);
    if (q.hi - b->base > (1 << 18))
        fail("shared window over 256 KB: too much static shared memory");
}
static void poison(Block *b) {
    memset(smem, 0xff, b->dyn);
    size_t z = std::min<size_t>(SMEM_MAX - b->dyn, 1024);
    memset(smem + b->dyn, 0xA5, z);
#if !defined(__clang__) || !(defined(ASAN) || defined(EMU_TSAN))
    Cursor c = cur;
    uint3 k[4] = {threadIdx, blockIdx, blockDim,
                  gridDim};  // static __shared__ lives elsewhere in this program's TLS block
    memset(b->tls_lo, 0xff, (char *)smem - b->tls_lo);
    memset((char *)smem + SMEM_MAX, 0xff, b->tls_hi - ((char *)smem + SMEM_MAX));
    cur = c;
    threadIdx = k[0];
    blockIdx = k[1];
    blockDim = k[2];
    gridDim = k[3];
#endif
    if (opt.proxy) b->view.assign(b->tls_hi - b->base, (char)0xff);
#ifdef ASAN
    __asan_poison_memory_region(smem + b->dyn, SMEM_MAX - b->dyn);
#endif
}
static void run_block(Block *b) {
    Quiet quiet;
    b->ready.reserve(1 << 16);
    for (Bar &r : b->bars) r.waiters.reserve(1024);
    b->live = b->n;
    b->ready.clear();
    b->head = 0;
    b->async.clear();
    b->mbars.clear();
    for (Bar &r : b->bars) {
        r.arrived = r.expect = 0;
        r.warps = 0;
        r.waiters.clear();
    }
    int nw = (b->n + 31) / 32;
    b->wgsig.assign((nw + 3) / 4, {});
    while ((int)b->w.size() < nw) {
        b->w.emplace_back(new Warp);
        TSAN(b->w.back()->tsan_async = __tsan_create_fiber(0);)
    }
    for (int i = 0; i < nw; i++) {
        Warp *w = b->w[i].get();
        w->nc = 0;
        w->exited = 0;
        w->exists = b->n >= i * 32 + 32 ? ~0u : (1u << (b->n - i * 32)) - 1;
        w->wg.clear();
        w->wg_groups = 0;
        w->wg_fence = false;
        w->wg_seq = 0;
    }
    if (opt.poison) poison(b);
    for (int i = 0; i < b->n; i++) {
        if ((int)b->f.size() <= i) {
            b->f.emplace_back(new Fiber);
            b->f[i]->idx = i;
            make_fiber(b->f[i].get());
        }
        Fiber *f = b->f[i].get();
        f->lane = i & 31;
        f->warp = i >> 5;
        f->tid = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
        f->cp.clear();
        f->cp_end.clear();
        f->bulk_groups = 0;
        f->prio = rnd(b);
        make_ready(b, f);
    }
    if (opt.sched == PRIO)
        for (int i = 0; i < b->n; i++) b->f[i]->prio = b->f[i & ~31]->prio + (rnd(b) & 3);
    TSAN(__tsan_release(&b->t_start);)
    for (;;) {
        if (b->head == b->ready.size()) {
            b->ready.clear();
            b->head = 0;
            if (!b->async.empty()) {
                async_exec(b, opt.sched == FIFO ? 0 : rnd(b) % b->async.size());
                continue;
            }
            if (b->live == 0) break;
            deadlock(b);
        }
        if (opt.async == 2 && !b->async.empty() && (rnd(b) & 15) == 0) {
            size_t i = rnd(b) % b->async.size();
            auto k = b->async[i].kind;
            if (k == AsyncOp::LOAD || k == AsyncOp::BLOAD) async_exec(b, i);
        }
        if (opt.sched == RANDOM)
            std::swap(b->ready[b->head], b->ready[b->head + rnd(b) % (b->ready.size() - b->head)]);
        if (opt.sched == PRIO) {
            size_t m = b->head;
            for (size_t i = b->head + 1; i < b->ready.size(); i++)
                if (b->ready[i]->prio > b->ready[m]->prio) m = i;
            std::swap(b->ready[b->head], b->ready[m]);
            if ((rnd(b) & 63) == 0) {
                int w = b->ready[b->head]->warp;
                uint32_t q = rnd(b);
                for (int l = 0; l < 32 && w * 32 + l < b->n; l++)
                    b->f[w * 32 + l]->prio = q + (rnd(b) & 3);
            }
        }
        Fiber *f = b->ready[b->head++];
        if (b->head > 4096) {
            b->ready.erase(b->ready.begin(), b->ready.begin() + b->head);
            b->head = 0;
        }
        to_fiber(b, f);
    }
    TSAN(__tsan_acquire(&b->t_end); for (auto &w : b->w) __tsan_acquire(&w->t_done);)
    for (auto &m : b->mbars) {
        uint64_t v = *(uint64_t *)m.first;
        int32_t tx = (int32_t)((uint32_t)v << 9) >> 9;
        if (v >> 48 == MAGIC && tx)
            fail("block ends with mbarrier at shared 0x%x in mid-transaction (tx-count %d)",
                 m.second, tx);
    }
#ifdef ASAN
    __asan_unpoison_memory_region(smem, SMEM_MAX);
#else
    if (opt.poison)
        for (size_t i = b->dyn, e = std::min(SMEM_MAX, b->dyn + 1024); i < e; i++)
            if (smem[i] != 0xA5)
                fail("write past dynamic shared memory: byte %zu of %zu", i, b->dyn);
#endif
}
static std::map<const void *, int> func_smem;
static cudaError_t last_error = cudaSuccess;
static void segv(int sig, siginfo_t *si, void *);
static std::mutex pool_mu;
static std::vector<std::unique_ptr<Block>> pool;
static std::unique_ptr<Block> pool_get() {
    std::lock_guard<std::mutex> l(pool_mu);
    if (pool.empty()) return std::make_unique<Block>();
    auto b = std::move(pool.back());
    pool.pop_back();
    return b;
}
static void pool_put(std::unique_ptr<Block> b) {
    std::lock_guard<std::mutex> l(pool_mu);
    pool.push_back(std::move(b));
}
void run_grid(dim3 g, dim3 bd, size_t dyn, const void *fn, const char *name, void (*call)(void *),
              void *ctx) {
    static bool once = [] {
        stack_t ss{};
        ss.ss_sp = malloc(1 << 16);
        ss.ss_size = 1 << 16;
        sigaltstack(&ss, nullptr);
        struct sigaction sa {};
        sa.sa_sigaction = segv;
        sa.sa_flags = SA_SIGINFO | SA_ONSTACK;
#ifndef ASAN
        sigaction(SIGSEGV, &sa, nullptr);
        sigaction(SIGBUS, &sa, nullptr);
#endif
        sigaction(SIGALRM, &sa, nullptr);
        return true;
    }();
    (void)once;
    int n = bd.x * bd.y * bd.z;
    auto it = func_smem.find(fn);
    size_t lim = it == func_smem.end() ? 48 << 10 : (size_t)it->second;
    if (n < 1 || n > 1024 || dyn > lim || !g.x || !g.y || !g.z || g.y > 65535 || g.z > 65535) {
        fprintf(
            stderr,
            "EMU: launch of %s rejected: grid (%u,%u,%u) block %d dynamic shared %zu (limit %zu)\n",
            name, g.x, g.y, g.z, n, dyn, lim);
        last_error = cudaErrorInvalidConfiguration;
        return;
    }
    if (opt.timeout) alarm(opt.timeout);
    long total = (long)g.x * g.y * g.z;
    std::vector<long> order(total);
    for (long i = 0; i < total; i++) order[i] = i;
    if (opt.sched != FIFO) {
        uint64_t s = opt.seed;
        for (long i = total - 1; i > 0; i--) std::swap(order[i], order[splitmix(s) % (i + 1)]);
    }
    std::atomic<long> next{0};
    auto worker = [&] {
        std::unique_ptr<Block> own = pool_get();
        Block *b = own.get();
        Stats sum;
        find_tls(b);
        TSAN(b->tsan_main = __tsan_get_current_fiber();)
        for (long k; (k = next.fetch_add(1, std::memory_order_relaxed)) < total;) {
            long i = order[k];
            cur.blk = b;
            cur.self = nullptr;
            blockDim = {bd.x, bd.y, bd.z};
            gridDim = {g.x, g.y, g.z};
            blockIdx = {unsigned(i % g.x), unsigned(i / g.x % g.y),
                        unsigned(i / ((long)g.x * g.y))};
            b->n = n;
            b->dyn = dyn;
            b->call = call;
            b->ctx = ctx;
            b->name = name;
            b->rng = opt.seed * 0x9e3779b97f4a7c15ull + i;
            b->st = Stats{};
            b->st.blocks = 1;
            run_block(b);
            sum.add(b->st);
            cur.blk = nullptr;
        }
        pool_put(std::move(own));
        {
            std::lock_guard<std::mutex> l(pool_mu);
            stats[name].add(sum);
        }
    };
    if (opt.threads > 1) {
        std::vector<std::thread> t;
        for (int i = 0; i < opt.threads; i++) t.emplace_back(worker);
        for (auto &x : t) x.join();
    } else
        worker();
    if (opt.timeout) alarm(0);
}

// ------------------------------------------------------------------------------------------ device memory
struct Alloc {
    size_t n, map;
    char *m;
    const char *file;
    int line;
    bool freed;
};
static std::map<uintptr_t, Alloc> allocs;
static std::mutex amu;
static void segv(int sig, siginfo_t *si, void *) {
    if (sig == SIGALRM)
        fail(
            "time-out: still running after EMU_TIMEOUT seconds (spin loop without an emulated "
            "wait?)");
    uintptr_t a = (uintptr_t)si->si_addr;
    char msg[300] = "address not near any cudaMalloc block";
    auto it = allocs.upper_bound(a);
    auto tell = [&](uintptr_t p, Alloc &x) {
        if (x.freed && a >= p && a < p + x.n)
            snprintf(msg, sizeof msg, "use after cudaFree of the %zu-byte block from %s:%d", x.n,
                     x.file, x.line);
        else if (a >= p + x.n && a < p + x.n + 4096)
            snprintf(msg, sizeof msg, "%zu bytes past the end of the %zu-byte block from %s:%d",
                     (size_t)(a - p - x.n), x.n, x.file, x.line);
        else if (a < p && a + 8192 > p)
            snprintf(msg, sizeof msg, "%zu bytes before the %zu-byte block from %s:%d",
                     (size_t)(p - a), x.n, x.file, x.line);
    };
    if (it != allocs.end()) tell(it->first, it->second);
    if (it != allocs.begin()) {
        --it;
        tell(it->first, it->second);
    }
    fail("illegal address %p: %s", si->si_addr, msg);
}
bool is_device_ptr(const void *p) {
    std::lock_guard<std::mutex> l(amu);
    auto it = allocs.upper_bound((uintptr_t)p);
    if (it == allocs.begin()) return false;
    --it;
    return !it->second.freed && (uintptr_t)p <= it->first + it->second.n;
}
}  // namespace emu
using namespace emu;
cudaError_t emu_malloc(void **p, size_t n, const char *file, int line) {
    std::lock_guard<std::mutex> l(amu);
    Alloc a{n, 0, nullptr, file, line, false};
    char *q;
#ifdef ASAN
    q = (char *)aligned_alloc(256, std::max<size_t>((n + 255) / 256 * 256, 256));
    __asan_poison_memory_region(q + n, (256 - n % 256) % 256);
#else
    size_t r = (n + 15) & ~(size_t)15;
    a.map = ((r + 4095) & ~(size_t)4095) +
            8192;  // guard page on both sides; block ends at the upper one
    a.m = (char *)mmap(nullptr, a.map, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (a.m == MAP_FAILED) return cudaErrorMemoryAllocation;
    if (opt.guard) {
        mprotect(a.m, 4096, PROT_NONE);
        mprotect(a.m + a.map - 4096, 4096, PROT_NONE);
    }
    q = a.m + a.map - 4096 - r;
#endif
    if (opt.poison) memset(q, 0xff, n);  // NaN in bf16 and fp32
    allocs[(uintptr_t)q] = a;
    *p = q;
    return cudaSuccess;
}
cudaError_t cudaFree(void *p) {
    if (!p) return cudaSuccess;
    std::lock_guard<std::mutex> l(amu);
    auto it = allocs.find((uintptr_t)p);
    if (it == allocs.end() || it->second.freed)
        fail("cudaFree of %p, which is not an allocation", p);
#ifdef ASAN
    __asan_unpoison_memory_region(p, (it->second.n + 255) / 256 * 256);
    free(p);
    allocs.erase(it);
#else
    it->second.freed = true;
    mprotect(it->second.m, it->second.map, PROT_NONE);
    madvise(it->second.m, it->second.map, MADV_DONTNEED);
#endif
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, cudaMemcpyKind k) {
    bool dd = is_device_ptr(d), sd = is_device_ptr(s);
    if ((k == cudaMemcpyHostToDevice && (!dd || sd)) ||
        (k == cudaMemcpyDeviceToHost && (dd || !sd)) ||
        (k == cudaMemcpyDeviceToDevice && !(dd && sd)))
        fail("cudaMemcpy: kind %d does not match the pointers (dst %s, src %s)", k,
             dd ? "device" : "host", sd ? "device" : "host");
    memcpy(d, s, n);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *d, int v, size_t n) {
    if (!is_device_ptr(d)) fail("cudaMemset of a host pointer");
    memset(d, v, n);
    return cudaSuccess;
}
cudaError_t cudaGetLastError() {
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "emulated sm_90");
    p->major = 9;
    p->multiProcessorCount = 4;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = SMEM_MAX;
    p->totalGlobalMem = (size_t)8 << 30;
    return cudaSuccess;
}
cudaError_t emu_func_attr(const void *f, int a, int v) {
    if (a == cudaFuncAttributeMaxDynamicSharedMemorySize) {
        if (v < 0 || (size_t)v > SMEM_MAX) return cudaErrorInvalidValue;
        func_smem[f] = v;
    }
    return cudaSuccess;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType t, cuuint32_t rank, void *base,
                                const cuuint64_t *dims, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *estr,
                                CUtensorMapInterleave, CUtensorMapSwizzle sw,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    int es = t == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16  ? 2
             : t == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                                                    : 0;
    memset(m, 0, sizeof *m);
    if (!es || rank < 1 || rank > 3 || ((uintptr_t)m & 63) || ((uintptr_t)base & 15) ||
        !is_device_ptr(base))
        return CUDA_ERROR_INVALID_VALUE;
    for (cuuint32_t i = 0; i < rank; i++) {
        if (!dims[i] || dims[i] > (1ull << 32) || !box[i] || box[i] > 256 || estr[i] != 1)
            return CUDA_ERROR_INVALID_VALUE;
        m->dim[i] = (uint32_t)dims[i];
        m->box[i] = box[i];
    }
    for (cuuint32_t i = 0; i + 1 < rank; i++) {
        if (strides[i] % 16 || strides[i] >= (1ull << 40)) return CUDA_ERROR_INVALID_VALUE;
        m->stride[i] = strides[i];
    }
    uint32_t inner = box[0] * es, span = sw == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
                                         : sw == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                                         : sw == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                                                           : 0;
    if (inner % 16 || (span && inner > span)) return CUDA_ERROR_INVALID_VALUE;
    if (span && inner != span)
        fail("tensor map: inner box of %u bytes under a %u-byte swizzle is not emulated", inner,
             span);
    m->base = (uint64_t)base;
    m->rank = rank;
    m->elt = es;
    m->swz = span == 128 ? 1 : span == 64 ? 2 : span == 32 ? 3 : 0;
    m->magic = 0x7e45;
    return CUDA_SUCCESS;
}
static struct AtExit {
    ~AtExit() {
        if (getenv("EMU_STATS"))
            for (auto &k : stats) {
                Stats &s = k.second;
                fprintf(
                    stderr,
                    "EMU STATS %s: blocks %llu switches %llu mma %llu ldmatrix %llu "
                    "(bank-conflicted phases %llu) wgmma/warp %llu cp.async %llu B TMA %llu B\n",
                    k.first.c_str(), (unsigned long long)s.blocks, (unsigned long long)s.switches,
                    (unsigned long long)s.mma, (unsigned long long)s.ldm,
                    (unsigned long long)s.ldm_conflict, (unsigned long long)s.wgmma,
                    (unsigned long long)s.cp_bytes, (unsigned long long)s.tma_bytes);
            }
    }
} at_exit;
