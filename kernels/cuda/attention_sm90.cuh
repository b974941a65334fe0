// Hopper's attention kernels: what the forward (attention_sm90.cu) and the backward
// (attention_backward_sm90.cu) share.
//
// Roles. One warpgroup of a CTA is the producer: one of its threads (a warp, where stated) takes
// items of the work list and starts all loads; its registers go to the consumers, warpgroups that
// each compute 64 rows at a time. CTAs are persistent: each takes the next item, longest first,
// from a counter in memory, and the producer loads the first tiles of the next item while consumers
// finish this one.
//
// Barriers are mbarriers in shared memory, in pairs, one pair for each buffer. `full`: one arrival
// of the producer, and the bytes that TMA brings. `empty`: one arrival of each warp that reads it,
// after its last read: wgmma may complete warp by warp. A consumer that does not use a stage still
// waits for `full` and arrives on `empty`, so that no warp is ever two phases behind.
//
// Rows past a document's end. The tensor maps have one more dimension than the tensor (see
// ragged_map), so that TMA itself stops at the document's end: loads bring zeros, stores write
// nothing. NaN in a neighbour or past total_tokens cannot get in; score masks need no lengths; and
// a map is valid for every batch of the same buffer and size.
#pragma once

#include "attention.cuh"
#include "ptx.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SM90A 1
#else
#define SM90A 0
#pragma nv_diag_suppress 177  // used only in the kernels' bodies
#endif

extern __shared__ __align__(1024) unsigned char smem[];  // each kernel carves its own

// attention_sm90.cu. Rows of `columns` values in boxes of 64 columns, a document at a time. Row r
// of the document of `len` tokens at row `start` has coordinates (column, total_tokens - len + r,
// start + len): both of the last two step by a row, and the first of them leaves its dimension
// where the document ends. Row 0 of that space lies total_tokens rows before the tensor; nothing
// there is ever addressed.
CUtensorMap ragged_map(const floatX *tensor, int64_t columns, int64_t total_tokens, int box_rows);

namespace {

constexpr int WARPGROUP = 4 * WARP;
constexpr int PANEL_COLUMNS = 64;  // 128 bytes: one swizzled row of TMA and wgmma
constexpr int ROW_BYTES = PANEL_COLUMNS * 2;
constexpr int BOX_ROWS = 64;    // of a load
constexpr int STORE_ROWS = 16;  // of a store: what a warp has of 64 rows
constexpr int WARPS = 4;        // of a consumer

// A tile of ROWS rows of D columns: panels of 64 columns, one after the other
template <int ROWS, int D>
struct Tile {
    static constexpr int PANELS = D / PANEL_COLUMNS;
    static constexpr int PANEL = ROWS * ROW_BYTES, BYTES = PANELS * PANEL;
};

// A CTA of N consumers: its threads, and registers per thread, 65,536 in all
template <int N>
struct Roles {
    static constexpr int CONSUMERS = N, THREADS = (N + 1) * WARPGROUP;
    static constexpr int PRODUCER_REGISTERS = N == 3 ? 32 : 40;
    static constexpr int CONSUMER_REGISTERS = N == 3 ? 160 : 232;
    static_assert(
        WARPGROUP * (PRODUCER_REGISTERS + N * CONSUMER_REGISTERS) <=
            65536 / THREADS / 8 * 8 * THREADS,
        "setmaxnreg would wait for ever for registers that the CTA was not launched with");
};

// A consumer's part of an item of units (see attention_sm90.cu)
struct Job {
    WorkItem doc;
    int32_t row_block;  // of the document; IDLE: the item has no unit for this consumer
    int32_t head;
    int32_t row_blocks;  // of keys, that the item's units see; 0: no more items
};
constexpr int IDLE = -1;

#if SM90A

// Where a kernel's shared memory begins: the pattern of the swizzle repeats every 1,024 bytes.
__device__ __forceinline__ uint32_t shared_begin() {
    const uint32_t at = smem_u32(smem);
    if (at % 1024 != 0) __trap();
    return at;
}

__device__ __forceinline__ int warp_in_group() { return threadIdx.x % WARPGROUP / WARP; }

// ---- Barriers and loads -------------------------------------------------------------------------

// A barrier pair at `full`; `warps` warps release what it guards
__device__ __forceinline__ void init_pair(uint32_t full, int warps, int producers = 1) {
    mbar_init(full, producers);
    mbar_init(full + 8, warps);
}

// The body of every kernel: one thread fetches the tensor maps and initialises the barriers, then a
// warpgroup produces and the others consume.
template <class Roles, class Init, class Produce, class Consume, class... Maps>
__device__ __forceinline__ void run_roles(Init init, Produce produce, Consume consume,
                                          const Maps &...maps) {
    // uniform over a warp, as the compiler cannot see: addresses stay in uniform registers
    const int group = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0);
    if (threadIdx.x == 0) {
        (tma_prefetch(maps), ...);
        init(shared_begin());
        fence_mbar_init();
    }
    __syncthreads();
    if (group == Roles::CONSUMERS) {
        setmaxnreg_dec<Roles::PRODUCER_REGISTERS>();
        produce();
    } else {
        setmaxnreg_inc<Roles::CONSUMER_REGISTERS>();
        consume(group);
    }
}

