#include "gguf.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../base/dir.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/memory.h"
#include "../base/path.h"
#include "config.h"
#include "rope.h"
#include "safetensors.h"
#include "tokenizer.h"
#include "weights.h"

// ------------------------------------------------------------------------------------------------
// Elements. Each store writes n values; false when one is out of range.

static bool store_f32(const float *values, int64_t n, unsigned char *out) {
    memcpy(out, values, (size_t)n * sizeof(float));
    return true;
}

// Both rounded to nearest even, the larger ones to Inf. Below 2^-14 an fp16 counts in 2^-24.
static uint16_t f16_bits(float value) {
    const float size = fminf(fabsf(value), 0x1p16f);
    uint32_t bits;
    memcpy(&bits, &size, sizeof bits);
    bits = size < 0x1p-14f ? (uint32_t)lrintf(size * 0x1p24f)
                           : ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
    return (uint16_t)(bits | (signbit(value) ? 0x8000 : 0));
}

static bool store_16(const float *values, int64_t n, unsigned char *out, uint16_t (*bits_of)(float),
                     uint16_t infinity) {
    bool fits = true;
    for (int64_t i = 0; i < n; i++) {
        const uint16_t bits = bits_of(values[i]);
        memcpy(out + 2 * i, &bits, sizeof bits);
        fits = fits && (bits & 0x7fff) != infinity;
    }
    return fits;
}

static bool store_bf16(const float *values, int64_t n, unsigned char *out) {
    return store_16(values, n, out, bf16_bits, 0x7f80);
}

static bool store_f16(const float *values, int64_t n, unsigned char *out) {
    return store_16(values, n, out, f16_bits, 0x7c00);
}

enum { Q8_BLOCK = 32 };
static bool store_q8_0(const float *values, int64_t n, unsigned char *out) {
    bool fits = true;
    for (int64_t first = 0; first < n; first += Q8_BLOCK) {
        float largest = 0;
        for (int i = 0; i < Q8_BLOCK; i++) largest = fmaxf(largest, fabsf(values[first + i]));
        const float scale = largest / 127, inverse = scale > 0 ? 1 / scale : 0;
        fits = store_f16(&scale, 1, out) && fits;
        out += 2;
        for (int i = 0; i < Q8_BLOCK; i++)
            *out++ = (unsigned char)(signed char)roundf(values[first + i] * inverse);
    }
    return fits;
}

static const struct {
    const char *name;
    uint32_t type, file_type;  // llama.cpp's numbers: ggml_type, llama_ftype
    int block, block_bytes;    // elements and bytes of a block
    bool (*store)(const float *values, int64_t n, unsigned char *out);
} types[] = {
    [GGUF_BF16] = {"bf16", 30, 32, 1, 2, store_bf16},
    [GGUF_F16] = {"f16", 1, 1, 1, 2, store_f16},
    [GGUF_Q8_0] = {"q8_0", 8, 7, Q8_BLOCK, Q8_BLOCK + 2, store_q8_0},
    [GGUF_F32] = {"f32", 0, 0, 1, 4, store_f32},
};

// ------------------------------------------------------------------------------------------------
// The header, built in memory

typedef struct {
    char *bytes;
    size_t n, capacity;
    uint64_t num_values;
} Header;

static void put(Header *h, const void *data, size_t n) {
    h->bytes = host_grow(h->bytes, &h->capacity, h->n + n, 1, "GGUF header");
    memcpy(h->bytes + h->n, data, n);
    h->n += n;
}

static void put_u32(Header *h, uint32_t value) { put(h, &value, sizeof value); }
static void put_u64(Header *h, uint64_t value) { put(h, &value, sizeof value); }

static void put_text(Header *h, const char *text) {
    put_u64(h, strlen(text));
    put(h, text, strlen(text));
}

enum { U32 = 4, I32 = 5, F32 = 6, BOOL = 7, STRING = 8, ARRAY = 9 };  // types of values

