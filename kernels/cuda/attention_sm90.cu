// FlashAttention-3 (arXiv 2407.08608) for packed documents, with the instructions of sm_90a: TMA,
// mbarrier, wgmma, setmaxnreg. For other architectures this file compiles to nothing.
//
// Units. A unit is 64 queries of one head: what one warpgroup computes at a time. Units that read
// the same keys share a CTA: the units of a document are counted row block by row block, in a row
// block head by head over the heads that share (all of the group, or a part of it), and a work item
// is as many in a row as a CTA has consumer warpgroups. Any ratio of heads fills all warpgroups but
// at a document's end. A unit walks its keys from the diagonal down to key 0, 128 at a time, counted
// from the document's first key; the block of the diagonal has only 64 when the row block is even.
//
// Roles. One thread of the last warpgroup, the producer, takes items and starts all loads; it gives
// its registers to the consumers. A consumer warpgroup computes one unit of each item. CTAs are
// persistent: each takes the next item of the list, longest first, from a counter in memory, and
// the producer has the first tiles of the next item under way while consumers finish this one.
//
// Barriers (mbarriers in shared memory). X full: the bytes have come; X empty: may be overwritten.
//   q full   [unit]   one arrival of the producer and the bytes of Q. Guards Q and the unit's Job.
//   q empty  [unit]   one arrival a warp of that consumer, after its last product with Q
//   k full, v full [stage]   one arrival of the producer and the bytes
//   k empty, v empty [stage] one arrival a warp of every consumer: also of one that has no use for
//                     the block, because its rows come before it or because it has no unit. It
//                     waits for `full` first, so that nobody is ever two phases behind.
// Nothing else is shared: a warp writes its rows of O through shared memory of its own, and waits
// for its own last store to have read it.
//
// Rows past a document's end. The tensor maps have a dimension more than the tensor (see
// ragged_map), so that TMA itself ends at the document: loads bring zeros, stores write nothing.
// NaN in a neighbour or past total_tokens cannot come in; no length enters any mask; and the map
// holds for every batch of the same buffer, in a recorded graph too. Zeros as keys are hidden by the
// causal mask from every query inside the document, zeros as queries are not stored.
//
// Softmax and products overlap: the scores of a block and the product with V of the block before it
// are issued together; the exponentials run while that product does. Every row sees a key of its
// diagonal block, the first one: its maximum is finite from there on.
#include "attention.cuh"
#include "ptx.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SM90A 1
#else
#define SM90A 0
#pragma nv_diag_suppress 177  // what only the kernels' bodies use
#endif

extern __shared__ __align__(1024) unsigned char smem[];

// Says whether the machine code that this GPU runs is sm_90a's.
__device__ int32_t compiled_for_sm90a = SM90A;

