#include "checkpoint_files.h"

#include <float.h>
#include <string.h>

#include "../base/json.h"

// ---- Small files --------------------------------------------------------------------------------

enum { GENERATION_CONFIG };
static const char *const names[NUM_MODEL_FILES] = {
    "generation_config.json",  // the others are the tokenizer's
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
};

bool model_files_read(ModelFiles *f, bool tokenizer, const char **dirs, int num_dirs, Error *err) {
    const uint64_t max_bytes = 1 << 28;
    const int first = tokenizer ? GENERATION_CONFIG + 1 : GENERATION_CONFIG,
              last = tokenizer ? NUM_MODEL_FILES - 1 : GENERATION_CONFIG;
    bool found = false;
    for (int d = 0; d < num_dirs && !found; d++) {
        for (int i = first; i <= last && path_is_dir(dirs[d]); i++) {
            const char *path = PATH_IN(dirs[d], names[i]);
            if (!path_exists(path)) continue;
            f->text[i] = file_read_all(path, max_bytes, &f->size_bytes[i], "", err);
            if (!f->text[i]) return false;
            found = true;
        }
    }
    return true;
}

static bool write_generation_config(const ModelFiles *f, const LlamaConfig *c, Checkpoint *ck,
                                    Error *err) {
    const char *name = names[GENERATION_CONFIG], *text = f->text[GENERATION_CONFIG];
    TokenIds eos = c->eos;
    if (text && f->turn_ends.n == 0)
        return checkpoint_write_file(ck, name, text, f->size_bytes[GENERATION_CONFIG], err);
    json_t *all = text ? json_parse(text, f->size_bytes[GENERATION_CONFIG], name, err) : NULL;
    if (text && !all) return false;
    if (!all) all = json_object();
    if (f->turn_ends.n > 0) eos.of_config = eos.n;  // all of them
    if (c->bos.n > 0 && !text) json_object_set_new(all, "bos_token_id", token_ids_json(&c->bos));
    if (c->eos.n > 0) json_object_set_new(all, "eos_token_id", token_ids_json(&eos));
    return checkpoint_write_text(ck, name, json_write(all, JSON_INDENT(2)), err);
}

static const struct {
    const char *safetensors, *torch;
} dtypes[] = {[MODEL_FP32] = {"F32", "float32"}, [MODEL_BF16] = {"BF16", "bfloat16"}};

bool model_files_write(const ModelFiles *f, const LlamaConfig *config, ModelDtype dtype,
                       Checkpoint *ck, Error *err) {
    char *text = llama_config_text(config, dtypes[dtype].torch);
    bool ok = checkpoint_write_text(ck, "config.json", text, err) &&
              write_generation_config(f, config, ck, err);
    for (int i = GENERATION_CONFIG + 1; ok && i < NUM_MODEL_FILES; i++)
        ok = !f->text[i] ||
             checkpoint_write_file(ck, names[i], f->text[i], (size_t)f->size_bytes[i], err);
    return ok;
}

// ---- Tensors ------------------------------------------------------------------------------------

static bool write_tensors(Parameters p, const char *dtype, bool moments, const char *name,
                          Checkpoint *ck, Error *err) {
    FileWriter w;
    const char *path = ck ? PATH_IN(ck->dir, name) : NULL;
    if (!parameters_save(p, moments, dtype, path, &w, err)) return false;
    checkpoint_register(ck, name, w.size_bytes, w.crc);
    return true;
}

bool model_files_write_moments(Parameters p, ModelDtype dtype, Checkpoint *ck, Error *err) {
    return write_tensors(p, dtypes[dtype].safetensors, true, MOMENTS_FILE, ck, err);
}

// Takes the parameters of the next file off *rest: as many as max_bytes hold, but at least one.
static Parameters take_file(Parameters *rest, uint64_t element_bytes, uint64_t max_bytes) {
    Parameters file = *rest;
    uint64_t bytes = 0;
    file.num = 0;
    while (file.num < rest->num) {
        bytes += file.list[file.num].count * element_bytes;
        if (file.num > 0 && bytes > max_bytes) break;
        file.num++;
    }
    rest->list += file.num;
    rest->num -= file.num;
    return file;
}

bool model_files_write_weights(Parameters p, ModelDtype dtype, uint64_t max_file_bytes,
                               Checkpoint *ck, Error *err) {
    const char *index_name = "model.safetensors.index.json";
    const uint64_t element_bytes = tensor_dtype_size(dtypes[dtype].safetensors);
    Parameters rest = p;
    char name[64] = "model.safetensors";
    if (p.file) return write_tensors(p, dtypes[dtype].safetensors, false, p.file, ck, err);
    json_auto_t *map = json_object();
    uint64_t elements = 0;
    int files = 0;
    bool ok = true;
    for (; rest.num > 0; files++) take_file(&rest, element_bytes, max_file_bytes);
    for (int i = 1; i <= files; i++) {
        const Parameters file = take_file(&p, element_bytes, max_file_bytes);
        if (files > 1) snprintf(name, sizeof name, "model-%05d-of-%05d.safetensors", i, files);
        for (int k = 0; k < file.num; elements += file.list[k++].count)
            json_object_set_new(map, file.list[k].name, json_string(name));
        ok = write_tensors(file, dtypes[dtype].safetensors, false, name, ok ? ck : NULL, err);
    }
    if (!ok || files <= 1) return ok;
    json_t *index = json_pack("{s:{s:I}, s:O}", "metadata", "total_size",
                              (int64_t)(elements * element_bytes), "weight_map", map);
    return checkpoint_write_text(ck, index_name, json_write(index, JSON_INDENT(2)), err);
}