// A value; an array's begins with the type and the number of its elements.
static void put_key(Header *h, const char *key, uint32_t type) {
    put_text(h, key);
    put_u32(h, type);
    h->num_values++;
}

static void put_number(Header *h, const char *key, uint32_t value) {
    put_key(h, key, U32);
    put_u32(h, value);
}

static void put_float(Header *h, const char *key, float value) {
    put_key(h, key, F32);
    put(h, &value, sizeof value);
}

static void put_string(Header *h, const char *key, const char *value) {
    put_key(h, key, STRING);
    put_text(h, value);
}

static void put_array(Header *h, const char *key, uint32_t type, uint64_t count) {
    put_key(h, key, ARRAY);
    put_u32(h, type);
    put_u64(h, count);
}

// Mistral's tensors and maths are Llama's, for llama.cpp too.
static bool check_model(const LlamaConfig *c, const char *dir, Error *err) {
    const bool llama = c->model_type == MODEL_LLAMA || c->model_type == MODEL_MISTRAL;
    if (llama && c->rope_scaling.type != ROPE_YARN) return true;
    return error_set(err, EXIT_BAD_INPUT, "llama.cpp's convert_hf_to_gguf.py knows the others",
                     "%s: expected a model_type of llama or mistral without yarn RoPE, found %s",
                     dir, llama ? "yarn" : "another model_type");
}

static void put_model(Header *h, const LlamaConfig *c, GgufType type) {
    const struct {
        const char *key;
        int value;
    } numbers[] = {
        {"general.file_type", (int)types[type].file_type},
        {"general.quantization_version", 2},
        {"llama.vocab_size", c->vocab_size},
        {"llama.context_length", c->max_position_embeddings},
        {"llama.embedding_length", c->hidden_size},
        {"llama.block_count", c->num_layers},
        {"llama.feed_forward_length", c->intermediate_size},
        {"llama.attention.head_count", c->num_heads},
        {"llama.attention.head_count_kv", c->num_kv_heads},
        {"llama.attention.key_length", c->head_dim},
        {"llama.attention.value_length", c->head_dim},
        {"llama.rope.dimension_count", c->head_dim},
    };
    put_string(h, "general.architecture", "llama");
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        put_number(h, numbers[i].key, (uint32_t)numbers[i].value);
    put_float(h, "llama.rope.freq_base", (float)c->rope_theta);
    put_float(h, "llama.attention.layer_norm_rms_epsilon", c->rms_norm_eps);
}

// ------------------------------------------------------------------------------------------------
// The tokenizer

// clang-format off
#define BYTE_LEVEL "{\"add_prefix_space\":false,\"trim_offsets\":true,\"type\":\"ByteLevel\""
static const struct {
    const char *name, *json;  // llama.cpp's name, and the pre_tokenizer with sorted keys
} pre_tokenizers[] = {
    {"gpt-2", BYTE_LEVEL "}"},
    {"gpt-2", BYTE_LEVEL ",\"use_regex\":true}"},
    {"smollm",
     "{\"pretokenizers\":[{\"individual_digits\":true,\"type\":\"Digits\"},"
     BYTE_LEVEL ",\"use_regex\":true}],\"type\":\"Sequence\"}"},
    {"llama-bpe",
     "{\"pretokenizers\":[{\"behavior\":\"Isolated\",\"invert\":false,\"pattern\":{\"Regex\":\""
     "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}| "
     "?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
     "\"},\"type\":\"Split\"},"
     BYTE_LEVEL ",\"use_regex\":false}],\"type\":\"Sequence\"}"},
};
// clang-format on

// NULL: none that we know. Without merges all of them give the same tokens.
static const char *pre_tokenizer_name(const json_t *root, const json_t *merges) {
    const char *name = json_array_size(merges) == 0 ? "gpt-2" : NULL;
    char *json = json_dumps(json_member(root, "pre_tokenizer"), JSON_COMPACT | JSON_SORT_KEYS);
    for (size_t i = 0; json && !name && i < sizeof pre_tokenizers / sizeof *pre_tokenizers; i++)
        if (strcmp(json, pre_tokenizers[i].json) == 0) name = pre_tokenizers[i].name;
    free(json);
    return name;
}