namespace {

constexpr int WARPGROUP = 4 * WARP;
constexpr int PANEL_COLUMNS = 64;  // 128 bytes: one swizzled row of TMA and wgmma
constexpr int ROW_BYTES = PANEL_COLUMNS * 2;
constexpr int KEYS = 128;  // of a block

// What a consumer is to do with its part of an item
struct Job {
    int32_t start, len;  // the document: first row, tokens
    int32_t row_block;   // of the document; IDLE: this item has no unit for you
    int32_t head;
    int32_t key_blocks;  // that will come for the item; 0: no more items
};
constexpr int IDLE = -1;

template <int D>
struct ForwardSizes {
    static constexpr int CONSUMERS = forward_consumers(D);
    static constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;
    // Registers of a thread, 65,536 in all
    static constexpr int PRODUCER_REGISTERS = D == 64 ? 32 : 40;
    static constexpr int CONSUMER_REGISTERS = D == 64 ? 160 : 232;
    static constexpr int STAGES = D == 64 ? 3 : 2;
    static constexpr int PANELS = D / PANEL_COLUMNS;
    static constexpr int Q_PANEL = UNIT_ROWS * ROW_BYTES, Q_BYTES = PANELS * Q_PANEL;
    static constexpr int KV_PANEL = KEYS * ROW_BYTES, KV_BYTES = PANELS * KV_PANEL;
    static constexpr int O_PANEL = 16 * ROW_BYTES;  // of a warp
    // Where in shared memory; barriers in pairs, full and empty
    static constexpr int K = CONSUMERS * Q_BYTES, V = K + STAGES * KV_BYTES;
    static constexpr int O = V + STAGES * KV_BYTES;
    static constexpr int Q_BARRIERS = O + CONSUMERS * Q_BYTES;
    static constexpr int K_BARRIERS = Q_BARRIERS + 16 * CONSUMERS;
    static constexpr int V_BARRIERS = K_BARRIERS + 16 * STAGES;
    static constexpr int JOBS = V_BARRIERS + 16 * STAGES;
    static constexpr int BYTES = JOBS + CONSUMERS * (int)sizeof(Job);
};

#if SM90A

__device__ unsigned items_taken;  // beyond the first of each CTA; 0 between kernels

__device__ __forceinline__ int lane_id() { return threadIdx.x % WARP; }
__device__ __forceinline__ int warp_in_group() { return threadIdx.x % WARPGROUP / WARP; }
__device__ __forceinline__ int quad_row() { return lane_id() / 4; }
__device__ __forceinline__ int quad_col() { return lane_id() % 4 * 2; }

// One arrival for the warp. Every lane has passed the `full` barrier: none can miss its next phase.
__device__ __forceinline__ void release(uint32_t empty) {
    __syncwarp();
    if (lane_id() == 0) mbar_arrive(empty);
}

// Q, O and the Job of a consumer
template <int D>
struct UnitMemory {
    typedef ForwardSizes<D> Z;
    uint32_t q, o, full;
    Job *job;
    __device__ __forceinline__ UnitMemory(uint32_t base, int unit)
        : q(base + unit * Z::Q_BYTES),
          o(base + Z::O + unit * Z::Q_BYTES),
          full(base + Z::Q_BARRIERS + unit * 16),
          job(reinterpret_cast<Job *>(smem + Z::JOBS) + unit) {}
    __device__ __forceinline__ uint32_t empty() const { return full + 8; }
};

// K or V on their way from the producer to the consumers, a block of keys at a time. Both sides
// count stages alike. TILES, BARRIERS: where in shared memory.
template <int D, int TILES, int BARRIERS>
struct Ring {
    typedef ForwardSizes<D> Z;
    uint32_t base, stage, phase;

