// The size of a data set, and how much of it is never trained: printed at the start, and in the
// start event of log.jsonl.
#pragma once

#include <jansson.h>

#include "../shards/dataset.h"
#include "plan.h"

typedef struct {
    const Dataset *dataset;  // NULL: there is none
    int32_t max_seqlen;
    LongCounts counts;  // of the whole data set
} DataSummary;

// Fails where --long-docs leaves nothing to train or forbids a document.
bool data_summary(DataSummary *d, const Dataset *ds, const PlanSettings *s, Error *err);

// label: "train   "
void data_summary_print(const DataSummary *d, const char *label);

// The lines about the steps from `at` on: their size and cost, poor fill.
bool plan_print(const PlanSettings *s, Layout layout, const DataSummary *train, PlanState at,
                Error *err);

// For the log; null without a data set.
json_t *data_summary_json(const DataSummary *d);
