#include "saver.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "../base/clock.h"
#include "../base/machine.h"

bool save_checkpoint(const SaveJob *job, const char *name, Parameters p, Error *err) {
    Checkpoint ck = {0};
    const Options *o = job->o;
    const Data *d = job->data;
    const ModelDtype dtype = name ? (ModelDtype)o->final_dtype : MODEL_FP32;
    const bool adapters = o->lora > 0 && !(name && o->lora_merge);
    bool ok = job->writes && dir_lock_check(job->lock, o->out, err) && log_sync(&job->log, err) &&
              log_sync(&job->ledger, err) &&
              checkpoint_begin(&ck, o->out, job->state.cursor.step, name, err) &&
              model_files_write(&d->files, job->config, dtype, &ck, err) &&
              (!adapters ||
               checkpoint_write_text(&ck, "adapter_config.json",
                                     lora_config_text(&o->adapters, job->config, o->model), err));
    ok = model_files_write_weights(p, dtype, MODEL_FILE_BYTES, ok ? &ck : NULL, err);
    if (!name) ok = model_files_write_moments(p, (ModelDtype)o->moments, ok ? &ck : NULL, err);
    if (!name && d->reference)
        ok = ok &&
             checkpoint_write_file(&ck, "reference.bin", d->reference, d->reference_bytes, err);
    ok = ok &&
         (name || (checkpoint_write_text(&ck, "options", run_options_file(o, true), err) &&
                   state_write(&ck, &job->state, &d->loader_settings.plan, &d->train, job->version,
                               err))) &&
         dir_lock_check(job->lock, o->out, err) && checkpoint_publish(&ck, err);
    checkpoint_abort(&ck);
    return ok;
}

static void wait_at_exit(int code, void *saver) {
    const Saver *s = saver;
    (void)code;
    if (pthread_equal(s->thread, pthread_self())) return;
    while (s->running && !s->done && !error_waits()) sleep_ms(1);
}

void saver_open(Saver *s, size_t stride, size_t taken) {
    const size_t bytes = (ARENA_V + 1) * stride * sizeof(float), room = host_memory_free();
    s->stride = stride;
    s->bytes = bytes + taken <= room - room / 16 ? bytes : 0;
    on_exit(wait_at_exit, s);
}

static float *snapshot_at(const Saver *s, ParameterArena arena, size_t offset) {
    return s->snapshot + (size_t)arena * s->stride + offset;
}

static void take(void *saver, ParameterArena arena, size_t offset, float *values, size_t n) {
    const Saver *s = saver;
    (void)values;  // the snapshot gets them
    s->parameters.get(s->parameters.context, arena, offset, snapshot_at(s, arena, offset), n);
}

static void give(void *saver, ParameterArena arena, size_t offset, float *values, size_t n) {
    memcpy(values, snapshot_at(saver, arena, offset), n * sizeof *values);
}

static void take_snapshot(Saver *s) {
    Parameters p = s->parameters;
    p.context = s;
    p.get = take;
    model_files_write_weights(p, MODEL_FP32, MODEL_FILE_BYTES, NULL, &(Error){0});
    model_files_write_moments(p, MODEL_FP32, NULL, &(Error){0});
    p.get = give;
    s->parameters = p;
}

static void *run_save(void *saver) {
    Saver *s = saver;
    Error pruning = {0};
    s->ok = save_checkpoint(&s->job, NULL, s->parameters, &s->err);
    if (s->ok &&
        !checkpoint_prune(s->job.o->out, s->job.state.cursor.step, s->job.o->keep, &pruning))
        error_print(&pruning);
    s->ms += now_ms();
    s->done = true;
    return NULL;
}

void saver_start(Saver *s, bool wait, SaveJob job, Parameters p) {
    assert(!s->running && !s->done);
    if (s->bytes && !s->snapshot && !wait) s->snapshot = malloc(s->bytes);
    const bool beside = s->snapshot && !wait;
    s->job = job;
    s->parameters = p;
    s->err = (Error){0};
    s->ms = -now_ms();
    if (beside) take_snapshot(s);
    s->running = beside && pthread_create(&s->thread, NULL, run_save, s) == 0;
    if (!s->running) run_save(s);
}

bool saver_ended(Saver *s, bool wait) {
    for (uint64_t seen = 0; wait && s->running && !s->done; sleep_ms(1)) {
        if (seen != io_parts && io_progress) io_progress();
        seen = io_parts;
    }
    if (!s->done) return false;
    if (s->running) pthread_join(s->thread, NULL);
    s->done = false;
    s->running = false;
    return true;
}
