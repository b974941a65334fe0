#include "state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../base/json.h"
#include "../base/path.h"

#define FILE_NAME "trainer_state.json"

// A number that must be the same for a resumed run to see the same documents in the same steps.
typedef struct {
    const char *name;
    int64_t value;
    int64_t before;  // the value of checkpoints that do not have it; -1: all have it
} PlanField;
enum { NUM_PLAN_FIELDS = 9, PACKER = 2 };

static void get_plan_fields(PlanField *f, const PlanSettings *p, const Dataset *train) {
    const int64_t tokens = (int64_t)(train->token_fingerprint >> 12);  // 52 bits: exact in JSON
    PlanField fields[NUM_PLAN_FIELDS] = {
        {"data_fingerprint", (int64_t)(train->fingerprint >> 12), -1},
        {"token_fingerprint", tokens, tokens},
        {"seed", (int64_t)p->seed, -1},
        {"max_seqlen", p->max_seqlen, -1},
        {"micro_batch_tokens", p->micro_batch_tokens, -1},
        {"num_micro_batches", p->num_micro, -1},
        {"fill_ppm", p->fill_ppm, -1},
        {"long_docs", (int64_t)p->long_docs, -1},
        // packer 1 moved segments between micro-batches; one micro-batch is the same in both
        {"packer", PACKER, p->num_micro == 1 ? PACKER : 1},
    };
    memcpy(f, fields, sizeof fields);
}

static bool read_cursor(const json_t *state, TrainingState *s, Error *err) {
    const int64_t max = (int64_t)1 << 52;
    PlanState *c = &s->cursor;
    return json_get_int64(state, "step", 0, max, &c->step, true, err) &&
           json_get_int64(state, "epoch", 0, max, &c->epoch, true, err) &&
           json_get_int64(state, "doc_pos", 0, max, &c->doc_pos, true, err) &&
           json_get_int64(state, "tok_off", 0, max, &c->tok_off, true, err) &&
           json_get_int64(state, "log_bytes", 0, max, &s->log_bytes, true, err) &&
           json_get_int(state, "skips_in_a_row", 0, 1 << 30, &s->skips_in_a_row, true, err);
}

static bool check_plan(const json_t *state, const PlanField *plan, const char *path, Error *err) {
    const int64_t max = (int64_t)1 << 52;
    char misfits[512] = "";
    for (int i = 0; i < NUM_PLAN_FIELDS; i++) {
        int64_t was = plan[i].before;
        if (!json_get_int64(state, plan[i].name, 0, max, &was, was < 0, err)) return false;
        size_t used = strlen(misfits);
        if (was != plan[i].value)
            snprintf(misfits + used, sizeof misfits - used, " %s (was %ld, is %ld)", plan[i].name,
                     was, plan[i].value);
    }
    return misfits[0] == 0 ||
           error_set(err, EXIT_CHECKPOINT_MISFIT,
                     "resume with the data and sizes of the interrupted run",
                     "%s: expected the same documents in the same steps, found other values of%s",
                     path, misfits);
}

bool state_write(Checkpoint *ck, const TrainingState *s, const PlanSettings *plan,
                 const Dataset *train, const char *version, const Option *options, Error *err) {
    const PlanState *c = &s->cursor;
    PlanField fields[NUM_PLAN_FIELDS];
    get_plan_fields(fields, plan, train);
    json_t *state =
        json_pack("{s:i, s:s, s:I, s:I, s:I, s:I, s:I, s:i}", "format", 1, "version", version,
                  "step", c->step, "epoch", c->epoch, "doc_pos", c->doc_pos, "tok_off", c->tok_off,
                  "log_bytes", s->log_bytes, "skips_in_a_row", s->skips_in_a_row);
    for (int i = 0; i < NUM_PLAN_FIELDS; i++)
        json_object_set_new(state, fields[i].name, json_integer(fields[i].value));
    json_object_set_new(state, "options", options_json(options));
    char *text = json_write(state, JSON_INDENT(2));
    if (strlen(text) <= JSON_MAX_CONFIG) return checkpoint_write_text(ck, FILE_NAME, text, err);
    free(text);
    return error_set(err, EXIT_USAGE, "give shorter options",
                     FILE_NAME ": expected at most %d bytes", JSON_MAX_CONFIG);
}

json_t *state_open(const char *dir, Error *err) {
    char path[IO_PATH_MAX];
    if (!path_join(path, sizeof path, dir, FILE_NAME, err)) return NULL;
    return json_read(path, JSON_MAX_CONFIG, "choose another checkpoint", err);
}

bool state_read(TrainingState *s, const char *dir, const PlanSettings *plan, const Dataset *train,
                Error *err) {
    char path[IO_PATH_MAX];
    PlanField fields[NUM_PLAN_FIELDS];
    json_auto_t *state = state_open(dir, err);
    if (!state || !path_join(path, sizeof path, dir, FILE_NAME, err)) return false;
    get_plan_fields(fields, plan, train);
    return read_cursor(state, s, err) && check_plan(state, fields, path, err);
}
