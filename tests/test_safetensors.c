// data/models/safetensors.h: files byte for byte as specified, hostile files refused. Some hostile
// files are taken from the tests of safetensors and of llama.cpp's gguf reader.
#include <math.h>

#include "../data/base/hash.h"
#include "../data/models/safetensors.h"
#include "scratch.h"

// Closed at the end of the block
#define SAFETENSORS __attribute__((cleanup(safetensors_close))) SafetensorsSet

static bool opens(const char *path, Error *err) {
    SafetensorsSet s;
    memset(err, 0, sizeof *err);
    bool ok = safetensors_open(&s, path, err);
    CHECK(ok == (err->code == 0));
    CHECK_MSG(ok || (err->code == EXIT_BAD_INPUT && strstr(err->what, path)), "%s", err->what);
    if (ok) safetensors_close(&s);
    return ok;
}

// Of a length (uint64), this header, and zeros
static bool opens_built(const char *header, size_t data_bytes, Error *err) {
    char bytes[4096] = {0};
    const uint64_t n = strlen(header);
    memcpy(bytes, &n, 8);
    memcpy(bytes + 8, json_of(header), n);
    put_file(scratch("built.safetensors"), bytes, 8 + n + data_bytes);
    return opens(scratch("built.safetensors"), err);
}

// Tensors one after another of the n bytes of data; returns the CRC of the file.
static uint32_t write_set(const char *path, const TensorInfo *tensors, int count, const void *data,
                          uint64_t n) {
    static FileWriter w;
    Error err = {0};
    unlink(path);
    CHECK_MSG(safetensors_create(&w, path, tensors, count, &err) &&
                  writer_write(&w, data, n, &err) && writer_close(&w, &err),
              "%s", err.what);
    return w.crc;
}

TEST(bytes_of_a_small_file) {
    const TensorInfo t[4] = {{"b", "F32", 2, {1, 2}, 0, 0, 0},
                             {"a \"\\\n\xc3\xa9", "U8", 1, {3}, 0, 0, 0},
                             {"e", "F32", 2, {0, 9}, 0, 0, 0},
                             {"s", "F32", 0, {0}, 0, 0, 0}};
    const char *data = "\0\1\2\3\4\5\6\7\10\11\12\13\14\15\16";
    SafetensorsSet set;
    Error err = {0};
    uint64_t n = 0, header = 0;
    const uint32_t crc = write_set(scratch("small"), t, 4, data, 15);
    AUTO_FREE char *bytes = file_read_all(scratch("small"), 4096, &n, "", &err);
    CHECK(bytes && crc == crc32c(0, bytes, n));
    const char *expected = json_of(
        "{'__metadata__': {'format': 'pt'}, 'b': {'dtype': 'F32', 'shape': [1, 2], 'data_offsets':"
        " [0, 8]}, 'a \\\"\\\\\\n\xc3\xa9': {'dtype': 'U8', 'shape': [3], 'data_offsets': [8, 11]},"
        " 'e': {'dtype': 'F32', 'shape': [0, 9], 'data_offsets': [11, 11]},"
        " 's': {'dtype': 'F32', 'shape': [], 'data_offsets': [11, 15]}}");
    memcpy(&header, bytes, 8);
    CHECK(header % 8 == 0 && n == 8 + header + 15);
    CHECK(strncmp(bytes + 8, expected, strlen(expected)) == 0);
    CHECK(strspn(bytes + 8 + strlen(expected), " ") == header - strlen(expected));
    CHECK(memcmp(bytes + 8 + header, data, 15) == 0);
    MUST(safetensors_open(&set, scratch("small"), &err));
    for (int i = 0; i < 4; i++) {
        const TensorInfo *f = safetensors_find(&set, t[i].name);
        CHECK(f && f->ndim == t[i].ndim && memcmp(f->shape, t[i].shape, sizeof f->shape) == 0);
    }
    CHECK(set.num_tensors == 4 && !safetensors_find(&set, "none"));
    safetensors_close(&set);
    safetensors_close(&set);
    for (size_t i = 1; i <= 8; i++) {  // headers of any length, and the longest names
        TensorInfo one = {"", "U8", 1, {3}, 0, 0, 0};
        memset(one.name, 'n', sizeof one.name - i);
        write_set(scratch("small"), &one, 1, data, 3);
        AUTO_FREE char *other = file_read_all(scratch("small"), 4096, &n, "", &err);
        CHECK(other && other[0] % 8 == 0 && opens(scratch("small"), &err));
    }
}

static void write_one(const char *dtype, const void *data, uint64_t count, uint64_t size) {
    TensorInfo t = {"x", "", 1, {count}, 0, 0, 0};
    strcpy(t.dtype, dtype);
    write_set(scratch("one"), &t, 1, data, count * size);
}

