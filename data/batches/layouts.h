// The chunks of a step in the layouts other than packed.
#ifndef UNPAD_LAYOUTS_H
#define UNPAD_LAYOUTS_H

#include "plan.h"

// -------------------------------------------------------------------------------------------------
// The same chunks in the other layouts

// One chunk a row of S tokens, floor(C / S) rows a micro-batch.
void plan_layout_padded(StepPlan *p, const PlanSettings *s);

// The stream in rows of S tokens; a chunk that crosses the end of a micro-batch is cut there.
void plan_layout_rows(StepPlan *p, const PlanSettings *s);

#endif
