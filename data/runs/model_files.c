#include "model_files.h"

#include "../base/file.h"
#include "../base/json.h"
#include "../base/path.h"

enum { GENERATION_CONFIG, FIRST_TOKENIZER_FILE };
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

static bool read_files(ModelFiles *f, const char **dirs, int num_dirs, int first, int last,
                       Error *err) {
    const uint64_t max_bytes = 1 << 28;
    char path[IO_PATH_MAX];
    bool found = false;
    for (int d = 0; d < num_dirs && !found; d++) {
        for (int i = first; i <= last && path_is_dir(dirs[d]); i++) {
            if (!path_join(path, sizeof path, dirs[d], names[i], err)) return false;
            if (!path_exists(path)) continue;
            f->text[i] = file_read_all(path, max_bytes, &f->size_bytes[i], "", err);
            if (!f->text[i]) return false;
            found = true;
        }
    }
    return true;
}

bool model_files_read_generation(ModelFiles *f, const char **dirs, int num_dirs, Error *err) {
    return read_files(f, dirs, num_dirs, GENERATION_CONFIG, GENERATION_CONFIG, err);
}

bool model_files_read_tokenizer(ModelFiles *f, const char **dirs, int num_dirs, Error *err) {
    return read_files(f, dirs, num_dirs, FIRST_TOKENIZER_FILE, NUM_MODEL_FILES - 1, err);
}

static bool write_carried(const ModelFiles *f, Checkpoint *ck, Error *err) {
    for (int i = 0; i < NUM_MODEL_FILES; i++)
        if (f->text[i] &&
            !checkpoint_write_file(ck, names[i], f->text[i], (size_t)f->size_bytes[i], err))
            return false;
    return true;
}

static bool write_generation_config(const LlamaConfig *c, Checkpoint *ck, Error *err) {
    char text[256];
    JsonWriter w;
    json_writer_init(&w, text, sizeof text, 2);
    json_begin(&w, NULL, '{');
    if (c->bos_token_id >= 0) json_put_int(&w, "bos_token_id", c->bos_token_id);
    if (c->eos_token_id >= 0) json_put_int(&w, "eos_token_id", c->eos_token_id);
    json_end(&w, '}');
    return checkpoint_write_file(ck, names[GENERATION_CONFIG], text, w.n, err);
}

bool model_files_write(const ModelFiles *f, const LlamaConfig *config, Checkpoint *ck, Error *err) {
    char text[8192];
    const size_t n = llama_config_text(config, "float32", text, sizeof text);
    return checkpoint_write_file(ck, "config.json", text, n, err) &&
           (f->text[GENERATION_CONFIG] || write_generation_config(config, ck, err)) &&
           write_carried(f, ck, err);
}