// The text of every id of the model, as in tokenizer.json; NULL: the tokenizer does not have it.
static const char **token_texts(const json_t *root, int vocab_size) {
    const char **texts = host_calloc((size_t)vocab_size, sizeof *texts, "the vocabulary"), *text;
    const json_t *item;
    size_t i;
    json_object_foreach(json_member(json_member(root, "model"), "vocab"), text, item)
        texts[(int)json_number_value(item)] = text;
    json_array_foreach(json_member(root, "added_tokens"), i, item)
        texts[(int)json_number_value(json_member(item, "id"))] =
            json_string_value(json_member(item, "content"));
    return texts;
}

static void put_tokens(Header *h, const Tokenizer *t, const char **texts, int vocab_size) {
    enum { NORMAL = 1, CONTROL = 3, USER_DEFINED = 4, UNUSED = 5 };
    char missing[32];
    put_array(h, "tokenizer.ggml.tokens", STRING, (uint64_t)vocab_size);
    for (int id = 0; id < vocab_size; id++) {
        snprintf(missing, sizeof missing, "[PAD%d]", id);
        put_text(h, texts[id] ? texts[id] : missing);
    }
    put_array(h, "tokenizer.ggml.token_type", I32, (uint64_t)vocab_size);
    for (int id = 0; id < vocab_size; id++)
        put_u32(h, !texts[id]       ? UNUSED
                   : t->special[id] ? CONTROL
                   : t->added[id]   ? USER_DEFINED
                                    : NORMAL);
}

// "left right" or ["left", "right"]
static bool put_merges(Header *h, const json_t *merges, Error *err) {
    const json_t *item;
    char pair[2048];
    size_t i;
    put_array(h, "tokenizer.ggml.merges", STRING, json_array_size(merges));
    json_array_foreach(merges, i, item) {
        const char *left = json_string_value(json_array_get(item, 0)),
                   *right = json_string_value(json_array_get(item, 1)),
                   *whole = json_string_value(item);
        if (!whole && left && right &&
            snprintf(pair, sizeof pair, "%s %s", left, right) < (int)sizeof pair)
            whole = pair;
        if (!whole) return bad_input(err, "model.merges: expected two tokens at %zu", i);
        put_text(h, whole);
    }
    return true;
}

// The tokens with a role, as tokenizer_config.json names them, else config.json numbers them.
static void put_roles(Header *h, const Tokenizer *t, const json_t *config, const char **texts,
                      const LlamaConfig *c) {
    const struct {
        const char *name, *key;
        int id;
    } roles[] = {{"bos_token", "tokenizer.ggml.bos_token_id", c->bos_token_id},
                 {"eos_token", "tokenizer.ggml.eos_token_id", c->eos_token_id},
                 {"unk_token", "tokenizer.ggml.unknown_token_id", -1},
                 {"pad_token", "tokenizer.ggml.padding_token_id", -1}};
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) {
        const json_t *item = json_member(config, roles[i].name);
        if (json_is_object(item)) item = json_member(item, "content");
        int id = roles[i].id;
        for (int k = 0; json_is_string(item) && k < c->vocab_size; k++)
            if (texts[k] && json_string_is(item, texts[k])) id = k;
        if (id >= 0) put_number(h, roles[i].key, (uint32_t)id);
    }
    put_key(h, "tokenizer.ggml.add_bos_token", BOOL);
    put(h, &t->adds_bos, 1);
}

