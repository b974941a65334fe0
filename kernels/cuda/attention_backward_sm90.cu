// Attention backward on Hopper, without atomics: every result is computed by one warpgroup in one
// order. Roles, barriers and what lies past a document's end: attention_sm90.cuh.
//
// Two kernels compute 7 products instead of 5; in return dQ needs no fp32 buffer to clear, add into
// and convert, and every run gives the same bits.
//   backward_q   items and units of the forward (see attention_sm90.cu): a consumer has 64 queries
//                of one head and loops over K and V, from the diagonal down to key 0; dQ stays
//                in registers. Also writes delta, which backward_kv reads.
//   backward_kv  an item is 128 keys of one kv head, 64 for each of two consumers; it loops over
//                Q and dO of all heads of the group, from the diagonal on; dK and dV stay in
//                registers. S and dP are computed transposed: P and dS then have the layout of left
//                operands.
//                Items that are pieces of a tile add their sums through memory (attention.cuh).
// Both loops process 64 rows at a time, so that the diagonal's block is square.
// The tensor cores always have work while a consumer computes exponentials: dP, which
// is issued with S, and in backward_q dQ of the block before; dV, and for hd64 S of the next block,
// while it computes dS.
//
// Barrier pairs. backward_q: one per consumer for Q, dO and its Job; one per stage for K and V
// together. backward_kv: one for K, V and the Job of both consumers; one per stage for Q, dO and
// their statistics, lse and delta, for which a second warp of the producer's group arrives.
//
// Queries past the end of the document, in backward_kv: their lse is +inf, so that P and dS are 0.
// Keys past the end, in backward_q: the causal mask hides them, as in the forward.
#include "attention_sm90.cuh"

namespace {

constexpr int ROWS = UNIT_ROWS;  // of all tiles

#if SM90A

__device__ unsigned q_items_taken, kv_items_taken;  // see take_number
__device__ unsigned pieces_arrived[MAX_PIECES * (BACKWARD_KEYS / STORE_ROWS)];

// x = the inverse of rope_forward on x, an accumulator. Columns c and c + D / 2 are a pair, both in
// the same thread. row: the warp's first in the buffer, `rows` are in the document.
template <int D>
__device__ __forceinline__ void unrotate(float (&x)[D / 2], const Rope &rope, int row, int rows) {
    unrolled_for (int r = 0; r < 2; r++) {
        const int own = quad_row() + 8 * r;
        if (own >= rows) continue;
        const float *angles = rope.table + (int64_t)rope.position_ids[row + own] * D;
        unrolled_for (int i = 2 * r; i < D / 4; i += 4) {
            float low[2] = {x[i], x[i + 1]}, high[2] = {x[i + D / 4], x[i + D / 4 + 1]};
            unrotate_pairs(low, high, angles + 2 * (i / 4 * 8 + quad_col()));
            x[i] = low[0], x[i + 1] = low[1], x[i + D / 4] = high[0], x[i + D / 4 + 1] = high[1];
        }
    }
}

#endif

// ---- dQ -----------------------------------------------------------------------------------------

template <int D>
struct QuerySizes : Roles<forward_consumers(D)> {
    static constexpr int CONSUMERS = forward_consumers(D);
    static constexpr int STAGES = D == 64 ? 4 : 3;
    typedef Tile<ROWS, D> T;
    // Where in shared memory: Q and dO of each consumer, its results, stages of K and V
    static constexpr int OUT = CONSUMERS * 2 * T::BYTES, KV = OUT + CONSUMERS * T::BYTES;
    static constexpr int UNIT_PAIRS = KV + STAGES * 2 * T::BYTES;
    static constexpr int KV_PAIRS = UNIT_PAIRS + 16 * CONSUMERS;
    static constexpr int JOBS = KV_PAIRS + 16 * STAGES;
    static constexpr int BYTES = JOBS + CONSUMERS * (int)sizeof(Job);
};

#if SM90A

template <int D>
using KeyRing = Ring<QuerySizes<D>::KV, 2 * QuerySizes<D>::T::BYTES, QuerySizes<D>::KV_PAIRS,
                     QuerySizes<D>::STAGES>;

// delta = rowsum(dout * out) and lse of a thread's two rows, a quad to a row; zeros past the end
template <int D>
struct RowStatistics {
    float delta[2], lse_log2e[2];

