// data/models/config.h: published configs in and out, and every way a config can be wrong.
#include <math.h>

#include "../data/base/file.h"
#include "../data/base/json.h"
#include "../data/models/config.h"
#include "scratch.h"

static const char *const names[] = {"demo",         "smollm2-135m", "smollm2-360m", "smollm2-1.7b",
                                    "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"};
enum { NUM_NAMES = sizeof names / sizeof *names };

static bool parse(LlamaConfig *c, const char *text, Error *err) {
    json_auto_t *root = json_parse(json_of(text), strlen(text), "config.json", err);
    const bool ok = root && llama_config_parse(c, root, "config.json", err);
    CHECK(ok == (err->code == 0) && (ok || (err->code == EXIT_BAD_INPUT && err->what[0])));
    return ok;
}

static LlamaConfig must_parse(const char *text) {
    LlamaConfig c;
    MUST(parse(&c, text, &err));
    return c;
}

// tests/golden/configs/NAME.json: as Hugging Face publishes it, with keys to be ignored; valid
// as long as what printed() returns. llama-3.2-1b-new is as newer transformers writes it.
static const char *published_text(const char *name) {
    uint64_t n = 0;
    AUTO_FREE char *text =
        file_read_all(printed("tests/golden/configs/%s.json", name), 4095, &n, "", &(Error){0});
    CHECK_MSG(text, "%s", name);
    return printed("%s", text);
}

// Keys that transformers' class of a type does not have
static const char *const foreign_keys[][6] = {
    [MODEL_LLAMA] = {"sliding_window", "no_rope"},
    [MODEL_MISTRAL] = {"attention_bias", "mlp_bias", "pretraining_tp", "use_sliding_window"},
    [MODEL_QWEN2] = {"attention_bias", "mlp_bias", "pretraining_tp", "no_rope"},
    [MODEL_QWEN3] = {"mlp_bias", "pretraining_tp", "no_rope"},
    [MODEL_SMOLLM3] = {"pretraining_tp"},
};

static void check_written(const LlamaConfig *c) {
    AUTO_FREE char *text = llama_config_text(c, "float32");
    for (const char *const *key = foreign_keys[c->model_type]; *key; key++)
        CHECK_MSG(!strstr(text, *key), "%s: %s", text, *key);
    const LlamaConfig back = must_parse(text);
    // every byte: both began as copies of tables, with their padding
    CHECK_MSG(memcmp(c, &back, sizeof back) == 0, "%s", text);
}

// Their numbers of parameters, as published, depend on biases, norms, heads and ties.
TEST(published_configs) {
    static const struct {
        const char *name, *builtin;
        ModelType type;
        int no_rope_interval;
        uint64_t num_params;
    } published[] = {{"smollm2-135m", "smollm2-135m", MODEL_LLAMA, 0, 134515008},
                     {"llama-3.2-1b", "llama-3.2-1b", MODEL_LLAMA, 0, 1235814400},
                     {"llama-3.2-1b-new", "llama-3.2-1b", MODEL_LLAMA, 0, 1235814400},
                     {"qwen2.5-0.5b", NULL, MODEL_QWEN2, 0, 494032768},
                     {"qwen3-0.6b", NULL, MODEL_QWEN3, 0, 596049920},
                     {"mistral-7b-v0.3", NULL, MODEL_MISTRAL, 0, 7248023552},
                     {"smollm3-3b", NULL, MODEL_SMOLLM3, 4, 3075098624}};
    for (int i = 0; i < 7; i++) {
        const LlamaConfig c = must_parse(published_text(published[i].name));
        LlamaConfig expected;
        CHECK(c.model_type == published[i].type);
        CHECK(c.no_rope_interval == published[i].no_rope_interval);
        CHECK_MSG(llama_config_num_params(&c) == published[i].num_params, "%lu parameters",
                  llama_config_num_params(&c));
        check_written(&c);
        if (!published[i].builtin) continue;
        CHECK(llama_config_builtin(&expected, published[i].builtin));
        if (i == 1) expected.eos = (TokenIds){3, 3, {128001, 128008, 128009}};  // Instruct's
        CHECK(memcmp(&c, &expected, sizeof c) == 0);
    }
}