static bool check_tokenizer(const Tokenizer *t, const json_t *root, const char *pre,
                            const LlamaConfig *c, Error *err) {
    const json_t *normalizer = json_member(root, "normalizer");
    if (t->vocab_size > c->vocab_size)
        return bad_input(err, "expected at most the %d tokens of config.json, found %d",
                         c->vocab_size, t->vocab_size);
    if (pre && !normalizer && json_mentions_type(json_member(root, "decoder"), "ByteLevel"))
        return true;
    return error_set(err, EXIT_BAD_INPUT, "llama.cpp's convert_hf_to_gguf.py knows more of them",
                     "expected byte-level BPE that splits text as GPT-2, SmolLM2 or Llama 3 do, "
                     "found another %s",
                     normalizer ? "normalizer" : "pre_tokenizer");
}

static bool put_tokenizer_of(Header *h, const char *dir, const Tokenizer *t, const json_t *root,
                             const LlamaConfig *c, Error *err) {
    char path[IO_PATH_MAX];
    const json_t *merges = json_member(json_member(root, "model"), "merges");
    const char *pre = pre_tokenizer_name(root, merges);
    if (!check_tokenizer(t, root, pre, c, err)) return error_prefix(err, t->file);
    if (!path_join(path, sizeof path, dir, "tokenizer_config.json", err)) return false;
    json_auto_t *config = path_exists(path) ? json_read(path, JSON_MAX_CONFIG, "", err) : NULL;
    char *chat = err->code ? NULL : tokenizer_chat_template(dir, path, err);
    if (err->code) return false;
    const char **texts = token_texts(root, c->vocab_size);
    put_string(h, "tokenizer.ggml.model", "gpt2");
    put_string(h, "tokenizer.ggml.pre", pre);
    put_tokens(h, t, texts, c->vocab_size);
    put_roles(h, t, config, texts, c);
    if (chat) put_string(h, "tokenizer.chat_template", chat);
    free(chat);
    free(texts);
    return put_merges(h, merges, err) || error_prefix(err, t->file);
}

static bool put_tokenizer(Header *h, const char *dir, const LlamaConfig *c, Error *err) {
    Tokenizer t;
    if (!tokenizer_open(&t, dir, err)) return false;
    json_auto_t *root = json_read(t.file, TOKENIZER_MAX_BYTES, "", err);
    const bool ok = root && put_tokenizer_of(h, dir, &t, root, c, err);
    tokenizer_free(&t);
    return ok;
}

// ------------------------------------------------------------------------------------------------
// Tensors

typedef struct {
    LlamaConfig config;
    GgufType type;  // of matrices
    Parameter *list;
    char (*names)[64];  // of the list in GGUF
    int num;
} Model;

static GgufType type_of(const Model *m, const Parameter *p) {
    return !p->cols ? GGUF_F32 : p->cols % types[m->type].block ? GGUF_F16 : m->type;
}

static void add_tensor(Model *m, int layer, const char *name, const char *hf_name, int rows,
                       int cols) {
    Parameter *p = &m->list[m->num];
    char block[32] = "", hf_layer[32] = "";
    if (layer >= 0) snprintf(block, sizeof block, "blk.%d.", layer);
    if (layer >= 0) snprintf(hf_layer, sizeof hf_layer, "model.layers.%d.", layer);
    snprintf(m->names[m->num++], sizeof *m->names, "%s%s.weight", block, name);
    snprintf(p->name, sizeof p->name, "%s%s.weight", hf_layer, hf_name);
    p->rows = rows;
    p->cols = cols;
}

