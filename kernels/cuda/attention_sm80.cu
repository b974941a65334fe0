// FlashAttention-2 (arXiv 2307.08691, algorithms 1 and 2) for packed documents, with the
// instructions of sm_80: cp.async, ldmatrix, mma.sync m16n8k16.
//
// Three kernels. A CTA of four warps handles one item of the work list for one head. A warp owns
// rows of the tile and needs no other warp's results; warps share only cp.async's two stages:
//   forward     rows are queries; loops over K and V; O, running maximum and sum in registers
//   backward_q  rows are queries; loops over K and V; recomputes P; dQ in registers; also writes
//               delta, which backward_kv reads
//   backward_kv rows are keys; loops over Q and dO of all query heads of the group; dK and dV in
//               registers, stored once: without atomics the result is deterministic
// The inverse of rope_forward is applied to dQ and dK while they are in registers: one pass over
// dqkv and one rounding less. Backward without atomics costs seven products instead of five.
//
// Masks. Query i sees keys j <= i, so in a document's last tile the causal mask hides the keys past
// the document's end from every query inside it: there is no length mask. Rows past the end are
// filled with zeros and never read: NaN in a neighbour or past total_tokens cannot become 0 * NaN.
// Results of such rows are not stored; as queries they add zeros to dK and dV, because their dO and
// delta are 0.
// The first key tile holds key 0, which every query sees: a running maximum is finite from the
// first tile on, and no row is -inf throughout.
//
// Sizes. ldmatrix moves 128 bytes a clock: a warp of 16 queries would wait as long for K and V as
// for its products, so the first two kernels give a warp 32 queries where two CTAs of that size fit
// on an SM, and each fragment of K and V serves two products. In backward_kv dK and dV of 32 keys
// leave too few registers for S and dP: a warp has 16 keys. A warp's own 16 x 128 or 32 x 64 values
// stay in registers where there is room for them. tiles_of has the sizes.
#include "attention.cuh"
#include "ptx.cuh"

extern __shared__ __align__(1024) unsigned char smem[];  // each kernel carves its own

namespace {

constexpr int WARPS = 4, THREADS = WARPS * WARP;
// fp32 blocks of one warp; ROWS a multiple of 16, COLS of 16
template <int ROWS, int COLS>
struct Block {
    float x[ROWS / 16][COLS / 8][4];
    typedef float Values[ROWS * COLS / WARP];
    __device__ __forceinline__ Values &values() { return reinterpret_cast<Values &>(x); }
};
// One value for each row of a block: rows l / 4 and l / 4 + 8 of each 16
template <int ROWS>
struct RowValues {
    float x[ROWS / 16][2];
};

__device__ __forceinline__ int warp_id() { return threadIdx.x / WARP; }

// -------------------------------------------------------------------------------------------------
// Tiles in shared memory: rows of D bf16 values, their 16-byte chunks in an order that depends on
// the row, so that eight rows of one column lie in eight different groups of banks

// Where a kernel's shared memory begins. step() below relies on tiles that start at multiples of a
// row.
__device__ __forceinline__ uint32_t shared_begin() {
    const uint32_t at = smem_u32(smem);
    if (at % 256 != 0) __trap();
    return at;
}

template <int D>
__device__ __forceinline__ int chunk_at(int row, int chunk) {
    return row * (D * 2) + ((chunk ^ (row & 7)) << 4);
}

// The address `rows` and `cols` blocks of 16 beyond `at`. Chunk numbers differ in bits above the
// lowest one, and tiles start at a multiple of a row: one XOR moves along a row, and no
// lane-dependent value has to be kept in a register for it.
template <int D>
__device__ __forceinline__ uint32_t step(uint32_t at, int rows, int cols) {
    return (at ^ (cols * 32)) + rows * 16 * D * 2;
}

// The slice of a tile that a thread copies: a chunk of every STEP-th row
template <int D>
struct ThreadSlice {
    static constexpr int CHUNKS = D / 8, STEP = THREADS / CHUNKS;
    static_assert(STEP % 8 == 0, "a chunk keeps its place from row to row");
    static __device__ __forceinline__ int first_row() { return threadIdx.x / CHUNKS; }
    static __device__ __forceinline__ int chunk() { return threadIdx.x % CHUNKS; }
    static __device__ __forceinline__ const floatX *begin(const floatX *tile, int64_t row_stride) {
        return tile + (first_row() * row_stride + chunk() * 8);
    }
};

// tile (ROWS, D) = rows [0, rows) of the tile in memory where this thread's slice begins at
// `slice`, and zeros. The address of a row past them is never used: `valid` stands in for it.
template <int ROWS, int D>
__device__ __forceinline__ void load_slice(uint32_t tile, const floatX *slice, int64_t row_stride,
                                           int rows, const floatX *valid) {
    typedef ThreadSlice<D> Slice;
    const int first = Slice::first_row();
    const uint32_t to = tile + chunk_at<D>(first, Slice::chunk());
    static_assert(ROWS % Slice::STEP == 0, "rows of a tile");
    unrolled_for (int i = 0; i < ROWS / Slice::STEP; i++) {
        const bool is_row = first + i * Slice::STEP < rows;
        cp_async16(to + i * Slice::STEP * D * 2, is_row ? slice : valid, is_row);
        slice += Slice::STEP * row_stride;
    }
}

// tile (ROWS, D) = rows [0, rows) of src, and zeros
template <int ROWS, int D>
__device__ __forceinline__ void load_tile(uint32_t tile, const floatX *src, int64_t row_stride,
                                          int rows) {
    load_slice<ROWS, D>(tile, ThreadSlice<D>::begin(src, row_stride), row_stride, rows, src);
}

// The rows of a tile that this warp owns, as left operand: kept in registers, or read from shared
// memory at each use.
template <int ROWS, int D, bool IN_REGISTERS>
struct OwnRows {
    uint32_t at;  // this lane's row and chunk of the first 16 x 16 values
    uint32_t held[IN_REGISTERS ? ROWS / 16 : 1][IN_REGISTERS ? D / 16 : 1][4];

