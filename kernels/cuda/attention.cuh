// Causal attention on CUDA: shared by attention.cu (work list, checks, dispatch) and the kernels.
#pragma once

#include "common.cuh"

// Tiles are counted from a document's first token, so a document gives the same bits wherever it
// lies.
enum {
    QUERY_TILE = 128,     // queries of one item of the forward and the dQ kernel
    KEY_TILE = 64,        // keys of one item of the dK, dV kernel
    UNIT_ROWS = 64,       // queries of one head: what a warpgroup of sm_90 computes at a time
    BACKWARD_KEYS = 128,  // keys of one item of sm_90's dK, dV kernel
};

// sm_90, forward: computing warpgroups of a CTA. An item is that many units of a document that read
// the same keys: the units of `shared` heads of a group are numbered together, row block by row
// block.
constexpr int forward_consumers(int head_dim) { return head_dim == 64 ? 3 : 2; }
static inline int shared_heads(int group, int consumers) {
    int shared = group < consumers ? group : consumers;
    while (group % shared != 0) shared--;
    return shared;
}

// The work list of a batch: the number of items of each list, then their items, costliest first. An
// item is for every head: a kernel takes item blockIdx.x / heads for head blockIdx.x % heads, so
// that heads that share keys run side by side. It exists because documents differ:
//
//   documents of 4, 1 and 2 tiles      a grid over the longest      the list
//   a0 a1 a2 a3|b0|c0 c1               a0 a1 a2 a3                  a3 a2 a1 c1 a0 b0 c0
//                                      b0  .  .  .
//                                      c0 c1  .  .
//
// The grid starts blocks that have no work (dots), more of them the more lengths differ. And tile
// a3, which reads four tiles of keys, may start last in it, while all other processors are done and
// wait. The list is built once per batch, on the host, and serves every layer and both passes.
enum WorkList {
    // of the forward and the dQ kernel: QUERY_TILE queries (sm_90: a few units), all keys up to
    // them
    FORWARD_ITEMS,
    // of the dK, dV kernel: KEY_TILE keys (sm_90: BACKWARD_KEYS), all queries from them on
    BACKWARD_ITEMS,
    NUM_WORK_LISTS
};
struct Document {
    int32_t start, len;  // first row, tokens
};
// Shared prefixes. The rows of a document's first shared_len tokens begin at shared_first; `start`
// is as many rows before its first own one, and may be negative. Tiles are of own rows.
struct WorkItem : Document {
    int32_t tile;
    int32_t shared_first, shared_len;
};
// Documents that borrow a tile of keys follow their leader: for the dK, dV kernel their own rows
// are its too. Where they are many, several items divide them:
//
//   leader, borrowers       items
//   k0 k1|a a|b b b|c c c   k0: k0 k1 a a b b b c c c   with 3 kv heads, 48 CTAs for a prefix of
//                           k1: k1 a a b b b c c c      2,048 tokens, however many borrow it
//   in pieces               k0: k0 k1 a a b|b b c c c   each sums its part of dK and dV
//
// The warp that ends last adds the pieces' sums, in their order: which one that is makes no
// difference.
struct KeyItem : Document {  // len: up to the last query
    int32_t tile, from;      // from: the first query
    int32_t pieces, piece;   // of the tile, and which of them this is
    int32_t slot;            // of the first piece's sums
};
enum {
    PIECES_PER_SM = 3,
    MAX_PIECES = PIECES_PER_SM * 132,  // of all kv heads, on an H100
    PIECE_BLOCKS = 8  // of 64 queries, at least: storing sums costs little beside them
};

// No batch of these sizes has more items, whatever its layout. Grids are sized by this bound, so
// they depend only on host values. CTAs past the list's count end at once.
static inline int64_t max_work_items(int64_t tokens, int64_t docs, int tile) {
    int64_t with_a_token = docs < tokens ? docs : tokens;
    return (tokens + (tile - 1) * with_a_token) / tile;
}

// Of sm_90's forward: the row block, 64 queries, of the item's last unit
__host__ __device__ __forceinline__ int last_row_block(const WorkItem &item, int consumers,
                                                       int shared) {
    const int units = ceil_div<int>(item.len - item.shared_len, UNIT_ROWS) * shared;
    const int end = (item.tile + 1) * consumers;
    return item.shared_len / UNIT_ROWS + ((end < units ? end : units) - 1) / shared;
}

__device__ __forceinline__ int work_count(const int32_t *work, WorkList list) { return work[list]; }

__device__ __forceinline__ const WorkItem *work_items(const int32_t *work) {
    return reinterpret_cast<const WorkItem *>(work + NUM_WORK_LISTS);
}
__device__ __forceinline__ const KeyItem *key_items(const int32_t *work) {
    return reinterpret_cast<const KeyItem *>(work_items(work) + work_count(work, FORWARD_ITEMS));
}

// Shapes as kernels need them; rows in elements
struct AttentionShape {
    int64_t qkv_row, out_row, total_tokens;
    int num_heads, num_kv_heads, group;  // group: query heads per kv head
    int shared;                          // of a group, in one item of sm_90's forward
    float scale, scale_log2e;
};

// Inputs and scratch of backward; rows as in kernels.h
struct Gradients {
    float *__restrict__ delta, *__restrict__ sums;
    const floatX *__restrict__ dout, *__restrict__ out;
    const float *__restrict__ lse;
};
// For the inverse of rope_forward on dQ and dK
struct Rope {
    const int32_t *position_ids;
    const float *table;
};