    __device__ __forceinline__ void load(const Gradients &g, const AttentionShape &s,
                                         const Job &job) {
        unrolled_for (int r = 0; r < 2; r++) {
            const int row = job.row_block * ROWS + warp_in_group() * 16 + quad_row() + 8 * r;
            const int64_t in_buffer = job.doc.start + row;
            const int64_t at = in_buffer * s.out_row + job.head * D;
            const int64_t statistic = job.head * s.total_tokens + in_buffer;
            row_statistics<D>(&delta[r], &lse_log2e[r], g.delta + statistic, g.dout + at,
                              g.out + at, g.lse + statistic, row < job.doc.len);
        }
    }
};

template <int D>
struct QueryConsumer {
    typedef QuerySizes<D> Z;
    typedef typename Z::T T;
    const AttentionShape &shape;
    const uint32_t q, dout, result;
    const Turns<Z::CONSUMERS> turns;
    KeyRing<D> keys;
    float dq[D / 2];
    uint32_t ds[ROWS / 16][4];
    RowStatistics<D> rows;

    __device__ __forceinline__ QueryConsumer(const AttentionShape &s, uint32_t base, int unit)
        : shape(s),
          q(base + unit * 2 * T::BYTES),
          dout(q + T::BYTES),
          result(base + Z::OUT + unit * T::BYTES + warp_in_group() * Tile<STORE_ROWS, D>::BYTES),
          turns{unit},
          keys(base) {}

    __device__ __forceinline__ void probabilities(float (&s)[ROWS / 2]) const {
        unrolled_for (int i = 0; i < ROWS / 2; i++)
            s[i] = ex2(s[i] * shape.scale_log2e - rows.lse_log2e[i / 2 % 2]);
    }
    __device__ __forceinline__ void dscores(float (&dp)[ROWS / 2],
                                            const float (&p)[ROWS / 2]) const {
        unrolled_for (int i = 0; i < ROWS / 2; i++) dp[i] = p[i] * (dp[i] - rows.delta[i / 2 % 2]);
    }

    // dS of the diagonal's block
    __device__ __forceinline__ void first_block(const Gradients &g, const Job &job) {
        float s[ROWS / 2], dp[ROWS / 2];
        const uint32_t k = keys.wait();
        turns.take();
        wgmma_fence();
        multiply_transposed<D, ROWS, ROWS>(s, q, k);
        multiply_transposed<D, ROWS, ROWS>(dp, dout, k + T::BYTES);
        turns.pass();
        rows.load(g, shape, job);
        wgmma_wait<0>();
        wgmma_pin(s);
        wgmma_pin(dp);
        mask_diagonal(s);
        probabilities(s);
        dscores(dp, s);
        to_operand(ds, dp);
    }

    // dQ += dS K of the block before, while dS of the next is computed
    __device__ __forceinline__ void next_block() {
        float s[ROWS / 2], dp[ROWS / 2];
        const uint32_t before = keys.tile(), k = keys.following().wait();
        wgmma_pin(dq);
        turns.take();
        wgmma_fence();
        multiply_transposed<D, ROWS, ROWS>(s, q, k);
        multiply_transposed<D, ROWS, ROWS>(dp, dout, k + T::BYTES);
        multiply_add<ROWS, ROWS>(dq, ds, before);
        turns.pass();
        wgmma_wait<2>();
        wgmma_pin(s);
        probabilities(s);
        before_wait(all_zero_and_one_negative(s));
        wgmma_wait<1>();
        wgmma_pin(dp);
        dscores(dp, s);
        wgmma_wait<0>();
        wgmma_pin(dq);
        wgmma_pin(dp);  // wgmma no longer reads ds
        keys.done();
        to_operand(ds, dp);
    }

