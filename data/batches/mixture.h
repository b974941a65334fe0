// A mixture: which source the next segment is drawn from, so that each has its share of the tokens.
//
// The schedule is worst-case fair weighted fair queueing (WF2Q: Bennett and Zhang, INFOCOM 1996):
// of the sources that are not ahead of their share, the one whose next segment would be due first,
// or the first of these. No source is ever ahead of its share by more than a segment of its own, or
// behind it by more than the longest segment of any, from the last change of the weights on.
#pragma once

#include <jansson.h>

#include "stream.h"

// The documents of one source alone.
DocIndex mixture_source(const DocIndex *index, int32_t i);

// stream_next_segment of the source whose turn it is.
bool mixture_draw(const DocIndex *index, const PlanSettings *s, PlanState *at, Segment *segment,
                  LongCounts *counts, Error *err);

// How often all documents of a source have been used up, up to the next one that is trained: of the
// source with a weight where this is the least, which *source becomes. Fails as mixture_draw does.
bool mixture_epochs(const DocIndex *index, const PlanSettings *s, const PlanState *at,
                    double *epochs, int32_t *source, Error *err);

// If there are several sources, prints a line for each: its share and size, and what was drawn.
// Without steps (tokens_per_step NaN): nothing.
void mixture_print(const Sources *s, const PlanState *at, double tokens_per_step);
// What was drawn, for the log; NULL for a single source (or s NULL).
json_t *mixture_json(const Sources *s, const PlanState *at);