TEST(built_in_configs_have_their_sizes_and_come_back) {
    static const uint64_t counts[] = {2412480,    134515008,  361821120, 1711376384,
                                      1235814400, 3212749824, 8030261248};
    const RopeScaling scalings[] = {{ROPE_LINEAR, 0, 2.5, 0, 0, 0},
                                    {ROPE_YARN, 32768, 4, 1, 32, 1.25}};
    for (int i = 0; i < NUM_NAMES; i++) {
        LlamaConfig c, none;
        Error err = {0};
        MUST(llama_config_find(&c, names[i], &err));
        CHECK_MSG(llama_config_num_params(&c) == counts[i], "%s", names[i]);
        CHECK(!llama_config_find(&none, "none", &err) && strstr(err.hint, names[i]));
        c.rms_norm_eps *= 1 + (float)i;
        c.rope_theta += i / 7.0;
        if (i == 3) c.eos = (TokenIds){0};
        if (i < 2) c.rope_scaling = scalings[i];
        check_written(&c);
    }
    LlamaConfig c;
    CHECK(!llama_config_builtin(&c, "llama") && !llama_config_builtin(&c, ""));
}

static LlamaConfig small(const char *type, const char *more) {
    return must_parse(printed(
        "{'model_type':'%s',%s'vocab_size':100,'hidden_size':512,'intermediate_size':7,"
        "'num_hidden_layers':8,'num_attention_heads':32}", type, more));
}

TEST(missing_keys_have_the_defaults_of_their_type) {
    static const struct {
        const char *type, *more;
        int kv_heads, head_dim, positions, bos, eos;
        double theta;
        bool tied;
    } cases[] = {{"llama", "", 32, 16, 2048, 1, 2, 1e4, false},
                 {"mistral", "'sliding_window':null,", 8, 16, 131072, 1, 2, 1e4, false},
                 {"qwen2", "", 32, 16, 32768, -1, -1, 1e4, false},
                 {"qwen3", "", 32, 128, 32768, -1, -1, 1e4, false},
                 {"smollm3", "", 4, 16, 32768, -1, -1, 2e6, true},  // 128001: not in its vocabulary
                 {"granite", "", 32, 16, 2048, 1, 2, 1e4, false}};
    for (int i = 0; i < 6; i++) {
        const LlamaConfig c = small(cases[i].type, cases[i].more);
        CHECK(c.num_kv_heads == cases[i].kv_heads && c.head_dim == cases[i].head_dim);
        CHECK(c.max_position_embeddings == cases[i].positions);
        CHECK((c.bos.n ? c.bos.ids[0] : -1) == cases[i].bos);
        CHECK((c.eos.n ? c.eos.ids[0] : -1) == cases[i].eos);
        CHECK(c.rope_theta == cases[i].theta && c.tie_word_embeddings == cases[i].tied);
        CHECK(c.rms_norm_eps == 1e-6f && c.initializer_range == 0.02f);
        CHECK(c.rope_scaling.type == ROPE_PLAIN && c.no_rope_interval == (i == 4 ? 4 : 0));
        CHECK(llama_norm_eps(&c) == c.rms_norm_eps && c.logits_scaling == (i == 5));
        CHECK(llama_residual_scale(&c) == 0 && llama_logit_scale(&c) == 0);
    }
}

TEST(minicpm_is_granite_under_other_names) {
    const LlamaConfig c = small("minicpm", "'scale_emb':12,'scale_depth':1.4,'dim_model_base':256,"
                                           "'auto_map':{'A':'b'},'initializer_range':0.02,"),
                      same = small("granite", "'embedding_multiplier':12,'logits_scaling':2,"
                                   "'residual_multiplier':0.49497474683058323,"
                                   "'attention_multiplier':0.25,'tie_word_embeddings':true,");
    CHECK(memcmp(&c, &same, sizeof c) == 0);
}

// ---- Wrong configs: a good one with other members, or without one -------------------------------

