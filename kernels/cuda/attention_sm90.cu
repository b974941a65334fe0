// Attention forward on Hopper: FlashAttention-3 (arXiv 2407.08608) for packed documents. Roles,
// barriers and what lies past a document's end: attention_sm90.cuh. For architectures other than
// sm_90a the kernels are empty.
//
// Units. A unit is 64 queries of one head: one consumer's part of an item. Units that read the same
// keys share a CTA: a document's units are numbered row block by row block, and within a row block
// head by head over the heads that share (all of the group, or a part of it). An item is as many
// consecutive units as a CTA has consumers. Any ratio of heads keeps all consumers busy except at a
// document's end. A unit walks its keys from the diagonal down to key 0, 128 at a time, counted
// from the document's first key; the diagonal's block has only 64 when the row block is even.
//
// Barrier pairs: one per consumer for Q and its Job, one per stage for K and one for V, because V
// is used one block later. Consumers share nothing else.
//
// Rows past the end are zeros: as keys the causal mask hides them from every query of the document,
// as queries their results are not stored.
//
// Softmax and products overlap: the scores of a block and the product with V of the block before it
// are issued together; the exponentials run while that product does. Every row sees a key of its
// diagonal block, the first one: its maximum is finite from there on.
#include "attention_sm90.cuh"

// Whether the machine code that this GPU runs was compiled for sm_90a.
__device__ int32_t compiled_for_sm90a = SM90A;

