#include "batch.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/memory.h"

const char *layout_name(Layout layout) {
    static const char *const names[] = {"packed", "padded", "rows", "repad", "shared", "cached"};
    return (unsigned)layout < sizeof names / sizeof *names ? names[layout] : "unknown";
}

// The arrays of rows, then the arrays of segments
enum { ROW_ARRAYS = 8, ARRAYS = 13 };
static int32_t **batch_array(Batch *b, int i) {
    int32_t **const arrays[ARRAYS] = {
        &b->tokens,       &b->targets,    &b->position_ids, &b->token_order, &b->sort_scratch,
        &b->head_rows,    &b->real_rows,  &b->cache_rows,   &b->cu_seqlens,  &b->real_cu_seqlens,
        &b->shared_first, &b->shared_len, &b->doc_runs};
    return arrays[i];
}

void batch_init(Batch *b, int32_t micro_batch_tokens, int32_t max_segments) {
    assert(micro_batch_tokens > 0 && micro_batch_tokens <= BATCH_MAX_ROWS);
    assert(max_segments > 0 && max_segments < INT32_MAX);
    const size_t rows = (size_t)micro_batch_tokens, ends = (size_t)max_segments + 1;
    *b = (Batch){.micro_batch_tokens = micro_batch_tokens, .max_segments = max_segments};
    for (int i = 0; i < ARRAYS; i++)
        *batch_array(b, i) = host_calloc(i < ROW_ARRAYS ? rows : ends, sizeof(int32_t), "a batch");
    b->weights = host_calloc(rows, sizeof(float), "a batch");
}

void batch_free(Batch *b) {
    for (int i = 0; i < ARRAYS; i++) free(*batch_array(b, i));
    free(b->weights);
    free(b->runs);
    free(b->run_weights);
    free(b->pairs);
    *b = (Batch){0};
}

// ---- Filling ------------------------------------------------------------------------------------

// Radix sort, least significant digit first: one pass for up to 2048 ids, two for up to 4 million.
static void batch_sort_tokens(Batch *b) {
    enum { BITS = 11, BUCKETS = 1 << BITS };
    int32_t largest = 0;
    for (int32_t i = 0; i < b->total_tokens; i++) {
        assert(b->tokens[i] >= 0);
        if (b->tokens[i] > largest) largest = b->tokens[i];
        b->token_order[i] = i;
    }
    for (int shift = 0; shift < 31 && (largest >> shift) > 0; shift += BITS) {
        int32_t start[BUCKETS + 1] = {0}, *from = b->token_order, *sorted = b->sort_scratch;
        for (int32_t i = 0; i < b->total_tokens; i++)
            start[(b->tokens[i] >> shift) % BUCKETS + 1]++;
        for (int k = 0; k < BUCKETS; k++) start[k + 1] += start[k];
        for (int32_t i = 0; i < b->total_tokens; i++)
            sorted[start[(b->tokens[from[i]] >> shift) % BUCKETS]++] = from[i];
        b->token_order = sorted;
        b->sort_scratch = from;
    }
}

static void batch_clear(Batch *b, Layout layout) {
    b->layout = layout;
    b->num_docs = b->num_runs = b->num_pairs = b->doc_runs[0] = 0;
    b->total_tokens = b->num_segments = b->max_seqlen = b->num_targets = 0;
    b->real_tokens = b->num_head_rows = b->num_shared = 0;
    b->masked = b->weighted = false;
    b->num_real_rows = b->num_real_segments = b->real_max_seqlen = 0;
    b->cu_seqlens[0] = b->real_cu_seqlens[0] = 0;
}

// The target of token i of a document; -1: none. The last token of a document has none:
//
//   tokens    the cat sat <eos>|one two <eos>
//   targets   cat sat <eos>  -1|two <eos>  -1
//
// In the buffer `one` follows <eos>, but no text ever continues that way: to predict it would train
// the model on an accident of the packing. A piece of a split document does continue: next_token.
static int32_t target_of(const DocView *doc, int32_t i) {
    return doc->targets          ? doc->targets[i]
           : i + 1 < doc->length ? doc->tokens[i + 1]
                                 : doc->next_token;
}