// Each member alone is refused, with its name
static const char *const wrong_values[][2] = {
    {NULL,
     "{'vocab_size': 0, 'rope_theta': 0, 'qk_norm': true, 'mlp_bias': true, 'rms_norm_eps': 0,"
     " 'use_mrope': true, 'model_type': null, 'hidden_act': null, 'bos_token_id': 264,"
     " 'eos_token_id': 264, 'attention_bias': 0, 'pretraining_tp': 2, 'logit_scale': 0.0625,"
     " 'num_hidden_layers': 0, 'sliding_window': 4096, 'intermediate_size': -1,"
     " 'initializer_range': -1, 'num_attention_heads': 0, 'num_key_value_heads': 0,"
     " 'tie_word_embeddings': 1, 'attention_dropout': 0.1, 'rope_interleaved': true,"
     " 'no_rope_layers': [1, 0], 'hidden_size': 4294967296, 'use_sliding_window': true,"
     " 'embedding_multiplier': 12, 'partial_rotary_factor': 0.5, 'rope_parameters': 7,"
     " 'max_position_embeddings': 1e12, 'auto_map': {'AutoModel': 'x.y'},"
     " 'quantization_config': {'quant_method': 'gptq'},"
     " 'layer_types': ['full_attention', 'sliding_attention']}"},
    {NULL,
     "{'vocab_size': 1e300, 'bos_token_id': ['1'], 'eos_token_id': [264], 'rope_theta': [1]}"},
    {NULL, "{'eos_token_id': [0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]}"},
    {"mistral-7b-v0.3", "{'no_rope_layers': [1, 0]}"},
    {"qwen3-0.6b",
     "{'use_mrope': true, 'num_experts': 128, 'attention_bias': true, 'use_sliding_window': true,"
     " 'layer_types': ['full_attention', 'sliding_attention']}"},
    {"smollm3-3b", "{'mlp_bias': true, 'no_rope_layers': 7, 'attention_bias': true}"},
    {"../granite4/config",
     "{'position_embedding_type': 'nope', 'num_local_experts': 8, 'shared_intermediate_size': 0,"
     " 'layer_types': ['attention'], 'attention_bias': true, 'embedding_multiplier': 0}"}};

#define ROPE(members_) "{'rope_scaling': {" members_ "}}"
#define YARN(members_) ROPE("'rope_type': 'yarn', 'factor': 2.0" members_)
#define LLAMA3(members_) ROPE("'rope_type': 'llama3', 'low_freq_factor': 1" members_)

static const struct {
    const char *base, *change, *expected;
} bad_configs[] = {
    {NULL, "{'model_type': 'gemma'}",
     "model_type: expected one of llama, mistral, qwen2, qwen3, smollm3, granite, "
     "granitemoehybrid"},
    {NULL, "{'vocab_size': 1.5}", "found 1.5"},
    {NULL, "{'vocab_size': 257}", "eos_token_id"},
    {NULL, "{'num_key_value_heads': 2}", "multiple of num_key_value_heads"},
    {NULL, "{'head_dim': 63}", "head_dim 63: expected an even"},
    {NULL, "{'attention_bias': true}", "attention_bias: expected false, found true"},
    {NULL, "{'hidden_act': 'gelu'}", "hidden_act: expected silu, found \"gelu\""},
    {NULL, ROPE("'type': 'linear'"), "factor: required"},
    {NULL, ROPE("'type': 'linear', 'factor': 0.5"), "factor"},
    {NULL, YARN(", 'mscale': 0.7"), "mscale"},
    {NULL, YARN(", 'truncate': false"), "truncate: expected true, found false"},
    {NULL, YARN(", 'truncate': null"), "truncate: expected true, found null"},
    {NULL, "{'rms_norm_eps': null}", "rms_norm_eps: expected a value, found null"},
    {NULL, YARN(", 'beta_fast': 1"), "beta_fast 1"},
    {NULL, YARN(", 'attention_factor': 0"), "attention_factor"},
    {NULL, ROPE("'rope_type': 'dynamic'"), "found \"dynamic\""},
    {NULL, ROPE("'factor': 2.0"), "rope_type: required"},
    {NULL, ROPE("'rope_type': 'llama3', 'type': 'linear', 'factor': 2"), "low_freq_factor"},
    {NULL, LLAMA3(", 'factor': 8, 'high_freq_factor': 1, 'original_max_position_embeddings': 8"),
     "high_freq_factor"},
    {NULL, LLAMA3(", 'factor': 8, 'high_freq_factor': 4"),
     "original_max_position_embeddings: required"},
    {NULL, "{'rope_parameters': {'rope_theta': 20000}}", "rope_theta: expected one value"},
    {NULL, "{'rope_parameters': {'rope_type': 'default', 'partial_rotary_factor': 0.5}}",
     "partial_rotary"},
    {NULL, "{'rope_parameters': {'full_attention': {'rope_theta': 1e6}}}", "one RoPE for all"},
    {NULL, "{'head_dim': 1024, 'num_attention_heads': 257, 'num_key_value_heads': 1}",
     "num_attention_heads 257 x head_dim 1024: expected at most"},
    {NULL, "{'hidden_size': 193, 'head_dim': null}", "expected a multiple of num_attention_heads"},
    {NULL, "{'hidden_size': 262144, 'intermediate_size': 262144, 'num_hidden_layers': 1024}",
     "2^40 parameters"},
    {"mistral-7b-v0.3", "{'sliding_window': 0}", "sliding_window"},
    {"smollm3-3b", "{'no_rope_layers': [1, 1]}",
     "no_rope_layers: expected an array with a number for each layer"},
    {"smollm3-3b", "{'no_rope_layers': [1, 1, 1, 0, 1, 1, 1, 1], 'num_hidden_layers': 8}",
     "no_rope_layers: expected 1, and 0 at equal intervals, found 1"},
    {"../granite4/config", "-layer_types", "layer_types: expected attention for each layer"},
    {"../granite4/config", "{'layer_types': ['attention', 'mamba']}",
     "layer_types: expected attention, found \"mamba\""},
    {"../granite4/config", "-position_embedding_type", "expected rope, found none"},
    {"../granite4/config", "-num_local_experts", "num_local_experts: expected 0, found none"},
    {"../granite4/config", "-shared_intermediate_size", "shared_intermediate_size: required"},
    {NULL, "-model_type", "model_type: required"},
    {NULL, "-vocab_size", "vocab_size: required"},
};