    __device__ __forceinline__ void walk(const Gradients &g, const Job &job) {
        clear(dq);
        first_block(g, job);
        for (int left = job.row_block; left > 0; left--) next_block();
        wgmma_pin(dq);
        wgmma_fence();
        multiply_add<ROWS, ROWS>(dq, ds, keys.tile());
        wgmma_wait<0>();
        wgmma_pin(dq);
        keys.done();
    }

    __device__ __forceinline__ void store(const CUtensorMap *dqkv_map, const Rope &rope,
                                          const Job &job) {
        const int row = job.row_block * ROWS + warp_in_group() * STORE_ROWS;
        const float factor[2] = {shape.scale, shape.scale};
        unrotate<D>(dq, rope, job.doc.start + row, job.doc.len - row);
        store_rows<D>(dqkv_map, result, dq, factor, job.head * D, row, job.doc, shape.total_tokens);
    }
};

template <int D>
__device__ __forceinline__ void consume_keys(const CUtensorMap *dqkv_map, const Gradients &g,
                                             const Rope &rope, const AttentionShape &s, int unit) {
    typedef QuerySizes<D> Z;
    const uint32_t base = smem_u32(smem), full = base + Z::UNIT_PAIRS + unit * 16;
    QueryConsumer<D> me(s, base, unit);
    me.turns.begin();
    for (uint32_t phase = 0;; phase ^= 1) {
        mbar_wait(full, phase);
        const Job job = reinterpret_cast<const Job *>(smem + Z::JOBS)[unit];
        if (job.row_blocks == 0) break;
        for (int n = job.row_blocks - 1; n > job.row_block; n--) {
            me.turns.skip();
            me.keys.skip();
        }
        if (job.row_block != IDLE) me.walk(g, job);
        release(full + 8);
        if (job.row_block != IDLE) me.store(dqkv_map, rope, job);
    }
    me.turns.end();
    if (lane_id() == 0) bulk_wait<0>();
}

template <int D>
__device__ __forceinline__ void produce_keys(const CUtensorMap *qkv_map,
                                             const CUtensorMap *dout_map, const int32_t *work,
                                             const AttentionShape &s) {
    typedef QuerySizes<D> Z;
    typedef typename Z::T T;
    const uint32_t base = smem_u32(smem);
    const int tokens = (int)s.total_tokens;
    Job *const jobs = reinterpret_cast<Job *>(smem + Z::JOBS);
    KeyRing<D> keys(base);
    produce_units<Z::CONSUMERS>(
        &q_items_taken, work, s, base + Z::UNIT_PAIRS, jobs, 2 * T::BYTES,
        [&](int unit, uint32_t full, const Job &job) {
            const uint32_t q = base + unit * 2 * T::BYTES;
            load_rows<D, T::PANEL>(q, qkv_map, full, job.doc, tokens, job.head * D,
                                   job.row_block * ROWS, ROWS);
            load_rows<D, T::PANEL>(q + T::BYTES, dout_map, full, job.doc, tokens, job.head * D,
                                   job.row_block * ROWS, ROWS);
        },
        [&](int kv_head, int row_blocks) {
            const int k_column = (s.num_heads + kv_head) * D;
            for (int block = row_blocks - 1; block >= 0; block--, keys.advance()) {
                mbar_wait(keys.empty(), keys.phase ^ 1);
                mbar_arrive_expect_tx(keys.full(), 2 * T::BYTES);
                const WorkItem rows = rows_of_keys(jobs, block * ROWS);
                load_rows<D, T::PANEL>(keys.tile(), qkv_map, keys.full(), rows, tokens, k_column,
                                       block * ROWS, ROWS);
                load_rows<D, T::PANEL>(keys.tile() + T::BYTES, qkv_map, keys.full(), rows, tokens,
                                       k_column + s.num_kv_heads * D, block * ROWS, ROWS);
            }
        });
}
#endif

template <int D>
__global__ void __launch_bounds__(QuerySizes<D>::THREADS, 1)
    attention_backward_q_sm90_kernel(const __grid_constant__ CUtensorMap dqkv_map,
                                     const __grid_constant__ CUtensorMap qkv_map,
                                     const __grid_constant__ CUtensorMap dout_map,
                                     const __grid_constant__ Gradients g,
                                     const int32_t *__restrict__ work,
                                     const __grid_constant__ AttentionShape s,
                                     const __grid_constant__ Rope rope) {
#if SM90A
    typedef QuerySizes<D> Z;
    run_roles<Z>(
        [](uint32_t base) {
            for (int w = 0; w < Z::CONSUMERS; w++) init_pair(base + Z::UNIT_PAIRS + w * 16, WARPS);
            for (int i = 0; i < Z::STAGES; i++)
                init_pair(base + Z::KV_PAIRS + i * 16, WARPS * Z::CONSUMERS);
        },
        [&] {
            if (threadIdx.x % WARPGROUP == 0) produce_keys<D>(&qkv_map, &dout_map, work, s);
        },
        [&](int unit) { consume_keys<D>(&dqkv_map, g, rope, s, unit); }, dqkv_map, qkv_map,
        dout_map);
#endif
}

// ---- dK and dV ----------------------------------------------------------------------------------

// The item of both consumers
struct KeyJob {
    KeyItem item;     // its tile is of BACKWARD_KEYS keys
    int32_t kv_head;  // STOP: no more items
};
constexpr int STOP = -1;

template <int D>
struct KeySizes : Roles<BACKWARD_KEYS / ROWS> {
    static constexpr int CONSUMERS = BACKWARD_KEYS / ROWS;
    static constexpr int STAGES = D == 64 ? 4 : 3;
    typedef Tile<ROWS, D> T;
    static constexpr int STATISTICS_BYTES = 2 * ROWS * 4;  // lse * log2(e), then delta
    // Where in shared memory: K and V of each consumer, its results, stages of Q and dO
    static constexpr int OUT = CONSUMERS * 2 * T::BYTES, Q = OUT + CONSUMERS * T::BYTES;
    static constexpr int STATISTICS = Q + STAGES * 2 * T::BYTES;
    static constexpr int KV_PAIR = STATISTICS + STAGES * STATISTICS_BYTES;
    static constexpr int Q_PAIRS = KV_PAIR + 16, JOB = Q_PAIRS + 16 * STAGES;
    static constexpr int BYTES = JOB + (int)sizeof(KeyJob);
};

#if SM90A

template <int D>
using QueryRing =
    Ring<KeySizes<D>::Q, 2 * KeySizes<D>::T::BYTES, KeySizes<D>::Q_PAIRS, KeySizes<D>::STAGES>;

// The row blocks of an item's queries, for each head of the group
struct QueryBlocks {
    int first, end;
    __device__ __forceinline__ explicit QueryBlocks(const KeyItem &item)
        : first(item.from / ROWS), end(ceil_div(item.len, ROWS)) {}
    __device__ __forceinline__ int count() const { return end - first; }
};

template <int D>
struct KeyConsumer {
    typedef KeySizes<D> Z;
    typedef typename Z::T T;
    const AttentionShape &shape;
    const uint32_t k, v, result;
    QueryRing<D> queries;
    float dk[D / 2], dv[D / 2];

