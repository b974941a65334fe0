#include "batch.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../base/error.h"
#include "../base/memory.h"

const char *layout_name(Layout layout) {
    static const char *const names[] = {"packed", "padded", "rows", "repad"};
    return (unsigned)layout < 4 ? names[layout] : "unknown";
}

void batch_init(Batch *b, int32_t micro_batch_tokens, int32_t max_docs) {
    assert(micro_batch_tokens > 0 && micro_batch_tokens <= BATCH_MAX_ROWS);
    assert(max_docs > 0 && max_docs < INT32_MAX);
    const size_t rows = (size_t)micro_batch_tokens, docs = (size_t)max_docs + 1;
    *b = (Batch){.micro_batch_tokens = micro_batch_tokens, .max_docs = max_docs};
    b->tokens = host_calloc(rows, sizeof(int32_t), "batch tokens");
    b->targets = host_calloc(rows, sizeof(int32_t), "batch targets");
    b->position_ids = host_calloc(rows, sizeof(int32_t), "batch positions");
    b->token_order = host_calloc(rows, sizeof(int32_t), "batch token order");
    b->sort_scratch = host_calloc(rows, sizeof(int32_t), "batch token order");
    b->real_rows = host_calloc(rows, sizeof(int32_t), "batch real rows");
    b->cu_seqlens = host_calloc(docs, sizeof(int32_t), "batch cu_seqlens");
    b->real_cu_seqlens = host_calloc(docs, sizeof(int32_t), "batch cu_seqlens");
}

void batch_free(Batch *b) {
    free(b->tokens);
    free(b->targets);
    free(b->position_ids);
    free(b->token_order);
    free(b->sort_scratch);
    free(b->real_rows);
    free(b->cu_seqlens);
    free(b->real_cu_seqlens);
    free(b->cache_rows);
    free(b->work);
    free(b->real_work);
    *b = (Batch){0};
}

// ------------------------------------------------------------------------------------------------
// Filling

// Stable counting sort of `src` by 11 bits of the token at each position.
static void batch_sort_pass(int32_t *dst, const int32_t *src, const int32_t *tokens, int32_t n,
                            int shift) {
    enum { BUCKETS = 1 << 11 };
    int32_t start[BUCKETS] = {0};
    int32_t sum = 0;
    for (int32_t i = 0; i < n; i++) start[(tokens[src[i]] >> shift) & (BUCKETS - 1)]++;
    for (int k = 0; k < BUCKETS; k++) {
        int32_t count = start[k];
        start[k] = sum;
        sum += count;
    }
    for (int32_t i = 0; i < n; i++)
        dst[start[(tokens[src[i]] >> shift) & (BUCKETS - 1)]++] = src[i];
}

// Radix sort, least significant digit first: one pass for up to 2048 ids, two for up to 4 million.
static void batch_sort_tokens(Batch *b) {
    int32_t largest = 0;
    for (int32_t i = 0; i < b->total_tokens; i++) {
        assert(b->tokens[i] >= 0);
        if (b->tokens[i] > largest) largest = b->tokens[i];
        b->token_order[i] = i;
    }
    for (int shift = 0; shift < 31 && (largest >> shift) > 0; shift += 11) {
        batch_sort_pass(b->sort_scratch, b->token_order, b->tokens, b->total_tokens, shift);
        int32_t *sorted = b->sort_scratch;
        b->sort_scratch = b->token_order;
        b->token_order = sorted;
    }
}

static void batch_clear(Batch *b, Layout layout) {
    b->layout = layout;
    b->total_tokens = b->num_docs = b->max_seqlen = b->num_targets = 0;
    b->real_tokens = b->num_real_docs = 0;
    b->masked = false;
    b->num_real_rows = b->num_real_segments = b->real_max_seqlen = 0;
    b->attention_pairs = 0;
    b->num_work = b->num_real_work = 0;
    b->cu_seqlens[0] = b->real_cu_seqlens[0] = 0;
}

