// Causal attention over packed documents on CUDA: the work list, the checks, the choice of kernels.
//
// One list per batch, made on the host, serves all layers and both passes (layout: attention.cuh).
// A document without a token has no item.
#include <algorithm>
#include "../comm/comm.h"
#include "attention.cuh"

extern "C" {
#include "../../data/base/error.h"
}

enum {
    COUNT_INTS = sizeof(WorkCounts) / sizeof(int32_t),
    ITEM_INTS = sizeof(WorkItem) / sizeof(int32_t),
};

static bool sm90() { return strcmp(attention_describe(), "sm90") == 0; }

static int64_t forward_items(int64_t tokens, int64_t segments) {
    return max_work_items(tokens, segments, sm90() ? UNIT_ROWS : QUERY_TILE);
}
static int64_t backward_items(int64_t tokens, int64_t segments) {
    return max_work_items(tokens, segments, sm90() ? BACKWARD_KEYS : KEY_TILE);
}

size_t attention_work_list_size(int64_t max_tokens, int64_t max_segments) {
    const int64_t items =
        forward_items(max_tokens, max_segments) + backward_items(max_tokens, max_segments);
    return COUNT_INTS + (size_t)items * ITEM_INTS;
}

// The end of the rows whose queries see a document's own key `first`: rows of the document, and of
// the documents that follow it and borrow that key.
static int32_t readers_end(const VarlenInfo &docs, int doc, int first) {
    int end = doc + 1;
    while (docs.shared_len && end < docs.num_segments && docs.shared_len[end] > first) end++;
    return docs.cu_seqlens[end];
}

// Appends a list to `work`: `tiles(len)` items for each document of `len` own tokens, by falling
// cost. Equal costs are in the order of the buffer: neighbours in the list are neighbours in the
// cache.
template <class Tiles, class Cost>
static void add_list(int32_t *work, WorkList list, const VarlenInfo &docs, int keys, Tiles tiles,
                     Cost cost) {
    WorkCounts *counts = reinterpret_cast<WorkCounts *>(work);
    WorkItem *items = reinterpret_cast<WorkItem *>(counts + 1), *end;
    if (list == BACKWARD_ITEMS) items += counts->items[FORWARD_ITEMS];
    end = items;
    for (int doc = 0; doc < docs.num_segments; doc++) {
        const int32_t row = docs.cu_seqlens[doc], own = docs.cu_seqlens[doc + 1] - row;
        const int32_t shared = docs.shared_len ? docs.shared_len[doc] : 0;
        assert(row >= 0 && own >= 0 && shared % SHARED_TILE == 0);
        for (int t = 0; t < tiles(own); t++)
            *end++ = list == BACKWARD_ITEMS
                         ? WorkItem{row, readers_end(docs, doc, shared + t * keys) - row, t, 0, 0}
                         : WorkItem{row - shared, shared + own, t,
                                    shared ? docs.shared_first[doc] : 0, shared};
    }
    counts->items[list] = (int32_t)(end - items);
    std::sort(items, end, [=](const WorkItem &a, const WorkItem &b) {
        if (cost(a) != cost(b)) return cost(a) > cost(b);
        return a.start != b.start ? a.start < b.start : a.tile < b.tile;
    });
}

size_t attention_work_list(int32_t *work_host, const int32_t *cu_seqlens_host,
                           const int32_t *shared_first_host, const int32_t *shared_len_host,
                           int num_segments, HeadShape heads) {
    const VarlenInfo docs = {cu_seqlens_host,   NULL,           0, num_segments, 0,
                             shared_first_host, shared_len_host};
    const int consumers = forward_consumers(heads.head_dim);
    const int shared = shared_heads(heads.num_heads / heads.num_kv_heads, consumers);
    const auto add_forward = [=](auto tiles, auto cost) {
        add_list(work_host, FORWARD_ITEMS, docs, 0, tiles, cost);
    };
    // Cost: blocks of 64 keys that the last query sees, or of 64 queries from the first key on
    const auto add_backward = [=](int keys) {
        add_list(
            work_host, BACKWARD_ITEMS, docs, keys, [=](int own) { return ceil_div(own, keys); },
            [=](const WorkItem &item) {
                return ceil_div<int>(item.len, UNIT_ROWS) - item.tile * (keys / UNIT_ROWS);
            });
    };
    if (sm90()) {
        add_forward(
            [=](int own) { return ceil_div(ceil_div<int>(own, UNIT_ROWS) * shared, consumers); },
            [=](const WorkItem &item) { return last_row_block(item, consumers, shared); });
        add_backward(BACKWARD_KEYS);
    } else {
        add_forward([](int own) { return ceil_div<int>(own, QUERY_TILE); },
                    [](const WorkItem &item) {
                        const int64_t end = item.shared_len + (item.tile + 1) * (int64_t)QUERY_TILE;
                        return ceil_div<int64_t>(std::min<int64_t>(end, item.len), KEY_TILE);
                    });
        add_backward(KEY_TILE);
    }
    const WorkCounts *counts = reinterpret_cast<const WorkCounts *>(work_host);
    return COUNT_INTS +
           (size_t)(counts->items[FORWARD_ITEMS] + counts->items[BACKWARD_ITEMS]) * ITEM_INTS;
}

