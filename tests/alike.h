// Documents that begin alike, for tests of shared prefixes
#pragma once

#include "../data/batches/batch.h"
#include "test.h"

// Up to so many documents, whose tokens, targets and weights are `longest` apart; one begins as the
// last one that shares nothing does, up to any token. Returns their number.
static int make_alike(DocView *docs, int most_docs, int32_t longest, int32_t vocab, bool masked,
                      bool weighted, int32_t *tokens, int32_t *targets, float *weights) {
    const int num = 1 + (int)test_rng_below((uint32_t)most_docs);
    int32_t most = 0;  // that the next one may share
    const DocView *leader = docs;
    for (int n = 0; n < num; n++, tokens += longest, targets += longest, weights += longest) {
        const int32_t length = 1 + (int32_t)test_rng_below((uint32_t)longest - 1);
        int32_t same = test_rng_below(4) ? (int32_t)test_rng_below((uint32_t)longest) : 0;
        if (same > length) same = length;
        if (n == 0 || same > leader->length) same = n ? leader->length : 0;
        DocView *d = &docs[n];
        *d = (DocView){tokens, length, test_rng_below(3) ? -1 : 5, NULL, NULL, 0};
        for (int32_t k = 0; k < length; k++)
            tokens[k] = k < same ? leader->tokens[k] : (int32_t)test_rng_below((uint32_t)vocab);
        for (int32_t k = 0; k < length; k++) {
            const int32_t next = k + 1 < length ? tokens[k + 1] : d->next_token;
            targets[k] = test_rng_below(3) ? -1 : next;
            weights[k] = (float)(int)test_rng_below(9) / 4 - 1;
        }
        if (masked && test_rng_below(3)) d->targets = targets;
        if (weighted && test_rng_below(2)) d->weights = weights;
        d->shared_len = same > 0 ? (same - 1) / 128 * 128 : 0;
        if (d->shared_len > most) d->shared_len = most;
        if (d->shared_len == 0) leader = d;
        most = d->shared_len ? d->shared_len : longest;
    }
    return num;
}