// Appends the tokens and targets of a document; batch_end_segment sets its positions.
static void batch_append(Batch *b, const DocView *doc) {
    const int32_t at = b->total_tokens, n = doc->length;
    assert(n >= 0 && n <= b->micro_batch_tokens - at);
    b->num_real_docs++;
    if (n == 0) return;
    memcpy(b->tokens + at, doc->tokens, (size_t)n * sizeof(int32_t));
    memcpy(b->targets + at, doc->tokens + 1, (size_t)(n - 1) * sizeof(int32_t));
    b->targets[at + n - 1] = doc->next_token;
    if (doc->targets) memcpy(b->targets + at, doc->targets, (size_t)n * sizeof(int32_t));
    b->masked |= doc->targets != NULL;
    for (int32_t i = at; i < at + n; i++) b->num_targets += b->targets[i] >= 0;
    b->total_tokens += n;
    b->real_tokens += n;
}

// Ends a segment at the current end of the buffer; its positions start at 0.
static void batch_end_segment(Batch *b) {
    const int32_t start = b->cu_seqlens[b->num_docs], n = b->total_tokens - start;
    assert(n >= 0 && b->num_docs < b->max_docs);
    for (int32_t i = 0; i < n; i++) b->position_ids[start + i] = i;
    b->cu_seqlens[++b->num_docs] = b->total_tokens;
    if (n > b->max_seqlen) b->max_seqlen = n;
    b->attention_pairs += (int64_t)n * (n + 1) / 2;
}

// Adds padding rows up to `end`.
static void batch_fill_to(Batch *b, int32_t end) {
    assert(end >= b->total_tokens && end <= b->micro_batch_tokens);
    for (int32_t i = b->total_tokens; i < end; i++) {
        b->tokens[i] = 0;
        b->targets[i] = -1;
    }
    b->total_tokens = end;
}

void batch_pack(Batch *b, const DocView *docs, int n) {
    batch_clear(b, LAYOUT_PACKED);
    for (int i = 0; i < n; i++) {
        batch_append(b, &docs[i]);
        batch_end_segment(b);
    }
    batch_sort_tokens(b);
}

static void batch_pad(Batch *b, const DocView *docs, int n, int32_t row_len) {
    batch_clear(b, LAYOUT_PADDED);
    assert(row_len > 0 && (int64_t)n * row_len <= b->micro_batch_tokens);
    for (int i = 0; i < n; i++) {
        assert(docs[i].length <= row_len);
        batch_append(b, &docs[i]);
        batch_fill_to(b, (i + 1) * row_len);
        batch_end_segment(b);
    }
    batch_sort_tokens(b);
}

// Documents concatenated; every row_len tokens are one segment. The last row is padded to its end.
static void batch_rows(Batch *b, const DocView *docs, int n, int32_t row_len) {
    batch_clear(b, LAYOUT_ROWS);
    assert(row_len > 0);
    for (int i = 0; i < n; i++) batch_append(b, &docs[i]);
    const int32_t end = (b->total_tokens + row_len - 1) / row_len * row_len;
    batch_fill_to(b, end);
    for (b->total_tokens = row_len; b->total_tokens <= end; b->total_tokens += row_len)
        batch_end_segment(b);
    b->total_tokens = end;
    batch_sort_tokens(b);
}

static void batch_repad(Batch *b, const DocView *docs, int n, int32_t row_len) {
    batch_pad(b, docs, n, row_len);
    b->layout = LAYOUT_REPAD;
    b->attention_pairs = 0;
    for (int i = 0; i < n; i++) {
        const int32_t length = docs[i].length;
        for (int32_t k = 0; k < length; k++) b->real_rows[b->num_real_rows++] = i * row_len + k;
        b->real_cu_seqlens[++b->num_real_segments] = b->num_real_rows;
        if (length > b->real_max_seqlen) b->real_max_seqlen = length;
        b->attention_pairs += (int64_t)length * (length + 1) / 2;
    }
}

