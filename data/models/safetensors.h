// Safetensors: a file or a sharded Hugging Face directory read, a file written as a stream.
//
//   file = uint64 N | N bytes of JSON {"name": {dtype, shape, data_offsets}, ...} | tensor bytes
//
// The reader trusts nothing: header bounded before it is read, JSON strict, every tensor's bytes
// equal to shape x dtype, tensors contiguous from 0 to the exact end of the file, index and files
// agreeing both ways.
#ifndef UNPAD_SAFETENSORS_H
#define UNPAD_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../base/error.h"
#include "../base/file.h"
#include "../base/path.h"

enum {
    SAFETENSORS_MAX_DIMS = 8,
    SAFETENSORS_MAX_FILES = 512,
    SAFETENSORS_MAX_HEADER = 100 * 1000 * 1000,  // as in the reference implementation
};

typedef struct {
    char name[160];
    char dtype[8];  // "F32", "BF16", "F16", "F64", "I32", "U8", ...
    int ndim;
    uint64_t shape[SAFETENSORS_MAX_DIMS];
    uint64_t begin, end;  // byte range in its file, absolute; filled by open and by create
    int file;             // index into SafetensorsSet.files
} TensorInfo;

typedef struct {
    File file;
    char path[IO_PATH_MAX];
} SafetensorsFile;

typedef struct {
    SafetensorsFile *files;
    TensorInfo *tensors;  // sorted by name
    int num_files, num_tensors;
    size_t tensors_capacity;
    uint64_t num_nonfinite;  // NaN and Inf seen by safetensors_read_f32 so far
} SafetensorsSet;

// Writing: create with the list, then the tensors' bytes in list order in pieces of any size, then
// finish. After finish, w.file.size_bytes and w.file.crc are what a manifest wants. A failure at
// any point closes and removes the file. Put dtypes of larger elements first: others read tensors
// in place, aligned.
typedef struct {
    FileWriter file;
    uint64_t data_bytes;  // promised by the header
    uint64_t written;
} SafetensorsWriter;

// ------------------------------------------------------------------------------------------------
// Tensors

// Bytes of one element of a safetensors dtype; 0 = unknown.
uint64_t tensor_dtype_size(const char *dtype);
uint64_t tensor_num_elements(const TensorInfo *t);

// In one line: tensor_info("lm_head.weight", "BF16", 2, vocab_size, hidden_size).
TensorInfo tensor_info(const char *name, const char *dtype, int ndim, uint64_t shape0,
                       uint64_t shape1);

// ------------------------------------------------------------------------------------------------
// Opening

// NULL when there is none.
const TensorInfo *safetensors_find(const SafetensorsSet *s, const char *name);
void safetensors_close(SafetensorsSet *s);

// A .safetensors file, or a directory with model.safetensors or model.safetensors.index.json.
bool safetensors_open(SafetensorsSet *s, const char *dir_or_file, Error *err);

// ------------------------------------------------------------------------------------------------
// Reading tensors

// Bytes [first_byte, first_byte + n) of the tensor, any dtype, unconverted (little-endian).
bool safetensors_read_raw(const SafetensorsSet *s, const TensorInfo *t, void *out,
                          uint64_t first_byte, uint64_t n, Error *err);

// Elements [first, first + count) of an F32, BF16, F16 or F64 tensor as fp32. Adds NaN and Inf to
// s->num_nonfinite: the caller decides whether they are an error.
bool safetensors_read_f32(SafetensorsSet *s, const TensorInfo *t, float *out, uint64_t first,
                          uint64_t count, Error *err);

// ------------------------------------------------------------------------------------------------
// Writing

// Only name, dtype, ndim and shape of tensors[] are read.
bool safetensors_create(SafetensorsWriter *w, const char *path, const TensorInfo *tensors,
                        int num_tensors, Error *err);
bool safetensors_write(SafetensorsWriter *w, const void *data, uint64_t n, Error *err);
bool safetensors_finish(SafetensorsWriter *w, Error *err);
void safetensors_abort(SafetensorsWriter *w);

#endif
