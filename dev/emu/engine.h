// Inside the emulator: the state of one block and its threads, shared by its source files
//   fibers.cpp    CUDA threads as fibers: stacks and switches
//   schedule.cpp  which thread runs next; blocks, grids, deadlock reports
//   warp.cpp      warp collectives, __syncthreads and named barriers
//   shared.cpp    shared memory: where it is, poison, the async proxy's view of it
//   async.cpp     cp.async, mbarrier, TMA: queued, done as late as allowed
//   tensor.cpp    ldmatrix, mma.sync, wgmma
//   streams.cpp   streams as threads
//   ptx.cpp       kernels that nvcc has compiled: which one runs
//   nccl.cpp      NCCL between processes of one machine
//   memory.cpp    device memory: guard pages, poison, reports of bad addresses
//   host_api.cpp  the CUDA runtime API: devices, streams, events, errors
#pragma once
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "include/cuda_runtime.h"
#include "include/emu_ptx.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define ASAN 1
#endif

// ThreadSanitizer: the runtime itself is compiled without it (-DEMU_TSAN), the kernels with it. The
// runtime tells it what a CUDA thread is, which operation orders what, and which memory an
// asynchronous operation touches.
#if defined(EMU_TSAN)
#include <sanitizer/tsan_interface.h>
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void *);
void __tsan_switch_to_fiber(void *, unsigned);
void __tsan_set_fiber_name(void *, const char *);
void __tsan_read_range(void *, unsigned long);
void __tsan_write_range(void *, unsigned long);
void AnnotateIgnoreReadsBegin(const char *, int);
void AnnotateIgnoreReadsEnd(const char *, int);
void AnnotateIgnoreWritesBegin(const char *, int);
void AnnotateIgnoreWritesEnd(const char *, int);
}
#define TSAN(...) __VA_ARGS__
#else
#define TSAN(...)
#endif

// The program's one dynamic shared array; kernels declare it as
// extern __shared__ __align__(1024) unsigned char smem[];
constexpr size_t SMEM_MAX = 232448;  // 227 KB, the limit that sm_90 lets a kernel ask for
extern thread_local unsigned char smem[SMEM_MAX];

// Where a test defines it (tests/fault.c): called with the name of each call of an API and of each
// kernel launched; what it returns, unless 0, is the call's result.
extern "C" int emu_fault(const char *call) __attribute__((weak));
#define EMU_CALL(result_, name_) \
    if (const int fault_ = emu_fault ? emu_fault(name_) : 0) return (result_)fault_