    __device__ __forceinline__ KeyConsumer(const AttentionShape &s, uint32_t base, int unit)
        : shape(s),
          k(base + unit * 2 * T::BYTES),
          v(k + T::BYTES),
          result(base + Z::OUT + unit * T::BYTES + warp_in_group() * Tile<STORE_ROWS, D>::BYTES),
          queries(base) {}

    // P, rows are keys, columns queries
    __device__ __forceinline__ void probabilities(float (&s)[ROWS / 2], const float *lse_log2e,
                                                  int ahead) {
        if (ahead >= 0) mask_earlier_queries(s, ahead);
        unrolled_for (int i = 0; i < ROWS / 2; i += 4) {
            const float2 lse = *reinterpret_cast<const float2 *>(lse_log2e + i * 2 + quad_col());
            unrolled_for (int j = i; j < i + 4; j++)
                s[j] = ex2(s[j] * shape.scale_log2e - (j % 2 == 0 ? lse.x : lse.y));
        }
    }
    __device__ __forceinline__ void dscores(float (&dp)[ROWS / 2], const float (&p)[ROWS / 2],
                                            const float *deltas) {
        unrolled_for (int i = 0; i < ROWS / 2; i += 4) {
            const float2 delta = *reinterpret_cast<const float2 *>(deltas + i * 2 + quad_col());
            unrolled_for (int j = i; j < i + 4; j++)
                dp[j] = p[j] * (dp[j] - (j % 2 == 0 ? delta.x : delta.y));
        }
    }

