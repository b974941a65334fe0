// Hostile files: a target for each format that others can hand us. An input is refused, or what its
// reader promises of it holds; either way without a wrong access, without an allocation that its
// size does not explain, and in time that grows as its size does.
//
//   make fuzz FUZZ_S=60 TARGET=config     libFuzzer looks for inputs (dev/fuzz/fuzz.py)
//   build/asan/test_fuzz                  replays those of tests/golden/fuzz
//
// An input is up to four files with "\n~~\n" between them, after a few bytes of flags. Every CRC32C
// is 0 here (the linker's --wrap), or hardly any input would be read beyond its checksum.
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include "../../data/base/hash.h"
#include "../../data/base/json.h"
#include "../../data/base/memory.h"
#include "../../data/models/lora.h"
#include "../../data/use/benchmark.h"
#include "../../data/runs/checkpoint_files.h"
#include "../../data/runs/out_dir.h"
#include "../../data/runs/run_options.h"
#include "../../data/shards/shard.h"
#include "../../data/texts/documents.h"
#include "../../tests/scratch.h"

#ifndef CHECK  // that of tests/test.h
#define CHECK(cond_) \
    ((cond_) ? (void)0 : (fprintf(stderr, "line %d: expected %s\n", __LINE__, #cond_), abort()))
#endif

enum { PARTS = 4, MAX_INPUT = 1 << 19 };

typedef struct {
    const unsigned char *p;
    size_t n;
} Bytes;

typedef struct {
    Bytes part[PARTS];
    unsigned char flags[2];
    Error err;     // of a target that returns false
    json_t *seen;  // array: what was read, for dev/fuzz/compare.py; NULL: not wanted
} Input;

// The file of that name in the scratch directory; none where there are no bytes.
static const char *put(const char *name, const void *p, size_t n) {
    const char *path = scratch(name);
    const int fd = n > 0 ? open(path, O_WRONLY | O_CREAT, 0600) : unlink(path);
    if (n > 0 && (fd < 0 || !io_write_all(fd, p, n) || ftruncate(fd, (off_t)n) != 0)) abort();
    if (n > 0) close(fd);
    return path;
}

uint32_t __wrap_crc32c(uint32_t crc, const void *data, size_t n);
uint32_t __wrap_crc32c(uint32_t crc, const void *data, size_t n) {
    return (void)crc, (void)data, (void)n, 0;
}

static json_t *parse(Bytes b) { return json_parse((const char *)b.p, b.n, "text", &(Error){0}); }

// Shards. A flag: the model is known; header up to its zeros, tokens, index, mask

static bool fuzz_shards(Input *in) {
    static unsigned char bin[MAX_INPUT + SHARD_HEADER_BYTES];
    const size_t head = in->part[0].n < 1024 ? in->part[0].n : 1024, bytes = in->part[1].n;
    const DatasetOptions options = {.vocab_size = in->flags[0] % 2 ? 100 : 0};
    memset(bin, 0, SHARD_HEADER_BYTES);
    memcpy(bin, in->part[0].p, head);
    memcpy(bin + SHARD_HEADER_BYTES, in->part[1].p, bytes);
    const char *path = put("f.bin", bin, SHARD_HEADER_BYTES + bytes);
    Dataset ds;
    int64_t tokens = 0, all_targets = 0;
    if (!dataset_open(&ds, path, &options, &in->err)) return false;
    CHECK(ds.num_docs > 0 && ds.vocab_size > 0);
    int32_t *ids = host_calloc((size_t)ds.num_tokens, sizeof *ids, "a document");
    for (int64_t doc = 0, n; doc < ds.num_docs; doc++, tokens += n) {
        int64_t targets = 0;
        n = dataset_doc_length(&ds, doc);
        CHECK(n >= 1 && n <= ds.num_tokens - tokens);
        if (!dataset_read(&ds, doc, 0, n, ids, &(Error){0})) memset(ids, 0, (size_t)n * 4);
        for (int64_t i = 0; i < n; i++) CHECK(ids[i] >= 0 && ids[i] < ds.vocab_size);
        for (int64_t i = 1; i < n; i++) targets += dataset_weight(&ds, doc, i) != 0;
        CHECK(targets == dataset_count_targets(&ds, doc, 1, n - 1));
        all_targets += targets;
    }
    CHECK(tokens == ds.num_tokens && all_targets == ds.num_targets);
    free(ids);
    dataset_close(&ds);
    return true;
}

// Texts and records. Ending of the name, tokenizer, train-on, no template; style of the template

enum { BYTES, NFC = 3, MISTRAL, NUM_TOKENIZERS };
static UnitOptions unit_options[NUM_TOKENIZERS];

static BpeEncoder *encoder(int i) {
    static Tokenizer list[NUM_TOKENIZERS] = {
        {.vocab_size = 258, .bos = 256, .eos = 257, .adds_bos = true, .byte_ids = true}};
    static const char *const dirs[] = {
        "", "tests/golden/tokenizers/smollm2", "tests/golden/tokenizers/llama3",
        "tests/golden/tokenizers/qwen", "tests/golden/tokenizers/mistral"};
    static BpeEncoder *opened[NUM_TOKENIZERS];
    Tokenizer *t = &list[i];
    if (opened[i]) return opened[i];
    must(i == 0 || tokenizer_open(t, dirs[i], &err));
    if (t->why_not.code) error_exit(&t->why_not);
    unit_options[i] =
        (UnitOptions){.tokenizer = t, .vocabulary = {1 << 24, t->bos, t->eos, 0, false}};
    if (!t->adds_bos) unit_options[i].vocabulary.bos = -1;
    return opened[i] = bpe_encoder_open(t);
}

// The bytes of a text's ids, but for BOS and EOS, are those of the text, without a byte order mark,
// with bad UTF-8 replaced.
static void check_text(const UnitOptions *o, Bytes file, const int32_t *ids, size_t n) {
    const uint64_t mark = file.n < 3 ? 0 : mark_bytes((const char *)file.p);
    file.p += mark, file.n -= mark;
    unsigned char *text = host_calloc(file.n, 3, "a text"), *at = text;
    const unsigned char *bytes, *end = text + utf8_replace(file.p, file.n, text);
    const ShardVocabulary *v = &o->vocabulary;
    for (size_t i = v->bos >= 0, length; i + (v->eos >= 0) < n; i++, at += length) {
        bytes = tokenizer_bytes(o->tokenizer, ids[i], &length);
        CHECK(length <= (size_t)(end - at) && memcmp(at, bytes, length) == 0);
    }
    CHECK(at == end);
    free(text);
}

static bool fuzz_documents(Input *in) {
    static const char *const names[] = {"f.txt", "f.jsonl", "f.json", "f"};
    static Unit u;
    const int flags = in->flags[0], style = in->flags[1], i = flags / 4 % NUM_TOKENIZERS;
    const char *path = put(names[flags % 4], in->part[0].p, in->part[0].n);
    BpeEncoder *e = encoder(i);
    UnitOptions *o = &unit_options[i];
    Inputs inputs;
    UnitReader r = {.in = &inputs, .most_bytes = MAX_DOCUMENT_BYTES, .file.fd = -1};
    size_t n;
    o->chat =
        (ChatTemplate){(ChatStyle)(style % NUM_CHAT_STYLES), "", "Short.", "", "<s>", "<|im_end|>"};
    if (style & 8) o->chat.system[0] = 0;
    o->trains_on_all = flags & 16;
    o->keeps_invalid = flags & 64;
    o->no_chat.code = flags & 32 ? EXIT_BAD_INPUT : 0;
    inputs_are_texts(path);
    bool ok = inputs_collect(&inputs, path, "/nowhere", &in->err);
    for (; ok && unit_read(&r, &u, &in->err); ok = u.err.code == 0) {
        unit_encode(&u, e, o);
        const int32_t *ids = bpe_ids(e, &n);
        for (size_t k = 0; k < n; k++) CHECK(ids[k] >= 0 && ids[k] < o->tokenizer->vocab_size);
        for (size_t d = 0, at = 0; d < u.num_documents; at = u.documents[d++].end) {
            const UnitDocument *doc = &u.documents[d];
            CHECK(doc->first >= at && doc->end > doc->first && doc->end <= n);
            for (uint64_t k = doc->first; doc->masked && k < doc->end; k++)
                CHECK(isfinite(u.weights[k]) && (k > doc->first || u.weights[k] == 0));
        }
        if (u.file->kind == INPUT_TEXT && u.num_documents == 1 &&
            u.found.counts[NUM_OWN_ENDS] == 0 && i != BYTES && i < NFC)
            check_text(o, in->part[0], ids, n);
    }
    file_close(&r.file);
    inputs_free(&inputs);
    return in->err.code == 0;
}

// tokenizer.json, tokenizer_config.json, chat_template.jinja, a prompt
static bool fuzz_tokenizer(Input *in) {
    static int32_t ids[512];
    const Bytes text = in->part[3];
    size_t bytes = 0, length;
    Tokenizer t;
    ChatTemplate chat;
    if (!tokenizer_open(&t, scratch("."), &in->err)) return false;
    json_auto_t *root = parse(in->part[0]);
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab"), *id;
    const json_t *added = json_member(root, "added_tokens");
    const char *name;
    double most = (double)json_object_size(vocab);
    json_object_foreach(vocab, name, id) most = fmax(most, json_number_value(id) + 1);
    CHECK(!added || json_is_array(added));
    json_auto_t *config = parse(in->part[1]);
    CHECK(t.vocab_size <=
          most + (double)(json_array_size(added) +
                          json_object_size(json_member(config, "added_tokens_decoder"))));
    CHECK(t.vocab_size > 0 && t.bos >= -1 && t.bos < t.vocab_size && t.eos < t.vocab_size);
    for (int32_t i = 0; i < t.vocab_size; i++) CHECK(t.offset[i] <= t.offset[i + 1]);
    chat_template_open(&chat, scratch("."), &t, &(Error){0});
    CHECK(strnlen(chat.system, sizeof chat.system) < sizeof chat.system);
    const int64_t n = tokenizer_encode(&t, (const char *)text.p, text.n, ids, 512, &in->err);
    CHECK(n <= 512);
    for (int64_t i = 0; i < n; i++, bytes += length) {
        CHECK(ids[i] >= 0 && ids[i] < t.vocab_size);
        json_array_append_new(in->seen, json_integer(ids[i]));
        tokenizer_bytes(&t, ids[i], &length);
        if (ids[i] == t.bos) length = 0;
    }
    bool changes = !t.byte_level || t.unk >= 0;
    for (const Step *s = t.steps; s < t.steps + t.num_steps; s++)
        changes |= s->kind != STEP_ADDED && s->kind != STEP_CUT;
    CHECK(changes || bytes <= text.n);
    tokenizer_free(&t);
    return n >= 0;
}

// config.json, generation_config.json
static bool fuzz_config(Input *in) {
    LlamaConfig c, again;
    if (!llama_config_read(&c, scratch("."), &in->err)) return false;
    CHECK(c.vocab_size > 0 && c.hidden_size > 0 && c.intermediate_size > 0 && c.num_layers > 0);
    CHECK(c.num_kv_heads > 0 && c.num_heads % c.num_kv_heads == 0 && c.head_dim >= 2);
    CHECK(llama_config_num_params(&c) <= (uint64_t)1 << 40 && rope_attention_factor(&c) < 1e9);
    for (int i = 0; i < c.head_dim / 2; i++) {
        CHECK(rope_frequency(&c, i) <= 1);
        if (in->seen) json_array_append_new(in->seen, json_real((double)rope_frequency(&c, i)));
    }
    for (int i = 0; i < c.eos.of_config; i++) CHECK(c.eos.ids[i] < c.vocab_size);
    for (int i = 0; i < c.bos.of_config; i++) CHECK(c.bos.ids[i] < c.vocab_size);
    char *text = llama_config_text(&c, "float32");
    json_auto_t *root = parse((Bytes){(unsigned char *)text, strlen(text)});
    CHECK(root && llama_config_parse(&again, root, "text", &in->err));
    char *text_again = llama_config_text(&again, "float32");
    CHECK(strcmp(text, text_again) == 0);
    json_array_append_new(in->seen, json_real(rope_attention_factor(&c)));
    json_array_append(in->seen, root);
    free(text);
    free(text_again);
    return true;
}

// adapter_config.json
static bool fuzz_adapter(Input *in) {
    char base[IO_PATH_MAX];
    LoraConfig c, again;
    if (!lora_config_read(&c, base, scratch("."), &in->err)) return false;
    CHECK(c.rank >= 1 && c.rank <= 1024 && lora_scale(&c) > 0);
    json_auto_t *root = parse(in->part[0]);
    const json_t *targets = json_object_get(root, "target_modules");
    CHECK(json_string_is(json_object_get(root, "peft_type"), "LORA"));
    CHECK(!memchr(in->part[0].p, 0, in->part[0].n));
    CHECK(strchr(json_string_value(json_array_get(targets, 0)), '_'));
    char *text = lora_config_text(&c, &(LlamaConfig){0}, base);
    put("adapter_config.json", text, strlen(text));
    if (in->seen) json_array_append_new(in->seen, json_loads(text, 0, NULL));
    CHECK(lora_config_read(&again, base, scratch("."), &in->err));
    CHECK(c.rank == again.rank && c.alpha == again.alpha);
    CHECK(memcmp(c.target, again.target, sizeof c.target) == 0);
    free(text);
    return true;
}

static void ignore(void *context, ParameterArena arena, size_t at, const float *values, size_t n) {
    (void)context, (void)arena, (void)at, (void)values, (void)n;
}

// Name, type, shape and bytes, the first 32 of them in hexadecimal
static void see_tensor(json_t *seen, const SafetensorsSet *s, const TensorInfo *t) {
    const size_t n = t->end - t->begin < 32 ? t->end - t->begin : 32;
    unsigned char bytes[32];
    char hex[65] = "";
    json_t *shape = json_array();
    CHECK(file_read_at(&s->files[t->file], bytes, n, t->begin, &(Error){0}));
    for (size_t i = 0; i < n; i++) sprintf(hex + 2 * i, "%02x", bytes[i]);
    for (int i = 0; i < t->ndim; i++)
        json_array_append_new(shape, json_integer((json_int_t)t->shape[i]));
    json_array_append_new(seen, json_pack("[s, s, o, s]", t->name, t->dtype, shape, hex));
}

// Headers begin with their length, the index is opened, moments; header and data of a file, index,
// header of a second file, whose data are 16 zeros
static bool fuzz_safetensors(Input *in) {
    static const Parameter list[] = {{.name = "a", .rows = 2, .cols = 3, .count = 6, .moments = 2},
                                     {.name = "b", .rows = 4, .offset = 6, .count = 4}};
    static const Parameters parameters = {list, 2, true, NULL, 3, NULL, ignore, NULL};
    static unsigned char file[MAX_INPUT + 8];
    const size_t skip = in->flags[0] & 1 ? 0 : 8;
    float values[99];
    uint64_t bytes = 0, header;
    for (int i = 0; i < 2; i++) {
        const Bytes head = in->part[3 * i],
                    data = i ? (Bytes){(const unsigned char[16]){0}, 16} : in->part[1];
        memcpy(file, &head.n, 8);
        memcpy(file + 8, head.p, head.n);
        memcpy(file + 8 + head.n, data.p, data.n);
        put(i ? "b.safetensors" : "a.safetensors", file + skip, 8 + head.n + data.n - skip);
    }
    const char *path = scratch(in->flags[0] & 2 ? "f.index.json" : "a.safetensors");
    SafetensorsSet s;
    if (!safetensors_open(&s, path, &in->err)) return false;
    json_auto_t *root = in->flags[0] == 1 ? parse(in->part[0]) : NULL;
    const json_t *metadata = json_member(root, "__metadata__");
    CHECK(!metadata || json_is_object(metadata));
    for (int i = 0; i < s.num_tensors; i++) {
        const TensorInfo *t = &s.tensors[i];
        const uint64_t n = tensor_num_elements(t), last = n < 99 ? n : 99;
        CHECK(t->begin <= t->end && t->end <= s.files[t->file].size_bytes);
        CHECK(t->end - t->begin == n * tensor_dtype_size(t->dtype));
        CHECK(safetensors_find(&s, t->name) == t && strnlen(t->name, 160) < 160);
        bytes += n * tensor_dtype_size(t->dtype);
        if (in->seen) see_tensor(in->seen, &s, t);
        CHECK(safetensors_read_f32(&s, t, values, n - last, last, &(Error){0}) ||
              !strstr("F32 BF16 F16 F64", t->dtype));
    }
    for (int i = 0; i < s.num_files; i++) {
        CHECK(file_read_at(&s.files[i], &header, 8, 0, &in->err));
        bytes += 8 + header - s.files[i].size_bytes;
    }
    CHECK(bytes == 0);
    safetensors_close(&s);
    return parameters_load(parameters, in->flags[0] & 4, path, &in->err) || in->seen;
}

// Options have values that their table allows, and their file gives the same ones again.
static void check_options(const Options *o) {
    static Options again;
    for (const Option *p = run_option_table; p->name; p++) {
        char buffer[OPTION_TEXT_MAX];
        const bool number = p->kind >= OPTION_INT && p->kind <= OPTION_FLOAT;
        const double x = number ? strtod(option_text(&o->set, p, buffer), NULL) : 0;
        const double slack = 1e-6;  // of fp32
        CHECK(!number || (p->min == 0 && p->max == 0) || (x == 0 && !p->fallback) ||
              (x >= p->min - slack && x <= p->max * (1 + slack)));
    }
    char *text = options_file(&o->set, "options|compare", true);
    put("again", text, strlen(text));
    options_open(&again.set, run_option_table);
    CHECK(options_read(&again.set, scratch("again"), GIVEN_BY_RUN, "", &(Error){0}));
    char *twice = options_file(&again.set, "options|compare", true);
    CHECK(strcmp(text, twice) == 0);
    options_free(&again.set);
    free(text);
    free(twice);
}

// Words of the command line after its first; the options of an earlier run; two files of options
static bool fuzz_options(Input *in) {
    char *line = host_calloc(in->part[0].n + 1, 1, "argv"), *argv[68], *rest = line;
    const char *topic = NULL;
    int argc = 0;
    static FILE *nowhere;
    static Options o, was;
    if (!nowhere) nowhere = fopen("/dev/null", "w");
    memcpy(line, in->part[0].p, in->part[0].n);
    while (argc < 64 && rest) argv[argc++] = strsep(&rest, "\n");
    for (int i = 2; i < 4; i++)
        if (in->part[i].n > 0)
            argv[argc++] = "--options", argv[argc++] = (char *)scratch(i == 2 ? "a" : "b");
    options_open(&o.set, run_option_table);
    options_open(&was.set, run_option_table);
    const bool ok = options_parse(&o.set, argc, argv, &topic, &in->err);
    CHECK(!ok || topic || !memchr(in->part[2].p, 0, in->part[2].n));
    if (ok && options_read(&was.set, scratch("options"), GIVEN_BY_RUN, "", &(Error){0})) {
        check_options(&was);
        options_take(&o.set, &was.set, "out");
        options_print_changes(&o.set, &was.set, "", nowhere);
    }
    if (ok) check_options(&o);
    if (topic) options_print_help(run_option_table, "", "lr|model", topic, nowhere, &(Error){0});
    options_free(&o.set);
    options_free(&was.set);
    free(line);
    return ok;
}

static int64_t length_of(const void *context, int64_t doc) { return (void)context, doc % 40 + 1; }

// manifest.json, trainer_state.json, f, log.jsonl
static bool fuzz_checkpoint(Input *in) {
    const Sources sources = {{{.weight = ALL_WEIGHTS, .num_docs = 50}}, 1};
    const Dataset train = {
        .sources = sources, .fingerprint = 5 << 12, .token_fingerprint = 6 << 12};
    const PlanSettings plan = {1, 16, 32, 2, 970000, 0, LONG_SPLIT, PAD_TO_LONGEST, false};
    const DocIndex index = {.num_docs = 50, .length = length_of, .sources = &sources};
    const char *dir = scratch(".");
    TrainingState s = {0};
    StepPlan step = {0};
    int64_t step_now = -1, last;
    Error why = {0};
    CHECK(!checkpoint_verify(dir, &step_now, &(Error){0}) || step_now >= 0);
    CHECK(out_dir_last_step(dir, &last, &why) || why.code == EXIT_USAGE);
    CHECK(last >= -1);
    if (!state_read(&s, dir, &plan, &train, &in->err)) return false;
    CHECK(s.cursor.step >= 0 && s.log_bytes >= 0 && s.trend.num_losses >= 0);
    CHECK(s.cursor.sources[0].counted <= s.cursor.sources[0].tokens && s.trend.mean <= DBL_MAX);
    const bool ok = plan_step(&step, &index, &plan, LAYOUT_PACKED, &s.cursor, &in->err);
    if (ok) CHECK(step.real_tokens > 0 && step.real_tokens <= 64 && step.num_segments > 0);
    plan_free(&step);
    return ok;
}

// The longest sequence; questions
static bool fuzz_questions(Input *in) {
    static const char tokenizer[] =
        "{\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"use_regex\": false}, \"model\": "
        "{\"merges\": "
        "[\"a b\"], \"vocab\": {\"a\": 0, \"b\": 1, \"ab\": 2, \"<s>\": 3, \"\u0120\": 4}}}";
    const Options o = {.bench = scratch("q.jsonl"), .max_seqlen = 1 + in->flags[0]};
    static FILE *nowhere;
    FILE *screen = stdout;
    Benchmark b;
    size_t rows = 0;
    if (!nowhere) put("tokenizer.json", tokenizer, strlen(tokenizer));
    if (!nowhere) nowhere = fopen("/dev/null", "w");
    stdout = nowhere;
    const bool ok = benchmark_open(&b, &o, scratch("."), 1 << 20, &in->err);
    stdout = screen;
    for (size_t i = 0, first = 0; ok && i < b.num_choices; rows += (size_t)b.choices[i++].rows) {
        const BenchmarkChoice *c = &b.choices[i];
        if (c->line != b.choices[first].line) first = i;
        CHECK(c->rows >= 1 && c->rows <= o.max_seqlen);
        CHECK((i + 1 < b.num_choices && c[1].line == c->line) || (int)(i - first) >= c->answer);
    }
    for (size_t i = 0; ok && i < rows; i++)
        CHECK(b.tokens[i] < b.tokenizer.vocab_size && b.targets[i] >= -1);
    CHECK(!ok || rows == b.num_tokens);
    path_list_free(&b.files);
    bpe_encoder_close(b.encoder);
    tokenizer_free(&b.tokenizer);
    void *const owned[] = {b.choices, b.log_likelihoods, b.tokens, b.targets};
    for (size_t i = 0; i < 4; i++) free(owned[i]);
    return ok;
}

// ---- One input ----------------------------------------------------------------------------------

typedef struct {
    const char *name;
    bool (*run)(Input *in);
    const char *files[PARTS];  // names of the parts that are written as they are
    int num_flags;             // bytes
} Target;

static const Target targets[] = {
    {"shards", fuzz_shards, {NULL, NULL, "f.idx", "f.mask"}, 1},
    {"documents", fuzz_documents, {NULL}, 2},
    {"tokenizer",
     fuzz_tokenizer,
     {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"},
     0},
    {"config", fuzz_config, {"config.json", "generation_config.json"}, 0},
    {"adapter", fuzz_adapter, {"adapter_config.json"}, 0},
    {"safetensors", fuzz_safetensors, {NULL, NULL, "f.index.json"}, 1},
    {"checkpoint", fuzz_checkpoint, {"manifest.json", "trainer_state.json", "f", "log.jsonl"}, 0},
    {"questions", fuzz_questions, {"q.jsonl"}, 1},
    {"options", fuzz_options, {NULL, "options", "a", "b"}, 0},
};
enum { NUM_TARGETS = sizeof targets / sizeof *targets };

const char *__asan_default_options(void);
const char *__asan_default_options(void) {  // what costs most of the time of small inputs is less
    return "max_allocation_size_mb=32:quarantine_size_mb=1:malloc_context_size=2:"
           "clear_shadow_mmap_threshold=4194304";
}

static void run_target(const Target *t, const unsigned char *p, size_t n) {
    Input in = {0};
    if (n > MAX_INPUT) return;
    for (int i = 0; i < t->num_flags && n > 0; i++, n--) in.flags[i] = *p++;
    for (int i = 0; i < PARTS; i++) {
        const unsigned char *end = i < PARTS - 1 ? memmem(p, n, "\n~~\n", 4) : NULL;
        in.part[i] = (Bytes){p, end ? (size_t)(end - p) : n};
        n -= in.part[i].n + (end ? 4 : 0);
        p += in.part[i].n + (end ? 4 : 0);
        if (t->files[i]) put(t->files[i], in.part[i].p, in.part[i].n);
    }
    warnings_off = true;
    in.seen = getenv("FUZZ_SEEN") ? json_array() : NULL;
    const bool ok = t->run(&in);
    CHECK(ok || (in.err.code >= EXIT_USAGE && in.err.what[0]));
    if (in.seen) fputs(json_write(ok ? in.seen : json_text(in.err.what), JSON_COMPACT), stdout);
}

// A piece of the input is repeated up to 128 KiB, then up to 256: that takes twice the time, not four
// times. In a process of its own: what it covers is no merit of this input.
static void check_time(const Target *t, const unsigned char *p, size_t n, uint64_t random) {
    static unsigned char text[MAX_INPUT];
    const size_t from = random % n, rest = n - from,
                 length = 1 + (random >> 32) % (rest < 100 ? rest : 100);
    clock_t ticks[2] = {0};
    int status = 0;
    const pid_t child = fork();
    while (child > 0 && waitpid(child, &status, 0) != child) {  // an alarm of libFuzzer's
    }
    CHECK(child >= 0 && status == 0);
    for (int i = 0; child == 0 && i < 6; i++) {  // three times: a busy machine
        size_t at = from;
        memcpy(text, p, from);
        for (; at < (size_t)1 << (17 + i % 2); at += length) memcpy(text + at, p + from, length);
        memcpy(text + at, p + from + length, rest - length);
        const clock_t start = clock();
        run_target(t, text, at + rest - length);
        ticks[i % 2] = clock() - start;
        if (i % 2 && (ticks[0] < CLOCKS_PER_SEC / 100 || ticks[1] < 3 * ticks[0])) _exit(0);
    }
    if (child > 0) return;
    fprintf(stderr, "bytes %zu to %zu repeated: %ld us for 128 KiB, %ld for 256\n", from,
            from + length - 1, ticks[0], ticks[1]);
    _exit(1);
}

static void try_input(const Target *t, const unsigned char *p, size_t n) {
    const uint64_t random = mix64(fnv1a(FNV1A_START, p, n));
    run_target(t, p, n);
    if (n > 0 && random % 4096 == 0 && !getenv("FUZZ_SEEN")) check_time(t, p, n, mix64(random + 1));
}

#ifdef FUZZING
int LLVMFuzzerTestOneInput(const unsigned char *p, size_t n);
int LLVMFuzzerTestOneInput(const unsigned char *p, size_t n) {
    int i = 0;
    while (strcmp(getenv("FUZZ_TARGET"), targets[i].name) != 0) i++;
    try_input(&targets[i], p, n);
    return 0;
}
#endif