// ptxas moves a wait for wgmma above arithmetic that does not depend on it, which then overlaps
// with nothing. It moves no wait over this branch, and nothing that `impossible` depends on below
// it. The vote keeps the branch uniform, and with it all addresses.
__device__ __forceinline__ void before_wait(bool impossible) {
    if (__any_sync(~0u, impossible)) __trap();
}

// Never true of results of ex2, which has no -0; NaN of either sign has other bits.
template <int N>
__device__ __forceinline__ bool all_zero_and_one_negative(const float (&x)[N]) {
    uint32_t bits = 0;
    unrolled_for (int i = 0; i < N; i++) bits |= __float_as_uint(x[i]);
    return bits == 0x80000000u;
}

// Consumers take turns to issue the products of a block of keys, so that the softmax of one runs
// during the products of another: without turns they start together, and stay so (FlashAttention-3
// schedules its two consumers in the same way). Each of N consumers takes as many turns in an item
// as the item has blocks of keys, including those that it skips. Barrier 1 + unit says that it is a
// consumer's turn.
constexpr bool TAKE_TURNS = true;  // false: to measure their effect; the same bits

template <int N>
struct Turns {
    int unit;
    __device__ __forceinline__ void take() const {
        if (TAKE_TURNS) named_bar_sync(1 + unit, 2 * WARPGROUP);
    }
    __device__ __forceinline__ void pass() const {
        if (TAKE_TURNS) named_bar_arrive(1 + (unit + 1 == N ? 0 : unit + 1), 2 * WARPGROUP);
    }
    __device__ __forceinline__ void skip() const {
        take();
        pass();
    }
    // The first turn is that of unit 0; its last one is passed to it, and taken so that no barrier
    // is left half full.
    __device__ __forceinline__ void begin() const {
        if (unit == N - 1) pass();
    }
    __device__ __forceinline__ void end() const {
        if (unit == 0) take();
    }
};

// One arrival for the warp. Every lane has passed the other barrier of the pair: none can miss its
// next phase.
__device__ __forceinline__ void release(uint32_t barrier) {
    __syncwarp();
    if (lane_id() == 0) mbar_arrive(barrier);
}

// Stages in flight from the producer to the consumers; both sides count alike. AT, PAIRS: the
// stages' and their barrier pairs' place in shared memory.
template <int AT, int STAGE_BYTES, int PAIRS, int STAGES>
struct Ring {
    uint32_t base, stage, phase;

