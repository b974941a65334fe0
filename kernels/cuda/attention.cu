// Causal attention over packed documents on CUDA: the work list, the checks, the choice of kernels.
//
// One list per batch, made on the host, serves all layers and both passes (layout: attention.cuh).
// Query items are for the forward and the dQ kernel: a tile of queries, all keys up to it. Key
// items are for the dK, dV kernel: a tile of keys, all queries from it on. Forward items are for
// sm_90's forward and dQ kernel: a few units, all keys up to the last. Backward items are for its
// dK, dV kernel, as key items. A document without a token has no item.
#include <algorithm>
#include "attention.cuh"

enum {
    COUNT_INTS = sizeof(WorkCounts) / sizeof(int32_t),
    ITEM_INTS = sizeof(WorkItem) / sizeof(int32_t),
};

size_t attention_plan_size(int64_t max_tokens, int64_t max_docs) {
    int64_t items = max_work_items(max_tokens, max_docs, QUERY_TILE) +
                    max_work_items(max_tokens, max_docs, KEY_TILE) +
                    max_work_items(max_tokens, max_docs, UNIT_ROWS) +
                    max_work_items(max_tokens, max_docs, BACKWARD_KEYS);
    return COUNT_INTS + (size_t)items * ITEM_INTS;
}

// Equal costs are in the order of the buffer: neighbours in the list are neighbours in the cache.
static int by_place(const WorkItem *a, const WorkItem *b) {
    if (a->start != b->start) return a->start < b->start ? -1 : 1;
    return (a->tile > b->tile) - (a->tile < b->tile);
}

// Cost: the keys that the last query sees, in tiles of KEY_TILE
static int costlier_query_item_first(const void *x, const void *y) {
    const WorkItem *a = (const WorkItem *)x, *b = (const WorkItem *)y;
    int64_t a_end = (a->tile + 1) * (int64_t)QUERY_TILE,
            b_end = (b->tile + 1) * (int64_t)QUERY_TILE;
    int64_t a_cost = ceil_div<int64_t>(a_end < a->len ? a_end : a->len, KEY_TILE);
    int64_t b_cost = ceil_div<int64_t>(b_end < b->len ? b_end : b->len, KEY_TILE);
    return a_cost != b_cost ? (a_cost > b_cost ? -1 : 1) : by_place(a, b);
}

// Cost: the queries from the first key on, in tiles of KEY_TILE
static int costlier_key_item_first(const void *x, const void *y) {
    const WorkItem *a = (const WorkItem *)x, *b = (const WorkItem *)y;
    int a_cost = ceil_div<int>(a->len, KEY_TILE) - a->tile;
    int b_cost = ceil_div<int>(b->len, KEY_TILE) - b->tile;
    return a_cost != b_cost ? (a_cost > b_cost ? -1 : 1) : by_place(a, b);
}

// `tiles` of a document of so many rows
template <class Tiles>
static int32_t add_items(WorkItem *items, const int32_t *cu_seqlens_host, int num_docs,
                         Tiles tiles) {
    int32_t n = 0;
    for (int doc = 0; doc < num_docs; doc++) {
        int32_t start = cu_seqlens_host[doc], len = cu_seqlens_host[doc + 1] - start;
        for (int t = 0; t < tiles(len); t++) items[n++] = {start, len, t};
    }
    return n;
}

// Cost: the keys that the last query sees, in row blocks
static int32_t add_forward_items(WorkItem *items, const int32_t *cu_seqlens_host, int num_docs,
                                 HeadShape heads) {
    const int consumers = forward_consumers(heads.head_dim);
    const int shared = shared_heads(heads.num_heads / heads.num_kv_heads, consumers);
    const int32_t n = add_items(items, cu_seqlens_host, num_docs, [=](int len) {
        return ceil_div(ceil_div<int>(len, UNIT_ROWS) * shared, consumers);
    });
    std::sort(items, items + n, [=](const WorkItem &a, const WorkItem &b) {
        const int a_cost = last_row_block(a, consumers, shared);
        const int b_cost = last_row_block(b, consumers, shared);
        return a_cost != b_cost ? a_cost > b_cost : by_place(&a, &b) < 0;
    });
    return n;
}

// Cost: the queries from the first key on, in row blocks
static int32_t add_backward_items(WorkItem *items, const int32_t *cu_seqlens_host, int num_docs) {
    const int32_t n = add_items(items, cu_seqlens_host, num_docs,
                                [](int len) { return ceil_div<int>(len, BACKWARD_KEYS); });
    auto cost = [](const WorkItem &item) {
        return ceil_div<int>(item.len, UNIT_ROWS) - item.tile * (BACKWARD_KEYS / UNIT_ROWS);
    };
    std::sort(items, items + n, [=](const WorkItem &a, const WorkItem &b) {
        return cost(a) != cost(b) ? cost(a) > cost(b) : by_place(&a, &b) < 0;
    });
    return n;
}