namespace emu {
// ---- Options, from the environment --------------------------------------------------------------

enum Sched { FIFO, RANDOM, PRIO };
enum AsyncMode {
    LAZY,
    EAGER,
    EITHER
};  // an asynchronous copy runs at its wait, at once, or either
struct Options {
    Sched sched = FIFO;
    AsyncMode async = LAZY;
    int threads = 1, proxy = 0, exact = 0, timeout = 0, guard = 1, poison = 1, stats = 0;
    int arch = 90, driver = 0, runtime = 0, devices = 1, streams = 0, slow_stream = 0, lag_ms = 1,
        trace = 0;
    int fast_math = 0;
    size_t align = 64, memory = (size_t)8 << 30, page_cache = 0;
    uint64_t seed = 1;
    Options();
};
extern Options opt;
uint64_t splitmix(uint64_t &state);

// ---- One block: threads, warps, barriers, queued copies -----------------------------------------

enum State : uint8_t { READY, RUNNING, W_WARP, W_BAR, W_MBAR, DONE };

struct CpOp {  // one cp.async: `valid` bytes, then zeros up to `bytes`; valid = -1: already done
    void *dst;
    const void *src;
    int bytes, valid;
};

struct Fiber {
    void *sp = nullptr;
    char *stack = nullptr, *stack_end = nullptr;
    char *fenced_from = nullptr;  // its stack from here up, at the last wgmma.fence:
    std::vector<char> fenced;
    uint3 tid;
    int index, lane, warp;
    State state = DONE;
    // The event that the thread waits for, for reports
    const char *what = "", *file = "";
    int line = 0;
    void *wait_object = nullptr;
    uint32_t wait_arg = 0;
    std::vector<CpOp> cp;     // cp.async, oldest first
    std::vector<int> cp_end;  // where each committed group ends in cp
    int bulk_groups = 0;
    std::vector<uint32_t> unpublished;  // words of shared memory written since its last proxy fence
    uint32_t priority = 0;
    void *asan_stack = nullptr, *tsan = nullptr;
};

struct Collective {  // a warp operation that waits for the rest of its lanes
    uint32_t mask = 0, arrived = 0;
    CollFn fn;
    const char *name, *file;
    int line;
    void *slot[32];
};

struct WgOp {  // one warp's quarter of a wgmma; the accumulators are written through d
    int n, group, scale;
    bool ta, tb, rs;
    uint64_t da, db;
    float *d[32];
    uint32_t a[32][4];
    const char *file;
    int line;
};

struct WgSignature {  // the four warps of a warpgroup must issue the same operations
    uint64_t da, db;
    int n, flags, line;
};

struct Warp {
    Collective pending[32];
    int num_pending = 0;
    uint32_t exited = 0, exists = 0;
    std::vector<WgOp> wg;
    int wg_groups = 0;
    bool wg_fence = false;
    size_t wg_issued = 0;
    int registers = 0;  // of a thread
    void *tsan_async = nullptr;
    char tsan_issue, tsan_done;
};

struct Barrier {
    int arrived = 0, expect = 0;  // expect = -1: every thread that has not exited
    uint32_t generation = 0;
    std::vector<Fiber *> waiters;
    const char *file = "";
    int line = 0;
    char tsan_tag[2];
};

struct AsyncOp {  // a TMA tile
    enum Kind { LOAD, STORE } kind;
    Fiber *owner;
    int group;
    CUtensorMap map;
    int rank, c[3];
    uint32_t smem, bytes, bar;
    void *global;
    const char *file;
    int line;
    bool into_shared() const { return kind == LOAD; }
};

struct Stats {
    uint64_t blocks = 0, switches = 0, mma = 0, ldmatrix = 0, ldmatrix_conflicts = 0, wgmma = 0,
             cp_bytes = 0, tma_bytes = 0;
    void add(const Stats &o);
};

struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<std::unique_ptr<Warp>> warps;
    Barrier bars[16];
    std::vector<AsyncOp> async;
    std::vector<std::vector<WgSignature>> wg_signatures;  // by warpgroup
    std::vector<Fiber *> ready;
    size_t head = 0;  // ready[head..] can run
    int n = 0, live = 0;
    uint64_t rng = 0;
    int registers_free = 0;  // by setmaxnreg
    size_t dynamic_smem = 0, static_smem = 0, static_limit = 0;
    std::vector<const void *> statics;  // the variables that static_smem counts
    void *sched_sp = nullptr;
    void (*call)(void *) = nullptr;
    void *context = nullptr;
    const char *name = "";
    char *tls_lo = nullptr, *tls_hi = nullptr;  // the thread-local block that is shared memory
    char *base = nullptr;                       // what 32-bit shared addresses count from
    std::vector<char> view;                     // shared memory as the async proxy sees it
    std::vector<unsigned char> seen;            // dynamic shared memory as threads left it
    std::vector<Fiber *> writer;                // of each WORD of it
    std::set<std::pair<void *, uint32_t>> mbars;
    Stats stats;
    void *asan_stack = nullptr, *tsan_main = nullptr;
    const void *os_bottom = nullptr;
    size_t os_size = 0;
    char tsan_start = 0, tsan_end = 0;
    float wg_a[16][16], wg_b[16][256], wg_d[16][256];
};

inline Warp *my_warp();
inline uint32_t rnd(Block *b) { return (uint32_t)(splitmix(b->rng) >> 32); }

// ---- fibers.cpp, schedule.cpp -------------------------------------------------------------------

void make_fiber(Fiber *f);
void to_fiber(Block *b, Fiber *f);
void to_sched(Fiber *f);
void make_ready(Block *b, Fiber *f);
void block_on(State state, const char *what, void *object, uint32_t arg, const char *file,
              int line);
