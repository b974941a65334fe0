// Warp collectives (the last lane to arrive computes for all), __syncthreads and named barriers.
#include "engine.h"

namespace emu {
int lane_id() { return cur.self->lane; }

// ---- Collectives --------------------------------------------------------------------------------

static void name_tsan_fiber(Fiber *f, const Collective &c) {
    (void)f, (void)c;
    TSAN(char name[64]; const char *s = strrchr(c.file, '/');
         snprintf(name, sizeof name, "thread %d.%d %s %s:%d", f->warp, f->lane, c.name,
                  s ? s + 1 : c.file, c.line);
         __tsan_set_fiber_name(f->tsan, name);)
}

static void run_collective(Block *b, Warp *w, int i, Fiber *self) {
    Collective c;
    {
        Quiet quiet;
        c = w->pending[i];
        w->pending[i] = w->pending[--w->num_pending];
    }
    name_tsan_fiber(self, c);
    c.fn(c.slot, c.arrived);
    for (uint32_t m = c.arrived; m; m &= m - 1) {
        Fiber *f = b->fibers[self->warp * 32 + __builtin_ctz(m)].get();
        if (f != self) make_ready(b, f);
    }
}

// The pending collective of this mask, or a new one. Lanes of one warp that wait at different
// places with overlapping masks would hang or exchange garbage on a GPU.
static int find_collective(Warp *w, uint32_t mask, CollFn fn, const char *name, const char *file,
                           int line) {
    int i = 0;
    for (; i < w->num_pending && w->pending[i].mask != mask; i++)
        if (w->pending[i].mask & mask & ~w->exited)
            fail("%s:%d %s mask %08x overlaps pending %s mask %08x at %s:%d", file, line, name,
                 mask, w->pending[i].name, w->pending[i].mask, w->pending[i].file,
                 w->pending[i].line);
    if (i == w->num_pending) {
        Collective &c = w->pending[w->num_pending++];
        c.mask = mask;
        c.arrived = 0;
        c.fn = fn;
        c.name = name;
        c.file = file;
        c.line = line;
    }
    Collective &c = w->pending[i];
    if (c.fn != fn || c.line != line)
        fail(
            "divergent warp collective: lane %d is at %s %s:%d, lanes %08x of warp %d wait at %s "
            "%s:%d",
            cur.self->lane, name, file, line, c.arrived, cur.self->warp, c.name, c.file, c.line);
    return i;
}

void warp_coll(uint32_t mask, CollFn fn, const char *name, void *arg, const char *file, int line,
               bool aligned) {
    Fiber *f = cur.self;
    Block *b = cur.blk;
    Warp *w = b->warps[f->warp].get();
    if (!(mask >> f->lane & 1))
        fail("%s:%d %s: calling lane %d is not in its own mask %08x", file, line, name, f->lane,
             mask);
    if (aligned && ((w->exited & mask) || (w->exists & mask) != mask))
        fail("%s:%d %s needs all 32 lanes, exited %08x missing %08x", file, line, name, w->exited,
             mask & ~w->exists);
    mask &= w->exists;
    int i = find_collective(w, mask, fn, name, file, line);
    Collective &c = w->pending[i];
    c.slot[f->lane] = arg;
    c.arrived |= 1u << f->lane;
    // Only __syncwarp orders memory; shuffles, votes and mma do not.
    TSAN(bool sync = fn == fn_sync; if (sync) __tsan_release(w);)
    if (c.arrived == (mask & ~w->exited)) {
        run_collective(b, w, i, f);
        TSAN(if (sync) __tsan_release(w);)
        if (opt.sched != FIFO) requeue();
    } else {
        block_on(W_WARP, name, w, mask, file, line);
    }
    TSAN(if (sync) __tsan_acquire(w);)
}

void fn_sync(void **, uint32_t) {}

void fn_shfl(void **slot, uint32_t mask) {
    for (int l = 0; l < 32; l++) {
        if (!(mask >> l & 1)) continue;
        ShflArg *a = (ShflArg *)slot[l];
        int src = a->src & 31;
        bool present = mask >> src & 1;  // reading an absent lane gives poison
        a->out = present ? ((ShflArg *)slot[src])->v : ~0ull;
    }
}

void fn_vote(void **slot, uint32_t mask) {
    uint32_t ballot = 0;
    for (int l = 0; l < 32; l++)
        if ((mask >> l & 1) && ((ShflArg *)slot[l])->pred) ballot |= 1u << l;
    for (int l = 0; l < 32; l++)
        if (mask >> l & 1) ((ShflArg *)slot[l])->ball = ballot;
}

// ---- Barriers of the block ----------------------------------------------------------------------

static bool try_release(Block *b, Barrier &r, Fiber *self) {
    int target = r.expect < 0 ? b->live : r.expect;
    if (!r.arrived || r.arrived < target) return false;
    for (Fiber *f : r.waiters)
        if (f != self) make_ready(b, f);
    r.waiters.clear();
    r.arrived = 0;
    r.expect = 0;
    r.generation++;
    return true;
}

static void check_barrier(const Barrier &r, int id, int count, const char *file, int line) {
    Fiber *f = cur.self;
    if (count > 0 && count % 32)
        fail("%s:%d barrier %d: thread count %d is not a multiple of 32", file, line, id, count);
    if (r.arrived && r.expect != count)
        fail("%s:%d barrier %d: count %d, earlier arrivals at %s:%d used %d", file, line, id, count,
             r.file, r.line, r.expect);
    if (!r.arrived || r.line == line) return;
    for (Fiber *o : r.waiters)
        if (o->warp == f->warp && o->line != line)
            fail("divergent barrier %d: lane %d of warp %d is at %s:%d, lane %d at %s:%d", id,
                 f->lane, f->warp, file, line, o->lane, o->file, o->line);
}

void bar(int id, int count, bool wait, const char *file, int line) {
    Fiber *f = cur.self;
    Block *b = cur.blk;
    if (id < 0 || id > 15) fail("%s:%d barrier id %d", file, line, id);
    Barrier &r = b->bars[id];
    check_barrier(r, id, count, file, line);
    r.expect = count;
    r.arrived++;
    r.file = file;
    r.line = line;
    TSAN(char *tag = &r.tsan_tag[r.generation & 1]; __tsan_release(tag);)
    if (wait) {
        f->file = file;
        f->line = line;
        r.waiters.push_back(f);
    }
    if (try_release(b, r, f)) {
        if (wait && opt.sched != FIFO) requeue();
    } else if (wait) {
        block_on(W_BAR, id == 0 && count < 0 ? "__syncthreads" : "named barrier", &r, (uint32_t)id,
                 file, line);
    }
    TSAN(if (wait) __tsan_acquire(tag);)
}

// ---- Exit: nothing asynchronous may be left, and nobody waits for this thread any more ----------

static void check_nothing_in_flight(Fiber *f) {
    Block *b = cur.blk;
    Warp *w = b->warps[f->warp].get();
    if (!f->cp.empty()) fail("thread exits with cp.async copies never waited for");
    for (AsyncOp &a : b->async)
        if (a.owner == f && !a.into_shared())
            fail("thread exits with an unfinished TMA store from %s:%d (no bulk wait)", a.file,
                 a.line);
    if (!w->wg.empty())
        fail("thread exits with wgmma in flight (%s:%d, no wgmma_wait<0>)", w->wg[0].file,
             w->wg[0].line);
}

void thread_exit(Fiber *f) {
    Block *b = cur.blk;
    Warp *w = b->warps[f->warp].get();
    check_nothing_in_flight(f);
    b->live--;
    w->exited |= 1u << f->lane;
    for (int i = 0; i < w->num_pending;) {
        Collective &c = w->pending[i];
        if (c.arrived && c.arrived == (c.mask & ~w->exited)) {
            run_collective(b, w, i, f);
            i = 0;
        } else {
            i++;
        }
    }
    for (Barrier &r : b->bars)
        if (r.expect < 0) try_release(b, r, nullptr);
}
}  // namespace emu