size_t attention_plan(int32_t *work_host, const int32_t *cu_seqlens_host, int num_docs,
                      HeadShape heads) {
    WorkCounts *counts = reinterpret_cast<WorkCounts *>(work_host);
    WorkItem *items = reinterpret_cast<WorkItem *>(counts + 1);
    counts->query_items = add_items(items, cu_seqlens_host, num_docs,
                                    [](int len) { return ceil_div<int>(len, QUERY_TILE); });
    qsort(items, counts->query_items, sizeof(WorkItem), costlier_query_item_first);
    items += counts->query_items;
    counts->key_items = add_items(items, cu_seqlens_host, num_docs,
                                  [](int len) { return ceil_div<int>(len, KEY_TILE); });
    qsort(items, counts->key_items, sizeof(WorkItem), costlier_key_item_first);
    items += counts->key_items;
    counts->forward_items = add_forward_items(items, cu_seqlens_host, num_docs, heads);
    items += counts->forward_items;
    counts->backward_items = add_backward_items(items, cu_seqlens_host, num_docs);
    items += counts->backward_items;
    return reinterpret_cast<int32_t *>(items) - work_host;
}

static AttentionShape make_shape(HeadShape heads, int64_t total_tokens) {
    if (heads.head_dim != 64 && heads.head_dim != 128)
        cuda_unsupported("attention: expected head_dim 64 or 128", heads.head_dim);
    if (heads.num_kv_heads <= 0)
        cuda_unsupported("attention: expected at least one kv head", heads.num_kv_heads);
    if (heads.num_heads <= 0 || heads.num_heads % heads.num_kv_heads != 0)
        cuda_unsupported("attention: expected heads that are a multiple of kv heads",
                         heads.num_heads);
    AttentionShape s;
    s.qkv_row = (int64_t)(heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
    s.out_row = (int64_t)heads.num_heads * heads.head_dim;
    s.total_tokens = total_tokens;
    s.num_heads = heads.num_heads;
    s.num_kv_heads = heads.num_kv_heads;
    s.group = heads.num_heads / heads.num_kv_heads;
    s.shared = shared_heads(s.group, forward_consumers(heads.head_dim));
    s.scale = (float)(1 / sqrt((double)heads.head_dim));
    s.scale_log2e = (float)(1.44269504088896340736 / sqrt((double)heads.head_dim));
    return s;
}

// Which kernels run. NULL until the first use: then what fits the GPU best.
static const char *path;

int attention_select(const char *name) {
    if (strcmp(name, "auto") == 0)
        path = attention_has_sm90() ? "sm90" : "sm80";
    else if (strcmp(name, "sm80") == 0)
        path = "sm80";
    else if (strcmp(name, "sm90") == 0 && attention_has_sm90())
        path = "sm90";
    else
        return -1;
    return 0;
}

const char *attention_describe(void) {
    if (!path) attention_select("auto");
    return path;
}
static bool sm90() { return strcmp(attention_describe(), "sm90") == 0; }

void attention_forward(floatX *out, real *lse, const floatX *qkv, const VarlenInfo *docs,
                       HeadShape heads) {
    const AttentionShape s = make_shape(heads, docs->total_tokens);
    if (docs->total_tokens == 0) return;
    if (sm90())
        return attention_forward_sm90(
            out, lse, qkv, docs->work, s, heads.head_dim,
            max_work_items(docs->total_tokens, docs->num_docs, UNIT_ROWS));
    attention_forward_sm80(out, lse, qkv, docs->work, s, heads.head_dim,
                           max_work_items(docs->total_tokens, docs->num_docs, QUERY_TILE));
}

void attention_backward(floatX *dqkv, real *delta, const floatX *dout, const floatX *qkv,
                        const floatX *out, const real *lse, const int32_t *position_ids,
                        const real *rope_table, const VarlenInfo *docs, HeadShape heads) {
    const AttentionShape s = make_shape(heads, docs->total_tokens);
    if (docs->total_tokens == 0) return;
    const Rope rope = {position_ids, rope_table};
    if (sm90())
        return attention_backward_sm90(
            dqkv, delta, dout, qkv, out, lse, docs->work, s, rope, heads.head_dim,
            max_work_items(docs->total_tokens, docs->num_docs, UNIT_ROWS),
            max_work_items(docs->total_tokens, docs->num_docs, BACKWARD_KEYS));
    attention_backward_sm80(dqkv, delta, dout, qkv, out, lse, docs->work, s, rope, heads.head_dim,
                            max_work_items(docs->total_tokens, docs->num_docs, QUERY_TILE),
                            max_work_items(docs->total_tokens, docs->num_docs, KEY_TILE));
}