bool batch_complete(Batch *b, int32_t total_tokens, int32_t num_docs, int32_t max_seqlen) {
    assert(max_seqlen > 0);
    const int32_t rows = total_tokens - b->total_tokens;
    const int32_t most = max_seqlen < BATCH_PAD_SEGMENT ? max_seqlen : BATCH_PAD_SEGMENT;
    const int32_t segments = (rows + most - 1) / most;
    if (b->layout != LAYOUT_PACKED || total_tokens > b->micro_batch_tokens ||
        num_docs > b->max_docs || rows < 0 || segments > num_docs - b->num_docs)
        return false;
    b->num_work = 0;
    while (b->total_tokens < total_tokens) {
        const int32_t left = total_tokens - b->total_tokens;
        batch_fill_to(b, b->total_tokens + (left < most ? left : most));
        batch_end_segment(b);
    }
    while (b->num_docs < num_docs) batch_end_segment(b);
    batch_sort_tokens(b);
    return true;
}

void batch_fill(Batch *b, Layout layout, const DocView *docs, int n, int32_t row_len) {
    if (layout == LAYOUT_PACKED)
        batch_pack(b, docs, n);
    else if (layout == LAYOUT_PADDED)
        batch_pad(b, docs, n, row_len);
    else if (layout == LAYOUT_ROWS)
        batch_rows(b, docs, n, row_len);
    else
        batch_repad(b, docs, n, row_len);
}

// ------------------------------------------------------------------------------------------------
// Checking

#define batch_bad(err_, ...) error_set(err_, EXIT_BAD_INPUT, "", "batch: " __VA_ARGS__)

// Checks cu (count + 1) over `total` rows: starts at 0, never decreases, ends at total, the longest
// segment has max_seqlen. *pairs: sum of len * (len + 1) / 2.
static bool batch_check_segments(const int32_t *cu, int32_t count, int32_t total,
                                 int32_t max_seqlen, int64_t *pairs, const char *name, Error *err) {
    int32_t longest = 0;
    *pairs = 0;
    if (cu[0] != 0) return batch_bad(err, "%s[0] is %d", name, cu[0]);
    for (int32_t i = 0; i < count; i++) {
        if (cu[i + 1] < cu[i] || cu[i + 1] > total)
            return batch_bad(err, "%s[%d] is %d, after %d, of %d rows", name, i + 1, cu[i + 1],
                             cu[i], total);
        const int64_t n = cu[i + 1] - cu[i];
        if (n > longest) longest = (int32_t)n;
        *pairs += n * (n + 1) / 2;
    }
    if (cu[count] != total)
        return batch_bad(err, "%s ends at %d, expected %d rows", name, cu[count], total);
    if (longest != max_seqlen)
        return batch_bad(err, "longest segment of %s is %d, expected %d", name, longest,
                         max_seqlen);
    return true;
}

// Tokens and targets are in the vocabulary, positions restart with each segment, num_targets is
// right.
static bool batch_check_rows(const Batch *b, int vocab_size, Error *err) {
    int32_t targets = 0;
    for (int32_t s = 0; s < b->num_docs; s++) {
        const int32_t start = b->cu_seqlens[s];
        for (int32_t i = start; i < b->cu_seqlens[s + 1]; i++) {
            const int32_t token = b->tokens[i], target = b->targets[i];
            if (token < 0 || token >= vocab_size || target < -1 || target >= vocab_size)
                return batch_bad(err, "row %d: token %d, target %d of %d ids", i, token, target,
                                 vocab_size);
            if (b->position_ids[i] != i - start)
                return batch_bad(err, "row %d: position %d, expected %d", i, b->position_ids[i],
                                 i - start);
            targets += target >= 0;
        }
    }
    const int32_t at_least = b->masked ? 0 : b->real_tokens - b->num_real_docs;
    if (targets == b->num_targets && targets >= at_least && targets <= b->real_tokens) return true;
    return batch_bad(err, "%d targets, expected %d, of %d tokens in %d docs", targets,
                     b->num_targets, b->real_tokens, b->num_real_docs);
}