    // ahead: first key minus first query
    __device__ __forceinline__ void block(int ahead) {
        float s[ROWS / 2], dp[ROWS / 2];
        uint32_t p[ROWS / 16][4], ds[ROWS / 16][4];
        const uint32_t q = queries.wait(), dout = q + T::BYTES;
        const float *statistics = reinterpret_cast<const float *>(
            smem + Z::STATISTICS + queries.stage * Z::STATISTICS_BYTES);
        wgmma_fence();
        multiply_transposed<D, ROWS, ROWS>(s, opaque(k), q);
        multiply_transposed<D, ROWS, ROWS>(dp, opaque(v), dout);
        wgmma_wait<1>();
        wgmma_pin(s);
        probabilities(s, statistics, ahead);
        to_operand(p, s);
        wgmma_pin(dv);
        wgmma_fence();
        multiply_add<ROWS, ROWS>(dv, p, dout);
        wgmma_wait<1>();
        wgmma_pin(dp);
        dscores(dp, s, statistics + ROWS);
        to_operand(ds, dp);
        wgmma_pin(dk);
        wgmma_fence();
        multiply_add<ROWS, ROWS>(dk, ds, q);
        wgmma_wait<0>();
        wgmma_pin(dv);
        wgmma_pin(dk);
        queries.done();
    }

    // ahead: of the first query block, of which the unit's first key is that many blocks ahead
    __device__ __forceinline__ void walk(int ahead, int query_blocks) {
        clear(dk);
        clear(dv);
        for (int head = 0; head < shape.group; head++)
            for (int n = 0; n < query_blocks; n++) block((ahead - n) * ROWS);
    }

    // The same for hd64, which has the registers to compute S of the NEXT block with this one's dV
    // and dS. s: S of this block, then of the next.
    template <bool NEXT>
    __device__ __forceinline__ void block_ahead(float (&s)[ROWS / 2], int ahead) {
        float dp[ROWS / 2], next[ROWS / 2];
        uint32_t p[ROWS / 16][4], ds[ROWS / 16][4];
        const uint32_t q = queries.tile(), dout = q + T::BYTES;
        const float *statistics = reinterpret_cast<const float *>(
            smem + Z::STATISTICS + queries.stage * Z::STATISTICS_BYTES);
        wgmma_fence();
        multiply_transposed<D, ROWS, ROWS>(dp, opaque(v), dout);
        probabilities(s, statistics, ahead);
        to_operand(p, s);
        const uint32_t next_q = NEXT ? queries.following().wait() : 0;
        wgmma_pin(dv);
        wgmma_fence();
        multiply_add<ROWS, ROWS>(dv, p, dout);
        if (NEXT) multiply_transposed<D, ROWS, ROWS>(next, opaque(k), next_q);
        wgmma_wait<NEXT ? 2 : 1>();
        wgmma_pin(dp);
        dscores(dp, s, statistics + ROWS);
        to_operand(ds, dp);
        wgmma_pin(dk);
        wgmma_fence();
        multiply_add<ROWS, ROWS>(dk, ds, q);
        wgmma_wait<0>();
        wgmma_pin(dv);
        wgmma_pin(dk);
        queries.done();
        if (!NEXT) return;
        wgmma_pin(next);
        unrolled_for (int i = 0; i < ROWS / 2; i++) s[i] = next[i];
    }
    __device__ __forceinline__ void walk_ahead(int ahead, int query_blocks) {
        float s[ROWS / 2];
        clear(dk);
        clear(dv);
        const uint32_t q = queries.wait();
        wgmma_fence();
        multiply_transposed<D, ROWS, ROWS>(s, opaque(k), q);
        wgmma_wait<0>();
        wgmma_pin(s);
        int n = 0;
        for (int left = query_blocks * shape.group; left > 1; left--) {
            block_ahead<true>(s, (ahead - n) * ROWS);
            if (++n == query_blocks) n = 0;
        }
        block_ahead<false>(s, (ahead - n) * ROWS);
    }