// A batch as passed to a path. max_work_items bounds the items of its lists.
struct AttentionBatch {
    AttentionShape shape;
    int head_dim;  // 64 or 128
    const int32_t *work;
    const floatX *qkv;
    int64_t forward_items, key_items;
};

// -------------------------------------------------------------------------------------------------
// Accumulators of either path are blocks of 16 rows and 8 columns, 4 registers a lane, x[0..3]:
// lane l holds rows l / 4 (x[0], x[1]) and l / 4 + 8 (x[2], x[3]), columns 2 * (l % 4) and the
// next. Four lanes, a quad, hold a row. The left operand of the next product has the same layout: P
// and dS need no shared memory.

constexpr float LOG2E = 1.44269504088896340736f;

__device__ __forceinline__ int lane_id() { return threadIdx.x % WARP; }
__device__ __forceinline__ int quad_row() { return lane_id() / 4; }
__device__ __forceinline__ int quad_col() { return lane_id() % 4 * 2; }

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// delta = rowsum(dout * out) of a row, whose quad calls this together, and lse in base 2. Pointers
// are at the row; zeros, and nothing read or written, where it is not `valid`.
template <int D>
__device__ __forceinline__ void row_statistics(float *delta, float *lse_log2e, float *delta_out,
                                               const floatX *dout, const floatX *out,
                                               const float *lse, bool valid) {
    const int first = lane_id() % 4 * (D / 4);  // of this lane's columns
    float sum = 0;
    *lse_log2e = 0;
    if (valid) {
        unrolled_for (int c = 0; c < D / 4; c += 8) {
            float x[8], y[8];
            load8(x, dout + first + c);
            load8(y, out + first + c);
            unrolled_for (int i = 0; i < 8; i++) sum += x[i] * y[i];
        }
        *lse_log2e = *lse * LOG2E;
    }
    *delta = quad_sum(sum);
    if (valid && quad_col() == 0) *delta_out = *delta;
}

// The inverse of rope_forward on columns c, c + 1 (low) and their partners c + D / 2 (high).
// angles: the angles of the row's position, from column c on.
__device__ __forceinline__ void unrotate_pairs(float (&low)[2], float (&high)[2],
                                               const float *angles) {
    const float4 two = *reinterpret_cast<const float4 *>(angles);
    const float cosine[2] = {two.x, two.z}, sine[2] = {two.y, two.w};
    unrolled_for (int i = 0; i < 2; i++) {
        const float x = low[i], y = high[i];
        low[i] = x * cosine[i] + y * sine[i];
        high[i] = y * cosine[i] - x * sine[i];
    }
}

// Stores a warp's sums x, y of a piece. True for the warp that stores the last of its tile and kv
// head: x and y are then the sums of all pieces, in their order.
// sums: of the first piece, counted in all pieces of all kv heads. arrived: zeros, and left so.
template <int N>
__device__ __forceinline__ bool add_pieces(float (&x)[N], float (&y)[N], float *sums,
                                           unsigned *arrived, const KeyItem &item, int kv_head,
                                           int num_kv_heads, int warp, int warps) {
    const int64_t stride = (int64_t)num_kv_heads * warps * 2 * N * WARP;  // from piece to piece
    const int first = (item.slot * num_kv_heads + kv_head) * warps + warp;
    sums += (int64_t)first * 2 * N * WARP + lane_id();
    float *own = sums + item.piece * stride;
    unrolled_for (int i = 0; i < N; i++) own[i * WARP] = x[i], own[(N + i) * WARP] = y[i];
    __threadfence();  // the sums are there before their count
    __syncwarp();     // of all lanes
    unsigned before = 0;
    if (lane_id() == 0) before = atomicInc(arrived + first, item.pieces - 1);
    if (__shfl_sync(~0u, before, 0) != (unsigned)item.pieces - 1) return false;
    __threadfence();  // the count is read before the sums
    unrolled_for (int i = 0; i < N; i++) x[i] = y[i] = 0;
#pragma unroll 1
    for (int piece = 0; piece < item.pieces; piece++, sums += stride)
        unrolled_for (int i = 0; i < N; i++) {  // not from the first cache, which may be older
            x[i] += __ldcg(sums + i * WARP);
            y[i] += __ldcg(sums + (N + i) * WARP);
        }
    return true;
}

// More than 48 KB of shared memory must be requested, once per kernel.
template <class Kernel>
bool allow_shared_memory(Kernel kernel, int bytes) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    return true;
}

// ---- The two paths ------------------------------------------------------------------------------

// attention_sm80.cu: cp.async, ldmatrix and mma.sync, for every architecture from sm_80 on
void attention_forward_sm80(floatX *out, real *lse, const AttentionBatch &batch);
void attention_backward_sm80(floatX *dqkv, const Gradients &g, const Rope &rope,
                             const AttentionBatch &batch);

// probe.cu: what is wrong with sm_90's kernels on this GPU, or NULL. Runs a batch through them in a
// separate process, for at most half a minute; call it before any batch.
const char *probe_attention();

// attention_sm90.cu: TMA, mbarrier and wgmma, for sm_90a only. True: this GPU is an sm_90, and the
// program has code for it.
bool attention_has_sm90();
void attention_forward_sm90(floatX *out, real *lse, const AttentionBatch &batch);
void attention_backward_sm90(floatX *dqkv, const Gradients &g, const Rope &rope,
                             const AttentionBatch &batch);