// Adds a target to the runs of the document that is appended; runs are of rows at first.
static void batch_add_to_run(Batch *b, int32_t row, float weight) {
    const int32_t n = b->num_runs;
    if (n > b->doc_runs[b->num_docs] && b->run_weights[n - 1] == weight &&
        row == b->runs[2 * n - 2] + b->runs[2 * n - 1]) {
        b->runs[2 * n - 1]++;
        return;
    }
    array_grow(b->runs, &b->run_capacity, 2 * (size_t)n + 2, "a batch");
    array_grow(b->run_weights, &b->run_weight_capacity, (size_t)n + 1, "a batch");
    b->runs[2 * n] = row;
    b->runs[2 * n + 1] = 1;
    b->run_weights[b->num_runs++] = weight;
}

// Appends the tokens and targets of a document from its first own one on; batch_end_segment sets
// its positions. The targets of the tokens that it borrows are added to the rows from shared_first
// on; tokens in the cache have no rows.
static void batch_append(Batch *b, const DocView *doc, int32_t shared_first) {
    const int32_t n = doc->length - doc->shared_len;
    assert(n >= 0 && n <= b->micro_batch_tokens - b->total_tokens && b->num_docs < b->max_segments);
    memcpy(b->tokens + b->total_tokens, doc->tokens + doc->shared_len, (size_t)n * sizeof(int32_t));
    for (int32_t i = b->layout == LAYOUT_CACHED ? doc->shared_len : 0; i < doc->length; i++) {
        const bool own = i >= doc->shared_len;
        const int32_t row = own ? b->total_tokens + i - doc->shared_len : shared_first + i,
                      target = target_of(doc, i);
        assert(own || b->tokens[row] == doc->tokens[i]);
        if (own) b->targets[row] = -1, b->weights[row] = 0;
        if (target < 0) continue;
        assert(own || b->targets[row] < 0 || b->targets[row] == target);
        b->num_targets += b->targets[row] < 0;
        b->targets[row] = target;
        b->weights[row] += doc->weights ? doc->weights[i] : 1;
        batch_add_to_run(b, row, doc->weights ? doc->weights[i] : 1);
    }
    b->doc_runs[++b->num_docs] = b->num_runs;
    b->masked |= doc->targets != NULL && n > 0;
    b->weighted |= doc->weights != NULL || (b->layout == LAYOUT_SHARED && doc->shared_len > 0);
    b->total_tokens += n;
    b->real_tokens += n;
}

// Adds padding rows up to `end`.
static void batch_fill_to(Batch *b, int32_t end) {
    assert(end >= b->total_tokens && end <= b->micro_batch_tokens);
    for (int32_t i = b->total_tokens; i < end; i++) {
        b->tokens[i] = 0;
        b->targets[i] = -1;
        b->weights[i] = 0;
    }
    b->total_tokens = end;
}

// Ends a segment at row `end`; its positions start after the tokens that it borrows.
static void batch_end_segment(Batch *b, int32_t end, int32_t shared_first, int32_t shared_len) {
    const int32_t start = b->cu_seqlens[b->num_segments], n = end - start;
    assert(n >= 0 && b->num_segments < b->max_segments);
    for (int32_t i = 0; i < n; i++) b->position_ids[start + i] = shared_len + i;
    b->shared_first[b->num_segments] = shared_first;
    b->shared_len[b->num_segments] = shared_len;
    b->num_shared += shared_len > 0;
    b->cu_seqlens[++b->num_segments] = end;
    if (shared_len + n > b->max_seqlen) b->max_seqlen = shared_len + n;
}

// repad: the n rows from `start` on are a segment of attention.
static void batch_add_real_rows(Batch *b, int32_t start, int32_t n) {
    for (int32_t i = 0; i < n; i++) b->real_rows[b->num_real_rows++] = start + i;
    b->real_cu_seqlens[++b->num_real_segments] = b->num_real_rows;
    if (n > b->real_max_seqlen) b->real_max_seqlen = n;
}

// The rows with a target, and padding
static void batch_list_head_rows(Batch *b, bool padded, const DocView *docs, int32_t row_len) {
    const int32_t real = b->layout == LAYOUT_ROWS ? b->real_tokens : b->total_tokens;
    int32_t *const index = b->sort_scratch;  // of a row in head_rows
    for (int32_t i = 0; i < b->total_tokens; i++) {
        index[i] = b->num_head_rows;
        if (b->targets[i] >= 0 || i >= real || (padded && i % row_len >= docs[i / row_len].length))
            b->head_rows[b->num_head_rows++] = i;
    }
    if (b->num_head_rows == 0 && b->total_tokens > 0) b->head_rows[b->num_head_rows++] = 0;
    for (int32_t k = 0; k < b->num_runs; k++) b->runs[2 * k] = index[b->runs[2 * k]];
}