static void list_tensors(Model *m) {
    const LlamaConfig *c = &m->config;
    const int hidden = c->hidden_size, ffn = c->intermediate_size, q = c->num_heads * c->head_dim,
              kv = c->num_kv_heads * c->head_dim;
    const struct {
        const char *name, *hf_name;
        int rows, cols;
    } of_layer[] = {
        {"attn_norm", "input_layernorm", hidden, 0},
        {"attn_q", "self_attn.q_proj", q, hidden},
        {"attn_k", "self_attn.k_proj", kv, hidden},
        {"attn_v", "self_attn.v_proj", kv, hidden},
        {"attn_output", "self_attn.o_proj", hidden, q},
        {"ffn_norm", "post_attention_layernorm", hidden, 0},
        {"ffn_gate", "mlp.gate_proj", ffn, hidden},
        {"ffn_up", "mlp.up_proj", ffn, hidden},
        {"ffn_down", "mlp.down_proj", hidden, ffn},
    };
    const size_t per_layer = sizeof of_layer / sizeof *of_layer,
                 most = (size_t)c->num_layers * per_layer + 3;
    m->list = host_calloc(most, sizeof *m->list, "tensor list");
    m->names = host_calloc(most, sizeof *m->names, "tensor list");
    add_tensor(m, -1, "token_embd", "model.embed_tokens", c->vocab_size, hidden);
    for (int layer = 0; layer < c->num_layers; layer++)
        for (size_t i = 0; i < per_layer; i++)
            add_tensor(m, layer, of_layer[i].name, of_layer[i].hf_name, of_layer[i].rows,
                       of_layer[i].cols);
    add_tensor(m, -1, "output_norm", "model.norm", hidden, 0);
    if (!c->tie_word_embeddings) add_tensor(m, -1, "output", "lm_head", c->vocab_size, hidden);
}

// A vector is one row.
static int64_t num_rows(const Parameter *p) { return p->cols ? p->rows : 1; }
static int64_t num_cols(const Parameter *p) { return p->cols ? p->cols : p->rows; }
static int64_t row_bytes(const Parameter *p, GgufType type) {
    return num_cols(p) / types[type].block * types[type].block_bytes;
}

// Returns the offset of the tensor after this one.
static uint64_t put_tensor(Header *h, const char *name, const Parameter *p, GgufType type,
                           uint64_t offset) {
    put_text(h, name);
    put_u32(h, p->cols ? 2 : 1);
    put_u64(h, (uint64_t)num_cols(p));
    if (p->cols) put_u64(h, (uint64_t)p->rows);
    put_u32(h, types[type].type);
    put_u64(h, offset);
    return offset + ((uint64_t)(num_rows(p) * row_bytes(p, type)) + 31) / 32 * 32;
}

static bool write_padding(FileWriter *w, Error *err) {
    static const char zeros[32];
    return writer_write(w, zeros, -w->size_bytes % sizeof zeros, err);
}

// Where row `row` of Q or K is in Hugging Face's order: llama.cpp rotates neighbours, Hugging Face
// the two halves of a head.
static int64_t hf_row(int64_t row, int64_t head_dim) {
    const int64_t i = row % head_dim;
    return row - i + i / 2 + i % 2 * (head_dim / 2);
}

static bool write_tensor(const Model *m, const Parameter *p, SafetensorsSet *s, FileWriter *w,
                         Error *err) {
    const TensorInfo *info = safetensors_find(s, p->name);
    const char *from = s->files[info->file].path;
    const GgufType type = type_of(m, p);
    const bool rotated = strstr(p->name, ".q_proj.") || strstr(p->name, ".k_proj.");
    const uint64_t n = (uint64_t)num_cols(p), bytes = (uint64_t)row_bytes(p, type);
    float *values = host_calloc(n, sizeof(float), "a row of weights");
    unsigned char *stored = host_calloc(bytes, 1, "a row of weights");
    bool ok = true;
    for (int64_t row = 0; ok && row < num_rows(p); row++) {
        const int64_t hf = rotated ? hf_row(row, m->config.head_dim) : row;
        ok = safetensors_read_f32(s, info, values, (uint64_t)hf * n, n, err);
        if (ok && s->num_nonfinite)
            ok = error_set(err, EXIT_DIVERGED, "take an earlier checkpoint",
                           "%s: expected finite weights, found NaN or Inf in %s", from, p->name);
        if (ok && !types[type].store(values, (int64_t)n, stored))
            ok = error_set(err, EXIT_BAD_INPUT, "--export-type bf16 has the range of fp32",
                           "%s: %s: expected weights in the range of %s, found a larger one", from,
                           p->name, types[type].name);
        ok = ok && writer_write(w, stored, bytes, err);
    }
    free(values);
    free(stored);
    return ok && write_padding(w, err);
}