    __device__ __forceinline__ explicit Ring(uint32_t begin) : base(begin), stage(0), phase(0) {}
    __device__ __forceinline__ uint32_t tile() const { return base + TILES + stage * Z::KV_BYTES; }
    __device__ __forceinline__ uint32_t full() const { return base + BARRIERS + stage * 16; }
    __device__ __forceinline__ uint32_t empty() const { return full() + 8; }
    __device__ __forceinline__ void advance() {
        if (++stage == Z::STAGES) stage = 0, phase ^= 1;
    }
};
template <int D>
using KeyRing = Ring<D, ForwardSizes<D>::K, ForwardSizes<D>::K_BARRIERS>;
template <int D>
using ValueRing = Ring<D, ForwardSizes<D>::V, ForwardSizes<D>::V_BARRIERS>;

// -------------------------------------------------------------------------------------------------
// Producer

// Rows [first, first + rows) of the document to `tile`, 64 at a time; zeros past its end.
template <int D, int PANEL_BYTES>
__device__ __forceinline__ void load_rows(uint32_t tile, const CUtensorMap *map, uint32_t full,
                                          const WorkItem &doc, int total_tokens, int head,
                                          int first, int rows) {
#pragma unroll 1
    for (int at = 0; at < rows; at += UNIT_ROWS)
#pragma unroll
        for (int panel = 0; panel < D / PANEL_COLUMNS; panel++)
            tma_load_3d(tile + panel * PANEL_BYTES + at * ROW_BYTES, map, full,
                        head * D + panel * PANEL_COLUMNS, total_tokens - doc.len + first + at,
                        doc.start + doc.len);
}

// The next block of the ring: keys from `first` on, at most KEYS of them, up to `end`
template <int D, class AnyRing>
__device__ __forceinline__ void load_block(AnyRing &ring, const CUtensorMap *map,
                                           const WorkItem &doc, int total_tokens, int head,
                                           int first, int end) {
    const int keys = min(KEYS, end - first);
    mbar_wait(ring.empty(), ring.phase ^ 1);
    mbar_arrive_expect_tx(ring.full(), keys * D * 2);
    load_rows<D, AnyRing::Z::KV_PANEL>(ring.tile(), map, ring.full(), doc, total_tokens, head,
                                       first, keys);
    ring.advance();
}

// Each call gives the next number; the last of `total` calls sets the counter back for the next
// kernel. Every item that is worked on draws once: `total` is the number of items.
__device__ __forceinline__ unsigned take_number(unsigned total) {
    return gridDim.x + atomicInc(&items_taken, total - 1);
}

template <int D>
__device__ __forceinline__ void produce(const CUtensorMap *qkv_map, const int32_t *work,
                                        const AttentionShape &s) {
    typedef ForwardSizes<D> Z;
    const uint32_t base = smem_u32(smem);
    const int T = (int)s.total_tokens;
    const unsigned shares = s.num_heads / s.shared;  // an item is for each of so many shared heads
    const unsigned total = reinterpret_cast<const WorkCounts *>(work)->forward_items * shares;
    KeyRing<D> keys(base);
    ValueRing<D> values(base);
    unsigned number = blockIdx.x;
    for (uint32_t phase = 0;; phase ^= 1) {
        const bool more = number < total;
        const int first_head = number % shares * s.shared;
        WorkItem item = {0, 0, 0};
        if (more) {
            item = forward_item(work, number / shares);
            number = take_number(total);  // long before it is used
        }
        const int last_block = last_row_block(item, Z::CONSUMERS, s.shared);
        const int key_blocks = more ? last_block / 2 + 1 : 0;
        int row_block = item.tile * Z::CONSUMERS / s.shared;
        int head = first_head + item.tile * Z::CONSUMERS % s.shared;
#pragma unroll 1
        for (int w = 0; w < Z::CONSUMERS; w++) {
            const UnitMemory<D> unit(base, w);
            const bool idle = !more || row_block > last_block;
            mbar_wait(unit.empty(), phase ^ 1);
            *unit.job = {item.start, item.len, idle ? IDLE : row_block, head, key_blocks};
            mbar_arrive_expect_tx(unit.full, idle ? 0 : Z::Q_BYTES);
            if (!idle)
                load_rows<D, Z::Q_PANEL>(unit.q, qkv_map, unit.full, item, T, head,
                                         row_block * UNIT_ROWS, UNIT_ROWS);
            if (++head == first_head + s.shared) head = first_head, row_block++;
        }
        if (!more) return;
        const int k_head = s.num_heads + first_head / s.group, end = (last_block + 1) * UNIT_ROWS;
        for (int block = key_blocks - 1; block >= -1; block--) {
            if (block >= 0) load_block<D>(keys, qkv_map, item, T, k_head, block * KEYS, end);
            if (block + 1 < key_blocks)  // V one block behind K, as it is used
                load_block<D>(values, qkv_map, item, T, k_head + s.num_kv_heads, (block + 1) * KEYS,
                              end);
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Consumer. An accumulator of 64 rows is x[N / 2] for each thread: x[i] is row
// 16 * warp + lane / 4 + 8 * (i / 2 % 2), column i / 4 * 8 + 2 * (lane % 4) + i % 2.

// Descriptor of a tile of panels, and the same `bytes` further: shared addresses are under 2^18, no
// carry leaves their field.
__device__ __forceinline__ uint64_t descriptor(uint32_t tile, int panel_bytes) {
    return wgmma_desc_sw128(tile, panel_bytes, 8 * ROW_BYTES);
}
__device__ __forceinline__ uint64_t further(uint64_t descriptor, int bytes) {
    return descriptor + (bytes >> 4);
}

// S (64, N) = Q K^T
template <int N, int D>
__device__ __forceinline__ void multiply_scores(float (&s)[N / 2], uint32_t q_tile,
                                                uint32_t k_tile) {
    typedef ForwardSizes<D> Z;
    const uint64_t q = descriptor(q_tile, Z::Q_PANEL), k = descriptor(k_tile, Z::KV_PANEL);
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const int panel = i / 4, column = i % 4 * 32;  // in bytes
        wgmma_ss<0, 0>(s, further(q, panel * Z::Q_PANEL + column),
                       further(k, panel * Z::KV_PANEL + column), i > 0);
    }
    wgmma_commit();
}

// O (64, D) += P (64, N) V
template <int N, int D>
__device__ __forceinline__ void multiply_values(float (&o)[D / 2],
                                                const uint32_t (&p)[KEYS / 16][4],
                                                uint32_t v_tile) {
    const uint64_t v = descriptor(v_tile, ForwardSizes<D>::KV_PANEL);
#pragma unroll
    for (int i = 0; i < N / 16; i++) wgmma_rs<1>(o, p[i], further(v, i * 16 * ROW_BYTES), 1);
    wgmma_commit();
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// The last 64 columns are the keys of the rows' own positions.
template <int N>
__device__ __forceinline__ void mask_diagonal(float (&s)[N]) {
    const int row = warp_in_group() * 16 + quad_row();
#pragma unroll
    for (int i = 0; i < UNIT_ROWS / 2; i++)
        if (i / 4 * 8 + quad_col() + i % 2 > row + i / 2 % 2 * 8)
            s[N - UNIT_ROWS / 2 + i] = -INFINITY;
}

// Running softmax of a thread's two rows: maximum of the raw scores, this thread's part of the sum
struct Softmax {
    float top[2], sum[2];
};

// s = exp(scale * s - maximum so far). keep: by what everything before has to be multiplied; exactly
// 1 when the maximum is what it was, 0 for the first block.
template <int N>
__device__ __forceinline__ void exponentials(float (&s)[N], float (&keep)[2], Softmax &state,
                                             float scale_log2e) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = state.top[r], sum[2] = {0, 0};
#pragma unroll
        for (int i = 2 * r; i < N; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
        top = quad_max(top);
        keep[r] = ex2((state.top[r] - top) * scale_log2e);
        const float shift = top * scale_log2e;
#pragma unroll
        for (int i = 2 * r; i < N; i += 4)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                s[i + j] = ex2(s[i + j] * scale_log2e - shift);
                sum[j] += s[i + j];
            }
        state.sum[r] = state.sum[r] * keep[r] + (sum[0] + sum[1]);
        state.top[r] = top;
    }
}

// The accumulator's layout is that of a left operand.
template <int N>
__device__ __forceinline__ void to_operand(uint32_t (&p)[KEYS / 16][4], const float (&s)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) p[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

template <int D>
struct Consumer {
    typedef ForwardSizes<D> Z;
    const AttentionShape &shape;
    const UnitMemory<D> unit;  // this warpgroup's
    KeyRing<D> keys;
    ValueRing<D> values;
    float o[D / 2];
    uint32_t p[KEYS / 16][4];
    Softmax state;

    __device__ __forceinline__ Consumer(const AttentionShape &s, uint32_t base, int group)
        : shape(s), unit(base, group), keys(base), values(base) {}

    // The next tile of a ring, when it has come
    template <class AnyRing>
    __device__ __forceinline__ uint32_t next(AnyRing &ring) {
        mbar_wait(ring.full(), ring.phase);
        return ring.tile();
    }
    template <class AnyRing>
    __device__ __forceinline__ void done(AnyRing &ring) {
        release(ring.empty());
        ring.advance();
    }
    __device__ __forceinline__ void skip(int blocks) {
        for (int n = 0; n < blocks; n++) {
            next(keys), done(keys);
            next(values), done(values);
        }
    }

    // P of the diagonal's block of N keys; nothing to overlap with yet
    template <int N>
    __device__ __forceinline__ void first_block() {
        float s[N / 2], keep[2];
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0;
        for (int r = 0; r < 2; r++) state.top[r] = -INFINITY, state.sum[r] = 0;
        const uint32_t k = next(keys);
        wgmma_fence();
        multiply_scores<N, D>(s, unit.q, k);
        wgmma_wait<0>();
        wgmma_pin(s);
        done(keys);
        mask_diagonal(s);
        exponentials(s, keep, state, shape.scale_log2e);
        to_operand(p, s);
    }

    // O += P V of the block before, which has N keys, while P of the next is computed
    template <int N>
    __device__ __forceinline__ void next_block() {
        float s[KEYS / 2], keep[2];
        const uint32_t k = next(keys), v = next(values);
        wgmma_pin(o);
        wgmma_fence();
        multiply_scores<KEYS, D>(s, unit.q, k);
        multiply_values<N, D>(o, p, v);
        wgmma_wait<1>();
        wgmma_pin(s);
        done(keys);
        exponentials(s, keep, state, shape.scale_log2e);
        wgmma_wait<0>();
        wgmma_pin(o);
        wgmma_pin(s);  // p is read no more
        done(values);
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] *= keep[i / 2 % 2];
        to_operand(p, s);
    }

    template <int N>
    __device__ __forceinline__ void last_values() {
        release(unit.empty());  // Q is read no more
        const uint32_t v = next(values);
        wgmma_pin(o);
        wgmma_fence();
        multiply_values<N, D>(o, p, v);
        wgmma_wait<0>();
        wgmma_pin(o);
        done(values);
    }

    // O of a unit, before the division by the sums
    __device__ __forceinline__ void walk(int row_block) {
        int left = row_block / 2;  // blocks before the diagonal's
        if (row_block % 2 != 0) {
            first_block<KEYS>();
        } else {
            first_block<KEYS / 2>();
            if (left == 0) return last_values<KEYS / 2>();
            next_block<KEYS / 2>();
            left--;
        }
        for (; left > 0; left--) next_block<KEYS>();
        last_values<KEYS>();
    }

    // O / sum and lse. O leaves through this warp's part of shared memory.
    __device__ __forceinline__ void store(const CUtensorMap *out_map, float *lse, const Job &job) {
        const int warp_row = job.row_block * UNIT_ROWS + warp_in_group() * 16;
        const uint32_t tile = unit.o + warp_in_group() * Z::PANELS * Z::O_PANEL;
        unsigned char *to = smem + (tile - smem_u32(smem));
        if (lane_id() == 0) bulk_wait_read<0>();
        __syncwarp();  // the store before has read what lay here
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = quad_row() + 8 * r, in_document = warp_row + row;
            const float sum = quad_sum(state.sum[r]), factor = 1 / sum;
            if (in_document < job.len && quad_col() == 0)
                lse[job.head * shape.total_tokens + job.start + in_document] =
                    state.top[r] * shape.scale + logf(sum);
#pragma unroll
            for (int i = 2 * r; i < D / 2; i += 4) {
                const int panel = i / 32, chunk = i / 4 % 8;
                *reinterpret_cast<uint32_t *>(to + panel * Z::O_PANEL + row * ROW_BYTES +
                                              ((chunk ^ (row & 7)) << 4) + quad_col() * 2) =
                    pack_bf16(o[i] * factor, o[i + 1] * factor);
            }
        }
        fence_proxy_async();
        __syncwarp();  // all lanes' values are there
        if (lane_id() == 0 && warp_row < job.len) {
#pragma unroll
            for (int panel = 0; panel < Z::PANELS; panel++)
                tma_store_3d(out_map, tile + panel * Z::O_PANEL,
                             job.head * D + panel * PANEL_COLUMNS,
                             (int)shape.total_tokens - job.len + warp_row, job.start + job.len);
            bulk_commit();
        }
    }
};

template <int D>
__device__ __forceinline__ void consume(const CUtensorMap *out_map, float *lse,
                                        const AttentionShape &s, int group) {
    Consumer<D> me(s, smem_u32(smem), group);
    for (uint32_t phase = 0;; phase ^= 1) {
        mbar_wait(me.unit.full, phase);
        const Job job = *me.unit.job;
        if (job.key_blocks == 0) break;
        if (job.row_block == IDLE) {
            release(me.unit.empty());
            me.skip(job.key_blocks);
            continue;
        }
        me.skip(job.key_blocks - 1 - job.row_block / 2);
        me.walk(job.row_block);
        me.store(out_map, lse, job);
    }
    if (lane_id() == 0) bulk_wait<0>();
}

template <int D>
__device__ __forceinline__ void init_barriers() {
    typedef ForwardSizes<D> Z;
    constexpr int WARPS = 4;  // that release what one consumer, or all, have read
    const uint32_t base = smem_u32(smem);
    for (int w = 0; w < Z::CONSUMERS; w++) {
        mbar_init(base + Z::Q_BARRIERS + w * 16, 1);
        mbar_init(base + Z::Q_BARRIERS + w * 16 + 8, WARPS);
    }
    for (int i = 0; i < 2 * Z::STAGES; i++) {  // K's, V's
        mbar_init(base + Z::K_BARRIERS + i * 16, 1);
        mbar_init(base + Z::K_BARRIERS + i * 16 + 8, WARPS * Z::CONSUMERS);
    }
    fence_mbar_init();
}
#endif

template <int D>
__global__ void __launch_bounds__(ForwardSizes<D>::THREADS, 1)
    attention_forward_sm90_kernel(const __grid_constant__ CUtensorMap out_map,
                                  const __grid_constant__ CUtensorMap qkv_map,
                                  float *__restrict__ lse, const int32_t *__restrict__ work,
                                  const __grid_constant__ AttentionShape s) {
#if SM90A
    typedef ForwardSizes<D> Z;
    const int group = threadIdx.x / WARPGROUP;
    if (threadIdx.x == 0) {
        if (smem_u32(smem) % 1024 != 0) __trap();
        init_barriers<D>();
    }
    __syncthreads();
    if (group == Z::CONSUMERS) {
        setmaxnreg_dec<Z::PRODUCER_REGISTERS>();
        if (threadIdx.x % WARPGROUP == 0) produce<D>(&qkv_map, work, s);
    } else {
        setmaxnreg_inc<Z::CONSUMER_REGISTERS>();
        consume<D>(&out_map, lse, s, group);
    }
#endif
}

// -------------------------------------------------------------------------------------------------
// Host

// Rows of `columns` values in boxes of 64 columns, a document at a time. Row r of the document of
// `len` tokens at row `start` has coordinates (column, total_tokens - len + r, start + len): both
// of the last two step by a row, and the first of them leaves its dimension where the document ends.
// Row 0 of that space lies total_tokens rows before the tensor; nothing there is ever addressed.
CUtensorMap ragged_map(const floatX *tensor, int64_t columns, int64_t total_tokens, int box_rows) {
    static decltype(&cuTensorMapEncodeTiled) encode = NULL;
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        void *entry = NULL;
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                    cudaEnableDefault, &found));
        if (!entry) cuda_unsupported("attention: expected a driver with tensor maps", 0);
        encode = (decltype(encode))entry;
    }
    const cuuint64_t row_bytes = (cuuint64_t)columns * sizeof(floatX);
    const cuuint64_t dims[3] = {(cuuint64_t)columns, (cuuint64_t)total_tokens,
                                (cuuint64_t)total_tokens + 1};
    const cuuint64_t strides[2] = {row_bytes, row_bytes};
    const cuuint32_t box[3] = {PANEL_COLUMNS, (cuuint32_t)box_rows, 1}, steps[3] = {1, 1, 1};
    void *origin = (void *)((uintptr_t)tensor - (uintptr_t)total_tokens * row_bytes);
    CUtensorMap map;
    const CUresult status =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, origin, dims, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
        cuda_unsupported("attention: cuTensorMapEncodeTiled refused a map", (int64_t)status);
    return map;
}