// Reads "x" back in three uneven pieces.
static uint64_t read_one(float *out, uint64_t count) {
    const uint64_t cuts[] = {0, count / 3, count / 3 + 1, count};
    SAFETENSORS s;
    MUST(safetensors_open(&s, scratch("one"), &err));
    const TensorInfo *t = safetensors_find(&s, "x");
    for (const uint64_t *at = cuts; at < cuts + 3; at++)
        MUST(safetensors_read_f32(&s, t, out + at[0], at[0], at[1] - at[0], &err));
    REFUSED(EXIT_BAD_INPUT, "", safetensors_read_f32(&s, t, out, count, 1, &err));
    REFUSED(EXIT_BAD_INPUT, "", safetensors_read_f32(&s, t, out, 1, UINT64_MAX, &err));
    return s.num_nonfinite;
}

static bool same_float(float a, float b) {
    return memcmp(&a, &b, 4) == 0 || (isnan(a) && isnan(b));
}

// Every value of a format of 16 bits, with so many of them for the mantissa.
static void check_every_16(const char *dtype, int mantissa_bits) {
    static uint16_t bits[65536];
    static float out[65536];
    const int one = 1 << mantissa_bits, top = 32767 >> mantissa_bits, bias = top / 2;
    for (int i = 0; i < 65536; i++) bits[i] = (uint16_t)i;
    write_one(dtype, bits, 65536, 2);
    CHECK(read_one(out, 65536) == 2 * (uint64_t)one);  // not finite
    for (int i = 0; i < 65536; i++) {
        const int exponent = i >> mantissa_bits & top, mantissa = i & (one - 1);
        double value = exponent ? ldexp(one + mantissa, exponent - bias - mantissa_bits)
                                : ldexp(mantissa, 1 - bias - mantissa_bits);
        if (exponent == top) value = mantissa ? NAN : INFINITY;
        CHECK_MSG(same_float(out[i], (float)(i & 0x8000 ? -value : value)), "%04x -> %g", i,
                  out[i]);
    }
}

TEST(every_f16_and_bf16) {
    check_every_16("F16", 10);
    check_every_16("BF16", 7);
    for (uint32_t i = 0; i < 0x7f80; i++)  // to the nearest, of two equally near ones to the even
        for (int more = -1; more <= 1; more++) {
            const uint32_t bits = (i << 16) + 0x8000 + (uint32_t)more;
            float value;
            memcpy(&value, &bits, 4);
            CHECK(bf16_bits(value) == i + (more ? more > 0 : i & 1));
        }
}

TEST(f32_and_f64_and_no_integers) {
    SAFETENSORS s;
    static double wide[10007];
    static float narrow[10007], out[10007];
    for (int i = 0; i < 10007; i++) wide[i] = narrow[i] = (float)(test_rng_normal() * 1e10);
    wide[5] = narrow[5] = NAN;
    wide[10006] = narrow[10006] = -INFINITY;
    for (int round = 0; round < 2; round++) {
        write_one(round ? "F32" : "F64", round ? (void *)narrow : wide, 10007, round ? 4 : 8);
        CHECK(read_one(out, 10007) == 2);
        for (int i = 0; i < 10007; i++) CHECK(same_float(out[i], narrow[i]));
    }
    write_one("I32", narrow, 4, 4);
    MUST(safetensors_open(&s, scratch("one"), &err));
    REFUSED(EXIT_BAD_INPUT, "found I32",
            safetensors_read_f32(&s, safetensors_find(&s, "x"), out, 0, 4, &err));
}

#define F32_AT(name_, shape_, begin_, end_) \
    "'" name_ "':{'dtype':'F32','shape':" shape_ ",'data_offsets':[" #begin_ "," #end_ "]}"