    __device__ __forceinline__ OwnRows(uint32_t tile, int first_row)
        : at(tile + chunk_at<D>(first_row + lane_id() % 16, lane_id() / 16)) {}
    __device__ __forceinline__ void read(uint32_t (&a)[4], int m, int k) const {
        ldmatrix_x4(a, step<D>(at, m, k));
    }
    // Once, when the tile has arrived
    __device__ __forceinline__ void fetch() {
        if constexpr (IN_REGISTERS) {
            unrolled_for (int m = 0; m < ROWS / 16; m++)
                unrolled_for (int k = 0; k < D / 16; k++) read(held[m][k], m, k);
        }
    }
    __device__ __forceinline__ void get(uint32_t (&a)[4], int m, int k) const {
        if constexpr (IN_REGISTERS) {
            unrolled_for (int i = 0; i < 4; i++) a[i] = held[m][k][i];
        } else {
            read(a, m, k);
        }
    }
};

// c (ROWS, COLS) = a (ROWS, D) times the transpose of tile (COLS, D)
template <int ROWS, int COLS, int D, bool IN_REGISTERS>
__device__ __forceinline__ void multiply_transposed(Block<ROWS, COLS> &c,
                                                    const OwnRows<ROWS, D, IN_REGISTERS> &a,
                                                    uint32_t tile) {
    const uint32_t at = tile + chunk_at<D>(lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2);
    c = {};
    unrolled_for (int k = 0; k < D / 16; k++) {
        uint32_t left[ROWS / 16][4];
        unrolled_for (int m = 0; m < ROWS / 16; m++) a.get(left[m], m, k);
        unrolled_for (int n = 0; n < COLS / 16; n++) {
            uint32_t right[4];
            ldmatrix_x4(right, step<D>(at, n, k));
            unrolled_for (int m = 0; m < ROWS / 16; m++) {
                mma_16816(c.x[m][2 * n], left[m], right[0], right[1]);
                mma_16816(c.x[m][2 * n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// c (ROWS, D) += bf16(a) (ROWS, COLS) times tile (COLS, D)
template <int ROWS, int COLS, int D>
__device__ __forceinline__ void multiply_add(Block<ROWS, D> &c, const Block<ROWS, COLS> &a,
                                             uint32_t tile) {
    const uint32_t at = tile + chunk_at<D>(lane_id() % 16, lane_id() / 16);
    unrolled_for (int k = 0; k < COLS / 16; k++) {
        uint32_t left[ROWS / 16][4];
        unrolled_for (int m = 0; m < ROWS / 16; m++) {
            const float(&lo)[4] = a.x[m][2 * k], (&hi)[4] = a.x[m][2 * k + 1];
            left[m][0] = pack_bf16(lo[0], lo[1]);
            left[m][1] = pack_bf16(lo[2], lo[3]);
            left[m][2] = pack_bf16(hi[0], hi[1]);
            left[m][3] = pack_bf16(hi[2], hi[3]);
        }
        unrolled_for (int n = 0; n < D / 16; n++) {
            uint32_t right[4];
            ldmatrix_x4_trans(right, step<D>(at, k, n));
            unrolled_for (int m = 0; m < ROWS / 16; m++) {
                mma_16816(c.x[m][2 * n], left[m], right[0], right[1]);
                mma_16816(c.x[m][2 * n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// Stores a warp's results as bf16 through its own rows of a shared tile, so that global memory gets
// whole rows in 16-byte stores.
template <int ROWS, int D>
struct OutRows {
    unsigned char *tile;

    __device__ __forceinline__ explicit OutRows(unsigned char *own_rows) : tile(own_rows) {
        __syncwarp();  // all lanes have read these rows
    }
    // Columns 8 * n + quad_col() and the next, of this lane's row i of block m
    __device__ __forceinline__ void put(int m, int i, int n, float x, float y) const {
        const int row = m * 16 + i * 8 + quad_row();
        *reinterpret_cast<uint32_t *>(tile + chunk_at<D>(row, n) + quad_col() * 2) =
            pack_bf16(x, y);
    }
    // Rows [0, rows) to dst
    __device__ __forceinline__ void store(floatX *dst, int64_t row_stride, int rows) const {
        constexpr int CHUNKS = D / 8, STEP = WARP / CHUNKS;
        __syncwarp();  // all lanes have written
        const int chunk = lane_id() % CHUNKS, first = lane_id() / CHUNKS;
        unrolled_for (int i = 0; i < ROWS / STEP; i++) {
            const int row = first + i * STEP;
            if (row < rows)
                *reinterpret_cast<uint4 *>(dst + row * row_stride + chunk * 8) =
                    *reinterpret_cast<const uint4 *>(tile + chunk_at<D>(row, chunk));
        }
    }
};

// Rows [0, rows) of dst = c * factor
template <int ROWS, int D>
__device__ __forceinline__ void store_rows(floatX *dst, int64_t row_stride, int rows,
                                           const Block<ROWS, D> &c, const RowValues<ROWS> &factor,
                                           unsigned char *own_rows) {
    const OutRows<ROWS, D> out(own_rows);
    unrolled_for (int m = 0; m < ROWS / 16; m++)
        unrolled_for (int n = 0; n < D / 8; n++)
            unrolled_for (int i = 0; i < 2; i++)
                out.put(m, i, n, c.x[m][n][2 * i] * factor.x[m][i],
                        c.x[m][n][2 * i + 1] * factor.x[m][i]);
    out.store(dst, row_stride, rows);
}

// Rows [0, rows) of dst = the inverse of rope_forward on c * factor. Columns x and x + D / 2 are a
// pair, and both are this lane's. position_ids is at the first row.
template <int ROWS, int D>
__device__ __forceinline__ void store_rows_unrotated(floatX *dst, int64_t row_stride, int rows,
                                                     const Block<ROWS, D> &c, float factor,
                                                     const int32_t *position_ids,
                                                     const float *rope_table,
                                                     unsigned char *own_rows) {
    constexpr int HALF = D / 16;  // blocks of 8 columns
    const OutRows<ROWS, D> out(own_rows);
    unrolled_for (int m = 0; m < ROWS / 16; m++)
        unrolled_for (int i = 0; i < 2; i++) {
            const int row = m * 16 + i * 8 + quad_row();
            if (row >= rows) continue;
            const float *angles = rope_table + (int64_t)position_ids[row] * D + 2 * quad_col();
            unrolled_for (int n = 0; n < HALF; n++) {
                float low[2], high[2];
                unrolled_for (int e = 0; e < 2; e++) {
                    low[e] = c.x[m][n][2 * i + e] * factor;
                    high[e] = c.x[m][n + HALF][2 * i + e] * factor;
                }
                unrotate_pairs(low, high, angles + 16 * n);
                out.put(m, i, n, low[0], low[1]);
                out.put(m, i, n + HALF, high[0], high[1]);
            }
        }
    out.store(dst, row_stride, rows);
}

// ---- Scores and probabilities -------------------------------------------------------------------

// -inf where the key comes after the query. ahead: first query of the block minus its first key.
template <bool ROWS_ARE_KEYS, int ROWS, int COLS>
__device__ __forceinline__ void mask_causal(Block<ROWS, COLS> &s, int ahead) {
    unrolled_for (int m = 0; m < ROWS / 16; m++)
        unrolled_for (int n = 0; n < COLS / 8; n++)
            unrolled_for (int i = 0; i < 4; i++) {
                const int row = m * 16 + i / 2 * 8 + quad_row(), col = n * 8 + i % 2 + quad_col();
                if ((ROWS_ARE_KEYS ? row - col : col - row) > ahead) s.x[m][n][i] = -INFINITY;
            }
}

// Running softmax of the rows: maximum of the raw scores, this lane's part of the sum
template <int ROWS>
struct Softmax {
    RowValues<ROWS> top, sum;
};

// s = exp(scale * s - maximum so far); earlier sums are rescaled to that maximum
template <int ROWS, int COLS, int D>
__device__ __forceinline__ void softmax_step(Block<ROWS, COLS> &s, Softmax<ROWS> &state,
                                             Block<ROWS, D> &o, float scale_log2e) {
    unrolled_for (int m = 0; m < ROWS / 16; m++)
        unrolled_for (int i = 0; i < 2; i++) {
            float top = state.top.x[m][i], sum = 0;
            unrolled_for (int n = 0; n < COLS / 8; n++)
                top = fmaxf(top, fmaxf(s.x[m][n][2 * i], s.x[m][n][2 * i + 1]));
            top = quad_max(top);
            // 0 at the first tile, exactly 1 where the maximum stays: contracted to FMA, a
            // difference of products would not be 0, and every tile would scale O by the same error
            const float keep = ex2((state.top.x[m][i] - top) * scale_log2e);
            const float shift = top * scale_log2e;
            unrolled_for (int n = 0; n < COLS / 8; n++)
                unrolled_for (int j = 2 * i; j < 2 * i + 2; j++) {
                    s.x[m][n][j] = ex2(s.x[m][n][j] * scale_log2e - shift);
                    sum += s.x[m][n][j];
                }
            unrolled_for (int n = 0; n < D / 8; n++) {
                o.x[m][n][2 * i] *= keep;
                o.x[m][n][2 * i + 1] *= keep;
            }
            state.sum.x[m][i] = state.sum.x[m][i] * keep + sum;
            state.top.x[m][i] = top;
        }
}

// ---- Sizes --------------------------------------------------------------------------------------

// For the forward and the dQ kernel: queries of a CTA, keys of a stage. For the dK, dV kernel:
// queries of a stage (its CTA has KEY_TILE keys).
struct Tiles {
    int forward_queries, forward_keys, q_queries, q_keys, kv_queries;
};
enum SharedMemory { SMALL = 100, LARGE = 164 };  // KB of an SM: sm_86, 89, 12x; all others
// Two CTAs of each kernel fit on an SM, and registers allow as many; three of the dK, dV kernel at
// head_dim 64 except on sm_100 to 110. What was tried: dev/SPEED.md.
constexpr Tiles tiles_of(int head_dim, int memory) {
    return head_dim == 64    ? Tiles{128, 64, 128, memory == LARGE ? 64 : 32, 32}
           : memory == LARGE ? Tiles{128, 32, 64, 32, 32}
                             : Tiles{64, 32, 64, 16, 16};
}
template <class Z, int MEMORY, int CTAS>  // a CTA takes 1 KB for itself
constexpr bool FITS = CTAS *(Z::BYTES + 1024) <= MEMORY * 1024;

// False: this architecture never runs a kernel with these sizes, and gets no code for it.
template <class Z>
__device__ __forceinline__ constexpr bool runs_here() {
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ == 1200 || __CUDA_ARCH__ == 1210
    return FITS<Z, SMALL, 2>;
#else
    return true;
#endif
}

// A tile of queries and the stages of keys it needs, in the forward and the dQ kernel
template <int D, int QUERIES, int KEYS>
struct QueryTile {
    static constexpr int ROWS = QUERIES / WARPS;  // queries of a warp
    static constexpr int Q_BYTES = QUERIES * D * 2;
    static constexpr int KV_BYTES = KEYS * D * 2;
    static constexpr int STAGE_BYTES = 2 * KV_BYTES;
    static constexpr int CTAS = QUERY_TILE / QUERIES;  // for an item of the work list and a head

    WorkItem item;
    int head, first, end;  // queries first to end - 1 of the document
    int own, own_first;    // this warp's first: in the tile, in the document
    int k_column;          // of the kv head in a row; V is s.num_kv_heads heads further

    // False: there are no such queries.
    __device__ __forceinline__ bool take(const int32_t *work, const AttentionShape &s) {
        const int number = blockIdx.x / CTAS, index = number / s.num_heads;
        if (index >= work_count(work, FORWARD_ITEMS)) return false;
        item = work_items(work)[index];
        head = number % s.num_heads;
        first = item.shared_len + item.tile * QUERY_TILE + (int)blockIdx.x % CTAS * QUERIES;
        end = min(first + QUERIES, item.len);
        own = warp_id() * ROWS, own_first = first + own;
        k_column = (s.num_heads + head / s.group) * D;
        return first < item.len;
    }
    __device__ __forceinline__ int num_stages() const { return ceil_div(end, KEYS); }
    __device__ __forceinline__ void load_stage(uint32_t stages, int j, const floatX *qkv,
                                               const AttentionShape &s) const {
        const int first_key = j * KEYS, rows = item.len - first_key;
        const int start = first_key < item.shared_len ? item.shared_first : item.start;
        const floatX *keys = qkv + (start + first_key) * s.qkv_row + k_column;
        const uint32_t k_tile = stages + j % 2 * STAGE_BYTES;
        load_tile<KEYS, D>(k_tile, keys, s.qkv_row, rows);
        load_tile<KEYS, D>(k_tile + KV_BYTES, keys + s.num_kv_heads * D, s.qkv_row, rows);
        cp_async_commit();
    }
    // False: this warp has no queries, or all keys of the stage come after them.
    __device__ __forceinline__ bool sees(int j) const {
        return own_first < end && own_first + ROWS > j * KEYS;
    }
};

// ---- Forward ------------------------------------------------------------------------------------

// O / sum and lse of this warp's rows. dst and lse are at the warp's first row.
template <int ROWS, int D>
__device__ __forceinline__ void finish_forward(floatX *dst, float *lse, int64_t row_stride,
                                               int rows, const Block<ROWS, D> &o,
                                               const Softmax<ROWS> &state, float scale,
                                               unsigned char *own_rows) {
    RowValues<ROWS> factor;
    unrolled_for (int m = 0; m < ROWS / 16; m++)
        unrolled_for (int i = 0; i < 2; i++) {
            const float sum = quad_sum(state.sum.x[m][i]);
            const int row = m * 16 + i * 8 + quad_row();
            factor.x[m][i] = 1 / sum;
            if (row < rows && quad_col() == 0) lse[row] = state.top.x[m][i] * scale + logf(sum);
        }
    store_rows<ROWS, D>(dst, row_stride, rows, o, factor, own_rows);
}

template <int D, int QUERIES, int KEYS>
struct ForwardSizes : QueryTile<D, QUERIES, KEYS> {
    typedef QueryTile<D, QUERIES, KEYS> Q;
    static constexpr int BYTES = Q::Q_BYTES + 2 * Q::STAGE_BYTES;
    static constexpr bool Q_IN_REGISTERS = Q::ROWS * D <= 32 * 64;
};

template <int D, int QUERIES, int KEYS>
__global__ void __launch_bounds__(THREADS, 2)
    attention_forward_kernel(floatX *__restrict__ out, float *__restrict__ lse,
                             const floatX *__restrict__ qkv, const int32_t *__restrict__ work,
                             AttentionShape s) {
    typedef ForwardSizes<D, QUERIES, KEYS> Z;
    QueryTile<D, QUERIES, KEYS> tile;
    if (!runs_here<Z>() || !tile.take(work, s)) return;
    const WorkItem &item = tile.item;
    const int head = tile.head, own_first = tile.own_first;
    const uint32_t q_tile = shared_begin(), stages = q_tile + Z::Q_BYTES;

    OwnRows<Z::ROWS, D, Z::Q_IN_REGISTERS> queries(q_tile, tile.own);
    Block<Z::ROWS, D> o = {};
    Softmax<Z::ROWS> state;
    unrolled_for (int m = 0; m < Z::ROWS / 16; m++)
        unrolled_for (int i = 0; i < 2; i++) state.top.x[m][i] = -INFINITY, state.sum.x[m][i] = 0;

    load_tile<QUERIES, D>(q_tile, qkv + (item.start + tile.first) * s.qkv_row + head * D, s.qkv_row,
                          tile.end - tile.first);
    tile.load_stage(stages, 0, qkv, s);
    const int num_stages = tile.num_stages();
    for (int j = 0; j < num_stages; j++) {
        cp_async_wait<0>();
        __syncthreads();  // stage j has arrived; no thread reads stage j - 1 any more
        if (j + 1 < num_stages) tile.load_stage(stages, j + 1, qkv, s);
        if (j == 0) queries.fetch();
        if (!tile.sees(j)) continue;
        const int ahead = own_first - j * KEYS;
        const uint32_t k_tile = stages + j % 2 * Z::STAGE_BYTES;
        Block<Z::ROWS, KEYS> p;
        multiply_transposed(p, queries, k_tile);
        if (ahead < KEYS - 1) mask_causal<false>(p, ahead);
        softmax_step(p, state, o, s.scale_log2e);
        multiply_add(o, p, k_tile + Z::KV_BYTES);
    }
    if (own_first >= tile.end) return;
    const int64_t row = (int64_t)item.start + own_first;
    finish_forward(out + row * s.out_row + head * D, lse + head * s.total_tokens + row, s.out_row,
                   tile.end - own_first, o, state, s.scale, smem + tile.own * D * 2);
}

// ---- Backward: dQ -------------------------------------------------------------------------------

// s = P = exp(scale * s - lse), then dp = dS = P * (dp - delta), for rows that are queries
template <int ROWS, int COLS>
__device__ __forceinline__ void dsoftmax_rows(Block<ROWS, COLS> &s, Block<ROWS, COLS> &dp,
                                              const RowValues<ROWS> &delta,
                                              const RowValues<ROWS> &lse_log2e, float scale_log2e) {
    unrolled_for (int m = 0; m < ROWS / 16; m++)
        unrolled_for (int n = 0; n < COLS / 8; n++)
            unrolled_for (int i = 0; i < 4; i++) {
                const float p = ex2(s.x[m][n][i] * scale_log2e - lse_log2e.x[m][i / 2]);
                dp.x[m][n][i] = p * (dp.x[m][n][i] - delta.x[m][i / 2]);
            }
}

template <int D, int QUERIES, int KEYS>
struct BackwardQSizes : QueryTile<D, QUERIES, KEYS> {
    typedef QueryTile<D, QUERIES, KEYS> Q;
    static constexpr int BYTES = 2 * Q::Q_BYTES + 2 * Q::STAGE_BYTES;
    static constexpr bool Q_IN_REGISTERS = Q::ROWS == 16;  // and dO
};

template <int D, int QUERIES, int KEYS>
__global__ void __launch_bounds__(THREADS, 2)
    attention_backward_q_kernel(floatX *__restrict__ dqkv, float *__restrict__ delta_out,
                                const floatX *__restrict__ dout, const floatX *__restrict__ qkv,
                                const floatX *__restrict__ out, const float *__restrict__ lse,
                                const int32_t *__restrict__ work, AttentionShape s, Rope rope) {
    typedef BackwardQSizes<D, QUERIES, KEYS> Z;
    QueryTile<D, QUERIES, KEYS> tile;
    if (!runs_here<Z>() || !tile.take(work, s)) return;
    const WorkItem &item = tile.item;
    const int own_first = tile.own_first, rows = tile.end - own_first;
    const int row = item.start + own_first;  // the warp's first, in the buffer
    const int column = tile.head * D;
    const uint32_t q_tile = shared_begin(), dout_tile = q_tile + Z::Q_BYTES;
    const uint32_t stages = dout_tile + Z::Q_BYTES;

    load_tile<QUERIES, D>(q_tile, qkv + (item.start + tile.first) * s.qkv_row + column, s.qkv_row,
                          tile.end - tile.first);
    load_tile<QUERIES, D>(dout_tile, dout + (item.start + tile.first) * s.out_row + column,
                          s.out_row, tile.end - tile.first);
    tile.load_stage(stages, 0, qkv, s);

    OwnRows<Z::ROWS, D, Z::Q_IN_REGISTERS> queries(q_tile, tile.own), douts(dout_tile, tile.own);
    Block<Z::ROWS, D> dq = {};
    RowValues<Z::ROWS> delta, lse_log2e;
    const int64_t at = row * s.out_row + column, statistic = tile.head * s.total_tokens + row;
    unrolled_for (int m = 0; m < Z::ROWS / 16; m++)
        unrolled_for (int i = 0; i < 2; i++) {
            const int r = m * 16 + i * 8 + quad_row();
            row_statistics<D>(&delta.x[m][i], &lse_log2e.x[m][i], delta_out + statistic + r,
                              dout + at + r * s.out_row, out + at + r * s.out_row,
                              lse + statistic + r, r < rows);
        }

    const int num_stages = tile.num_stages();
    for (int j = 0; j < num_stages; j++) {
        cp_async_wait<0>();
        __syncthreads();  // stage j has arrived; no thread reads stage j - 1 any more
        if (j + 1 < num_stages) tile.load_stage(stages, j + 1, qkv, s);
        if (j == 0) queries.fetch(), douts.fetch();
        if (!tile.sees(j)) continue;
        const int ahead = own_first - j * KEYS;
        const uint32_t k_tile = stages + j % 2 * Z::STAGE_BYTES;
        Block<Z::ROWS, KEYS> p, ds;
        multiply_transposed(p, queries, k_tile);
        multiply_transposed(ds, douts, k_tile + Z::KV_BYTES);
        if (ahead < KEYS - 1) mask_causal<false>(p, ahead);
        dsoftmax_rows(p, ds, delta, lse_log2e, s.scale_log2e);
        multiply_add(dq, ds, k_tile);
    }
    if (rows <= 0) return;
    store_rows_unrotated<Z::ROWS, D>(dqkv + row * s.qkv_row + column, s.qkv_row, rows, dq, s.scale,
                                     rope.position_ids + row, rope.table, smem + tile.own * D * 2);
}

// ---- Backward: dK and dV ------------------------------------------------------------------------

__device__ unsigned pieces_arrived[MAX_PIECES * WARPS];

// PIECES: items may be pieces
template <int D, int QUERIES, bool PIECES>
struct BackwardKvSizes {
    static constexpr int ROWS = KEY_TILE / WARPS;  // keys of a warp
    static constexpr int KV_BYTES = KEY_TILE * D * 2;
    static constexpr int Q_BYTES = QUERIES * D * 2;
    static constexpr int STAGE_BYTES = 2 * Q_BYTES;
    static constexpr int STATISTICS = 2 * QUERIES;  // floats of a stage: lse * log2(e), then delta
    static constexpr bool KV_IN_REGISTERS = D == 64;
    // Where in shared memory. Statistics of odd stages lie where K was, if that is in registers: on
    // an SM of 100 KB a third CTA fits.
    static constexpr int STAGES = 2 * KV_BYTES, EVEN = STAGES + 2 * STAGE_BYTES;
    static constexpr int ODD = KV_IN_REGISTERS ? 0 : EVEN + STATISTICS * 4;
    static constexpr int BYTES = EVEN + (KV_IN_REGISTERS ? 1 : 2) * STATISTICS * 4;
// CTAs on an SM for which registers are allotted; shared memory may allow fewer
#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
    static constexpr int CTAS = 2;  // with registers for three ptxas spills
#else
    static constexpr int CTAS = D == 64 && !PIECES ? 3 : 2;
#endif
};

// As dsoftmax_rows, for columns that are queries; s stays P, for dV.
template <int ROWS, int COLS>
__device__ __forceinline__ void probabilities_columns(Block<ROWS, COLS> &s, const float *lse_log2e,
                                                      float scale_log2e) {
    unrolled_for (int n = 0; n < COLS / 8; n++) {
        const float2 shift = *reinterpret_cast<const float2 *>(lse_log2e + n * 8 + quad_col());
        unrolled_for (int m = 0; m < ROWS / 16; m++)
            unrolled_for (int i = 0; i < 4; i++)
                s.x[m][n][i] = ex2(s.x[m][n][i] * scale_log2e - (i % 2 == 0 ? shift.x : shift.y));
    }
}
template <int ROWS, int COLS>
__device__ __forceinline__ void dscores_columns(Block<ROWS, COLS> &dp, const Block<ROWS, COLS> &p,
                                                const float *delta) {
    unrolled_for (int n = 0; n < COLS / 8; n++) {
        const float2 d = *reinterpret_cast<const float2 *>(delta + n * 8 + quad_col());
        unrolled_for (int m = 0; m < ROWS / 16; m++)
            unrolled_for (int i = 0; i < 4; i++)
                dp.x[m][n][i] = p.x[m][n][i] * (dp.x[m][n][i] - (i % 2 == 0 ? d.x : d.y));
    }
}

template <int D, int QUERIES, bool PIECES>
__global__ void __launch_bounds__(THREADS, BackwardKvSizes<D, QUERIES, PIECES>::CTAS)
    attention_backward_kv_kernel(floatX *__restrict__ dqkv, float *__restrict__ sums,
                                 const floatX *__restrict__ dout, const floatX *__restrict__ qkv,
                                 const float *__restrict__ lse, const float *__restrict__ delta,
                                 const int32_t *__restrict__ work, AttentionShape s, Rope rope) {
    typedef BackwardKvSizes<D, QUERIES, PIECES> Z;
    const int index = blockIdx.x / s.num_kv_heads;
    if (!runs_here<Z>() || index >= work_count(work, BACKWARD_ITEMS)) return;
    const KeyItem item = key_items(work)[index];
    const int kv_head = blockIdx.x % s.num_kv_heads, first_head = kv_head * s.group;
    const int first = item.tile * KEY_TILE, end = min(first + (int)KEY_TILE, item.len);
    const int own = warp_id() * Z::ROWS, own_first = first + own;  // in the tile, in the document
    // All query tiles from the first one on, at the diagonal if this is no piece, of the group's
    // first head, then of the next
    const int from = PIECES ? item.from : first;
    const int num_tiles = ceil_div(item.len - from, QUERIES);
    const int num_stages = num_tiles * s.group;

    const int64_t k_at = (item.start + first) * s.qkv_row + (s.num_heads + kv_head) * D;
    const uint32_t k_tile = shared_begin(), v_tile = k_tile + Z::KV_BYTES;
    const uint32_t q_tiles = k_tile + Z::STAGES;
    auto statistics = [](int j) {
        return reinterpret_cast<float *>(smem + (j % 2 == 0 ? Z::EVEN : Z::ODD));
    };
    // Where this thread reads the next stage, advanced from stage to stage: fewer instructions than
    // computing addresses from rows and heads
    const int64_t first_query = (int64_t)item.start + from;
    const int statistic = threadIdx.x % QUERIES;
    const bool is_lse = (int)threadIdx.x < QUERIES;
    const floatX *next_q =
        ThreadSlice<D>::begin(qkv + first_query * s.qkv_row + first_head * D, s.qkv_row);
    const floatX *next_dout =
        ThreadSlice<D>::begin(dout + first_query * s.out_row + first_head * D, s.out_row);
    const float *next_statistic =
        (is_lse ? lse : delta) + first_head * s.total_tokens + first_query + statistic;
    int next_rows = item.len - from;
    // Starts the copies of a stage. Returns this thread's value of its statistics, which the caller
    // stores after it has computed the stage before: arithmetic hides one global latency.
    auto load_stage = [&](int j) {
        const uint32_t q_tile = q_tiles + j % 2 * Z::STAGE_BYTES;
        load_slice<QUERIES, D>(q_tile, next_q, s.qkv_row, next_rows, qkv);
        load_slice<QUERIES, D>(q_tile + Z::Q_BYTES, next_dout, s.out_row, next_rows, dout);
        cp_async_commit();
        float value = 0;
        if (statistic < next_rows && (int)threadIdx.x < Z::STATISTICS) value = *next_statistic;
        next_q += QUERIES * s.qkv_row, next_dout += QUERIES * s.out_row;
        next_statistic += QUERIES, next_rows -= QUERIES;
        if (next_rows <= 0) {  // the next head's first query
            const int64_t queries = num_tiles * QUERIES;
            next_q += D - queries * s.qkv_row, next_dout += D - queries * s.out_row;
            next_statistic += s.total_tokens - queries;
            next_rows = item.len - from;
        }
        return value;
    };
    auto store_statistics = [&](int j, float value) {
        const float factor = is_lse ? LOG2E : 1;
        if ((int)threadIdx.x < Z::STATISTICS) statistics(j)[threadIdx.x] = value * factor;
    };
    static_assert(Z::STATISTICS <= THREADS, "at most one value a thread");

    load_tile<KEY_TILE, D>(k_tile, qkv + k_at, s.qkv_row, end - first);
    load_tile<KEY_TILE, D>(v_tile, qkv + k_at + s.num_kv_heads * D, s.qkv_row, end - first);
    store_statistics(0, load_stage(0));

    OwnRows<Z::ROWS, D, Z::KV_IN_REGISTERS> keys(k_tile, own), values(v_tile, own);
    Block<Z::ROWS, D> dk = {}, dv = {};
    if constexpr (Z::KV_IN_REGISTERS) {
        cp_async_wait<0>();
        __syncthreads();  // K and V have arrived
        keys.fetch(), values.fetch();
    }
    for (int j = 0, tile = 0; j < num_stages; j++) {
        cp_async_wait<0>();
        __syncthreads();  // stage j has arrived; no thread reads stage j - 1 any more
        float next = 0;
        if (j + 1 < num_stages) next = load_stage(j + 1);
        const int ahead = from - first + tile * QUERIES - own;
        if (own_first < end && ahead + QUERIES > 0) {  // else no keys, or no query sees them
            const uint32_t q_tile = q_tiles + j % 2 * Z::STAGE_BYTES;
            const float *lse_log2e = statistics(j);
            Block<Z::ROWS, QUERIES> p, ds;
            multiply_transposed(p, keys, q_tile);
            if (ahead < Z::ROWS - 1) mask_causal<true>(p, ahead);
            probabilities_columns(p, lse_log2e, s.scale_log2e);
            multiply_add(dv, p, q_tile + Z::Q_BYTES);
            multiply_transposed(ds, values, q_tile + Z::Q_BYTES);
            dscores_columns(ds, p, lse_log2e + QUERIES);
            multiply_add(dk, ds, q_tile);
        }
        store_statistics(j + 1, next);  // read last before the barrier above
        if (++tile == num_tiles) tile = 0;
    }
    if constexpr (Z::KV_IN_REGISTERS) __syncthreads();  // results overwrite statistics
    if (own_first >= end) return;
    if (PIECES && item.pieces > 1 &&
        !add_pieces(dk.values(), dv.values(), sums, pieces_arrived, item, kv_head, s.num_kv_heads,
                    warp_id(), WARPS))
        return;
    floatX *dk_rows = dqkv + k_at + own * s.qkv_row;
    store_rows_unrotated<Z::ROWS, D>(dk_rows, s.qkv_row, end - own_first, dk, s.scale,
                                     rope.position_ids + item.start + own_first, rope.table,
                                     smem + own * D * 2);
    RowValues<Z::ROWS> factor;
    unrolled_for (int m = 0; m < Z::ROWS / 16; m++) factor.x[m][0] = factor.x[m][1] = 1;
    store_rows<Z::ROWS, D>(dk_rows + s.num_kv_heads * D, s.qkv_row, end - own_first, dv, factor,
                           smem + Z::KV_BYTES + own * D * 2);
}

// ---- Launches -----------------------------------------------------------------------------------

// A grid's first dimension may have 2^31 - 1 CTAs.
unsigned grid_size(int64_t items, int heads) {
    if (items * heads > INT32_MAX)
        cuda_unsupported("attention", "fewer than 2^31 items times heads", items * heads);
    return (unsigned)(items * heads);
}

template <int D, int MEMORY>
void forward(floatX *out, float *lse, const AttentionBatch &b) {
    constexpr int QUERIES = tiles_of(D, MEMORY).forward_queries;
    constexpr int KEYS = tiles_of(D, MEMORY).forward_keys;
    typedef ForwardSizes<D, QUERIES, KEYS> Z;
    static_assert(FITS<Z, MEMORY, 2>, "two CTAs on an SM");
    [[maybe_unused]] static const bool ready =
        allow_shared_memory(attention_forward_kernel<D, QUERIES, KEYS>, Z::BYTES);
    const unsigned grid = grid_size(b.forward_items * Z::CTAS, b.shape.num_heads);
    attention_forward_kernel<D, QUERIES, KEYS>
        <<<grid, THREADS, Z::BYTES, cuda_stream()>>>(out, lse, b.qkv, b.work, b.shape);
    LAUNCH_CHECK("attention_forward_kernel");
}

template <int D, int MEMORY, bool PIECES>
void backward_keys(floatX *dqkv, const Gradients &g, const Rope &rope, const AttentionBatch &b) {
    constexpr int Q = tiles_of(D, MEMORY).kv_queries;
    typedef BackwardKvSizes<D, Q, PIECES> Z;
    static_assert(FITS<Z, MEMORY, Z::CTAS>, "CTAs on an SM");
    [[maybe_unused]] static const bool ready =
        allow_shared_memory(attention_backward_kv_kernel<D, Q, PIECES>, Z::BYTES);
    const unsigned grid = grid_size(b.key_items, b.shape.num_kv_heads);
    attention_backward_kv_kernel<D, Q, PIECES><<<grid, THREADS, Z::BYTES, cuda_stream()>>>(
        dqkv, g.sums, g.dout, b.qkv, g.lse, g.delta, b.work, b.shape, rope);
    LAUNCH_CHECK("attention_backward_kv_kernel");
}

template <int D, int MEMORY>
void backward(floatX *dqkv, const Gradients &g, const Rope &rope, const AttentionBatch &b) {
    constexpr int Q = tiles_of(D, MEMORY).q_queries, K = tiles_of(D, MEMORY).q_keys;
    typedef BackwardQSizes<D, Q, K> Z;
    static_assert(FITS<Z, MEMORY, 2>, "two CTAs on an SM");
    [[maybe_unused]] static const bool ready =
        allow_shared_memory(attention_backward_q_kernel<D, Q, K>, Z::BYTES);
    const unsigned grid = grid_size(b.forward_items * Z::CTAS, b.shape.num_heads);
    attention_backward_q_kernel<D, Q, K><<<grid, THREADS, Z::BYTES, cuda_stream()>>>(
        dqkv, g.delta, g.dout, b.qkv, g.out, g.lse, b.work, b.shape, rope);
    LAUNCH_CHECK("attention_backward_q_kernel");
    const auto keys = g.sums ? backward_keys<D, MEMORY, true> : backward_keys<D, MEMORY, false>;
    keys(dqkv, g, rope, b);
}

// sm_87 may run the code of sm_86, which has none of the large kernels.
bool has_large_memory() {
    return cuda_shared_kb() >= LARGE && (cuda_arch() == 80 || cuda_arch() >= 90);
}

}  // namespace

void attention_forward_sm80(floatX *out, real *lse, const AttentionBatch &batch) {
    const auto run = has_large_memory()
                         ? batch.head_dim == 64 ? forward<64, LARGE> : forward<128, LARGE>
                     : batch.head_dim == 64 ? forward<64, SMALL>
                                            : forward<128, SMALL>;
    run(out, lse, batch);
}

void attention_backward_sm80(floatX *dqkv, const Gradients &g, const Rope &rope,
                             const AttentionBatch &batch) {
    const auto run = has_large_memory()
                         ? batch.head_dim == 64 ? backward<64, LARGE> : backward<128, LARGE>
                     : batch.head_dim == 64 ? backward<64, SMALL>
                                            : backward<128, SMALL>;
    run(dqkv, g, rope, batch);
}
