#include "layouts.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "batch.h"
#include "plan.h"

// -------------------------------------------------------------------------------------------------
// The same chunks in the other layouts

void plan_layout_padded(StepPlan *p, const PlanSettings *s) {
    const int64_t rows = s->capacity / s->max_seqlen;
    const int64_t num_micro = (p->num_stream + rows - 1) / rows;
    plan_reserve_chunks(p, (size_t)p->num_stream);
    plan_reserve_micros(p, (size_t)num_micro);
    memcpy(p->chunks, p->stream, (size_t)p->num_stream * sizeof(Chunk));
    p->num_chunks = p->num_stream;
    p->num_micro = (int32_t)num_micro;
    for (int64_t m = 0; m <= num_micro; m++)
        p->micro_start[m] = m < num_micro ? m * rows : p->num_stream;
    for (int64_t m = 0; m < num_micro; m++) {
        p->micro_work[m] = 0;
        for (int64_t i = p->micro_start[m]; i < p->micro_start[m + 1]; i++) {
            const int64_t length = p->chunks[i].length, padding = s->max_seqlen - length;
            p->micro_work[m] += p->layout == LAYOUT_PADDED
                                    ? plan_work(s, s->max_seqlen)
                                    : plan_work(s, length) + padding * s->work_token;
        }
    }
}

void plan_layout_rows(StepPlan *p, const PlanSettings *s) {
    const int64_t room = (int64_t)(s->capacity / s->max_seqlen) * s->max_seqlen;
    const int64_t num_micro = (p->real_tokens + room - 1) / room;
    plan_reserve_chunks(p, (size_t)(p->num_stream + num_micro));
    plan_reserve_micros(p, (size_t)num_micro);
    p->num_chunks = p->num_micro = 0;
    int64_t left = 0;  // room in the micro-batch being filled
    for (int64_t i = 0; i < p->num_stream; i++) {
        const Chunk chunk = p->stream[i];
        for (int32_t done = 0; done < chunk.length;) {
            if (left == 0) {
                p->micro_start[p->num_micro++] = p->num_chunks;
                left = room;
            }
            Chunk *piece = &p->chunks[p->num_chunks++];
            const int32_t rest = chunk.length - done;
            piece->doc = chunk.doc;
            piece->tok_off = chunk.tok_off + done;
            piece->length = rest < left ? rest : (int32_t)left;
            piece->has_next = piece->length < rest || chunk.has_next;
            done += piece->length;
            left -= piece->length;
        }
    }
    p->micro_start[p->num_micro] = p->num_chunks;
    for (int32_t m = 0; m < p->num_micro; m++) {
        const int64_t tokens = m + 1 < p->num_micro ? room : room - left;
        const int64_t rows = (tokens + s->max_seqlen - 1) / s->max_seqlen;
        p->micro_work[m] = rows * plan_work(s, s->max_seqlen);
    }
}