static AttentionShape make_shape(HeadShape heads, int64_t total_tokens) {
    if (heads.head_dim != 64 && heads.head_dim != 128)
        cuda_unsupported("attention", "head_dim 64 or 128", heads.head_dim);
    if (heads.num_kv_heads <= 0)
        cuda_unsupported("attention", "at least one kv head", heads.num_kv_heads);
    if (heads.num_heads <= 0 || heads.num_heads % heads.num_kv_heads != 0)
        cuda_unsupported("attention", "heads that are a multiple of kv heads", heads.num_heads);
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

// The kernels in use. NULL until the first use, which selects what fits the GPU best.
static const char *path;

// sm90 if it works on every rank's GPU: other kernels give other bits
static const char *best_path(const char *wrong) {
    const int worst = comm_max(!wrong ? 0 : *wrong ? 2 + comm_rank() : 1);
    if (wrong && *wrong)
        warning("the attention kernels of sm90 %s on this GPU; sm80's take their place", wrong);
    else if (worst > 1)
        warning("the attention kernels of sm90 fail on the GPU of rank %d; sm80's take their place",
                worst - 2);
    return worst ? "sm80" : "sm90";
}

int attention_select(const char *name) {
    const bool probe = strcmp(name, "auto") == 0, choose = probe || strcmp(name, "unprobed") == 0;
    // even if the name decides: other ranks may have been given another name
    const char *best = best_path(!choose                 ? NULL
                                 : !attention_has_sm90() ? ""
                                 : probe                 ? probe_attention()
                                                         : NULL);
    if (choose)
        path = best;
    else if (strcmp(name, "sm80") == 0)
        path = "sm80";
    else if (strcmp(name, "sm90") == 0 && attention_has_sm90())
        path = "sm90";
    else
        return -1;
    return 0;
}

const char *attention_describe(void) {
    if (!path) path = attention_has_sm90() ? "sm90" : "sm80";
    return path;
}

static AttentionBatch make_batch(const floatX *qkv, const VarlenInfo *docs, HeadShape heads) {
    const int64_t tokens = docs->total_tokens, segments = docs->num_segments;
    assert(tokens == 0 || (segments > 0 && docs->work));
    return {make_shape(heads, tokens),
            heads.head_dim,
            docs->work,
            qkv,
            forward_items(tokens, segments),
            backward_items(tokens, segments)};
}

void attention_forward(floatX *out, real *lse, const floatX *qkv, const VarlenInfo *docs,
                       HeadShape heads) {
    const AttentionBatch batch = make_batch(qkv, docs, heads);
    if (docs->total_tokens == 0) return;
    (sm90() ? attention_forward_sm90 : attention_forward_sm80)(out, lse, batch);
}

void attention_backward(floatX *dqkv, real *delta, const floatX *dout, const floatX *qkv,
                        const floatX *out, const real *lse, const int32_t *position_ids,
                        const real *rope_table, const VarlenInfo *docs, HeadShape heads) {
    const AttentionBatch batch = make_batch(qkv, docs, heads);
    if (docs->total_tokens == 0) return;
    (sm90() ? attention_backward_sm90 : attention_backward_sm80)(dqkv, {delta, dout, out, lse},
                                                                 {position_ids, rope_table}, batch);
}