// What llama.cpp divides the frequencies of plain RoPE by.
static bool write_rope_factors(const LlamaConfig *c, FileWriter *w, Error *err) {
    LlamaConfig plain = *c;
    bool ok = true;
    plain.rope_scaling.type = ROPE_PLAIN;
    for (int i = 0; ok && i < c->head_dim / 2; i++) {
        const float factor = rope_frequency(&plain, i) / rope_frequency(c, i);
        ok = writer_write(w, &factor, sizeof factor, err);
    }
    return ok;
}

// ------------------------------------------------------------------------------------------------
// The file

static bool put_header(Header *h, const Model *m, const char *dir, Error *err) {
    const bool scaled_rope = m->config.rope_scaling.type != ROPE_PLAIN;
    const Parameter factors = {.rows = m->config.head_dim / 2};
    put(h, "GGUF", 4);
    put_u32(h, 3);
    put_u64(h, (uint64_t)m->num + scaled_rope);
    const size_t at = h->n;
    put_u64(h, 0);
    put_model(h, &m->config, m->type);
    if (!put_tokenizer(h, dir, &m->config, err)) return false;
    memcpy(h->bytes + at, &h->num_values, sizeof h->num_values);
    uint64_t offset = 0;
    for (int i = 0; i < m->num; i++)
        offset = put_tensor(h, m->names[i], &m->list[i], type_of(m, &m->list[i]), offset);
    if (scaled_rope) put_tensor(h, "rope_freqs.weight", &factors, GGUF_F32, offset);
    return true;
}

static bool write_file(const Model *m, const Header *h, const char *dir, FileWriter *w,
                       Error *err) {
    SafetensorsSet s;
    if (!safetensors_open(&s, dir, err)) return false;
    bool ok = writer_write(w, h->bytes, h->n, err) && write_padding(w, err);
    for (int i = 0; ok && i < m->num; i++) ok = write_tensor(m, &m->list[i], &s, w, err);
    safetensors_close(&s);
    return ok &&
           (m->config.rope_scaling.type == ROPE_PLAIN || write_rope_factors(&m->config, w, err));
}

static bool create_file(const Model *m, const Header *h, const char *dir, const char *path,
                        Error *err) {
    FileWriter w;
    char temp[IO_PATH_MAX], parent[IO_PATH_MAX];
    if (!path_parent(parent, sizeof parent, path, err) ||
        !path_printf(temp, sizeof temp, err, "%s.tmp-%ld", path, (long)getpid()) ||
        !writer_open(&w, temp, err))
        return false;
    if (!write_file(m, h, dir, &w, err)) writer_abort(&w);
    if (err->code || !writer_close(&w, err)) return false;
    if (io_rename(temp, path, err)) return dir_sync(parent, err);
    unlink(temp);
    return false;
}

bool gguf_export(const char *dir, GgufType type, const char *path, Error *err) {
    Model m = {.type = type};
    Header h = {0};
    if (path_exists(path))
        return error_set(err, EXIT_USAGE, "remove it, or choose another --out",
                         "%s: expected a new file, found one", path);
    if (!llama_config_read(&m.config, dir, err) || !check_model(&m.config, dir, err)) return false;
    list_tensors(&m);
    const Parameters p = {.list = m.list, .num = m.num, .tied_head = m.config.tie_word_embeddings};
    const bool ok = weights_check(p, dir, err) && put_header(&h, &m, dir, err) &&
                    create_file(&m, &h, dir, path, err);
    if (ok)
        printf("wrote %s: %.2f M parameters, %s\n", path,
               (double)llama_config_num_params(&m.config) * 1e-6, types[type].name);
    free(h.bytes);
    free(m.list);
    free(m.names);
    return ok;
}
