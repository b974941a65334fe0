// Causal attention on CUDA: what attention.cu (work list, checks, dispatch) and the kernels share.
#ifndef UNPAD_CUDA_ATTENTION_CUH
#define UNPAD_CUDA_ATTENTION_CUH

#include "common.cuh"

// Tiles are counted from a document's first token: that is why a document gives the same bits
// wherever it lies.
enum {
    QUERY_TILE = 128,  // queries of one item of the forward and the dQ kernel
    KEY_TILE = 64,     // keys of one item of the dK, dV kernel
};

// The work list of a batch: counts, the query items, the key items; each kind costliest first. An
// item is for every head: a kernel takes item blockIdx.x / heads for head blockIdx.x % heads, so
// that the hardware starts the longest items first and heads that share keys run side by side.
struct WorkCounts {
    int32_t query_items, key_items;
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

// Shapes as kernels need them; rows in elements
struct AttentionShape {
    int64_t qkv_row, out_row, total_tokens;
    int num_heads, num_kv_heads, group;  // group: query heads per kv head
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

#endif