void batch_fill(Batch *b, Layout layout, const DocView *docs, int n, int32_t row_len) {
    const bool padded = layout == LAYOUT_PADDED || layout == LAYOUT_REPAD;
    int32_t leader = 0;  // shared: its first row
    assert(layout == LAYOUT_PACKED || layout == LAYOUT_SHARED || row_len > 0);
    batch_clear(b, layout);
    for (int i = 0; i < n; i++) {
        DocView doc = docs[i];
        const int32_t start = b->total_tokens;
        if (layout != LAYOUT_SHARED) doc.shared_len = 0;
        if (doc.shared_len == 0) leader = start;
        batch_append(b, &doc, leader);
        assert(!padded || doc.length <= row_len);
        if (padded) batch_fill_to(b, start + row_len);
        if (layout == LAYOUT_REPAD) batch_add_real_rows(b, start, doc.length);
        if (layout != LAYOUT_ROWS)
            batch_end_segment(b, b->total_tokens, doc.shared_len ? leader : 0, doc.shared_len);
    }
    if (layout == LAYOUT_ROWS) {
        batch_fill_to(b, (b->total_tokens + row_len - 1) / row_len * row_len);
        for (int32_t end = row_len; end <= b->total_tokens; end += row_len)
            batch_end_segment(b, end, 0, 0);
    }
    batch_list_head_rows(b, padded, docs, row_len);
    batch_sort_tokens(b);
}

void batch_pack(Batch *b, const DocView *docs, int n) { batch_fill(b, LAYOUT_PACKED, docs, n, 0); }

void batch_pack_cached(Batch *b, const DocView *docs, const int32_t *first_rows, int n) {
    batch_clear(b, LAYOUT_CACHED);
    for (int i = 0; i < n; i++) {
        int32_t row = b->total_tokens;
        batch_append(b, &docs[i], 0);
        batch_end_segment(b, b->total_tokens, first_rows[i], docs[i].shared_len);
        while (row < b->total_tokens) b->cache_rows[row++] = first_rows[i];
    }
    batch_list_head_rows(b, false, docs, 0);
    batch_sort_tokens(b);
}

void batch_spread_losses(const Batch *b, float *losses) {
    int32_t i = b->num_head_rows;
    for (int32_t t = b->total_tokens - 1; t >= 0; t--)
        losses[t] = i > 0 && b->head_rows[i - 1] == t ? losses[--i] : 0;
}

// ---- Checking -----------------------------------------------------------------------------------

// cu (count + 1) starts at 0, never decreases and ends at total; the longest segment has
// max_seqlen, with what it shares. shared NULL: nothing
static bool segments_are_valid(const int32_t *cu, const int32_t *shared, int32_t count,
                               int32_t total, int32_t max_seqlen) {
    int32_t longest = 0;
    if (cu[0] != 0 || cu[count] != total) return false;
    for (int32_t i = 0; i < count; i++) {
        const int32_t n = cu[i + 1] - cu[i] + (shared ? shared[i] : 0);
        if (cu[i + 1] < cu[i]) return false;
        if (n > longest) longest = n;
    }
    return longest == max_seqlen;
}

// Borrowers share whole tiles of their leader's rows, ever fewer.
static bool shared_rows_are_valid(const Batch *b) {
    int32_t first = 0, most = 0, num_shared = 0;  // of the rows that a document may share
    for (int32_t s = 0; s < b->num_segments; s++) {
        const int32_t n = b->shared_len[s], rows = b->cu_seqlens[s + 1] - b->cu_seqlens[s];
        if (n == 0) first = b->cu_seqlens[s], most = rows - 1;
        if (n < 0 || n % SHARED_TILE_TOKENS != 0 || b->shared_first[s] != (n ? first : 0) ||
            (n > 0 && (n > most || rows == 0 || b->layout != LAYOUT_SHARED)))
            return false;
        if (n > 0) most = n, num_shared++;
    }
    return num_shared == b->num_shared;
}