namespace {

constexpr int KEYS = 128;  // of a block

template <int D>
struct ForwardSizes : Roles<forward_consumers(D)> {
    static constexpr int CONSUMERS = forward_consumers(D);
    static constexpr int STAGES = D == 64 ? 3 : 2;
    typedef Tile<UNIT_ROWS, D> Q;
    typedef Tile<KEYS, D> KV;
    // Where in shared memory; *_PAIRS: barriers, full and empty
    static constexpr int K = CONSUMERS * Q::BYTES, V = K + STAGES * KV::BYTES;
    static constexpr int O = V + STAGES * KV::BYTES;
    static constexpr int Q_PAIRS = O + CONSUMERS * Q::BYTES;
    static constexpr int K_PAIRS = Q_PAIRS + 16 * CONSUMERS, V_PAIRS = K_PAIRS + 16 * STAGES;
    static constexpr int JOBS = V_PAIRS + 16 * STAGES;
    static constexpr int BYTES = JOBS + CONSUMERS * (int)sizeof(Job);
};

#if SM90A

template <int D>
using KeyRing = Ring<ForwardSizes<D>::K, ForwardSizes<D>::KV::BYTES, ForwardSizes<D>::K_PAIRS,
                     ForwardSizes<D>::STAGES>;
template <int D>
using ValueRing = Ring<ForwardSizes<D>::V, ForwardSizes<D>::KV::BYTES, ForwardSizes<D>::V_PAIRS,
                       ForwardSizes<D>::STAGES>;

__device__ unsigned items_taken;  // see take_number; 0 between kernels

// ---- Producer -----------------------------------------------------------------------------------

// The next block of the ring: keys from `first` on, at most KEYS of them, up to `end`
template <int D, class Ring>
__device__ __forceinline__ void load_block(Ring &ring, const CUtensorMap *map, const Job *job,
                                           int total_tokens, int head, int first, int end) {
    const int keys = min(KEYS, end - first);
    mbar_wait(ring.empty(), ring.phase ^ 1);
    mbar_arrive_expect_tx(ring.full(), keys * D * 2);
    load_rows<D, ForwardSizes<D>::KV::PANEL>(ring.tile(), map, ring.full(),
                                             rows_of_keys(job, first), total_tokens, head * D,
                                             first, keys);
    ring.advance();
}

template <int D>
__device__ __forceinline__ void produce(const CUtensorMap *qkv_map, const int32_t *work,
                                        const AttentionShape &s) {
    typedef ForwardSizes<D> Z;
    const uint32_t base = smem_u32(smem);
    const int tokens = (int)s.total_tokens;
    Job *const jobs = reinterpret_cast<Job *>(smem + Z::JOBS);
    KeyRing<D> keys(base);
    ValueRing<D> values(base);
    produce_units<Z::CONSUMERS>(
        &items_taken, work, s, base + Z::Q_PAIRS, jobs, Z::Q::BYTES,
        [&](int unit, uint32_t full, const Job &job) {
            load_rows<D, Z::Q::PANEL>(base + unit * Z::Q::BYTES, qkv_map, full, job.doc, tokens,
                                      job.head * D, job.row_block * UNIT_ROWS, UNIT_ROWS);
        },
        [&](int kv_head, int row_blocks) {
            const int k_head = s.num_heads + kv_head, end = row_blocks * UNIT_ROWS;
            const int key_blocks = ceil_div(end, KEYS);
            for (int block = key_blocks - 1; block >= -1; block--) {
                if (block >= 0)
                    load_block<D>(keys, qkv_map, jobs, tokens, k_head, block * KEYS, end);
                if (block + 1 < key_blocks)  // V follows K by one block, as it is used
                    load_block<D>(values, qkv_map, jobs, tokens, k_head + s.num_kv_heads,
                                  (block + 1) * KEYS, end);
            }
        });
}

// ---- Consumer -----------------------------------------------------------------------------------

// Running softmax of a thread's two rows: maximum of the raw scores, this thread's part of the sum
struct Softmax {
    float top[2], sum[2];
};

// s = exp(scale * s - maximum so far). keep: the factor for everything summed before; exactly 1
// where the maximum has not changed, 0 for the first block.
template <int N>
__device__ __forceinline__ void exponentials(float (&s)[N], float (&keep)[2], Softmax &state,
                                             float scale_log2e) {
    unrolled_for (int r = 0; r < 2; r++) {
        float top = state.top[r], sum[2] = {0, 0};
        unrolled_for (int i = 2 * r; i < N; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
        top = quad_max(top);
        keep[r] = ex2((state.top[r] - top) * scale_log2e);
        const float shift = top * scale_log2e;
        unrolled_for (int i = 2 * r; i < N; i += 4)
            unrolled_for (int j = 0; j < 2; j++) {
                s[i + j] = ex2(s[i + j] * scale_log2e - shift);
                sum[j] += s[i + j];
            }
        state.sum[r] = state.sum[r] * keep[r] + (sum[0] + sum[1]);
        state.top[r] = top;
    }
}

template <int D>
struct Consumer {
    typedef ForwardSizes<D> Z;
    const AttentionShape &shape;
    const uint32_t q, result, q_empty;
    const Turns<Z::CONSUMERS> turns;
    KeyRing<D> keys;
    ValueRing<D> values;
    float o[D / 2];
    uint32_t p[KEYS / 16][4];
    Softmax state;

    __device__ __forceinline__ Consumer(const AttentionShape &s, uint32_t base, int unit)
        : shape(s),
          q(base + unit * Z::Q::BYTES),
          result(base + Z::O + unit * Z::Q::BYTES + warp_in_group() * Tile<STORE_ROWS, D>::BYTES),
          q_empty(base + Z::Q_PAIRS + unit * 16 + 8),
          turns{unit},
          keys(base),
          values(base) {}

    __device__ __forceinline__ void skip(int blocks) {
        for (int n = 0; n < blocks; n++) {
            turns.skip();
            keys.skip();
            values.skip();
        }
    }

    // P of the diagonal's block of N keys; nothing to overlap with yet
    template <int N>
    __device__ __forceinline__ void first_block() {
        float s[N / 2], keep[2];
        clear(o);
        for (int r = 0; r < 2; r++) state.top[r] = -INFINITY, state.sum[r] = 0;
        const uint32_t k = keys.wait();
        turns.take();
        wgmma_fence();
        multiply_transposed<D, UNIT_ROWS, KEYS>(s, q, k);
        turns.pass();
        wgmma_wait<0>();
        wgmma_pin(s);
        keys.done();
        mask_diagonal(s);
        exponentials(s, keep, state, shape.scale_log2e);
        to_operand(p, s);
    }

    // O += P V of the block before, which has N keys, while P of the next is computed
    template <int N>
    __device__ __forceinline__ void next_block() {
        float s[KEYS / 2], keep[2];
        const uint32_t k = keys.wait(), v = values.wait();
        wgmma_pin(o);
        turns.take();
        wgmma_fence();
        multiply_transposed<D, UNIT_ROWS, KEYS>(s, q, k);
        multiply_add<N, KEYS>(o, p, v);
        turns.pass();
        wgmma_wait<1>();
        wgmma_pin(s);
        keys.done();
        exponentials(s, keep, state, shape.scale_log2e);
        before_wait(state.sum[0] + state.sum[1] < 0);
        wgmma_wait<0>();
        wgmma_pin(o);
        wgmma_pin(s);  // p is read no more
        values.done();
        unrolled_for (int i = 0; i < D / 2; i++) o[i] *= keep[i / 2 % 2];
        to_operand(p, s);
    }

    // O += P V of the last block, of which `rows` keys count. One body for both sizes: with two,
    // ptxas spills half of P for D == 64 and serialises wgmma.
    __device__ __forceinline__ void last_values(int rows) {
        release(q_empty);  // Q is read no more
        const uint32_t v = values.wait();
        wgmma_pin(o);
        wgmma_fence();
        multiply_add<KEYS, KEYS>(o, p, v, rows);
        wgmma_wait<0>();
        wgmma_pin(o);
        values.done();
    }

    // O of a unit, before the division by the sums
    __device__ __forceinline__ void walk(int row_block) {
        int left = row_block / 2;  // blocks before the diagonal's
        if (row_block % 2 != 0) {
            first_block<KEYS>();
        } else {
            first_block<KEYS / 2>();
            if (left > 0) next_block<KEYS / 2>(), left--;
        }
        for (; left > 0; left--) next_block<KEYS>();
        last_values(row_block == 0 ? KEYS / 2 : KEYS);
    }

    // O / sum and lse
    __device__ __forceinline__ void store(const CUtensorMap *out_map, float *lse, const Job &job) {
        const int warp_row = job.row_block * UNIT_ROWS + warp_in_group() * STORE_ROWS;
        float factor[2];
        unrolled_for (int r = 0; r < 2; r++) {
            const int row = warp_row + quad_row() + 8 * r;
            const float sum = quad_sum(state.sum[r]);
            factor[r] = 1 / sum;
            if (row < job.doc.len && quad_col() == 0)
                lse[job.head * shape.total_tokens + job.doc.start + row] =
                    state.top[r] * shape.scale + logf(sum);
        }
        store_rows<D>(out_map, result, o, factor, job.head * D, warp_row, job.doc,
                      shape.total_tokens);
    }
};

template <int D>
__device__ __forceinline__ void consume(const CUtensorMap *out_map, float *lse,
                                        const AttentionShape &s, int unit) {
    typedef ForwardSizes<D> Z;
    const uint32_t base = smem_u32(smem);
    Consumer<D> me(s, base, unit);
    me.turns.begin();
    for (uint32_t phase = 0;; phase ^= 1) {
        mbar_wait(base + Z::Q_PAIRS + unit * 16, phase);
        const Job job = reinterpret_cast<const Job *>(smem + Z::JOBS)[unit];
        if (job.row_blocks == 0) break;
        const int key_blocks = ceil_div(job.row_blocks * UNIT_ROWS, KEYS);
        if (job.row_block == IDLE) {
            release(me.q_empty);
            me.skip(key_blocks);
            continue;
        }
        me.skip(key_blocks - 1 - job.row_block / 2);
        me.walk(job.row_block);
        me.store(out_map, lse, job);
    }
    me.turns.end();
    if (lane_id() == 0) bulk_wait<0>();
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
    run_roles<Z>(
        [](uint32_t base) {
            for (int w = 0; w < Z::CONSUMERS; w++) init_pair(base + Z::Q_PAIRS + w * 16, WARPS);
            for (int i = 0; i < Z::STAGES; i++) {
                init_pair(base + Z::K_PAIRS + i * 16, WARPS * Z::CONSUMERS);
                init_pair(base + Z::V_PAIRS + i * 16, WARPS * Z::CONSUMERS);
            }
        },
        [&] {
            if (threadIdx.x % WARPGROUP == 0) produce<D>(&qkv_map, work, s);
        },
        [&](int unit) { consume<D>(&out_map, lse, s, unit); }, out_map, qkv_map);
#endif
}

// ---- Host ---------------------------------------------------------------------------------------

template <int D>
void forward(floatX *out, float *lse, const AttentionBatch &b) {
    const AttentionShape &s = b.shape;
    [[maybe_unused]] static const bool ready =
        allow_shared_memory(attention_forward_sm90_kernel<D>, ForwardSizes<D>::BYTES);
    const CUtensorMap qkv_map = ragged_map(b.qkv, s.qkv_row, s.total_tokens, BOX_ROWS);
    const CUtensorMap out_map = ragged_map(out, s.out_row, s.total_tokens, STORE_ROWS);
    const unsigned grid = persistent_grid(b.forward_items * (s.num_heads / s.shared));
    attention_forward_sm90_kernel<D>
        <<<grid, ForwardSizes<D>::THREADS, ForwardSizes<D>::BYTES, cuda_stream()>>>(
            out_map, qkv_map, lse, b.work, s);
    LAUNCH_CHECK("attention_forward_sm90_kernel");
}

}  // namespace

CUtensorMap ragged_map(const floatX *tensor, int64_t columns, int64_t total_tokens, int box_rows) {
    static decltype(&cuTensorMapEncodeTiled) encode = NULL;
    if (!encode) {
        cudaDriverEntryPointQueryResult found;
        void *entry = NULL;
#if CUDART_VERSION >= 12050
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                    cudaEnableDefault, &found));
#else  // gone in 13.0
        CUDA_CHECK(
            cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found));
