// What a checkpoint holds: a Hugging Face model, and beside it the optimizer and where we are.
#ifndef UNPAD_SAVING_H
#define UNPAD_SAVING_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "../data/base/error.h"
#include "../data/base/file.h"
#include "../data/base/json.h"
#include "../data/base/options.h"
#include "../data/base/path.h"
#include "../data/batches/plan.h"
#include "../data/models/config.h"
#include "../data/models/safetensors.h"
#include "../data/runs/checkpoint.h"
#include "../llama.h"            // defines: LlamaModel
#include "algorithms.h"          // defines: save_matmul_choices

// ------------------------------------------------------------------------------------------------
// The model: config.json, generation_config.json, tokenizer files, model.safetensors: what
// from_pretrained loads

// Small files of a model directory that every model we write carries unchanged. They are read once,
// at the start, so that nothing that happens to that directory later takes them away.
static const char *const model_file_names[] = {
    "generation_config.json",  // the others are the tokenizer's
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"};
enum {
    NUM_MODEL_FILES = sizeof model_file_names / sizeof *model_file_names,
    GENERATION_CONFIG = 0,
    FIRST_TOKENIZER_FILE = 1,
};

typedef struct {
    char *text[NUM_MODEL_FILES];  // NULL: there is none
    uint64_t size_bytes[NUM_MODEL_FILES];
} ModelFiles;

// Files first .. last - 1 of the table, those that `dir` has. *found: how many.
static inline bool model_files_read(ModelFiles *f, const char *dir, int first, int last, int *found,
                                    Error *err) {
    const uint64_t max_bytes = 1 << 28;
    char path[IO_PATH_MAX];
    *found = 0;
    for (int i = first; i < last; i++) {
        if (!path_join(path, sizeof path, dir, model_file_names[i], err)) return false;
        if (!path_exists(path)) continue;
        f->text[i] = file_read_all(path, max_bytes, &f->size_bytes[i], "", err);
        if (!f->text[i]) return false;
        ++*found;
    }
    return true;
}

static inline bool save_model_files(Checkpoint *ck, const ModelFiles *f, Error *err) {
    for (int i = 0; i < NUM_MODEL_FILES; i++)
        if (f->text[i] && !checkpoint_write_file(ck, model_file_names[i], f->text[i],
                                                 (size_t)f->size_bytes[i], err))
            return false;
    return true;
}

// For a model that came without one.
static inline bool save_generation_config(Checkpoint *ck, const LlamaConfig *c, Error *err) {
    char text[256];
    JsonWriter w;
    json_writer_init(&w, text, sizeof text, 2);
    json_begin(&w, NULL, '{');
    if (c->bos_token_id >= 0) json_int(&w, "bos_token_id", c->bos_token_id);
    if (c->eos_token_id >= 0) json_int(&w, "eos_token_id", c->eos_token_id);
    json_end(&w, '}');
    return checkpoint_write_file(ck, model_file_names[GENERATION_CONFIG], text, w.n, err);
}

static inline bool save_model(Checkpoint *ck, LlamaModel *m, const ModelFiles *files,
                              Error *err) {
    char text[8192], path[IO_PATH_MAX];
    SafetensorsWriter w;
    size_t n = llama_config_text(&m->config, "float32", text, sizeof text);
    return checkpoint_write_file(ck, "config.json", text, n, err) &&
           (files->text[GENERATION_CONFIG] || save_generation_config(ck, &m->config, err)) &&
           save_model_files(ck, files, err) &&
           checkpoint_path(ck, "model.safetensors", path, sizeof path, err) &&
           llama_save_weights(m, path, &w, err) &&
           checkpoint_register(ck, "model.safetensors", w.file.size_bytes, w.file.crc, err);
}

// ------------------------------------------------------------------------------------------------
// Where we are: trainer_state.json

typedef struct {
    PlanState cursor;   // of the next step to train
    int64_t log_bytes;  // of log.jsonl so far
    int skips_in_a_row;
} TrainingState;

// What must be the same for a resumed run to see the same documents in the same steps.
typedef struct {
    const char *name;
    int64_t value;
    int64_t before;  // what checkpoints stand for that do not have it; -1: all have
} StateField;
enum { STATE_PLAN_FIELDS = 11 };

static inline void state_plan_fields(StateField *f, const PlanSettings *p,
                                     uint64_t data_fingerprint, uint64_t token_fingerprint) {
    const PlanSettings usual = plan_settings();
    const int64_t tokens = (int64_t)(token_fingerprint >> 12);  // 52 bits: exact in JSON
    StateField fields[STATE_PLAN_FIELDS] = {
        {"data_fingerprint", (int64_t)(data_fingerprint >> 12), -1},
        {"token_fingerprint", tokens, tokens},
        {"seed", (int64_t)p->seed, -1},
        {"max_seqlen", p->max_seqlen, -1},
        {"micro_batch_tokens", p->micro_batch_tokens, -1},
        {"num_micro_batches", p->num_micro, -1},
        {"fill_ppm", p->fill_ppm, -1},
        {"long_docs", (int64_t)p->long_docs, -1},
        {"work_token", p->work_token, usual.work_token},
        {"work_tile", p->work_tile, usual.work_tile},
        {"work_side", p->work_side, usual.work_side},
    };
    memcpy(f, fields, sizeof fields);
}

// Returns the bytes written, 0 when the buffer is too small.
static inline size_t state_text(char *text, size_t capacity, const TrainingState *s,
                                const StateField *plan, const char *version,
                                const Option *options) {
    JsonWriter w;
    json_writer_init(&w, text, capacity, 2);
    json_begin(&w, NULL, '{');
    json_int(&w, "format", 1);
    json_string(&w, "version", version);
    json_int(&w, "step", s->cursor.step);
    json_int(&w, "epoch", s->cursor.epoch);
    json_int(&w, "doc_pos", s->cursor.doc_pos);
    json_int(&w, "tok_off", s->cursor.tok_off);
    json_int(&w, "log_bytes", s->log_bytes);
    json_int(&w, "skips_in_a_row", s->skips_in_a_row);
    for (int i = 0; i < STATE_PLAN_FIELDS; i++) json_int(&w, plan[i].name, plan[i].value);
    json_begin(&w, "options", '{');
    options_write_json(options, &w);
    json_end(&w, '}');
    json_end(&w, '}');
    return w.overflow ? 0 : w.n;
}

static inline bool state_read_cursor(const cJSON *state, TrainingState *s, Error *err) {
    const int64_t max = (int64_t)1 << 52;
    PlanState *c = &s->cursor;
    return json_get_int64(state, "step", 0, max, &c->step, true, err) &&
           json_get_int64(state, "epoch", 0, max, &c->epoch, true, err) &&
           json_get_int64(state, "doc_pos", 0, max, &c->doc_pos, true, err) &&
           json_get_int64(state, "tok_off", 0, max, &c->tok_off, true, err) &&
           json_get_int64(state, "log_bytes", 0, max, &s->log_bytes, true, err) &&
           json_get_int(state, "skips_in_a_row", 0, 1 << 30, &s->skips_in_a_row, true, err);
}

static inline bool state_check_plan(const cJSON *state, const StateField *plan, const char *path,
                                    Error *err) {
    const int64_t max = (int64_t)1 << 52;
    char misfits[512] = "";
    for (int i = 0; i < STATE_PLAN_FIELDS; i++) {
        int64_t was = plan[i].before;
        if (!json_get_int64(state, plan[i].name, 0, max, &was, was < 0, err)) return false;
        size_t used = strlen(misfits);
        if (was != plan[i].value)
            snprintf(misfits + used, sizeof misfits - used, " %s (was %lld, is %lld)", plan[i].name,
                     (long long)was, (long long)plan[i].value);
    }
    return misfits[0] == 0 ||
           error_set(err, EXIT_CHECKPOINT_MISFIT,
                     "resume with the data and sizes of the interrupted run",
                     "%s: expected the same documents in the same steps, found other values of%s",
                     path, misfits);
}

// The trainer_state.json of `dir`, for the caller to delete; NULL with the error.
static inline cJSON *state_open(const char *dir, Error *err) {
    char path[IO_PATH_MAX];
    if (!path_join(path, sizeof path, dir, "trainer_state.json", err)) return NULL;
    return json_read(path, JSON_MAX_CONFIG, "choose another checkpoint", err);
}

// *s from the trainer_state.json of `dir`; every field of the plan must be as it is now.
static inline bool state_read(TrainingState *s, const char *dir, const StateField *plan,
                              Error *err) {
    char path[IO_PATH_MAX];
    cJSON *state = state_open(dir, err);
    if (!state || !path_join(path, sizeof path, dir, "trainer_state.json", err)) return false;
    const bool ok = state_read_cursor(state, s, err) && state_check_plan(state, plan, path, err);
    cJSON_Delete(state);
    return ok;
}

// trainer_state.json of this text, and beside it what else going on needs. path: of
// optimizer.safetensors.
static inline bool save_training_state(Checkpoint *ck, LlamaModel *m, const char *path,
                                       const char *text, size_t n, Error *err) {
    SafetensorsWriter w;
    return llama_save_optimizer(m, path, &w, err) &&
           checkpoint_register(ck, "optimizer.safetensors", w.file.size_bytes, w.file.crc, err) &&
           save_matmul_choices(ck, err) &&
           checkpoint_write_file(ck, "trainer_state.json", text, n, err);
}

#endif