// ---- The state of a run -------------------------------------------------------------------------

#define FILE_NAME "trainer_state.json"

enum { PACKER = 3 };  // another number where steps are packed otherwise
static const int64_t max_count = (int64_t)1 << 52;

// Numbers that must be the same for a resumed run to see the same documents in the same steps
static json_t *plan_json(const PlanSettings *p, const Dataset *train) {
    return json_pack("{s:I, s:I, s:I, s:i, s:i, s:i, s:i, s:i, s:i}", "data_fingerprint",
                     (int64_t)(train->fingerprint >> 12),  // 52 bits: exact in JSON
                     "token_fingerprint", (int64_t)(train->token_fingerprint >> 12), "seed",
                     (int64_t)p->seed, "max_seqlen", p->max_seqlen, "micro_batch_tokens",
                     p->micro_batch_tokens, "num_micro_batches", p->num_micro, "fill_ppm",
                     p->fill_ppm, "long_docs", (int)p->long_docs, "packer", PACKER);
}

static json_t *cursors_json(const SourceCursor *c, const Sources *sources) {
    json_t *list = json_array();
    for (int32_t i = 0; i < sources->n; i++, c++)
        json_array_append_new(
            list, json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "epoch", c->epoch, "doc_pos",
                            c->doc_pos, "tok_off", c->tok_off, "tokens", c->tokens, "counted",
                            c->counted, "weight", sources->list[i].weight));
    return list;
}

// Where a weight has changed, shares count from here.
static bool read_cursors(const json_t *state, const Sources *all, SourceCursor *at, Error *err) {
    const json_t *list = json_member(state, "sources");
    bool changed = false;
    for (int32_t i = 0; i < all->n; i++) {
        const json_t *from = json_array_get(list, (size_t)i);
        SourceCursor *c = &at[i];
        int64_t weight = 0;
        if (!json_get_int64(from, "epoch", 0, max_count, &c->epoch, true, err) ||
            !json_get_int64(from, "doc_pos", 0, max_count, &c->doc_pos, true, err) ||
            !json_get_int64(from, "tok_off", 0, max_count, &c->tok_off, true, err) ||
            !json_get_int64(from, "tokens", 0, max_count, &c->tokens, true, err) ||
            !json_get_int64(from, "counted", 0, c->tokens, &c->counted, true, err) ||
            !json_get_int64(from, "weight", 0, ALL_WEIGHTS, &weight, true, err))
            return false;
        changed |= weight != all->list[i].weight;
    }
    for (int32_t i = 0; changed && i < all->n; i++) at[i].counted = 0;
    return true;
}

static bool read_progress(const json_t *state, TrainingState *s, Error *err) {
    return json_get_int64(state, "step", 0, max_count, &s->cursor.step, true, err) &&
           json_get_int64(state, "log_bytes", 0, max_count, &s->log_bytes, true, err) &&
           json_get_int(state, "skips_in_a_row", 0, 1 << 30, &s->skips_in_a_row, true, err) &&
           json_get_int64(state, "num_losses", 0, max_count, &s->trend.num_losses, true, err) &&
           json_get_double(state, "loss_mean", 0, DBL_MAX, &s->trend.mean, true, err) &&
           json_get_double(state, "loss_deviation", 0, DBL_MAX, &s->trend.deviation, true, err) &&
           json_get_int64(state, "frozen_crc", 0, max_count, &s->frozen_crc, true, err);
}

static bool check_plan(const json_t *state, json_t *plan, const char *path, Error *err) {
    char misfits[512] = "";
    const char *name;
    json_t *value;
    json_object_foreach(plan, name, value) {
        const int64_t is = json_integer_value(value);
        int64_t was;
        if (!json_get_int64(state, name, 0, max_count, &was, true, err)) return false;
        const size_t used = strlen(misfits);
        if (was != is)
            snprintf(misfits + used, sizeof misfits - used, " %s (was %ld, is %ld)", name, was, is);
    }
    return misfits[0] == 0 ||
           error_set(err, EXIT_CHECKPOINT_MISFIT,
                     "resume with the data, sizes and order of sources of the interrupted run",
                     "%s: expected the same documents in the same steps, found other values of%s",
                     path, misfits);
}

bool state_write(Checkpoint *ck, const TrainingState *s, const PlanSettings *plan,
                 const Dataset *train, const char *version, Error *err) {
    json_t *state = json_pack("{s:i, s:s, s:I, s:o, s:I, s:i, s:I, s:f, s:f, s:I}", "format", 1,
                              "version", version, "step", s->cursor.step, "sources",
                              cursors_json(s->cursor.sources, &train->sources), "log_bytes",
                              s->log_bytes, "skips_in_a_row", s->skips_in_a_row, "num_losses",
                              s->trend.num_losses, "loss_mean", s->trend.mean, "loss_deviation",
                              s->trend.deviation, "frozen_crc", s->frozen_crc);
    json_auto_t *same = plan_json(plan, train);
    json_object_update(state, same);
    return checkpoint_write_text(ck, FILE_NAME, json_write(state, JSON_INDENT(2)), err);
}

bool state_read(TrainingState *s, const char *dir, const PlanSettings *plan, const Dataset *train,
                Error *err) {
    const char *path = PATH_IN(dir, FILE_NAME);
    json_auto_t *state = json_read(path, JSON_MAX_CONFIG, "--resume needs a step-* directory", err),
                *same = plan_json(plan, train);
    return state && check_plan(state, same, path, err) && read_progress(state, s, err) &&
           read_cursors(state, &train->sources, s->cursor.sources, err);
}