static const struct {
    const char *header;
    size_t data_bytes;
    const char *expected;  // NULL: a good file
} headers[] = {
    {"{}", 0, NULL},
    {"{'__metadata__':{'a':'b'}," F32_AT("x", "[2]", 0, 8) "}", 8, NULL},
    {"{" F32_AT("x", "[]", 0, 4) "}", 4, NULL},
    {"{" F32_AT("x", "[0]", 0, 0) "}", 0, NULL},
    {"{" F32_AT("y", "[1]", 4, 8) "," F32_AT("x", "[1]", 0, 4) "}", 8, NULL},
    {"{" F32_AT("e", "[0]", 4, 4) "," F32_AT("x", "[1]", 0, 4) "," F32_AT("y", "[1]", 4, 8) "}", 8,
     NULL},
    {"{" F32_AT("x", "[1,1,1,1,1,1,1,1]", 0, 4) "}", 4, NULL},
    {"{'x':{'data_offsets':[0,2],'shape':[2],'dtype':'F8_E4M3'}}", 2, NULL},
    {"", 0, "header: expected 2"},
    {" {}", 0, "expected {"},
    {"{" F32_AT("", "[1]", 0, 4) "}", 4, "tensor name"},
    {"{'x':{'dtype':'F32','shape':[1]}}", 4, "x: expected {dtype"},
    {"{'x':{'dtype':'F32','shape':[1],'data_offsets':[0,4],'a':1}}", 4, "x: expected {dtype"},
    {"{'x':{'dtype':'F31','shape':[1],'data_offsets':[0,4]}}", 4, "dtype: expected"},
    {"{'x':{'dtype':'F32F32F32F32','shape':[1],'data_offsets':[0,4]}}", 4, "dtype: expected"},
    {"{" F32_AT("x", "1", 0, 4) "}", 4, "shape: expected an array"},
    {"{" F32_AT("x", "[-1]", 0, 4) "}", 4, "shape: expected an integer"},
    {"{" F32_AT("x", "[4294967296,4294967296]", 0, 0) "}", 0, "bytes for its shape"},
    {"{" F32_AT("x", "[4294967296,1073741824]", 0, 0) "}", 0, "its shape"},  // x 4 wraps to 0
    {"{" F32_AT("x", "[1,1,1,1,1,1,1,1,1]", 0, 4) "}", 4, "8 dimensions"},
    {"{" F32_AT("x", "[2]", 0, 4) "}", 4, "expected 8 bytes for its shape"},
    {"{" F32_AT("x", "[1]", 0, 8) "}", 8, "expected 4 bytes for its shape"},
    {"{" F32_AT("x", "[1]", 4, 0) "}", 4, "data_offsets: expected an integer from 4"},
    {"{" F32_AT("x", "[1]", 0.5, 4.5) "}", 8, "data_offsets: expected an integer"},
    {"{'x':{'dtype':'F32','shape':[1],'data_offsets':[0]}}", 4, "data_offsets: expected [begin"},
    {"{" F32_AT("x", "[1]", 0, 4) "}", 3, "expected 4 bytes of tensors, found 3"},
    {"{" F32_AT("x", "[1]", 0, 4) "}", 5, "expected 4 bytes of tensors, found 5"},
    {"{" F32_AT("x", "[1]", 0, 4) "," F32_AT("y", "[1]", 8, 12) "}", 12, "hole or overlap"},
    {"{" F32_AT("x", "[1]", 0, 4) "," F32_AT("y", "[1]", 0, 4) "}", 4, "hole or overlap"},
    {"{" F32_AT("e", "[0]", 2, 2) "," F32_AT("x", "[1]", 0, 4) "}", 4, "hole or overlap"},
    {"{" F32_AT("x", "[1]", 0, 4) "," F32_AT("\\u0078", "[1]", 4, 8) "}", 8, "duplicate object"},
};

TEST(hostile_headers) {
    for (size_t i = 0; i < sizeof headers / sizeof *headers; i++) {
        Error err;
        const char *expected = headers[i].expected;
        const bool ok = opens_built(headers[i].header, headers[i].data_bytes, &err);
        CHECK_MSG(ok ? !expected : expected && strstr(err.what, expected), "case %zu %s: %s", i,
                  headers[i].header, err.what);
    }
}

static void make_shards(void) {
    const TensorInfo ab[2] = {{"a", "F32", 1, {2}, 0, 0, 0}, {"b", "F32", 1, {1}, 0, 0, 0}},
                     ca[2] = {{"c", "F32", 1, {3}, 0, 0, 0}, {"a", "F32", 1, {2}, 0, 0, 0}};
    MUST(dir_remove_tree(scratch("dir"), &err) && dir_create_all(scratch("dir"), &err));
    write_set(scratch("dir/s1"), ab, 2, "aaaaaaaabbbb", 12);
    write_set(scratch("dir/s2"), ca, 1, "cccccccccccc", 12);
    write_set(scratch("dir/twice"), ca, 2, "ccccccccccccaaaaaaaa", 20);
}

static bool opens_index(const char *index, Error *err) {
    put_file(scratch("dir/model.safetensors.index.json"), json_of(index), strlen(index));
    return opens(scratch("dir"), err);
}

// test_llama.c reads the numbers of models in several files.
TEST(indexes_are_consistent_or_refused) {
    static const char good[] =
        "{'metadata':{'total_size':24},'weight_map':{'a':'s1','c':'s2','b':'s1'}}";
    static const char *const bad[][2] = {
        {"{'weight_map':{}}", "weight_map"},
        {"{'weight_map':{'a':1}}", "weight_map: expected file names"},
        {"{'weight_map':{'a':'s1','b':'s1','c':'s3'}}", "cannot open"},
        {"{'weight_map':{'a':'s1','b':'s2','c':'s2'}}", "b: expected in s2"},
        {"{'weight_map':{'a':'s1','c':'s2'}}", "expected all 3 tensors"},
        {"{'weight_map':{'a':'../dir/s1'}}", "plain file name"},
        {"{'weight_map':{'a':'..'}}", "plain file name"},
        {"{'weight_map':{'a':''}}", "plain file name"},
        {"{'weight_map':{'a':'s1','b':'s1','c':'twice'}}", "weight_map: "},
        {"{'weight_map':{'a':'model.safetensors.index.json'}}", "header"},
    };
    Error none;
    make_shards();
    REFUSED(EXIT_BAD_INPUT, "index.json, found neither", opens(scratch("dir"), &err));
    CHECK(!opens(scratch("not there"), &none) && none.hint[0]);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        REFUSED(EXIT_BAD_INPUT, bad[i][1], opens_index(bad[i][0], &err));
    MUST(opens_index(good, &err) && opens(scratch("dir/model.safetensors.index.json"), &err));
}

TEST_MAIN()