template <int D>
bool allow_shared_memory() {
    CUDA_CHECK(cudaFuncSetAttribute(attention_forward_sm90_kernel<D>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    ForwardSizes<D>::BYTES));
    return true;
}

template <int D>
void forward(floatX *out, float *lse, const floatX *qkv, const int32_t *work,
             const AttentionShape &s, int64_t forward_items) {
    static bool ready = allow_shared_memory<D>();
    (void)ready;
    const CUtensorMap qkv_map = ragged_map(qkv, s.qkv_row, s.total_tokens, UNIT_ROWS);
    const CUtensorMap out_map = ragged_map(out, s.out_row, s.total_tokens, 16);
    const int64_t items = forward_items * (s.num_heads / s.shared);
    const unsigned grid = (unsigned)(items < cuda_num_sms() ? items : cuda_num_sms());
    attention_forward_sm90_kernel<D>
        <<<grid, ForwardSizes<D>::THREADS, ForwardSizes<D>::BYTES, cuda_stream()>>>(
            out_map, qkv_map, lse, work, s);
    LAUNCH_CHECK("attention_forward_sm90_kernel");
}

}  // namespace

bool attention_has_sm90() {
    int32_t compiled = 0;
    if (cuda_arch() != 90) return false;
    CUDA_CHECK(cudaMemcpyFromSymbol(&compiled, compiled_for_sm90a, sizeof compiled));
    return compiled != 0;
}

void attention_forward_sm90(floatX *out, real *lse, const floatX *qkv, const int32_t *work,
                            const AttentionShape &shape, int head_dim, int64_t forward_items) {
    if (head_dim == 64)
        forward<64>(out, lse, qkv, work, shape, forward_items);
    else
        forward<128>(out, lse, qkv, work, shape, forward_items);
}
