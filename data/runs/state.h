// trainer_state.json: where a run is in its data, and the plan and the options it was started with.
#ifndef UNPAD_STATE_H
#define UNPAD_STATE_H

#include <jansson.h>

#include "../base/error.h"
#include "../base/options.h"
#include "../batches/plan.h"
#include "../shards/dataset.h"
#include "checkpoint.h"

typedef struct {
    PlanState cursor;   // of the next step to train
    int64_t log_bytes;  // of log.jsonl so far
    int skips_in_a_row;
} TrainingState;

// Writes the file into the checkpoint.
bool state_write(Checkpoint *ck, const TrainingState *s, const PlanSettings *plan,
                 const Dataset *train, const char *version, const Option *options, Error *err);

// The parsed file of `dir`, to be freed by the caller; NULL with *err.
json_t *state_open(const char *dir, Error *err);

// Reads the state from `dir`. Exit 9 when plan or data differ from those it was written with: the
// resumed run would see other documents in its steps.
bool state_read(TrainingState *s, const char *dir, const PlanSettings *plan, const Dataset *train,
                Error *err);

#endif