// The texts have rows of the cache one after another, and the tokens of a text know its first row.
static bool cache_rows_are_valid(const Batch *b) {
    int32_t free_row = 0, num_cached = 0;
    for (int32_t s = 0; s < b->num_segments; s++) {
        const int32_t rows = b->cu_seqlens[s + 1] - b->cu_seqlens[s], first = b->shared_first[s],
                      room = b->micro_batch_tokens - rows - first;
        if (first < free_row || b->shared_len[s] < 0 || b->shared_len[s] > room) return false;
        for (int32_t i = b->cu_seqlens[s]; i < b->cu_seqlens[s + 1]; i++)
            if (b->cache_rows[i] != first) return false;
        free_row = first + b->shared_len[s] + rows;
        num_cached += b->shared_len[s] > 0;
    }
    return num_cached == b->num_shared;
}

// Row i, in segment s: ids are in the vocabulary, positions restart with each segment, only targets
// have weights, and token_order is sorted by (token, row), so that no row is in it twice.
static bool row_is_valid(const Batch *b, int32_t s, int32_t i, int vocab_size) {
    const int32_t at = b->token_order[i], before = i > 0 ? b->token_order[i - 1] : -1;
    return b->tokens[i] >= 0 && b->tokens[i] < vocab_size && b->targets[i] >= -1 &&
           b->targets[i] < vocab_size &&
           b->position_ids[i] == i - b->cu_seqlens[s] + b->shared_len[s] &&
           (b->targets[i] >= 0 && b->weighted ? isfinite(b->weights[i])
                                              : b->weights[i] == (b->targets[i] >= 0)) &&
           at >= 0 && at < b->total_tokens &&
           (i == 0 || b->tokens[before] < b->tokens[at] ||
            (b->tokens[before] == b->tokens[at] && before < at));
}

// repad: segment s of real_rows is the beginning of segment s.
static bool real_rows_are_valid(const Batch *b) {
    for (int32_t s = 0; s < b->num_real_segments; s++)
        for (int32_t i = b->real_cu_seqlens[s]; i < b->real_cu_seqlens[s + 1]; i++) {
            const int32_t row = b->cu_seqlens[s] + i - b->real_cu_seqlens[s];
            if (b->real_rows[i] != row || row >= b->cu_seqlens[s + 1]) return false;
        }
    return true;
}

static bool head_rows_are_valid(const Batch *b) {
    const int32_t n = b->num_targets + b->total_tokens - b->real_tokens;
    int32_t targets = 0;
    if (b->num_head_rows != (n == 0 && b->total_tokens > 0 ? 1 : n)) return false;
    for (int32_t i = 0; i < b->num_head_rows; i++) {
        const int32_t row = b->head_rows[i];
        if (row <= (i > 0 ? b->head_rows[i - 1] : -1) || row >= b->total_tokens ||
            (n > 0 && b->targets[row] < 0 && b->tokens[row] != 0))
            return false;
        targets += b->targets[row] >= 0;
    }
    return targets == b->num_targets;
}

static bool runs_are_valid(const Batch *b) {
    int32_t k = 0;
    for (int32_t i = 0; i < b->num_docs; i++)
        for (; k < b->doc_runs[i + 1]; k++)
            if (b->runs[2 * k] < 0 || b->runs[2 * k + 1] < 1 ||
                b->runs[2 * k + 1] > b->num_head_rows - b->runs[2 * k])
                return false;
    return k == b->num_runs && b->doc_runs[b->num_docs] == k &&
           (b->num_pairs == 0 || 2 * b->num_pairs == b->num_docs);
}

bool batch_is_valid(const Batch *b, int vocab_size) {
    const bool repad = b->layout == LAYOUT_REPAD;
    int32_t targets = 0;
    if (b->total_tokens > b->micro_batch_tokens || b->num_segments < 0 ||
        b->num_segments > b->max_segments || b->num_real_rows != (repad ? b->real_tokens : 0) ||
        b->num_real_segments != (repad ? b->num_segments : 0) ||
        !segments_are_valid(b->cu_seqlens, b->shared_len, b->num_segments, b->total_tokens,
                            b->max_seqlen) ||
        !segments_are_valid(b->real_cu_seqlens, NULL, b->num_real_segments, b->num_real_rows,
                            b->real_max_seqlen) ||
        !(b->layout == LAYOUT_CACHED ? cache_rows_are_valid(b) : shared_rows_are_valid(b)))
        return false;
    for (int32_t s = 0, i = 0; s < b->num_segments; s++)
        for (; i < b->cu_seqlens[s + 1]; i++) {
            if (!row_is_valid(b, s, i, vocab_size)) return false;
            targets += b->targets[i] >= 0;
        }
    return targets == b->num_targets && real_rows_are_valid(b) && head_rows_are_valid(b) &&
           runs_are_valid(b);
}