    // False for a piece that is not the last
    __device__ __forceinline__ bool add(float *sums, const KeyJob &job, int unit) {
        return job.item.pieces == 1 ||
               add_pieces(dk, dv, sums, pieces_arrived, job.item, job.kv_head, shape.num_kv_heads,
                          unit * WARPS + warp_in_group(), Z::CONSUMERS * WARPS);
    }

    __device__ __forceinline__ void store(const CUtensorMap *dqkv_map, const Rope &rope,
                                          const KeyJob &job, int key_block) {
        const int row = key_block * ROWS + warp_in_group() * STORE_ROWS;
        const int column = (shape.num_heads + job.kv_head) * D;
        const float scale[2] = {shape.scale, shape.scale}, one[2] = {1, 1};
        store_rows<D>(dqkv_map, result, dv, one, column + shape.num_kv_heads * D, row, job.item,
                      shape.total_tokens);
        unrotate<D>(dk, rope, job.item.start + row, job.item.len - row);
        store_rows<D>(dqkv_map, result, dk, scale, column, row, job.item, shape.total_tokens);
    }
};

template <int D>
__device__ __forceinline__ void consume_queries(const CUtensorMap *dqkv_map, const Gradients &g,
                                                const Rope &rope, const AttentionShape &s,
                                                int unit) {
    typedef KeySizes<D> Z;
    const uint32_t base = smem_u32(smem), full = base + Z::KV_PAIR;
    KeyConsumer<D> me(s, base, unit);
    for (uint32_t phase = 0;; phase ^= 1) {
        mbar_wait(full, phase);
        const KeyJob *job = reinterpret_cast<const KeyJob *>(smem + Z::JOB);
        if (job->kv_head == STOP) break;
        const QueryBlocks blocks(job->item);
        const int query_blocks = blocks.count();
        const int ahead = job->item.tile * Z::CONSUMERS + unit - blocks.first;
        const bool idle = unit >= query_blocks;  // no keys
        if (idle)
            for (int n = query_blocks * s.group; n > 0; n--) me.queries.skip();
        else if (D == 64)
            me.walk_ahead(ahead, query_blocks);
        else
            me.walk(ahead, query_blocks);
        const KeyJob done = *job;  // reread, so that it occupied no registers meanwhile
        release(full + 8);
        if (!idle && me.add(g.sums, done, unit))
            me.store(dqkv_map, rope, done, done.item.tile * Z::CONSUMERS + unit);
    }
    if (lane_id() == 0) bulk_wait<0>();
}

// lse * log2(e) and delta of a lane's two queries of a block; +inf and 0 past the document's end
struct ColumnStatistics {
    float lse_log2e[2], delta[2];

