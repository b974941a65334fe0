// The segments of a step in the layouts other than packed. Only for plan_step.
#ifndef UNPAD_LAYOUTS_H
#define UNPAD_LAYOUTS_H

#include "plan.h"

// One segment in each row of max_seqlen tokens, as many rows in a micro-batch as it holds.
void plan_layout_padded(StepPlan *p, const PlanSettings *s);

// The stream in rows of max_seqlen tokens; a segment that crosses the end of a micro-batch is cut
// there.
void plan_layout_rows(StepPlan *p, const PlanSettings *s);

#endif
