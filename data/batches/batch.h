// One micro-batch: documents in one 1D buffer of tokens, in one of five layouts, or texts that are
// generated.
//
//   packed   documents one after another; cu_seqlens = document ends; no padding
//   shared   packed, but the leader of documents that begin alike lends them these tokens
//   padded   each document in a row of row_len tokens, padding after it; cu_seqlens = 0, R, 2R ...
//   rows     documents concatenated and cut every row_len tokens; attention crosses documents
//   repad    padded, plus the list of real rows that attention gathers and scatters
//   cached   packed, but the first tokens of each text are in the key-value cache: generation
//
// Targets are shifted inside the document in every layout, so the number of targets does not depend
// on the layout. The last token of a document has none (-1); the last token of a segment has the
// true next token if its document continues; a loss mask removes some. Padding rows have token 0,
// target -1 and consecutive positions. Filling reads no file, and allocates memory for runs alone.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/pair.h"

typedef enum {
    LAYOUT_PACKED,
    LAYOUT_PADDED,
    LAYOUT_ROWS,
    LAYOUT_REPAD,
    LAYOUT_SHARED,
    LAYOUT_CACHED
} Layout;

// A document, or a segment of one
typedef struct {
    const int32_t *tokens;  // (length)
    int32_t length;
    int32_t next_token;  // the token after a segment whose document continues, or -1
    // (length) the target after each token, or -1 where a loss mask excludes it; NULL: no mask, the
    // targets are the next tokens
    const int32_t *targets;
    const float *weights;  // (length) of the targets; NULL: all 1
    // shared only, 0: a leader (VarlenInfo of kernels.h). Else the tokens that the document borrows
    // from the leader before it, a multiple of SHARED_TILE; both have the same token after them.
    // cached: as many of its first tokens are in the cache.
    int32_t shared_len;
} DocView;

enum { SHARED_TILE_TOKENS = 128 };  // SHARED_TILE of kernels.h, which this room does not see

// T = total_tokens
typedef struct {
    Layout layout;          // set by the filling call
    int32_t total_tokens;   // rows that the layers work on, padding included
    int32_t num_segments;   // segments of cu_seqlens
    int32_t max_seqlen;     // length of the longest of them, with what it shares
    int32_t num_targets;    // rows with a target
    bool masked;            // a document has a loss mask
    bool weighted;          // a target may have a weight that is not 1
    int32_t real_tokens;    // rows that are not padding
    int32_t *tokens;        // (T)
    int32_t *targets;       // (T) -1: no target
    float *weights;         // (T) of the targets; a shared one's are summed; 0 without a target
    int32_t *position_ids;  // (T)
    int32_t *token_order;   // (T) rows sorted by (token, row), for embedding_backward
    // the rows whose logits are computed, in order: those with a target, and padding, on which the
    // padded layouts do full work; at least one, so that the head's gradient is written
    int32_t num_head_rows;
    int32_t *head_rows;  // (num_head_rows)
    // Each document's targets, the borrowed ones too, as runs of head_rows with equal weights:
    // document i has runs doc_runs[i] to doc_runs[i+1] - 1. cached: none
    int32_t num_docs, num_runs;
    int64_t first_doc;    // its number among the documents of a step
    int32_t *doc_runs;    // (num_docs + 1)
    int32_t *runs;        // (num_runs, 2) index of the first in head_rows, and how many they are
    float *run_weights;   // (num_runs)
    int32_t num_pairs;    // 0, or num_docs / 2: see pairs.h, which fills pairs
    PairTerms *pairs;     // (num_pairs)
    int32_t *cu_seqlens;  // (num_segments + 1)
    int32_t num_shared;   // segments that share, or have tokens in the cache
    // (num_segments) as in VarlenInfo of kernels.h; 0 in segments that do not share
    // cached: the row of the cache where the text begins, and how many of its tokens are there
    int32_t *shared_first, *shared_len;
    int32_t *cache_rows;  // (T) cached only: shared_first of the segment of each token
    // repad only, num_real_rows = 0 otherwise: attention runs on the gathered real rows
    int32_t num_real_rows;
    int32_t num_real_segments;
    int32_t real_max_seqlen;
    int32_t *real_rows;        // (num_real_rows)
    int32_t *real_cu_seqlens;  // (num_real_segments + 1)
    // what the arrays have room for
    int32_t micro_batch_tokens, max_segments;
    size_t run_capacity, run_weight_capacity, pair_capacity;
    int32_t *sort_scratch;  // (micro_batch_tokens)
} Batch;

// Sums of rows fit into int32 up to this many.
enum { BATCH_MAX_ROWS = 1 << 30 };

const char *layout_name(Layout layout);

// Room for micro_batch_tokens rows, and for max_segments segments and documents; exits with code 5
// when memory is refused.
void batch_init(Batch *b, int32_t micro_batch_tokens, int32_t max_segments);
void batch_free(Batch *b);

// The n documents must fit; row_len is not used by packed and shared.
void batch_fill(Batch *b, Layout layout, const DocView *docs, int n, int32_t row_len);
void batch_pack(Batch *b, const DocView *docs, int n);

// Packs the tokens of n texts that are not in the cache. Text i begins at row first_rows[i] of the
// cache, which has micro_batch_tokens rows; the texts are in the order of their rows.
void batch_pack_cached(Batch *b, const DocView *docs, const int32_t *first_rows, int n);

// losses (T), in place: the losses of head_rows, which come first, move to their rows; 0 elsewhere.
void batch_spread_losses(const Batch *b, float *losses);

// Everything that the kernels rely on: for asserts.
bool batch_is_valid(const Batch *b, int vocab_size);
