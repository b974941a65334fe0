#!/usr/bin/env bash
# data/batches/plan.h against dev/reference/plan.py, a second implementation of the same rules: the
# golden values of test_plan.c and random cases, in all layouts, micro-batch by micro-batch.
. "$(dirname "$0")/lib.sh"
scratch 'plan reference'
reference=$root/dev/reference/plan.py
command -v python3 > /dev/null || skip_all plan_reference 'python3 is not installed'

cat > plans.c <<'C'
#include <stdio.h>

#include "data/base/error.h"
#include "data/base/hash.h"
#include "data/batches/plan.h"

typedef struct {
    int64_t length[100];
    uint64_t mask;
} Lengths;

static int64_t length_of(const void *context, int64_t doc) {
    return ((const Lengths *)context)->length[doc];
}

static int64_t targets_of(const void *context, int64_t doc, int64_t from, int64_t n) {
    int64_t targets = 0;
    for (int64_t i = from; i < from + n; i++)
        targets += splitmix64((uint64_t)(doc << 20 | i / 8)) % ((const Lengths *)context)->mask == 0;
    return targets;
}

static void print_step(const StepPlan *p, Layout layout) {
    for (int32_t m = 0; m < p->num_micro; m++) {
        printf("%d %lld", (int)layout, (long long)p->micro_work[m]);
        for (int64_t i = p->micro_start[m]; i < p->micro_start[m + 1]; i++) {
            const Segment *c = &p->segments[i];
            printf(" %lld:%lld:%d:%d", (long long)c->doc, (long long)c->tok_off, c->length,
                   c->has_next);
        }
        printf("\n");
    }
}

static void print_plans(const PlanSettings *s, const DocIndex *index) {
    static StepPlan p;
    PlanState state = {0, 0, 0, 0};
    for (int step = 0; step < 4; step++, state = p.cursor_after)
        for (int layout = 0; layout < 4; layout++) {
            Error err = {0};
            const bool ok = plan_step(&p, index, s, (Layout)layout, &state, &err);
            if (!ok && p.num_targets > 0) error_exit(&err);
            const PlanState *then = &p.cursor_after;
            if (layout == 0)
                printf("targets %lld then %lld %lld %lld\n", (long long)p.num_targets,
                       (long long)then->epoch, (long long)then->doc_pos, (long long)then->tok_off);
            if (!ok) return;
            print_step(&p, (Layout)layout);
        }
}

int main(void) {
    static char line[1 << 14];
    while (fgets(line, sizeof line, stdin)) {
        PlanSettings s = plan_settings();
        Lengths l;
        DocIndex index = {.length = length_of, .context = &l};
        long long f[10], length;
        char *at = line;
        int n = 0;
        for (int i = 0; i < 10; i++, at += n)
            if (sscanf(at, "%lld%n", &f[i], &n) != 1) return 1;
        while (index.num_docs < 100 && sscanf(at, "%lld%n", &length, &n) == 1) {
            l.length[index.num_docs++] = length;
            at += n;
        }
        s.seed = (uint64_t)f[0], s.max_seqlen = (int32_t)f[1], s.micro_batch_tokens = (int32_t)f[2];
        s.num_micro = (int32_t)f[3], s.fill_ppm = (int32_t)f[4], s.long_docs = (LongDocs)f[5];
        s.work_token = (int32_t)f[6], s.work_tile = (int32_t)f[7], s.work_side = (int32_t)f[8];
        l.mask = (uint64_t)f[9];
        if (l.mask) index.targets = targets_of;
        print_plans(&s, &index);
    }
    return 0;
}
C
check build "${CC:-cc}" -std=gnu11 -O1 -I "$root" plans.c \
    "$root/build/cpu/libhost.a" -o plans -ljansson -lpthread -lm

check golden python3 "$reference" golden
cp out.txt golden.txt
missing=0
while read -r value; do
    grep -qF -- "$value" "$root/tests/test_plan.c" || missing=$((missing + 1))
done < golden.txt
if [ $missing -eq 0 ] && [ "$(wc -l < golden.txt)" -eq 12 ]; then ok golden_values_match_the_reference
else bad golden_values_match_the_reference "$missing of $(wc -l < golden.txt) values missing"; fi

python3 "$reference" cases 80 > cases.txt || bad cases "exit code $?"
python3 "$reference" plans < cases.txt > expected.txt 2> out.txt || bad reference "exit code $?"
./plans < cases.txt > found.txt 2> out.txt || bad plans "exit code $?"
check enough_to_compare test "$(grep -c ^targets expected.txt)" -gt 200
if cmp expected.txt found.txt > out.txt; then ok random_cases_match_the_reference
else diff expected.txt found.txt | head -6 >> out.txt; bad random_cases_match_the_reference ''; fi
finish
