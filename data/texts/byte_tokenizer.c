#include "byte_tokenizer.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "../base/file.h"
#include "../base/json.h"
#include "../models/tokenizer.h"

#define SPECIAL(id_, content_)                                                                 \
    "{\"id\": " #id_ ", \"content\": \"" content_                                              \
    "\", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false," \
    " \"special\": true}"
#define BYTE_LEVEL                                                                   \
    "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true," \
    " \"use_regex\": false}"
#define BOS "{\"SpecialToken\": {\"id\": \"<|bos|>\", \"type_id\": 0}}"
#define SEQUENCE(id_, type_) "{\"Sequence\": {\"id\": \"" id_ "\", \"type_id\": " #type_ "}}"

static const char tokenizer_json[] =
    "{\"version\": \"1.0\", \"truncation\": null, \"padding\": null, \"added_tokens\": ["  //
    SPECIAL(256, "<|bos|>") ", " SPECIAL(257, "<|eos|>") "],"
    " \"normalizer\": null, \"pre_tokenizer\": " BYTE_LEVEL ","
    " \"post_processor\": {\"type\": \"TemplateProcessing\","
    " \"single\": [" BOS ", " SEQUENCE("A", 0) "],"
    " \"pair\": [" BOS ", " SEQUENCE("A", 0) ", " SEQUENCE("B", 0) "],"
    " \"special_tokens\": {\"<|bos|>\":"
    " {\"id\": \"<|bos|>\", \"ids\": [256], \"tokens\": [\"<|bos|>\"]}}},"
    " \"decoder\": " BYTE_LEVEL ","
    " \"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null,"
    " \"continuing_subword_prefix\": null, \"end_of_word_suffix\": null, \"fuse_unk\": false,"
    " \"byte_fallback\": false, \"ignore_merges\": false, \"vocab\": {}, \"merges\": []}}";

static const char config_json[] =
    "{\n \"tokenizer_class\": \"PreTrainedTokenizerFast\",\n \"bos_token\": \"<|bos|>\",\n"
    " \"eos_token\": \"<|eos|>\",\n \"clean_up_tokenization_spaces\": false\n}\n";
static const char map_json[] = "{\n \"bos_token\": \"<|bos|>\",\n \"eos_token\": \"<|eos|>\"\n}\n";

size_t byte_tokenizer_json(char out[BYTE_TOKENIZER_ROOM]) {
    json_t *root = json_loads(tokenizer_json, 0, NULL);
    json_t *vocab = json_object_get(json_object_get(root, "model"), "vocab");
    for (int i = 0; i < 256; i++) {
        const unsigned char byte = (unsigned char)i;
        char token[4];
        gpt2_encode(&byte, 1, "", token);
        json_object_set_new(vocab, token, json_integer(i));
    }
    const size_t n = json_dumpb(root, out, BYTE_TOKENIZER_ROOM - 2, JSON_INDENT(1));
    json_decref(root);
    memcpy(out + n, "\n", 2);
    return n + 1;
}

static bool write_one(const char *dir, const char *name, const char *text, Error *err) {
    char path[IO_PATH_MAX];
    return path_join(path, sizeof path, dir, name, err) &&
           file_create(path, text, strlen(text), err);
}

bool byte_tokenizer_write(const char *dir, Error *err) {
    char json[BYTE_TOKENIZER_ROOM];
    byte_tokenizer_json(json);
    return write_one(dir, "tokenizer.json", json, err) &&
           write_one(dir, "tokenizer_config.json", config_json, err) &&
           write_one(dir, "special_tokens_map.json", map_json, err);
}
