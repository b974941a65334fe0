// Samples of a run: the model continues --prompt, or the first tokens of documents.
#pragma once

#include "../runs/log.h"
#include "../runs/run_data.h"
#include "text_writer.h"

// Reads or encodes the prompts. One that cannot be encoded is an error (exit 2).
bool samples_open(TextWriter *w, const Options *o, Data *data, Error *err);

// Writes, prints and logs one round.
void samples_report(TextWriter *w, ModelFace model, int64_t step, RunLog *log);
