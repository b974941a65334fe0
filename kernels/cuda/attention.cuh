// Causal attention on CUDA: what attention.cu (work list, checks, dispatch) and the kernels share.
#ifndef UNPAD_CUDA_ATTENTION_CUH
#define UNPAD_CUDA_ATTENTION_CUH

#include "common.cuh"

// Tiles are counted from a document's first token: that is why a document gives the same bits
// wherever it lies.
enum {
    QUERY_TILE = 128,     // queries of one item of the forward and the dQ kernel
    KEY_TILE = 64,        // keys of one item of the dK, dV kernel
    UNIT_ROWS = 64,       // queries of one head: what a warpgroup of sm_90 computes at a time
    BACKWARD_KEYS = 128,  // keys of one item of sm_90's dK, dV kernel
};

// sm_90, forward: warpgroups of a CTA that compute. An item is so many units of a document that
// read the same keys: `shared` heads of a group have their units counted together, row block by row
// block.
constexpr int forward_consumers(int head_dim) { return head_dim == 64 ? 3 : 2; }
static inline int shared_heads(int group, int consumers) {
    int shared = group < consumers ? group : consumers;
    while (group % shared != 0) shared--;
    return shared;
}

// The work list of a batch: counts, the query items, the key items, the items of sm_90's forward
// (its dQ kernel's too) and of its dK, dV kernel; each kind costliest first. An item is for every
// head: a kernel takes item blockIdx.x / heads for head blockIdx.x % heads, so that the hardware
// starts the longest items first and heads that share keys run side by side.
struct WorkCounts {
    int32_t query_items, key_items, forward_items, backward_items;
};
struct WorkItem {
    int32_t start, len;  // the document: first row, tokens
    int32_t tile;
};

// No batch of these sizes has more items, whatever its layout. Grids are made from this bound: they
// depend on host values alone. CTAs past the list's count end at once.
static inline int64_t max_work_items(int64_t tokens, int64_t docs, int tile) {
    int64_t with_a_token = docs < tokens ? docs : tokens;
    return (tokens + (tile - 1) * with_a_token) / tile;
}

// Of sm_90's forward: the row block, 64 queries, of the item's last unit
__host__ __device__ __forceinline__ int last_row_block(const WorkItem &item, int consumers,
                                                       int shared) {
    const int units = ceil_div<int>(item.len, UNIT_ROWS) * shared;
    const int end = (item.tile + 1) * consumers;
    return ((end < units ? end : units) - 1) / shared;
}

// False: there is no item of this index.
__device__ __forceinline__ bool query_item(WorkItem &item, const int32_t *work, int index) {
    const WorkCounts *counts = reinterpret_cast<const WorkCounts *>(work);
    if (index >= counts->query_items) return false;
    item = reinterpret_cast<const WorkItem *>(counts + 1)[index];
    return true;
}
__device__ __forceinline__ bool key_item(WorkItem &item, const int32_t *work, int index) {
    const WorkCounts *counts = reinterpret_cast<const WorkCounts *>(work);
    if (index >= counts->key_items) return false;
    item = reinterpret_cast<const WorkItem *>(counts + 1)[counts->query_items + index];
    return true;
}

__device__ __forceinline__ WorkItem forward_item(const int32_t *work, int index) {
    const WorkCounts *counts = reinterpret_cast<const WorkCounts *>(work);
    const WorkItem *items = reinterpret_cast<const WorkItem *>(counts + 1);
    return items[counts->query_items + counts->key_items + index];
}

__device__ __forceinline__ WorkItem backward_item(const int32_t *work, int index) {
    return forward_item(work, reinterpret_cast<const WorkCounts *>(work)->forward_items + index);
}

// Shapes as kernels need them; rows in elements
struct AttentionShape {
    int64_t qkv_row, out_row, total_tokens;
    int num_heads, num_kv_heads, group;  // group: query heads per kv head
    int shared;                          // of a group, in one item of sm_90's forward
    float scale, scale_log2e;
};

// What turns dQ and dK back: see rope_forward
struct Rope {
    const int32_t *position_ids;
    const float *table;
};

// attention_sm80.cu: cp.async, ldmatrix and mma.sync, for every architecture from sm_80 on.
// query_items and key_items are max_work_items of the batch; head_dim is 64 or 128.
void attention_forward_sm80(floatX *out, real *lse, const floatX *qkv, const int32_t *work,
                            const AttentionShape &shape, int head_dim, int64_t query_items);
void attention_backward_sm80(floatX *dqkv, real *delta, const floatX *dout, const floatX *qkv,
                             const floatX *out, const real *lse, const int32_t *work,
                             const AttentionShape &shape, const Rope &rope, int head_dim,
                             int64_t query_items, int64_t key_items);

// attention_sm90.cu: TMA, mbarrier and wgmma, for sm_90a alone. True: this GPU is one, and the
// program has code for it.
bool attention_has_sm90();
// forward_items is max_work_items of the batch with UNIT_ROWS.
void attention_forward_sm90(floatX *out, real *lse, const floatX *qkv, const int32_t *work,
                            const AttentionShape &shape, int head_dim, int64_t forward_items);

// backward_items is max_work_items of the batch with BACKWARD_KEYS.
void attention_backward_sm90(floatX *dqkv, real *delta, const floatX *dout, const floatX *qkv,
                             const floatX *out, const real *lse, const int32_t *work,
                             const AttentionShape &shape, const Rope &rope, int head_dim,
                             int64_t forward_items, int64_t backward_items);

#endif