// A published config, or (NULL) the demo's, with the members of an object instead of its own, or
// without one: "-key". The caller frees it.
static char *config_with(const char *base, const char *change) {
    LlamaConfig c;
    Error err = {0};
    llama_config_builtin(&c, "demo");
    AUTO_FREE char *demo = llama_config_text(&c, "float32");
    const char *text = base ? published_text(base) : demo;
    json_auto_t *root = json_parse(text, strlen(text), "", &err);
    if (change[0] == '-')
        json_object_del(root, change + 1);
    else
        json_object_update_new(root, json_parse(json_of(change), strlen(change), "", &err));
    return json_dumps(root, JSON_COMPACT);
}

static void check_bad(const char *base, const char *change, const char *expected) {
    LlamaConfig c;
    Error err = {0};
    AUTO_FREE char *text = config_with(base, change);
    const bool ok = parse(&c, text, &err);
    CHECK_MSG(!ok && strstr(err.what, expected) && !strncmp(err.what, "config.json: ", 13),
              "%s: %s", change, err.what);
}

// Calls check for each member of the object alone, with its name.
static void each_member(const char *base, const char *object,
                        void (*check)(const char *base, const char *change, const char *name)) {
    Error err = {0};
    const char *name;
    json_t *value;
    json_auto_t *all = json_parse(json_of(object), strlen(object), "", &err);
    CHECK_MSG(all, "%s", err.what);
    json_object_foreach(all, name, value) {
        json_auto_t *one = json_pack("{s:O}", name, value);
        AUTO_FREE char *change = json_dumps(one, 0);
        check(base, change, name);
    }
}

TEST(bad_configs_are_refused_by_name) {
    for (size_t i = 0; i < sizeof wrong_values / sizeof *wrong_values; i++)
        each_member(wrong_values[i][0], wrong_values[i][1], check_bad);
    for (size_t i = 0; i < sizeof bad_configs / sizeof *bad_configs; i++)
        check_bad(bad_configs[i].base, bad_configs[i].change, bad_configs[i].expected);
}

static LlamaConfig config_of(const char *base, const char *change) {
    AUTO_FREE char *text = config_with(base, change);
    return must_parse(text);
}

TEST(yarn_has_the_defaults_of_its_paper) {
    const LlamaConfig c = config_of(NULL, ROPE("'type': 'yarn', 'factor': 4"));
    const RopeScaling *r = &c.rope_scaling;
    CHECK(r->type == ROPE_YARN && r->factor == 4 && r->low_freq_factor == 1);
    CHECK(r->high_freq_factor == 32 && r->original_max_position_embeddings == 8192);
    CHECK(fabs(r->attention_factor - 1.1386294361119891) < 1e-15);
}