void requeue();  // lets another thread run
void run_block(Block *b);

// warp.cpp, shared.cpp, async.cpp
void thread_exit(Fiber *f);
void find_shared_memory(Block *b);
void poison_shared_memory(Block *b);
void check_past_dynamic_smem(Block *b);
enum { WORD = 4 };  // bytes whose writer is known
char *async_view(uint32_t a, char *p);
void note_writes(Fiber *f);
void async_exec(Block *b, size_t i);
void check_mbarriers_idle(Block *b);

// streams.cpp
struct Worker;           // the thread of a stream
Worker *start_worker();  // nullptr: work is done at the call
void put_work(Worker *w, std::function<void()> work);
bool worker_idle(const Worker *w);
void drain(const Worker *w);  // waits until it is idle
void drain_all();
void park_if_leaving();  // for loops that may outlive main
struct Mark {            // of an event
    uint64_t set = 0, reached = 0;
};
uint64_t mark_set(Mark *m);
void mark_reach(Mark *m, uint64_t count);
uint64_t mark_now(const Mark *m);
bool mark_reached(const Mark *m);
void mark_wait(const Mark *m, uint64_t count);

// memory.cpp
void catch_faults();
size_t device_memory_in_use();

// 64-bit mbarrier in shared memory, so that overwriting it is noticed:
// [63:48] magic  [47] phase  [46:35] pending  [34:23] count  [22:0] tx-count (signed)
// The magic is LOCAL until fence.mbarrier_init.
struct MbarrierBits {
    static constexpr uint64_t MAGIC = 0xB5B5, LOCAL = 0xB5B4;
    uint32_t phase, pending, count;
    int32_t tx;
    bool local;
    static bool valid(uint64_t v) { return v >> 48 == MAGIC || v >> 48 == LOCAL; }
    static MbarrierBits of(uint64_t v) {
        return {(uint32_t)(v >> 47 & 1), (uint32_t)(v >> 35 & 4095), (uint32_t)(v >> 23 & 4095),
                (int32_t)((uint32_t)v << 9) >> 9, v >> 48 == LOCAL};
    }
    uint64_t packed() const {
        return (local ? LOCAL : MAGIC) << 48 | (uint64_t)phase << 47 | (uint64_t)pending << 35 |
               (uint64_t)count << 23 | ((uint32_t)tx & 0x7fffff);
    }
};

// The bytes of a shared address under TMA's and wgmma's 128, 64 and 32-byte swizzles (1, 2, 3)
inline uint32_t swizzle(uint32_t a, int mode) {
    uint32_t rows = mode == 1 ? 7 : mode == 2 ? 3 : mode == 3 ? 1 : 0;
    return a ^ (a >> 7 & rows) << 4;
}

inline Warp *my_warp() { return cur.blk->warps[cur.self->warp].get(); }

// ---- ThreadSanitizer glue -----------------------------------------------------------------------

// Hides the runtime's own bookkeeping.
struct Quiet {
#if defined(EMU_TSAN)
    Quiet() {
        AnnotateIgnoreReadsBegin(__FILE__, 0);
        AnnotateIgnoreWritesBegin(__FILE__, 0);
    }
    ~Quiet() {
        AnnotateIgnoreReadsEnd(__FILE__, 0);
        AnnotateIgnoreWritesEnd(__FILE__, 0);
    }
#else
    Quiet() {}
#endif
};

// Asynchronous operations run in a TSan context of their own, one per warp: ordered after their
// issue, and before other threads only by the matching wait. Their footprint is touched at issue
// and again at completion, which covers every moment in between.
struct Async {
#if defined(EMU_TSAN)
    Warp *warp;
    void *back;
    Async(Warp *w, bool issue, const char *what, const char *file, int line);
    ~Async();
#else
    Async(Warp *, bool, const char *, const char *, int) {}
#endif
};
inline void async_done() { TSAN(__tsan_acquire(&my_warp()->tsan_done);) }
}  // namespace emu
