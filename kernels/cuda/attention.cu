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

static bool sm90() { return strcmp(attention_describe(), "sm90") == 0; }

static int64_t forward_items(int64_t tokens, int64_t segments) {
    return max_work_items(tokens, segments, sm90() ? UNIT_ROWS : QUERY_TILE);
}
static int key_tile() { return sm90() ? BACKWARD_KEYS : KEY_TILE; }
static int max_pieces(int64_t tokens) {
    return tokens >= 2 * PIECE_BLOCKS * UNIT_ROWS ? MAX_PIECES : 0;
}
static int64_t key_items(int64_t tokens, int64_t segments, int pieces) {
    return max_work_items(tokens, segments, key_tile()) + pieces;
}

size_t attention_work_list_size(int64_t max_tokens, int64_t max_segments) {
    const int64_t keys = key_items(max_tokens, max_segments, max_pieces(max_tokens)),
                  bytes = forward_items(max_tokens, max_segments) * (int64_t)sizeof(WorkItem) +
                          keys * (int64_t)sizeof(KeyItem);
    return NUM_WORK_LISTS + (size_t)bytes / sizeof(int32_t);
}

size_t attention_sums_size(int64_t max_tokens, int head_dim) {
    return (size_t)2 * max_pieces(max_tokens) * BACKWARD_KEYS * head_dim;
}

static int query_blocks(const KeyItem &item) {
    return ceil_div<int>(item.len - item.from, UNIT_ROWS);
}

// Appends an item, or its pieces of `most` to twice as many blocks of queries. Returns the end.
static KeyItem *add_in_pieces(KeyItem *end, KeyItem item, int most, int *slots) {
    const int blocks = query_blocks(item), from = item.from, len = item.len;
    item.pieces = std::max(1, blocks / most), item.slot = *slots;
    for (int p = 0; p < item.pieces; p++) {
        item.piece = p;
        item.from = from + blocks * p / item.pieces * UNIT_ROWS;
        item.len = std::min(len, from + blocks * (p + 1) / item.pieces * UNIT_ROWS);
        *end++ = item;
    }
    if (item.pieces > 1) *slots += item.pieces;
    return end;
}

// Calls f(item, borrowed) for each tile of keys; borrowed: documents after its own see these, too.
template <class F>
static void each_key_tile(const VarlenInfo &docs, F f) {
    const int keys = key_tile();
    for (int doc = 0; doc < docs.num_segments; doc++) {
        const int32_t row = docs.cu_seqlens[doc], own = docs.cu_seqlens[doc + 1] - row;
        const int32_t shared = docs.shared_len ? docs.shared_len[doc] : 0;
        for (int t = 0; t * keys < own; t++) {
            int end = doc + 1;  // of the documents that see the tile's first key
            while (docs.shared_len && end < docs.num_segments &&
                   docs.shared_len[end] > shared + t * keys)
                end++;
            f(KeyItem{row, docs.cu_seqlens[end] - row, t, t * keys, 1, 0, 0}, end > doc + 1);
        }
    }
}

// Sorts items by falling cost. Equal costs are in the order of the buffer: neighbours in the list
// are neighbours in the cache.
template <class Item, class Cost>
static void sort_items(Item *items, Item *end, Cost cost) {
    std::sort(items, end, [=](const Item &a, const Item &b) {
        if (cost(a) != cost(b)) return cost(a) > cost(b);
        return a.start != b.start ? a.start < b.start : a.tile < b.tile;
    });
}

// Tiles that others borrow are divided if one of them takes longer than an SM's share of all work.
// Returns the end of the list.
static KeyItem *add_key_items(KeyItem *items, const VarlenInfo &docs, int num_kv_heads) {
    int64_t blocks = 0;
    int longest = 0, slots = 0;
    KeyItem *end = items;
    each_key_tile(docs, [&](const KeyItem &item, bool borrowed) {
        blocks += query_blocks(item);
        if (borrowed) longest = std::max(longest, query_blocks(item));
    });
    const int64_t share = ceil_div<int64_t>(blocks * num_kv_heads, MAX_PIECES);
    const bool divide = longest > share * PIECES_PER_SM * 9 / 8;
    const int most = divide ? std::max((int)share, (int)PIECE_BLOCKS) : INT32_MAX;
    each_key_tile(docs, [&](const KeyItem &item, bool borrowed) {
        end = add_in_pieces(end, item, borrowed ? most : INT32_MAX, &slots);
    });
    assert(slots * num_kv_heads <= MAX_PIECES);
    sort_items(items, end, query_blocks);
    return end;
}