    __device__ __forceinline__ void load(const Gradients &g, int64_t total_tokens,
                                         const Document &doc, int head, int query_block) {
        unrolled_for (int n = 0; n < 2; n++) {
            const int row = query_block * ROWS + lane_id() + n * WARP;
            const int64_t at = head * total_tokens + doc.start + row;
            const bool valid = row < doc.len;
            lse_log2e[n] = valid ? g.lse[at] * LOG2E : INFINITY;
            delta[n] = valid ? g.delta[at] : 0;
        }
    }
    __device__ __forceinline__ void put(float *statistics) const {
        unrolled_for (int n = 0; n < 2; n++) {
            statistics[lane_id() + n * WARP] = lse_log2e[n];
            statistics[ROWS + lane_id() + n * WARP] = delta[n];
        }
    }
};

// One warp: loads the statistics of a block before it waits for the previous stage to be free
template <int D>
__device__ __forceinline__ void produce_statistics(const Gradients &g, const AttentionShape &s) {
    typedef KeySizes<D> Z;
    const uint32_t base = smem_u32(smem), full = base + Z::KV_PAIR;
    QueryRing<D> queries(base);
    for (uint32_t phase = 0;; phase ^= 1) {
        mbar_wait(full, phase);
        const KeyJob job = *reinterpret_cast<const KeyJob *>(smem + Z::JOB);
        release(full + 8);
        if (job.kv_head == STOP) return;
        const QueryBlocks blocks(job.item);
        ColumnStatistics statistics;
        int head = job.kv_head * s.group, block = blocks.first;
        statistics.load(g, s.total_tokens, job.item, head, block);
        for (int left = blocks.count() * s.group; left > 0; left--) {
            mbar_wait(queries.empty(), queries.phase ^ 1);
            statistics.put(reinterpret_cast<float *>(smem + Z::STATISTICS +
                                                     queries.stage * Z::STATISTICS_BYTES));
            release(queries.full());
            queries.advance();
            if (++block == blocks.end) block = blocks.first, head++;
            if (left > 1) statistics.load(g, s.total_tokens, job.item, head, block);
        }
    }
}

// One thread: loads items, K and V, then Q and dO
template <int D>
__device__ __forceinline__ void produce_queries(const CUtensorMap *qkv_map,
                                                const CUtensorMap *dout_map, const int32_t *work,
                                                const AttentionShape &s) {
    typedef KeySizes<D> Z;
    typedef typename Z::T T;
    const uint32_t base = smem_u32(smem), full = base + Z::KV_PAIR;
    const int tokens = (int)s.total_tokens;
    const unsigned total = work_count(work, BACKWARD_ITEMS) * (unsigned)s.num_kv_heads;
    QueryRing<D> queries(base);
    unsigned number = take_number(&kv_items_taken, total);
    for (uint32_t phase = 0;; phase ^= 1) {
        KeyJob job = {{}, STOP};
        if (number < total) {
            job = {key_items(work)[number / s.num_kv_heads], (int)(number % s.num_kv_heads)};
            number = take_number(&kv_items_taken, total);
        }
        const KeyItem &item = job.item;
        const QueryBlocks blocks(item);
        const int units = min(Z::CONSUMERS, blocks.count());  // that have keys
        mbar_wait(full + 8, phase ^ 1);
        *reinterpret_cast<KeyJob *>(smem + Z::JOB) = job;
        mbar_arrive_expect_tx(full, units * 2 * T::BYTES);
        if (job.kv_head == STOP) return;
        const int k_column = (s.num_heads + job.kv_head) * D;
#pragma unroll 1
        for (int n = 0; n < units; n++) {
            const uint32_t k = base + n * 2 * T::BYTES;
            const int row = item.tile * BACKWARD_KEYS + n * ROWS;
            load_rows<D, T::PANEL>(k, qkv_map, full, item, tokens, k_column, row, ROWS);
            load_rows<D, T::PANEL>(k + T::BYTES, qkv_map, full, item, tokens,
                                   k_column + s.num_kv_heads * D, row, ROWS);
        }
        int block = blocks.first, column = job.kv_head * s.group * D;
        for (int left = blocks.count() * s.group; left > 0; left--, queries.advance()) {
            mbar_wait(queries.empty(), queries.phase ^ 1);
            mbar_arrive_expect_tx(queries.full(), 2 * T::BYTES);
            load_rows<D, T::PANEL>(queries.tile(), qkv_map, queries.full(), item, tokens, column,
                                   block * ROWS, ROWS);
            load_rows<D, T::PANEL>(queries.tile() + T::BYTES, dout_map, queries.full(), item,
                                   tokens, column, block * ROWS, ROWS);
            if (++block == blocks.end) block = blocks.first, column += D;
        }
    }
}
#endif

template <int D>
__global__ void __launch_bounds__(KeySizes<D>::THREADS, 1)
    attention_backward_kv_sm90_kernel(const __grid_constant__ CUtensorMap dqkv_map,
                                      const __grid_constant__ CUtensorMap qkv_map,
                                      const __grid_constant__ CUtensorMap dout_map,
                                      const __grid_constant__ Gradients g,
                                      const int32_t *__restrict__ work,
                                      const __grid_constant__ AttentionShape s,
                                      const __grid_constant__ Rope rope) {
#if SM90A
    typedef KeySizes<D> Z;
    run_roles<Z>(
        [](uint32_t base) {
            init_pair(base + Z::KV_PAIR, WARPS * Z::CONSUMERS + 1);  // and the statistics' warp
            for (int i = 0; i < Z::STAGES; i++)
                init_pair(base + Z::Q_PAIRS + i * 16, WARPS * Z::CONSUMERS, 2);
        },
        [&] {
            if (warp_in_group() == 1) produce_statistics<D>(g, s);
            if (threadIdx.x % WARPGROUP == 0) produce_queries<D>(&qkv_map, &dout_map, work, s);
        },
        [&](int unit) { consume_queries<D>(&dqkv_map, g, rope, s, unit); }, dqkv_map, qkv_map,
        dout_map);
#endif
}

// ---- Launches -----------------------------------------------------------------------------------

template <int D>
void backward(floatX *dqkv, const Gradients &g, const Rope &rope, const AttentionBatch &b) {
    const AttentionShape &s = b.shape;
    typedef QuerySizes<D> Q;
    typedef KeySizes<D> K;
    [[maybe_unused]] static const bool ready =
        allow_shared_memory(attention_backward_q_sm90_kernel<D>, Q::BYTES) &&
        allow_shared_memory(attention_backward_kv_sm90_kernel<D>, K::BYTES);
    const CUtensorMap qkv_map = ragged_map(b.qkv, s.qkv_row, s.total_tokens, BOX_ROWS);
    const CUtensorMap dout_map = ragged_map(g.dout, s.out_row, s.total_tokens, BOX_ROWS);
    const CUtensorMap dqkv_map = ragged_map(dqkv, s.qkv_row, s.total_tokens, STORE_ROWS);
    const unsigned q_grid = persistent_grid(b.forward_items * (s.num_heads / s.shared));
    const unsigned kv_grid = persistent_grid(b.key_items * s.num_kv_heads);
    attention_backward_q_sm90_kernel<D><<<q_grid, Q::THREADS, Q::BYTES, cuda_stream()>>>(
        dqkv_map, qkv_map, dout_map, g, b.work, s, rope);
    LAUNCH_CHECK("attention_backward_q_sm90_kernel");
    attention_backward_kv_sm90_kernel<D><<<kv_grid, K::THREADS, K::BYTES, cuda_stream()>>>(
        dqkv_map, qkv_map, dout_map, g, b.work, s, rope);
    LAUNCH_CHECK("attention_backward_kv_sm90_kernel");
}

}  // namespace

void attention_backward_sm90(floatX *dqkv, const Gradients &g, const Rope &rope,
                             const AttentionBatch &batch) {
    (batch.head_dim == 64 ? backward<64> : backward<128>)(dqkv, g, rope, batch);
}
