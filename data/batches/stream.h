// The stream of segments that steps are cut from: documents in an order keyed by (seed, epoch). The
// documents of one record follow one another, where the first of them would be. A document longer
// than max_seqlen becomes segments of at most max_seqlen tokens; with a loss mask, documents and
// segments without a target are left out: nothing in them has a gradient.
#pragma once

#include <jansson.h>

#include "../shards/sources.h"

enum { PLAN_MAX_SEQLEN = 1 << 24 };

// Part of a document, or all of it
typedef struct {
    int64_t doc, tok_off;  // its tokens are tok_off .. tok_off + length - 1 of the document
    int32_t length;
    bool has_next;       // the token after it is the target of its last token
    int32_t shared_len;  // in a plan of layout shared: see DocView
    bool more;           // another document of its record follows, and is not left out
    int64_t epoch;       // of its source
} Segment;

typedef struct {
    int64_t num_docs;
    int64_t (*length)(const void *context, int64_t doc);  // tokens of a document, >= 1
    const void *context;
    // Of tokens [from, from + n) of a document, from >= 1, how many are targets; NULL: all
    int64_t (*targets)(const void *context, int64_t doc, int64_t from, int64_t n);
    // The sum of the magnitudes of a segment's weights; NULL: all are 1
    double (*weights)(const void *context, const Segment *c);
    // Does a document belong to the record of the one before it? False after the last; NULL: none
    bool (*follows)(const void *context, int64_t doc);
    int64_t first_doc;       // documents are first_doc .. first_doc + num_docs - 1
    const Sources *sources;  // of these documents; NULL: one
    // The first n tokens of a segment; only for layout shared
    bool (*read)(const void *context, const Segment *c, int64_t n, int32_t *tokens, Error *err);
} DocIndex;

// Policy for documents longer than max_seqlen
typedef enum { LONG_SPLIT, LONG_TRUNCATE, LONG_DROP, LONG_ERROR } LongDocs;

// The rows of padded and repad: as long as the longest segment of the micro-batch, rounded up to 8,
// as collators pad; max_seqlen; or the longest again, of segments that are sorted by length first
typedef enum { PAD_TO_LONGEST, PAD_TO_MAX, PAD_GROUPED } PadTo;

typedef struct {
    uint64_t seed;
    int32_t max_seqlen;          // the longest segment, and the row of rows and PAD_TO_MAX
    int32_t micro_batch_tokens;  // the buffer of one micro-batch, >= max_seqlen
    int32_t num_micro;           // micro-batches of a step, all ranks together
    int32_t fill_ppm;            // fill in millionths: fraction of the buffers that a step may use
    int64_t set_tokens;  // > 0: the most tokens of a step, regardless of fill_ppm (plan_fix_set)
    LongDocs long_docs;
    PadTo pad_to;
    // Records are pairs of documents (pairs.h): each is taken whole or, with LONG_DROP, which they
    // need, left out if one of its documents is too long. A micro-batch holds two of max_seqlen.
    bool pairs;
} PlanSettings;

// A position in the stream of one source; {0} is the beginning.
typedef struct {
    int64_t epoch;
    int64_t doc_pos;  // documents of this epoch that are used up, or come with their records
    int64_t tok_off;  // tokens of the next one, and of its record, that are used up
    int64_t tokens;   // of all segments so far
    int64_t counted;  // for its share: tokens since the weights were last changed
} SourceCursor;

// Everything a run must remember about its position in the data; {0} is the beginning.
typedef struct {
    int64_t step;
    SourceCursor sources[MAX_SOURCES];
} PlanState;

// Documents longer than max_seqlen, by what happened to them; documents that their mask leaves
// without a target; and tokens left out
typedef struct {
    int64_t docs_split, docs_truncated, docs_dropped, docs_without_target, tokens_left_out;
} LongCounts;

// The segment at *at of the documents as one source; advances *at past it and adds to *counts.
// EXIT_BAD_INPUT when the policy forbids a document, or leaves out all of them;
// EXIT_CHECKPOINT_MISFIT when *at is not a position in them.
bool stream_next_segment(const DocIndex *index, const PlanSettings *s, SourceCursor *at,
                         Segment *segment, LongCounts *counts, Error *err);

// The counts of a whole data set, for the summary at the start. Fails where training would fail at
// the first of the long documents.
bool stream_count_left_out(const DocIndex *index, const PlanSettings *s, LongCounts *out,
                           Error *err);

// Number of tokens of the segment that have a target
int64_t stream_targets(const DocIndex *index, const Segment *c);

// ---- A mixture of sources -----------------------------------------------------------------------

// The choice of the source of the next segment, so that each source has its share of the tokens.
//
// The schedule is worst-case fair weighted fair queueing (WF2Q: Bennett and Zhang, INFOCOM 1996):
// of the sources that are not ahead of their share, the one whose next segment would be due first,
// or the first of these. No source is ever ahead of its share by more than a segment of its own, or
// short of it by more than the longest segment of any, from the last change of the weights on.

// The documents of one source alone.
DocIndex mixture_source(const DocIndex *index, int32_t i);

// stream_next_segment of the source whose turn it is.
bool mixture_draw(const DocIndex *index, const PlanSettings *s, PlanState *at, Segment *segment,
                  LongCounts *counts, Error *err);

// How often all documents of a source have been used up, up to the next one that is trained: of the
// source with a weight where this is the least, which *source becomes. Fails as mixture_draw does.
bool mixture_epochs(const DocIndex *index, const PlanSettings *s, const PlanState *at,
                    double *epochs, int32_t *source, Error *err);

// If there are several sources, prints a line for each: its share, its size, and the amount drawn.
// Without steps (tokens_per_step NaN): nothing.
void mixture_print(const Sources *s, const PlanState *at, double tokens_per_step);
// The amounts drawn, for the log; NULL for a single source (or s NULL).
json_t *mixture_json(const Sources *s, const PlanState *at);
