// ledger.bin: the loss of every document of every step and validation, in blocks with a checksum.
// Byte layout: data/README.md. scripts/ledger.py reads it.
#pragma once

#include "../batches/loader.h"
#include "log.h"

typedef enum { LEDGER_STEP, LEDGER_VALIDATION, LEDGER_EVAL } LedgerKind;

// A document, or a segment of one, in a step. The sums are over its targets.
typedef struct {
    int64_t doc, tok_off;  // as in Segment
    double loss, weight;   // weight * loss; magnitudes of the weights: the targets, without any
    uint32_t tokens, targets;
    uint32_t epoch, source;  // from 0
} LedgerEntry;

typedef struct {
    RunLog file;                        // open with --ledger, on rank 0
    double source_losses[MAX_SOURCES];  // per target; NaN: it has none in this step
} Ledger;

// Opens ledger.bin of the run. keep_step < 0: empty; else keeps the whole blocks up to this step.
// Failures are EXIT_DISK.
bool ledger_open(Ledger *l, const char *dir, int64_t keep_step, Error *err);

// Adds the documents of a step, or of a validation after it, as a block that is written whole or
// not at all, as a record of the log is. losses (num_segments): times weights and the plan's scale;
// NULL: not known. Returns the mean losses of the sources; NULL: there is one, or not known.
const double *ledger_add(Ledger *l, LedgerKind kind, int64_t step, const Dataset *ds,
                         const StepPlan *plan, const double *losses);

// A new file of one block, for --eval
bool ledger_write(const char *path, const Dataset *ds, const StepPlan *plan, const double *losses,
                  Error *err);
