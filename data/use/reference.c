#include "reference.h"

#include <stdlib.h>
#include <string.h>

#include "../base/memory.h"
#include "../base/signals.h"

// In reference.bin, before the documents of training and of validation
enum { FINGERPRINTS = 2 };

static void keep(double *reference, const StepPlan *plan, const double *losses) {
    for (int64_t i = 0; i < plan->num_segments; i++) reference[plan->segments[i].doc] = losses[i];
}

// A step holds as many micro-batches as in training.
static bool compute(double *reference, Data *d, ModelFace m, Error *err) {
    LoaderSettings s = d->loader_settings;
    StepData step = {0};
    bool ok = true;
    if (s.layout != LAYOUT_SHARED) s.layout = LAYOUT_PACKED;
    if (m.rank == 0)
        printf("reference: the losses of %ld documents under these weights, in one pass\n",
               d->train.num_docs);
    for (s.source = 1; ok && s.source <= d->train.sources.n; s.source++) {
        const Source *source = &d->train.sources.list[s.source - 1];
        PlanState at = {0};
        const SourceCursor *c = at.sources;
        while (ok && c->epoch == 0 && c->doc_pos < source->num_docs) {
            line_show(stderr, "reference: %ld of %ld ...", c->doc_pos, source->num_docs);
            if (stop_signal) exit(128 + (int)stop_signal);  // nothing is trained yet
            ok = loader_load_step(&step, &d->train, &s, at, err);
            if (ok) keep(reference, &step.plan, m.document_losses(m.model, &step));
            at = step.plan.cursor_after;
        }
    }
    line_erase(stderr);
    step_data_free(&step);
    return ok;
}

bool reference_open(Data *d, ModelFace m, const char *checkpoint, Error *err) {
    const DocIndex index = dataset_doc_index(&d->val);
    const uint64_t is[FINGERPRINTS] = {d->train.token_fingerprint, d->val.token_fingerprint};
    const size_t num_docs = (size_t)(d->train.num_docs + d->val.num_docs);
    uint64_t n = d->reference_bytes = (FINGERPRINTS + num_docs) * sizeof(double);
    d->val_pairs = d->loader_settings.pairs;
    if (d->val_pairs.kind != PREFERENCE_DPO) return true;
    if (checkpoint[0])
        d->reference =
            (double *)file_read_all(PATH_IN(checkpoint, "reference.bin"), (uint64_t)1 << 40, &n,
                                    "resume with --preference dpo, or start with it", err);
    else
        d->reference = host_calloc(n, 1, "the reference");
    if (!d->reference) return false;
    if (!checkpoint[0]) memcpy(d->reference, is, sizeof is);
    if (n != d->reference_bytes || memcmp(d->reference, is, sizeof is) != 0)
        return error_set(err, EXIT_CHECKPOINT_MISFIT, "resume with the data of the interrupted run",
                         "%s: expected the reference of this training and validation data, found "
                         "another",
                         PATH_IN(checkpoint, "reference.bin"));
    double *train = d->reference + FINGERPRINTS, *val = train + d->train.num_docs;
    if (!checkpoint[0] && !compute(train, d, m, err)) return false;
    d->loader_settings.pairs.reference = train;
    d->val_pairs.reference = val;
    for (StepData *s = d->val_steps; d->has_val && s < d->val_steps + d->val.sources.n; s++) {
        if (!checkpoint[0]) keep(val, &s->plan, m.document_losses(m.model, s));
        for (Batch *b = s->micro; b < s->micro + s->num_micro; b++)  // loaded before
            pairs_fill(b, &d->val_pairs, &index, &s->plan.segments[b->first_doc]);
    }
    return true;
}
