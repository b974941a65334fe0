// --eval: loss and perplexity of a model on every document of a data set, by document length.
#ifndef UNPAD_EVALUATE_H
#define UNPAD_EVALUATE_H

#include "../base/error.h"
#include "../shards/dataset.h"
#include "model_face.h"
#include "run_options.h"

// Prints the table. o: max_seqlen, micro_batch_tokens, long_docs, and seed, which orders documents.
// A segment of a split document is computed alone and counts in the row of its document.
bool evaluate(Dataset *data, const Options *o, ModelFace model, Error *err);

#endif
