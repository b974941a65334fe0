// Safetensors: reads a file or a sharded Hugging Face directory, writes a file as a stream.
//
//   file = uint64 N | N bytes of JSON {"name": {dtype, shape, data_offsets}, ...} | tensor bytes
//
// The reader trusts nothing: the size of the header is checked before it is read, JSON is strict,
// every tensor's size matches its shape and dtype, tensors are contiguous from 0 to the end of the
// file, and index and files agree in both directions. Violations exit 3.
#pragma once

#include "../base/file.h"

enum {
    SAFETENSORS_MAX_DIMS = 8,
    SAFETENSORS_MAX_FILES = 512,
    SAFETENSORS_MAX_HEADER = 1 << 24,  // bytes: 10^5 tensors; parsed, up to 75 times as much
};

typedef struct {
    char name[160];
    char dtype[8];  // "F32", "BF16", "F16", "F64", "I32", "U8", ...
    int ndim;
    uint64_t shape[SAFETENSORS_MAX_DIMS];
    uint64_t begin, end;  // bytes of its file; set by safetensors_open
    int file;             // index into SafetensorsSet.files
} TensorInfo;

typedef struct {
    File *files;          // (num_files) their paths are owned
    TensorInfo *tensors;  // sorted by name
    int num_files, num_tensors;
    size_t tensors_capacity;
    uint64_t num_nonfinite;  // NaN and Inf that safetensors_read_f32 has read so far
} SafetensorsSet;

// Bytes of one element of a safetensors dtype; 0: unknown.
uint64_t tensor_dtype_size(const char *dtype);
uint64_t tensor_num_elements(const TensorInfo *t);

// The upper half of an fp32, rounded to nearest even; Inf if that is out of range.
uint16_t bf16_bits(float value);

// ---- Reading ------------------------------------------------------------------------------------

// A .safetensors file, or a directory with model.safetensors or model.safetensors.index.json. On
// failure *s needs no closing.
bool safetensors_open(SafetensorsSet *s, const char *dir_or_file, Error *err);
void safetensors_close(SafetensorsSet *s);

// NULL when there is none.
const TensorInfo *safetensors_find(const SafetensorsSet *s, const char *name);

// Elements [first, first + count) of an F32, BF16, F16 or F64 tensor as fp32. Counts NaN and Inf in
// s->num_nonfinite: the caller decides whether they are an error.
bool safetensors_read_f32(SafetensorsSet *s, const TensorInfo *t, float *out, uint64_t first,
                          uint64_t count, Error *err);

// ---- Writing ------------------------------------------------------------------------------------

// Creates a file and writes its header from name, dtype, ndim and shape of tensors (num_tensors).
// Their bytes follow by writer_write, in the order of the list, then writer_close. Put dtypes with
// larger elements first: readers map the file and need aligned tensors.
bool safetensors_create(FileWriter *w, const char *path, const TensorInfo *tensors, int num_tensors,
                        Error *err);
