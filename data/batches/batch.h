// One micro-batch: documents laid out in one 1D buffer of tokens, in one of four layouts.
//
//   packed   documents one after another; cu_seqlens = document ends; no padding, unless
//            batch_complete puts some at the end to make batches of one size
//   padded   each document in a row of row_len tokens, padding after it; cu_seqlens = 0, S, 2S, ...
//   rows     documents concatenated and cut every row_len tokens; attention crosses documents
//   repad    padded, plus the list of real rows that attention gathers and scatters
//
// Targets are shifted inside the document in every layout, so that the same documents have the same
// number of targets whatever the layout: a document's last token has none (-1), a chunk of a split
// document keeps its true next token. Padding rows have token 0, target -1, positions running on.
// No file is touched here; batch_check is the one predicate that says what a Batch must satisfy.
#ifndef UNPAD_BATCH_H
#define UNPAD_BATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "../base/error.h"

typedef enum { LAYOUT_PACKED, LAYOUT_PADDED, LAYOUT_ROWS, LAYOUT_REPAD } Layout;

typedef struct {
    const int32_t *tokens;
    int32_t length;
    int32_t next_token;  // the true next token after a chunk of a split document, or -1
} DocView;

typedef struct {
    Layout layout;            // set by the filling call
    int32_t total_tokens;     // T: rows of the buffer that the layers work on, padding included
    int32_t num_docs;         // segments of cu_seqlens
    int32_t max_seqlen;       // of the longest segment
    int32_t num_targets;      // rows with a target
    int32_t real_tokens;      // rows that are not padding
    int32_t num_real_docs;    // documents (or chunks of them) placed
    int64_t attention_pairs;  // sum of len * (len + 1) / 2 over the segments attention computes
    int32_t *tokens;          // (capacity) like the next three
    int32_t *targets;         // -1: no target
    int32_t *position_ids;
    int32_t *token_order;  // positions sorted by (token, position), for embedding_backward
    int32_t *cu_seqlens;   // (max_docs + 1)
    // repad only, num_real_rows = 0 otherwise: attention runs on the gathered real rows
    int32_t num_real_rows;
    int32_t num_real_segments;
    int32_t real_max_seqlen;
    int32_t *real_rows;        // (capacity)
    int32_t *real_cu_seqlens;  // (max_docs + 1)
    int32_t capacity, max_docs;
    int32_t *sort_scratch;  // (capacity)
} Batch;

// The sums that batch_check compares stay inside int32 below this many rows.
enum { BATCH_MAX_ROWS = 1 << 30 };

const char *layout_name(Layout layout);

// -------------------------------------------------------------------------------------------------
// Memory: allocated once; filling a Batch allocates nothing

void batch_init(Batch *b, int32_t capacity, int32_t max_docs);
void batch_free(Batch *b);

// -------------------------------------------------------------------------------------------------
// Filling

// token_order by least significant digit first: one pass up to 2048 ids, two up to 4 million.
void batch_sort_tokens(Batch *b);

// Documents one after another, each its own segment.
void batch_pack(Batch *b, const DocView *docs, int n);

// One document a row; every segment is a whole row, as attention on a padded batch sees it.
void batch_pad(Batch *b, const DocView *docs, int n, int32_t row_len);

// As padded, but attention gathers the real rows, works on them packed and scatters back.
void batch_repad(Batch *b, const DocView *docs, int n, int32_t row_len);

// Segments that batch_complete adds are short: attention over padding costs next to nothing.
enum { BATCH_PAD_SEGMENT = 128 };

// Makes a packed batch one of total_tokens rows and num_docs segments: segments of padding behind
// the documents, then empty ones. False, and nothing has changed, where that is not possible.
bool batch_complete(Batch *b, int32_t total_tokens, int32_t num_docs);
void batch_fill(Batch *b, Layout layout, const DocView *docs, int n, int32_t row_len);

// -------------------------------------------------------------------------------------------------
// The sanity predicate

// Everything that must hold of a filled Batch. Never reads outside it, whatever its fields say.
bool batch_check(const Batch *b, int vocab_size, Error *err);

#endif