// token_order sorts by (token, row): strictly increasing pairs prove that, and that it is a
// permutation.
static bool batch_check_order(const Batch *b, Error *err) {
    for (int32_t i = 0; i < b->total_tokens; i++) {
        const int32_t at = b->token_order[i], before = i > 0 ? b->token_order[i - 1] : 0;
        bool good = at >= 0 && at < b->total_tokens;
        if (good && i > 0)
            good = b->tokens[before] < b->tokens[at] ||
                   (b->tokens[before] == b->tokens[at] && before < at);
        if (!good) return batch_bad(err, "token_order[%d] is %d, after %d", i, at, before);
    }
    return true;
}

static bool batch_is_padding(const Batch *b, int32_t row) {
    return b->tokens[row] == 0 && b->targets[row] == -1;
}

// A row whose target is the next row's token is inside a document; any other ends one. With a mask,
// one without a target may be either.
static bool batch_is_inside(const Batch *b, int32_t row) {
    if (row + 1 >= b->total_tokens) return false;
    return b->targets[row] < 0 ? b->masked : b->targets[row] == b->tokens[row + 1];
}

// packed: only the last row of a segment may end a document; the segments after the documents are
// padding.
static bool batch_check_packed(const Batch *b, Error *err) {
    if (b->num_real_docs > b->num_docs || b->cu_seqlens[b->num_real_docs] != b->real_tokens)
        return batch_bad(err, "%d documents of %d tokens in %d of %d", b->num_real_docs,
                         b->real_tokens, b->num_docs, b->total_tokens);
    for (int32_t i = b->real_tokens; i < b->total_tokens; i++)
        if (!batch_is_padding(b, i)) return batch_bad(err, "row %d is not padding", i);
    for (int32_t s = 0; s < b->num_real_docs; s++)
        for (int32_t i = b->cu_seqlens[s]; i + 1 < b->cu_seqlens[s + 1]; i++)
            if (!batch_is_inside(b, i))
                return batch_bad(err, "row %d: target %d, next token %d", i, b->targets[i],
                                 b->tokens[i + 1]);
    return true;
}

// padded, repad: rows of one length with one document each, and only padding after its last token.
static bool batch_check_padded(const Batch *b, Error *err) {
    int32_t not_padding = 0;
    if ((int64_t)b->num_docs * b->max_seqlen != b->total_tokens || b->num_real_docs != b->num_docs)
        return batch_bad(err, "%d documents, %d rows of %d, %d in all", b->num_real_docs,
                         b->num_docs, b->max_seqlen, b->total_tokens);
    for (int32_t i = 0; i < b->total_tokens; i++) {
        const int32_t row_end = (i / b->max_seqlen + 1) * b->max_seqlen;
        if (!batch_is_padding(b, i)) not_padding++;
        if (i + 1 < row_end && batch_is_inside(b, i)) continue;
        for (i++; i < row_end; i++)
            if (!batch_is_padding(b, i)) return batch_bad(err, "row %d is after its document", i);
        i = row_end - 1;
    }
    if (not_padding <= b->real_tokens &&
        (b->masked || b->real_tokens <= not_padding + b->num_real_docs))
        return true;
    return batch_bad(err, "%d real tokens, %d rows that are not padding", b->real_tokens,
                     not_padding);
}

