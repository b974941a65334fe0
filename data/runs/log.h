// Progress of a run: lines on the console, and one JSON record in log.jsonl per step.
#pragma once

#include "../base/path.h"
#include "../batches/pairs.h"
#include "../batches/summary.h"
#include "../models/config.h"
#include "run_options.h"

// log.jsonl, or another file of records that are appended whole or not at all
typedef struct {
    bool open;  // false: no records are written
    int fd;
    int64_t size_bytes;  // of whole records: the offset of the next one
    int64_t lost;        // records since the last one that could be written
    char path[IO_PATH_MAX];
} RunLog;

// Opens log.jsonl in `dir`. keep_bytes < 0: empty; else truncated to the records that end within
// keep_bytes, its length at the checkpoint of `step`. Warns when that removes records, or when some
// are missing. Failures are EXIT_DISK.
bool log_open(RunLog *log, const char *dir, int64_t keep_bytes, int64_t step, Error *err);

// The file alone, for records of another kind; empty: without the old ones
bool log_open_file(RunLog *log, const char *dir, const char *name, bool empty, Error *err);
void log_append(RunLog *log, const void *record, size_t n);  // of n bytes, to an open file

// Appends a record, which it frees, whole or not at all. Records that do not fit on the disk are
// dropped, with a warning at the first, and another one when the disk has space again.
void log_write(RunLog *log, json_t *record);

// Call it before a checkpoint refers to the log's length: all records are on disk when it is true.
bool log_sync(const RunLog *log, Error *err);

// The first record of a process. event: "start" or "resume"; device_bytes: planned; command: argv.
void log_start(RunLog *log, const char *event, const char *version, const char *device,
               size_t device_bytes, char **command, int64_t step, const LlamaConfig *config,
               const DataSummary *train, const DataSummary *val, const Options *o);

// The busiest rank's work over the mean of all ranks: 1 is even. With one rank, all 0.
typedef struct {
    double planned;   // 0: the plan was made without costs
    double measured;  // slowest rank over mean, by device time of the previous step
    int32_t slowest_rank;
} StepBalance;

// Of all steps so far; mean_ms: expected of the next one
typedef struct {
    int64_t steps, tokens, computed, targets;
    double ms, pauses_ms, mean_ms;
} RunTotals;

typedef struct {
    const Options *o;
    int64_t step;  // 1-based
    double ms;     // of this step
    // Parts of ms: waiting for the loader; the device's time for the passes through the model. The
    // rest is the update, and the part of the gradients' exchange that does not overlap.
    double read_ms, passes_ms;
    double loss, grad_norm;
    const double *source_losses;  // of a mixture (NaN: no target); NULL: not known
    PairSums pairs;               // 0: no preference is trained
    const LlamaConfig *config;    // NULL: not known
    bool skipped;                 // loss or gradient were not finite: no weight has changed
    bool spike;                   // loss_is_spike
    StepBalance balance;
    bool pauses;  // validation, samples or a checkpoint follow
} StepReport;

// Documents of the validation set, their tokens, and the tokens with a target, or pairs
typedef struct {
    int64_t docs, tokens, targets;
    int64_t bytes;  // of the targets' texts; 0: not known
} ValidationSet;

// Adds the step to *t, its record to the log and a line to the console. On a terminal the line is
// cut to its width by leaving out what matters least; each step rewrites it, and it stays every
// run_lines_every steps, before a pause, and where it is skipped or a spike.
void report_step(RunLog *log, RunTotals *t, const StepReport *r, const StepPlan *plan);
// source: of a mixture; NULL: the whole set. pairs: likewise
void report_validation(RunLog *log, int64_t step, double loss_sum, const ValidationSet *set,
                       const char *source, const PairSums *pairs);

// number: 1-based, of the samples after this step. ended: by the model's end of text.
void report_sample(RunLog *log, int64_t step, int number, bool ended, const char *text);

// Loss spikes: losses far above the running mean of the last ones. Checkpoints hold the trend.
typedef struct {
    double mean, deviation;  // of about the last 20 losses; mean absolute distance, so robust
    int64_t num_losses;
} LossTrend;  // starts as {0}

// Adds a loss to the trend. True when it is not finite, or above the mean by more than 1 and by
// more than three deviations; among the first five, whose noise is not known yet, also by more than
// the mean itself.
bool loss_is_spike(LossTrend *t, double loss);

// The line at the end of training. masked: tells targets from tokens.
void print_trained(const RunTotals *t, bool masked);