// Llama 3: the share of freq grows with the turns over the old context; YaRN (arXiv 2309.00071): it
// falls with the pair
TEST(frequencies_are_those_of_the_papers) {
    const double two_pi = 2 * acos(-1);
    for (int round = 0; round < 3000; round++) {
        LlamaConfig c;
        llama_config_builtin(&c, "demo");
        const double low = 1 + test_rng_below(3), high = low + 1 + test_rng_below(30);
        const int context = 1 + (int)test_rng_below(1u << test_rng_below(18)),
                  d = c.head_dim = 2 * (1 + (int)test_rng_below(32));
        const double theta = c.rope_theta = pow(10, 0.3 + 5 * test_rng_uniform());
        c.rope_scaling = (RopeScaling){
            round % 2 ? ROPE_LLAMA3 : ROPE_YARN, context, 1 + test_rng_below(8), low, high, 1};
        const double first = fmax(floor(d * log(context / (high * two_pi)) / (2 * log(theta))), 0);
        const double last = fmin(ceil(d * log(context / (low * two_pi)) / (2 * log(theta))), d - 1);
        for (int i = 0; i < d / 2; i++) {
            const double freq = pow(theta, -2.0 * i / d), turns = context * freq / two_pi;
            const double ramp = last == first ? i > first : (i - first) / (last - first),
                         share = round % 2 ? (turns - low) / (high - low) : 1 - ramp,
                         kept = fmin(fmax(share, 0), 1),
                         expected = freq * (kept + (1 - kept) / c.rope_scaling.factor);
            CHECK_MSG(fabs(rope_frequency(&c, i) - expected) <= 1e-6 * freq, "%d: %g, expected %g",
                      i, rope_frequency(&c, i), expected);
        }
    }
}

// The list of layers says more than the interval; an interval beyond the layers is none.
TEST(layers_without_rope) {
    for (int interval = 0; interval <= 36; interval += interval == 4 ? 32 : 2) {
        char list[140] = "{'no_rope_layers': [1", *end = strchr(list, 0);
        for (int l = 2; l <= 36; l++) end += sprintf(end, ",%d", !interval || l % interval != 0);
        sprintf(end, "]}");
        const LlamaConfig c = config_of("smollm3-3b", interval == 4 ? "-no_rope_layers" : list);
        CHECK_MSG(c.no_rope_interval == interval, "%d, %d wanted", c.no_rope_interval, interval);
        check_written(&c);
    }
}

static void check_good(const char *base, const char *change, const char *name) {
    (void)name;
    config_of(base, change);
}

TEST(harmless_values_are_accepted) {
    static const char *const good[] = {
        "{'attention_bias': null, 'sliding_window': null, 'eos_token_id': null,"
        " 'bos_token_id': null, 'partial_rotary_factor': 1.0, 'unheard_of': {'a': [1]},"
        " 'layer_types': ['full_attention'], 'architectures': null, 'logit_scale': 1,"
        " 'num_key_value_heads': null, 'rope_interleaved': false, 'rope_scaling': {},"
        " 'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000}}",
        "{'architectures': ['LlamaForCausalLM'], 'rope_scaling': {'type': 'default'},"
        " 'rope_parameters': {'rope_type': 'yarn', 'factor': 2.0, 'beta_fast': null,"
        " 'truncate': true, 'rope_theta': 10000}}",
        ROPE("'type': 'linear', 'factor': 2.0"), YARN(", 'mscale': null")};
    for (int i = 0; i < 4; i++) each_member(NULL, good[i], check_good);
    CHECK(config_of("qwen3-0.6b", "{'num_key_value_heads': null}").num_kv_heads == 16);
    const LlamaConfig c = config_of(NULL, "{'eos_token_id': [257, 256, 257]}");
    CHECK(c.eos.n == 2 && c.eos.ids[0] == 257 && c.eos.ids[1] == 256);
    check_written(&c);
    const LlamaConfig padded = config_of(NULL, "{'pad_token_id': 7}");
    CHECK(padded.pad.n == 1 && padded.pad.ids[0] == 7);
    check_written(&padded);
    for (int i = 0; i < 3; i++) {  // Mistral's window: none, the default, a value
        const LlamaConfig m = config_of("mistral-7b-v0.3", i == 0   ? "{'sliding_window': null}"
                                                           : i == 1 ? "-sliding_window"
                                                                    : "{'sliding_window': 96}");
        const int expected[] = {0, 4096, 96};
        CHECK(m.sliding_window == expected[i]);
        check_written(&m);
    }
}

// Of SmolLM3 3B every parameter but the norms' is that of a matrix, the head's that of embeddings.
TEST(flops_are_those_of_matrices_and_of_attention) {
    const LlamaConfig c = must_parse(published_text("smollm3-3b"));
    const double head = 128256.0 * 2048, pairs = 12.0 * 36 * 2048 * 99,
                 layers = (double)llama_config_num_params(&c) - head - (2 * 36 + 1) * 2048;
    for (int frozen = 0; frozen < 2; frozen++)
        CHECK(llama_config_flops(&c, frozen, 9, 8, 99) ==
              (frozen ? 4 : 6) * (9 * layers + 8 * head) + pairs);
}

TEST_MAIN()
