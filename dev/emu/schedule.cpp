// Which thread runs next, and what a grid is. Three schedules (EMU_SCHED):
//   fifo    in order: thread after thread, up to its next wait
//   random  any ready thread, at every wait and now and then in between
//   prio    warps with random priorities that change rarely: some warps run far ahead of others
#include "engine.h"

#include <atomic>
#include <mutex>
#include <signal.h>
#include <stdarg.h>
#include <thread>
#include <unistd.h>

namespace emu {
Options opt;

static bool env_is(const char *name, const char *value) {
    const char *v = getenv(name);
    return v && strcmp(v, value) == 0;
}
static uint64_t env_number(const char *name, uint64_t otherwise) {
    const char *v = getenv(name);
    return v && *v ? strtoull(v, nullptr, 10) : otherwise;
}

Options::Options() {
    if (env_is("EMU_SCHED", "random")) sched = RANDOM;
    if (env_is("EMU_SCHED", "prio")) sched = PRIO;
    async = sched == FIFO ? LAZY : EITHER;
    if (env_is("EMU_ASYNC", "eager")) async = EAGER;
    if (env_is("EMU_ASYNC", "lazy")) async = LAZY;
    if (env_is("EMU_ASYNC", "random")) async = EITHER;
    seed = env_number("EMU_SEED", seed);
    threads = (int)env_number("EMU_THREADS", 1);
    proxy = (int)env_number("EMU_PROXY", 0);
    exact = (int)env_number("EMU_EXACT", 0);
    timeout = (int)env_number("EMU_TIMEOUT", 0);
    guard = (int)env_number("EMU_GUARD", 1);
    poison = (int)env_number("EMU_POISON", 1);
    stats = (int)env_number("EMU_STATS", 0);
    arch = (int)env_number("EMU_ARCH", 90);
    driver = (int)env_number("EMU_DRIVER", 0);
    runtime = (int)env_number("EMU_RUNTIME", CUDART_VERSION);
    devices = (int)env_number("EMU_DEVICES", 1);
    streams = (int)env_number("EMU_STREAMS", 0);
    slow_stream = (int)env_number("EMU_SLOW_STREAM", 0);
    lag_ms = (int)env_number("EMU_LAG_MS", 1);
    trace = (int)env_number("EMU_TRACE", 0);
    fast_math = (int)env_number("EMU_FAST_MATH", 0);
    align = std::max<size_t>(16, env_number("EMU_ALIGN", align));
    memory = env_number("EMU_MEMORY", memory);
    page_cache = env_number("EMU_PAGE_CACHE", 0);
}

uint64_t splitmix(uint64_t &state) {
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// ---- Reports: exit code 97 for a broken rule, 98 for a deadlock ---------------------------------

void fail(const char *fmt, ...) {
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    fflush(stdout);
    fprintf(stderr, "EMU ERROR: ");
    if (cur.blk) fprintf(stderr, "%s: ", cur.blk->name);
    if (cur.self)
        fprintf(stderr, "block (%u,%u,%u) thread (%u,%u,%u): ", blockIdx.x, blockIdx.y, blockIdx.z,
                threadIdx.x, threadIdx.y, threadIdx.z);
    fprintf(stderr, "%s\n", text);
    _exit(97);
}

static std::string waits_for(Block *b, Fiber *f) {
    char detail[200] = "", text[400];
    if (f->state == W_BAR) {
        Barrier &r = *(Barrier *)f->wait_object;
        snprintf(detail, sizeof detail, " (id %u, %d arrived of %d)", f->wait_arg, r.arrived,
                 r.expect < 0 ? b->live : r.expect);
    }
    if (f->state == W_MBAR) {
        MbarrierBits m = MbarrierBits::of(*(uint64_t *)f->wait_object);
        snprintf(detail, sizeof detail,
                 " (shared 0x%x, waits for parity %u, phase %u, %u of %u arrivals pending, "
                 "tx-count %d)",
                 (unsigned)((char *)f->wait_object - b->base), f->wait_arg, m.phase, m.pending,
                 m.count, m.tx);
    }
    if (f->state == W_WARP) snprintf(detail, sizeof detail, " (mask %08x)", f->wait_arg);
    snprintf(text, sizeof text, "%s%s at %s:%d", f->what, detail, f->file, f->line);
    return text;
}

// Groups the threads that are left by what they wait for.
static void deadlock(Block *b) {
    fflush(stdout);
    fprintf(stderr, "EMU DEADLOCK: %s: block (%u,%u,%u): %d of %d threads live, none can run\n",
            b->name, blockIdx.x, blockIdx.y, blockIdx.z, b->live, b->n);
    std::map<std::string, std::pair<int, std::string>> groups;
    for (int i = 0; i < b->n; i++) {
        Fiber *f = b->fibers[(size_t)i].get();
        if (f->state == DONE) continue;
        auto &[count, threads] = groups[waits_for(b, f)];
        if (++count <= 6)
            threads += " " + std::to_string(f->warp) + "." + std::to_string(f->lane);
        else if (count == 7)
            threads += " ...";
    }
    for (auto &[what, group] : groups)
        fprintf(stderr, "  %4d threads: %s   [warp.lane%s]\n", group.first, what.c_str(),
                group.second.c_str());
    _exit(98);
}

#if defined(EMU_TSAN)
Async::Async(Warp *w, bool issue, const char *what, const char *file, int line)
    : warp(w), back(__tsan_get_current_fiber()) {
    char name[64];
    const char *s = strrchr(file, '/');
    snprintf(name, sizeof name, "%s %s:%d", what, s ? s + 1 : file, line);
    __tsan_set_fiber_name(w->tsan_async, name);
    if (issue) __tsan_release(&w->tsan_issue);
    __tsan_switch_to_fiber(w->tsan_async, 1);
    if (issue) __tsan_acquire(&w->tsan_issue);
}
Async::~Async() {
    __tsan_release(&warp->tsan_done);
    __tsan_switch_to_fiber(back, 1);
}
#endif

// ---- Waiting ------------------------------------------------------------------------------------

void make_ready(Block *b, Fiber *f) {
    f->state = READY;
    b->ready.push_back(f);
}
void block_on(State state, const char *what, void *object, uint32_t arg, const char *file,
              int line) {
    Fiber *f = cur.self;
    f->state = state;
    f->what = what;
    f->wait_object = object;
    f->wait_arg = arg;
    f->file = file;
    f->line = line;
    to_sched(f);
}
void requeue() {
    Fiber *f = cur.self;
    make_ready(cur.blk, f);
    to_sched(f);
}
void yield_point() {
    if (cur.self && opt.sched != FIFO && (rnd(cur.blk) & 7) == 0) requeue();
}

// ---- One block ----------------------------------------------------------------------------------

static void prepare_warps(Block *b) {
    int num_warps = (b->n + 31) / 32;
    b->wg_signatures.assign((size_t)(num_warps + 3) / 4, {});
    b->registers_free = 0;
    while ((int)b->warps.size() < num_warps) {
        b->warps.emplace_back(new Warp);
        TSAN(b->warps.back()->tsan_async = __tsan_create_fiber(0);)
    }
    for (int i = 0; i < num_warps; i++) {
        Warp *w = b->warps[(size_t)i].get();
        w->num_pending = 0;
        w->exited = 0;
        w->exists = b->n >= i * 32 + 32 ? ~0u : (1u << (b->n - i * 32)) - 1;
        w->wg.clear();
        w->wg_groups = 0;
        w->wg_fence = false;
        w->wg_issued = 0;
        w->registers = 65536 / b->n / 8 * 8;  // as __launch_bounds__(threads, 1) allows
    }
}

static void prepare_fibers(Block *b) {
    for (int i = 0; i < b->n; i++) {
        if ((int)b->fibers.size() <= i) {
            b->fibers.emplace_back(new Fiber);
            b->fibers.back()->index = i;
            make_fiber(b->fibers.back().get());
        }
        Fiber *f = b->fibers[(size_t)i].get();
        unsigned t = (unsigned)i;
        f->lane = i & 31;
        f->warp = i >> 5;
        f->tid = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
        f->cp.clear();
        f->cp_end.clear();
        f->bulk_groups = 0;
        f->priority = rnd(b);
        make_ready(b, f);
    }
    if (opt.sched != PRIO) return;
    for (int i = 0; i < b->n; i++)  // the lanes of a warp stay together
        b->fibers[(size_t)i]->priority = b->fibers[(size_t)(i & ~31)]->priority + (rnd(b) & 3);
}

static void prepare(Block *b) {
    b->ready.reserve(1 << 16);
    b->live = b->n;
    b->ready.clear();
    b->head = 0;
    b->async.clear();
    b->mbars.clear();
    b->statics.clear();
    b->static_smem = 0;
    for (Barrier &r : b->bars) {
        r.arrived = r.expect = 0;
        r.waiters.reserve(1024);
        r.waiters.clear();
    }
    prepare_warps(b);
    if (opt.poison) poison_shared_memory(b);
#if defined(ASAN)
    __asan_poison_memory_region(smem + b->dynamic_smem, SMEM_MAX - b->dynamic_smem);
#endif
    prepare_fibers(b);
}

// Moves the thread that runs next to the head of the queue.
static void choose(Block *b) {
    if (opt.sched == FIFO) return;
    size_t pick = b->head;
    if (opt.sched == RANDOM) pick += rnd(b) % (b->ready.size() - b->head);
    for (size_t i = b->head + 1; opt.sched == PRIO && i < b->ready.size(); i++)
        if (b->ready[i]->priority > b->ready[pick]->priority) pick = i;
    std::swap(b->ready[b->head], b->ready[pick]);
    if (opt.sched == PRIO && (rnd(b) & 63) == 0) {  // now and then its warp gets a new priority
        int warp = b->ready[b->head]->warp;
        uint32_t p = rnd(b);
        for (int l = 0; l < 32 && warp * 32 + l < b->n; l++)
            b->fibers[(size_t)(warp * 32 + l)]->priority = p + (rnd(b) & 3);
    }
}

// Nobody can run: an asynchronous copy may wake somebody. False at the end of the block.
static bool refill(Block *b) {
    b->ready.clear();
    b->head = 0;
    if (!b->async.empty()) {
        async_exec(b, opt.sched == FIFO ? 0 : rnd(b) % b->async.size());
        return true;
    }
    if (b->live) deadlock(b);
    return false;
}

// Loads may land at any time between issue and wait.
static void maybe_run_async(Block *b) {
    if (opt.async != EITHER || b->async.empty() || (rnd(b) & 15)) return;
    size_t i = rnd(b) % b->async.size();
    if (b->async[i].into_shared()) async_exec(b, i);
}

void run_block(Block *b) {
    Quiet quiet;
    prepare(b);
    TSAN(__tsan_release(&b->tsan_start);)
    for (;;) {
        if (b->head == b->ready.size()) {
            if (!refill(b)) break;
            continue;
        }
        maybe_run_async(b);
        choose(b);
        Fiber *f = b->ready[b->head++];
        if (b->head > 4096) {
            b->ready.erase(b->ready.begin(), b->ready.begin() + (ptrdiff_t)b->head);
            b->head = 0;
        }
        to_fiber(b, f);
    }
    TSAN(__tsan_acquire(&b->tsan_end); for (auto &w : b->warps) __tsan_acquire(&w->tsan_done);)
    check_mbarriers_idle(b);
    if (b->registers_free < 0)
        fail("setmaxnreg takes %d registers more than were released: it would wait for ever",
             -b->registers_free);
    for (const Barrier &r : b->bars)
        if (r.arrived)
            fail("block ends with %d of %d arrivals at the named barrier of %s:%d", r.arrived,
                 r.expect, r.file, r.line);
#if defined(ASAN)
    __asan_unpoison_memory_region(smem, SMEM_MAX);
#else
    if (opt.poison) check_past_dynamic_smem(b);
#endif
}

// ---- A grid: blocks in order, or in a random order; on EMU_THREADS OS threads -------------------

static std::mutex pool_mutex;
static std::vector<std::unique_ptr<Block>> pool;  // blocks keep their fibers from launch to launch
static std::map<std::string, Stats> stats;        // by kernel

static std::unique_ptr<Block> pool_get() {
    std::lock_guard<std::mutex> lock(pool_mutex);
    if (pool.empty()) return std::make_unique<Block>();
    std::unique_ptr<Block> b = std::move(pool.back());
    pool.pop_back();
    return b;
}
static void pool_put(std::unique_ptr<Block> b, const char *name, const Stats &sum) {
    std::lock_guard<std::mutex> lock(pool_mutex);
    pool.push_back(std::move(b));
    stats[name].add(sum);
}

struct Grid {
    dim3 grid, block;
    size_t smem, static_limit;
    const char *name;
    void (*call)(void *);
    void *context;
    std::vector<long> order;
    std::atomic<long> next{0};
};

static void run_blocks(Grid *g) {
    std::unique_ptr<Block> own = pool_get();
    Block *b = own.get();
    Stats sum;
    find_shared_memory(b);
    TSAN(b->tsan_main = __tsan_get_current_fiber();)
    for (long k; (k = g->next.fetch_add(1, std::memory_order_relaxed)) < (long)g->order.size();) {
        unsigned long i = (unsigned long)g->order[(size_t)k];
        cur.blk = b;
        cur.self = nullptr;
        blockDim = {g->block.x, g->block.y, g->block.z};
        gridDim = {g->grid.x, g->grid.y, g->grid.z};
        blockIdx = {unsigned(i % g->grid.x), unsigned(i / g->grid.x % g->grid.y),
                    unsigned(i / ((unsigned long)g->grid.x * g->grid.y))};
        b->n = (int)(g->block.x * g->block.y * g->block.z);
        b->dynamic_smem = g->smem;
        b->static_limit = g->static_limit;
        b->call = g->call;
        b->context = g->context;
        b->name = g->name;
        b->rng = opt.seed * 0x9e3779b97f4a7c15ull + i;
        b->stats = Stats{};
        b->stats.blocks = 1;
        run_block(b);
        sum.add(b->stats);
        cur.blk = nullptr;
    }
    pool_put(std::move(own), g->name, sum);
}

void run_grid(dim3 grid, dim3 block, size_t smem_bytes, size_t static_limit, const char *name,
              void (*call)(void *), void *context) {
    catch_faults();
    Grid g{grid, block, smem_bytes, static_limit, name, call, context, {}, {}};
    g.order.resize((size_t)grid.x * grid.y * grid.z);
    for (size_t i = 0; i < g.order.size(); i++) g.order[i] = (long)i;
    uint64_t s = opt.seed;
    for (size_t i = g.order.size(); opt.sched != FIFO && i > 1; i--)
        std::swap(g.order[i - 1], g.order[splitmix(s) % i]);
    if (opt.timeout) alarm((unsigned)opt.timeout);
    if (opt.threads > 1) {
        std::vector<std::thread> threads;
        for (int i = 0; i < opt.threads; i++) threads.emplace_back(run_blocks, &g);
        for (std::thread &t : threads) t.join();
    } else {
        run_blocks(&g);
    }
    if (opt.timeout) alarm(0);
}

// ---- EMU_STATS=1: what the kernels did, exactly; printed when the program ends ------------------

void Stats::add(const Stats &o) {
    blocks += o.blocks;
    switches += o.switches;
    mma += o.mma;
    ldmatrix += o.ldmatrix;
    ldmatrix_conflicts += o.ldmatrix_conflicts;
    wgmma += o.wgmma;
    cp_bytes += o.cp_bytes;
    tma_bytes += o.tma_bytes;
}

static struct PrintStats {
    ~PrintStats() {
        if (!opt.stats) return;
        for (auto &[name, s] : stats)
            fprintf(stderr,
                    "EMU STATS %s: blocks %llu switches %llu mma %llu ldmatrix %llu (with bank "
                    "conflicts %llu) wgmma/warp %llu cp.async %llu B TMA %llu B\n",
                    name.c_str(), (unsigned long long)s.blocks, (unsigned long long)s.switches,
                    (unsigned long long)s.mma, (unsigned long long)s.ldmatrix,
                    (unsigned long long)s.ldmatrix_conflicts, (unsigned long long)s.wgmma,
                    (unsigned long long)s.cp_bytes, (unsigned long long)s.tma_bytes);
    }
} print_stats;
}  // namespace emu