    __device__ __forceinline__ explicit Ring(uint32_t begin) : base(begin), stage(0), phase(0) {}
    __device__ __forceinline__ uint32_t tile() const { return base + AT + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint32_t full() const { return base + PAIRS + stage * 16; }
    __device__ __forceinline__ uint32_t empty() const { return full() + 8; }
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    __device__ __forceinline__ Ring following() const {
        Ring next = *this;
        next.advance();
        return next;
    }
    // Consumers: wait returns the next stage once it has arrived; done releases it
    __device__ __forceinline__ uint32_t wait() const {
        mbar_wait(full(), phase);
        return tile();
    }
    __device__ __forceinline__ void done() {
        release(empty());
        advance();
    }
    __device__ __forceinline__ void skip() {
        wait();
        done();
    }
};

// Rows [first, first + rows) of the document to `tile`, 64 at a time; zeros past its end. column:
// the first of D.
template <int D, int PANEL_BYTES>
__device__ __forceinline__ void load_rows(uint32_t tile, const CUtensorMap *map, uint32_t full,
                                          const Document &doc, int total_tokens, int column,
                                          int first, int rows) {
#pragma unroll 1
    for (int at = 0; at < rows; at += BOX_ROWS)
        unrolled_for (int panel = 0; panel < D / PANEL_COLUMNS; panel++)
            tma_load_3d(tile + panel * PANEL_BYTES + at * ROW_BYTES, map, full,
                        column + panel * PANEL_COLUMNS, total_tokens - doc.len + first + at,
                        doc.start + doc.len);
}
// An item's document, as if all its rows stood where its keys from `first` on stand. It is read
// from shared memory again and again, because a producer has no registers to keep it in.
__device__ __forceinline__ WorkItem rows_of_keys(const Job *job, int first) {
    WorkItem doc = job->doc;
    if (first < doc.shared_len) doc.start = doc.shared_first;
    return doc;
}

// The number of a CTA's next item, of `total`. Its first is drawn too, so that a CTA that starts
// late, after another kernel's, does not begin with one of the longest. Every CTA draws until it
// draws one past the end; the very last draw resets the counter to 0 for the next kernel.
__device__ __forceinline__ unsigned take_number(unsigned *items_taken, unsigned total) {
    return atomicInc(items_taken, total + gridDim.x - 1);
}

// The producer of items of units. For each item, load_unit(consumer, full, job) starts the loads of
// a consumer's own rows, UNIT_BYTES of them, and load_keys(kv_head, row_blocks) the loads of the
// keys that all consumers read. unit_pairs, jobs: a barrier pair and a Job for each consumer.
template <int CONSUMERS, class LoadUnit, class LoadKeys>
__device__ __forceinline__ void produce_units(unsigned *items_taken, const int32_t *work,
                                              const AttentionShape &s, uint32_t unit_pairs,
                                              Job *jobs, int unit_bytes, LoadUnit load_unit,
                                              LoadKeys load_keys) {
    const unsigned shares = s.num_heads / s.shared;  // an item exists for each set of shared heads
    const unsigned total = work_count(work, FORWARD_ITEMS) * shares;
    unsigned number = take_number(items_taken, total);
    for (uint32_t phase = 0;; phase ^= 1) {
        const bool more = number < total;
        const int first_head = number % shares * s.shared;
        WorkItem item = {};
        if (more) {
            // opaque: addresses kept over an item would take more registers than a producer has
            item = work_items(work + opaque(0))[number / shares];
            number = take_number(items_taken, total);  // long before it is used
        }
        const int row_blocks = more ? last_row_block(item, CONSUMERS, s.shared) + 1 : 0;
        Job job = {item, item.shared_len / UNIT_ROWS + item.tile * CONSUMERS / s.shared,
                   first_head + item.tile * CONSUMERS % s.shared, row_blocks};
        job.doc.tile = 0;  // nobody reads it: a register less
#pragma unroll 1
        for (int w = 0; w < CONSUMERS; w++) {
            const uint32_t full = unit_pairs + w * 16;
            const bool idle = job.row_block >= row_blocks;
            mbar_wait(full + 8, phase ^ 1);
            jobs[w] = job;
            if (idle) jobs[w].row_block = IDLE;
            mbar_arrive_expect_tx(full, idle ? 0 : unit_bytes);
            if (!idle) load_unit(w, full, job);
            if (++job.head == first_head + s.shared) job.head = first_head, job.row_block++;
        }
        if (!more) return;
        load_keys(first_head / s.group, row_blocks);
    }
}

// ---- Masks --------------------------------------------------------------------------------------
// Accumulators: see below.

// Rows are queries. The last 64 columns are the keys at the rows' own positions.
template <int N>
__device__ __forceinline__ void mask_diagonal(float (&s)[N]) {
    const int row = warp_in_group() * 16 + quad_row();
    unrolled_for (int i = 0; i < UNIT_ROWS / 2; i++)
        if (i / 4 * 8 + quad_col() + i % 2 > row + i / 2 % 2 * 8)
            s[N - UNIT_ROWS / 2 + i] = -INFINITY;
}
// Rows are keys, `ahead` of the columns, the queries.
__device__ __forceinline__ void mask_earlier_queries(float (&s)[UNIT_ROWS / 2], int ahead) {
    const int row = warp_in_group() * 16 + quad_row() + ahead;
    unrolled_for (int i = 0; i < UNIT_ROWS / 2; i++)
        if (row + i / 2 % 2 * 8 > i / 4 * 8 + quad_col() + i % 2) s[i] = -INFINITY;
}

// ---- Products of a warpgroup --------------------------------------------------------------------
// An accumulator of 64 rows and N columns is x[N / 2] for each thread: x[i] is row 16 * warp + lane
// / 4 + 8 * (i / 2 % 2), column i / 4 * 8 + 2 * (lane % 4) + i % 2. As left operand of the next
// product it has the same layout.

// Descriptor of a tile of panels, and the same `bytes` further: shared addresses are under 2^18, no
// carry leaves their field.
__device__ __forceinline__ uint64_t descriptor(uint32_t tile, int panel_bytes) {
    return wgmma_desc_sw128(tile, panel_bytes, 8 * ROW_BYTES);
}
__device__ __forceinline__ uint64_t further(uint64_t descriptor, int bytes) {
    return descriptor + (bytes >> 4);
}

// c (64, N) = a (64, D) times the transpose of b (N, D), in tiles of A_ROWS and B_ROWS rows
template <int D, int A_ROWS, int B_ROWS, int M>
__device__ __forceinline__ void multiply_transposed(float (&c)[M], uint32_t a_tile,
                                                    uint32_t b_tile) {
    constexpr int A_PANEL = A_ROWS * ROW_BYTES, B_PANEL = B_ROWS * ROW_BYTES;
    const uint64_t a = descriptor(a_tile, A_PANEL), b = descriptor(b_tile, B_PANEL);
    unrolled_for (int i = 0; i < D / 16; i++) {
        const int panel = i / 4, column = i % 4 * 32;  // in bytes
        wgmma_ss<0, 0>(c, further(a, panel * A_PANEL + column),
                       further(b, panel * B_PANEL + column), i > 0);
    }
    wgmma_commit();
}

// c (64, D) += a (64, N) times the first N rows of b, a tile of B_ROWS rows, of which the first
// `rows`, a power of two, are valid: columns of a beyond them are zeros, and meet valid rows.
template <int N, int B_ROWS, int M, int A>
__device__ __forceinline__ void multiply_add(float (&c)[M], const uint32_t (&a)[A][4],
                                             uint32_t b_tile, int rows = B_ROWS) {
    const uint64_t b = descriptor(b_tile, B_ROWS * ROW_BYTES);
    unrolled_for (int i = 0; i < N / 16; i++)
        wgmma_rs<1>(c, a[i], further(b, (i * 16 & (rows - 1)) * ROW_BYTES), 1);
    wgmma_commit();
}

// Columns that x lacks are zeros
template <int N, int A>
__device__ __forceinline__ void to_operand(uint32_t (&a)[A][4], const float (&x)[N]) {
    unrolled_for (int i = 0; i < 4 * A; i++)
        a[i / 4][i % 4] = i < N / 2 ? pack_bf16(x[2 * i], x[2 * i + 1]) : 0;
}

template <int N>
__device__ __forceinline__ void clear(float (&x)[N]) {
    unrolled_for (int i = 0; i < N; i++) x[i] = 0;
}

// ---- Results ------------------------------------------------------------------------------------
// A warp stores its 16 rows of an accumulator through shared memory of its own: at `tile`, panels
// of 16 rows.

// factor: for rows quad_row() and quad_row() + 8. row, rows: the warp's first in the document, the
// document's.
template <int D>
__device__ __forceinline__ void store_rows(const CUtensorMap *map, uint32_t tile, const float *x,
                                           const float (&factor)[2], int column, int row,
                                           const Document &doc, int64_t total_tokens) {
    typedef Tile<STORE_ROWS, D> T;
    unsigned char *to = smem + (tile - smem_u32(smem));
    if (lane_id() == 0) bulk_wait_read<0>();
    __syncwarp();  // the previous store has read this buffer
    unrolled_for (int i = 0; i < D / 2; i += 2) {
        const int r = i / 2 % 2, panel = i / 32, chunk = i / 4 % 8, in_tile = quad_row() + 8 * r;
        *reinterpret_cast<uint32_t *>(to + panel * T::PANEL + in_tile * ROW_BYTES +
                                      ((chunk ^ (in_tile & 7)) << 4) + quad_col() * 2) =
            pack_bf16(x[i] * factor[r], x[i + 1] * factor[r]);
    }
    fence_proxy_async();
    __syncwarp();  // all lanes' values are there
    if (lane_id() != 0 || row >= doc.len) return;
    unrolled_for (int panel = 0; panel < T::PANELS; panel++)
        tma_store_3d(map, tile + panel * T::PANEL, column + panel * PANEL_COLUMNS,
                     (int)total_tokens - doc.len + row, doc.start + doc.len);
    bulk_commit();
}

#endif  // SM90A

// One CTA per SM, fewer where there are fewer items; depends on host values only.
inline unsigned persistent_grid(int64_t items) {
    assert(items > 0);
    return (unsigned)(items < cuda_num_sms() ? items : cuda_num_sms());
}

}  // namespace