#endif
        if (!entry) cuda_unsupported("attention", "a driver with tensor maps", 0);
        encode = (decltype(encode))entry;
    }
    const cuuint64_t row_bytes = (cuuint64_t)columns * sizeof(floatX);
    const cuuint64_t dims[3] = {(cuuint64_t)columns, (cuuint64_t)total_tokens,
                                (cuuint64_t)total_tokens + 1};
    const cuuint64_t strides[2] = {row_bytes, row_bytes};
    const cuuint32_t box[3] = {PANEL_COLUMNS, (cuuint32_t)box_rows, 1}, steps[3] = {1, 1, 1};
    if ((uintptr_t)tensor <= (uintptr_t)total_tokens * row_bytes)
        device_fail("train with --attention sm80",
                    "attention: expected a tensor at an address above its size, found %p",
                    (const void *)tensor);
    void *origin = (void *)((uintptr_t)tensor - (uintptr_t)total_tokens * row_bytes);
    CUtensorMap map;
    const CUresult status =
        encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, origin, dims, strides, box, steps,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS)
        device_fail("train with --attention sm80",
                    "attention: cuTensorMapEncodeTiled refused a map: error %d", (int)status);
    return map;
}

bool attention_has_sm90() {
    int32_t compiled = 0;
    if (cuda_arch() != 90) return false;
    CUDA_CHECK(cudaMemcpyFromSymbol(&compiled, compiled_for_sm90a, sizeof compiled));
    return compiled != 0;
}

void attention_forward_sm90(floatX *out, real *lse, const AttentionBatch &batch) {
    (batch.head_dim == 64 ? forward<64> : forward<128>)(out, lse, batch);
}