// `tiles(len)` items for each document of `len` own tokens. Returns the end of the list.
template <class Tiles, class Cost>
static WorkItem *add_items(WorkItem *items, const VarlenInfo &docs, Tiles tiles, Cost cost) {
    WorkItem *end = items;
    for (int doc = 0; doc < docs.num_segments; doc++) {
        const int32_t row = docs.cu_seqlens[doc], own = docs.cu_seqlens[doc + 1] - row;
        const int32_t shared = docs.shared_len ? docs.shared_len[doc] : 0;
        assert(row >= 0 && own >= 0 && shared % SHARED_TILE == 0);
        for (int t = 0; t < tiles(own); t++)
            *end++ = {row - shared, shared + own, t, shared ? docs.shared_first[doc] : 0, shared};
    }
    sort_items(items, end, cost);
    return end;
}

size_t attention_work_list(int32_t *work_host, const int32_t *cu_seqlens_host,
                           const int32_t *shared_first_host, const int32_t *shared_len_host,
                           int num_segments, HeadShape heads) {
    const VarlenInfo docs = {cu_seqlens_host,   NULL,           0, num_segments, 0,
                             shared_first_host, shared_len_host};
    const int consumers = forward_consumers(heads.head_dim);
    const int shared = shared_heads(heads.num_heads / heads.num_kv_heads, consumers);
    WorkItem *items = reinterpret_cast<WorkItem *>(work_host + NUM_WORK_LISTS), *end;
    if (sm90())  // cost: blocks of 64 keys that the last query sees
        end = add_items(
            items, docs,
            [=](int own) { return ceil_div(ceil_div<int>(own, UNIT_ROWS) * shared, consumers); },
            [=](const WorkItem &item) { return last_row_block(item, consumers, shared); });
    else
        end = add_items(
            items, docs, [](int own) { return ceil_div<int>(own, QUERY_TILE); },
            [](const WorkItem &item) {
                const int64_t last = item.shared_len + (item.tile + 1) * (int64_t)QUERY_TILE;
                return ceil_div<int64_t>(std::min<int64_t>(last, item.len), KEY_TILE);
            });
    KeyItem *keys = reinterpret_cast<KeyItem *>(end);
    KeyItem *keys_end = add_key_items(keys, docs, heads.num_kv_heads);
    work_host[FORWARD_ITEMS] = (int32_t)(end - items);
    work_host[BACKWARD_ITEMS] = (int32_t)(keys_end - keys);
    return (size_t)(reinterpret_cast<int32_t *>(keys_end) - work_host);
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
            key_items(tokens, segments,
                      docs->shared_len ? max_pieces(tokens) / heads.num_kv_heads : 0)};
}

void attention_forward(floatX *out, real *lse, const floatX *qkv, const VarlenInfo *docs,
                       HeadShape heads) {
    const AttentionBatch batch = make_batch(qkv, docs, heads);
    if (docs->total_tokens == 0) return;
    (sm90() ? attention_forward_sm90 : attention_forward_sm80)(out, lse, batch);
}

void attention_backward(floatX *dqkv, real *delta, real *sums, const floatX *dout,
                        const floatX *qkv, const floatX *out, const real *lse,
                        const int32_t *position_ids, const real *rope_table, const VarlenInfo *docs,
                        HeadShape heads) {
    const AttentionBatch batch = make_batch(qkv, docs, heads);
    if (docs->total_tokens == 0) return;
    (sm90() ? attention_backward_sm90 : attention_backward_sm80)(
        dqkv, {delta, docs->shared_len ? sums : NULL, dout, out, lse}, {position_ids, rope_table},
        batch);
}
