// cp.async, mbarrier, TMA and bulk copies. A copy is queued when it is issued and done as late as
// its wait allows, at once, or at random (EMU_ASYNC): a kernel must be right in every case.
#include "engine.h"

namespace emu {
static bool at_once() { return opt.async == EAGER || (opt.async == EITHER && (rnd(cur.blk) & 1)); }

// ---- cp.async -----------------------------------------------------------------------------------

static void cp_do(const CpOp &o) {
    if (o.valid > 0) memcpy(o.dst, o.src, (size_t)o.valid);
    if (o.valid < o.bytes) memset((char *)o.dst + o.valid, 0, (size_t)(o.bytes - o.valid));
}

void cp_async(uint32_t dst, const void *src, int bytes, int valid, const char *file, int line) {
    if (dst % (uint32_t)bytes || (valid && (uintptr_t)src % (uintptr_t)bytes))
        fail("%s:%d cp.async misaligned: dst 0x%x src %p", file, line, dst, src);
    CpOp o{smem_ptr(dst, (size_t)bytes, "cp.async"), src, bytes, valid};
    TSAN({
        Async context(my_warp(), true, "cp.async", file, line);
        __tsan_write_range(o.dst, bytes);
        if (valid) __tsan_read_range((void *)src, valid);
    })
    if (at_once()) {
        Async context(my_warp(), false, "cp.async", file, line);
        cp_do(o);
        o.valid = -1;
    }
    cur.blk->stats.cp_bytes += (uint64_t)valid;
    cur.self->cp.push_back(o);
    yield_point();
}

void cp_async_commit() { cur.self->cp_end.push_back((int)cur.self->cp.size()); }

void cp_wait(int n) {
    Fiber *f = cur.self;
    int groups = (int)f->cp_end.size() - n;
    if (groups > 0) {
        int end = f->cp_end[(size_t)groups - 1];
        {
            Async context(my_warp(), false, "cp.async", "", 0);
            for (int i = 0; i < end; i++)
                if (f->cp[(size_t)i].valid >= 0) cp_do(f->cp[(size_t)i]);
        }
        async_done();
        f->cp.erase(f->cp.begin(), f->cp.begin() + end);
        f->cp_end.erase(f->cp_end.begin(), f->cp_end.begin() + groups);
        for (int &e : f->cp_end) e -= end;
    }
    yield_point();
}

// ---- mbarrier -----------------------------------------------------------------------------------

struct Mbarrier {
    uint64_t *p;
    MbarrierBits bits;
};

static Mbarrier mbar_at(uint32_t a, const char *op, const char *file, int line) {
    if (a & 7) fail("%s:%d %s: mbarrier address 0x%x is not 8-byte aligned", file, line, op, a);
    uint64_t *p = (uint64_t *)smem_ptr(a, 8, op);
    if (!MbarrierBits::valid(*p))
        fail("%s:%d %s: no initialised mbarrier at shared 0x%x (content %016llx)", file, line, op,
             a, (unsigned long long)*p);
    return {p, MbarrierBits::of(*p)};
}

// Stores the state; a phase ends when nothing is pending, and wakes those that wait for it.
static void mbar_store(Mbarrier m) {
    Block *b = cur.blk;
    bool done = m.bits.pending == 0 && m.bits.tx == 0;
    if (done) {
        m.bits.phase ^= 1;
        m.bits.pending = m.bits.count;
    }
    *m.p = m.bits.packed();
    for (int i = 0; done && i < b->n; i++) {
        Fiber *f = b->fibers[(size_t)i].get();
        if (f->state == W_MBAR && f->wait_object == m.p && f->wait_arg != m.bits.phase)
            make_ready(b, f);
    }
}

void mbar_init(uint32_t a, uint32_t count, const char *file, int line) {
    if (a & 7) fail("%s:%d mbarrier.init misaligned", file, line);
    if (!count || count > 4095) fail("%s:%d mbarrier.init count %u", file, line, count);
    uint64_t *p = (uint64_t *)smem_ptr(a, 8, "mbarrier.init");
    *p = MbarrierBits{0, count, count, 0, true}.packed();
    Quiet quiet;
    cur.blk->mbars.insert({p, a});
}

void fence_mbar_init() {
    for (auto &m : cur.blk->mbars) {
        uint64_t *p = (uint64_t *)m.first;
        MbarrierBits bits = MbarrierBits::of(*p);
        if (!MbarrierBits::valid(*p)) continue;
        bits.local = false;
        *p = bits.packed();
    }
}

void mbar_arrive(uint32_t a, uint32_t n, uint32_t tx, const char *file, int line) {
    Mbarrier m = mbar_at(a, "mbarrier.arrive", file, line);
    TSAN(__tsan_release(m.p);)
    if (m.bits.pending < n)
        fail("%s:%d mbarrier at shared 0x%x: more arrivals than its count %u in one phase", file,
             line, a, m.bits.count);
    m.bits.tx += (int)tx;
    m.bits.pending -= n;
    mbar_store(m);
    yield_point();
}

static void mbar_complete_tx(uint32_t a, uint32_t bytes, const char *file, int line) {
    Mbarrier m = mbar_at(a, "complete_tx", file, line);
    TSAN(__tsan_release(m.p);)
    m.bits.tx -= (int)bytes;
    mbar_store(m);
}

// Returns false now and then without reason when order is random: the ISA allows a time-out.
bool mbar_try_wait(uint32_t a, uint32_t parity, const char *file, int line) {
    Mbarrier m = mbar_at(a, "mbarrier.try_wait", file, line);
    if (m.bits.phase == (parity & 1)) {
        if (opt.sched != FIFO && (rnd(cur.blk) & 3) == 0) {
            requeue();
            return false;
        }
        block_on(W_MBAR, "mbarrier wait", m.p, parity & 1, file, line);
    } else {
        yield_point();
    }
    TSAN(__tsan_acquire(m.p);)
    return true;
}

void check_mbarriers_idle(Block *b) {
    for (auto &m : b->mbars) {
        uint64_t v = *(uint64_t *)m.first;
        if (MbarrierBits::valid(v) && MbarrierBits::of(v).tx)
            fail("block ends with mbarrier at shared 0x%x in mid-transaction (tx-count %d)",
                 m.second, MbarrierBits::of(v).tx);
    }
}

// ---- TMA tiles: doing them ----------------------------------------------------------------------

// Sixteen bytes of one row of a box: outside the tensor, loads give zeros and stores do nothing.
static void do_chunk(const AsyncOp &o, uint32_t a, char *row, int64_t x, bool row_inside) {
    uint32_t size = o.map.elt;
    char *p = (char *)smem_ptr(a, 16, "TMA tile");
    for (uint32_t e = 0; e < 16; e += size, x++) {
        bool inside = row_inside && x >= 0 && x < o.map.dim[0];
        if (o.kind == AsyncOp::LOAD) {
            char element[16] = {0};
            if (inside) memcpy(element, row + x * size, size);
            memcpy(p + e, element, size);
            if (!opt.proxy) continue;
            memcpy(async_view(a, p) + e, element, size);
            const size_t at = (size_t)(p + e - (char *)smem);
            if (at < cur.blk->seen.size()) memcpy(cur.blk->seen.data() + at, element, size);
        } else if (inside) {
            memcpy(row + x * size, async_view(a, p) + e, size);
        }
    }
}

static void do_tile(const AsyncOp &o) {
    const CUtensorMap &m = o.map;
    int box1 = o.rank > 1 ? m.box[1] : 1, box2 = o.rank > 2 ? m.box[2] : 1;
    uint32_t row_bytes = (uint32_t)m.box[0] * m.elt;
    for (int i = 0; i < box1 * box2; i++) {
        int64_t y = o.rank > 1 ? (int64_t)o.c[1] + i % box1 : 0;
        int64_t z = o.rank > 2 ? (int64_t)o.c[2] + i / box1 : 0;
        bool inside =
            (o.rank < 2 || (y >= 0 && y < m.dim[1])) && (o.rank < 3 || (z >= 0 && z < m.dim[2]));
        char *row = (char *)m.base + (o.rank > 1 ? y * (int64_t)m.stride[0] : 0) +
                    (o.rank > 2 ? z * (int64_t)m.stride[1] : 0);
        for (uint32_t at = 0; at < row_bytes; at += 16)
            do_chunk(o, swizzle(o.smem + (uint32_t)i * row_bytes + at, m.swz), row,
                     (int64_t)o.c[0] + at / m.elt, inside);
    }
}

void async_exec(Block *b, size_t i) {
    AsyncOp o;
    {
        Quiet quiet;
        o = b->async[i];
        b->async.erase(b->async.begin() + (ptrdiff_t)i);
    }
    Async context(b->warps[(size_t)o.owner->warp].get(), false, "TMA", o.file, o.line);
    do_tile(o);
    if (o.into_shared()) mbar_complete_tx(o.bar, o.bytes, o.file, o.line);
}

// ---- TMA tiles: issuing them --------------------------------------------------------------------

static void issue(AsyncOp o) {
    Block *b = cur.blk;
    o.owner = cur.self;
    o.group = cur.self->bulk_groups;
    {
        Quiet quiet;
        b->async.push_back(o);
    }
    TSAN({
        Async context(my_warp(), true, "TMA", o.file, o.line);
        void *p = smem_ptr(o.smem, o.bytes, "TMA");
        if (o.into_shared())
            __tsan_write_range(p, o.bytes);
        else
            __tsan_read_range(p, o.bytes);
    })
    b->stats.tma_bytes += o.bytes;
    if (opt.async == EAGER) async_exec(b, b->async.size() - 1);
    yield_point();
}

static AsyncOp tile_op(AsyncOp::Kind kind, const CUtensorMap *m, uint32_t s, uint32_t bar, int rank,
                       int c0, int c1, int c2, const char *file, int line) {
    Quiet quiet;
    if (m->magic != 0x7e45) fail("%s:%d TMA: not an encoded tensor map", file, line);
    if (m->rank != rank)
        fail("%s:%d TMA: rank %d instruction with a rank %d map", file, line, rank, m->rank);
    if (s & 127) fail("%s:%d TMA: shared address 0x%x is not 128-byte aligned", file, line, s);
    if (m->swz == 1 && (s & 1023))
        fail("%s:%d TMA: 128B-swizzled tile at 0x%x is not 1024-byte aligned", file, line, s);
    AsyncOp o{};
    o.kind = kind;
    o.map = *m;
    o.rank = rank;
    o.c[0] = c0;
    o.c[1] = c1;
    o.c[2] = c2;
    o.smem = s;
    o.bar = bar;
    o.file = file;
    o.line = line;
    o.bytes = (uint32_t)m->box[0] * m->elt;
    for (int i = 1; i < rank; i++) o.bytes *= m->box[i];
    smem_ptr(s, o.bytes, "TMA tile");
    return o;
}

void tma_load(uint32_t dst, const CUtensorMap *map, uint32_t bar, int rank, int c0, int c1, int c2,
              const char *file, int line) {
    if (mbar_at(bar, "TMA load", file, line).bits.local)
        fail("%s:%d TMA load: no fence.mbarrier_init since the mbarrier at 0x%x was initialised",
             file, line, bar);
    issue(tile_op(AsyncOp::LOAD, map, dst, bar, rank, c0, c1, c2, file, line));
}
void tma_store(const CUtensorMap *map, uint32_t src, int rank, int c0, int c1, int c2,
               const char *file, int line) {
    issue(tile_op(AsyncOp::STORE, map, src, 0, rank, c0, c1, c2, file, line));
}

void bulk_commit() { cur.self->bulk_groups++; }

// Waits for this thread's stores. Hardware lets "read" waits return when shared memory has been
// read; the write is then also done here.
void bulk_wait(int n) {
    Block *b = cur.blk;
    Fiber *f = cur.self;
    for (size_t i = 0; i < b->async.size();) {
        AsyncOp &o = b->async[i];
        if (o.owner == f && !o.into_shared() && o.group < f->bulk_groups - n)
            async_exec(b, i);
        else
            i++;
    }
    async_done();
    yield_point();
}
}  // namespace emu
