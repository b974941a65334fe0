#include "layouts.h"

#include <assert.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "batch.h"
#include "packing.h"
#include "plan.h"

void plan_layout_padded(StepPlan *p, const PlanSettings *s) {
    const int64_t rows = s->micro_batch_tokens / s->max_seqlen;
    assert(rows > 0);  // plan_settings_check
    const int64_t num_micro = (p->num_stream + rows - 1) / rows;
    plan_reserve_segments(p, (size_t)p->num_stream);
    plan_reserve_micros(p, (size_t)num_micro);
    memcpy(p->segments, p->stream, (size_t)p->num_stream * sizeof(Segment));
    p->num_segments = p->num_stream;
    p->num_micro = (int32_t)num_micro;
    for (int64_t m = 0; m <= num_micro; m++)
        p->micro_start[m] = m < num_micro ? m * rows : p->num_stream;
    for (int64_t m = 0; m < num_micro; m++) {
        p->micro_work[m] = 0;
        for (int64_t i = p->micro_start[m]; i < p->micro_start[m + 1]; i++) {
            const int64_t length = p->segments[i].length, padding = s->max_seqlen - length;
            p->micro_work[m] += p->layout == LAYOUT_PADDED
                                    ? plan_work(s, s->max_seqlen)
                                    : plan_work(s, length) + padding * s->work_token;
        }
    }
}

void plan_layout_rows(StepPlan *p, const PlanSettings *s) {
    const int64_t room = (int64_t)(s->micro_batch_tokens / s->max_seqlen) * s->max_seqlen;
    const int64_t num_micro = (p->real_tokens + room - 1) / room;
    plan_reserve_segments(p, (size_t)(p->num_stream + num_micro));
    plan_reserve_micros(p, (size_t)num_micro);
    p->num_segments = p->num_micro = 0;
    int64_t left = 0;  // room in the micro-batch being filled
    for (int64_t i = 0; i < p->num_stream; i++) {
        const Segment whole = p->stream[i];
        for (int32_t done = 0; done < whole.length;) {
            if (left == 0) {
                p->micro_start[p->num_micro++] = p->num_segments;
                left = room;
            }
            const int32_t rest = whole.length - done, n = rest < left ? rest : (int32_t)left;
            p->segments[p->num_segments++] =
                (Segment){whole.doc, whole.tok_off + done, n, n < rest || whole.has_next};
            done += n;
            left -= n;
        }
    }
    p->micro_start[p->num_micro] = p->num_segments;
    for (int32_t m = 0; m < p->num_micro; m++) {
        const int64_t tokens = m + 1 < p->num_micro ? room : room - left;
        const int64_t rows = (tokens + s->max_seqlen - 1) / s->max_seqlen;
        p->micro_work[m] = rows * plan_work(s, s->max_seqlen);
    }
}