// rows: rows of one length; at most one end for each document; padding only after the last one.
static bool batch_check_stream(const Batch *b, Error *err) {
    int32_t ends = 0;
    if ((int64_t)b->num_docs * b->max_seqlen != b->total_tokens ||
        b->total_tokens - b->real_tokens >= (b->max_seqlen > 0 ? b->max_seqlen : 1))
        return batch_bad(err, "%d tokens in %d rows of %d, %d in all", b->real_tokens, b->num_docs,
                         b->max_seqlen, b->total_tokens);
    for (int32_t i = 0; i < b->real_tokens; i++)
        ends += i + 1 == b->real_tokens || !batch_is_inside(b, i);
    if (ends > b->num_real_docs)
        return batch_bad(err, "%d documents end, expected at most %d", ends, b->num_real_docs);
    for (int32_t i = b->real_tokens; i < b->total_tokens; i++)
        if (!batch_is_padding(b, i)) return batch_bad(err, "row %d is not padding", i);
    return true;
}

// repad: segment s of real_rows is the beginning of row s, and the rest of that row is padding.
static bool batch_check_real_rows(const Batch *b, Error *err) {
    if (b->num_real_rows != b->real_tokens || b->num_real_segments != b->num_docs)
        return batch_bad(err, "%d real rows of %d, %d segments of %d", b->num_real_rows,
                         b->real_tokens, b->num_real_segments, b->num_docs);
    for (int32_t s = 0; s < b->num_docs; s++) {
        const int32_t start = b->cu_seqlens[s], from = b->real_cu_seqlens[s];
        const int32_t length = b->real_cu_seqlens[s + 1] - from;
        if (length > b->max_seqlen)
            return batch_bad(err, "%d real rows in row %d of %d", length, s, b->max_seqlen);
        for (int32_t k = 0; k < length; k++)
            if (b->real_rows[from + k] != start + k)
                return batch_bad(err, "real_rows[%d] is %d, expected %d", from + k,
                                 b->real_rows[from + k], start + k);
        for (int32_t i = start + length; i < b->cu_seqlens[s + 1]; i++)
            if (!batch_is_padding(b, i))
                return batch_bad(err, "row %d is left out, not padding", i);
    }
    return true;
}

bool batch_check(const Batch *b, int vocab_size, Error *err) {
    int64_t pairs = 0, real_pairs = 0;
    if ((unsigned)b->layout > LAYOUT_REPAD || b->micro_batch_tokens < 1 ||
        b->micro_batch_tokens > BATCH_MAX_ROWS || b->total_tokens < 0 ||
        b->total_tokens > b->micro_batch_tokens || b->num_docs < 0 || b->num_docs > b->max_docs ||
        b->real_tokens < 0 || b->real_tokens > b->total_tokens || b->num_real_docs < 0 ||
        b->num_real_rows < 0 || b->num_real_rows > b->micro_batch_tokens ||
        b->num_real_segments < 0 || b->num_real_segments > b->max_docs)
        return batch_bad(err, "%d rows, %d segments, %d real rows do not fit", b->total_tokens,
                         b->num_docs, b->real_tokens);
    if (!batch_check_segments(b->cu_seqlens, b->num_docs, b->total_tokens, b->max_seqlen, &pairs,
                              "cu_seqlens", err) ||
        !batch_check_rows(b, vocab_size, err) || !batch_check_order(b, err))
        return false;
    const bool good = b->layout == LAYOUT_PACKED ? batch_check_packed(b, err)
                      : b->layout == LAYOUT_ROWS ? batch_check_stream(b, err)
                                                 : batch_check_padded(b, err);
    if (!good) return false;
    if (!batch_check_segments(b->real_cu_seqlens, b->num_real_segments, b->num_real_rows,
                              b->real_max_seqlen, &real_pairs, "real_cu_seqlens", err))
        return false;
    if (b->layout == LAYOUT_REPAD && !batch_check_real_rows(b, err)) return false;
    if (b->layout != LAYOUT_REPAD && b->num_real_rows + b->num_real_segments != 0)
        return batch_bad(err, "real rows in layout %s", layout_name(b->layout));
    if (b->attention_pairs != (b->layout == LAYOUT_REPAD ? real_pairs : pairs))
        return batch_bad(err, "attention_pairs is %lld, expected %lld",
                         (long long)b->attention_pairs, (long long)pairs);
    return true;
}
