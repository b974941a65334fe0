// The parameters of a model between memory and files: random initial values, Hugging Face
// directories, and the optimizer's moments under the same names.
//
// The caller owns the values. They pass through its callbacks as fp32, at most `block` elements at
// a time, in the order of the list.
#pragma once

#include "safetensors.h"

#define MODEL_DTYPES "fp32|bf16"
typedef enum { MODEL_FP32, MODEL_BF16 } ModelDtype;  // of the weights

typedef struct {
    char name[96];               // as in a Hugging Face checkpoint
    int64_t rows, cols;          // cols = 0: a vector of `rows`
    size_t offset;               // elements from the start of every parameter arena
    size_t count;                // elements there
    bool decay;                  // matrices decay, norm weights and biases do not
    int moments;                 // kept by the optimizer: 2, or 1: m alone
    float init_std;              // 0: filled with ones; negative: with zeros
    float init_bound;            // more than 0: uniform in +- it instead
    int64_t pad_rows, pad_cols;  // zeros after the rows and columns, in arenas but not in files
} Parameter;

typedef enum { ARENA_WEIGHTS, ARENA_M, ARENA_V } ParameterArena;

// A model's parameters. put and get: values (n) of elements offset .. offset + n - 1 of an arena,
// all of one parameter.
typedef struct {
    const Parameter *list;  // (num)
    int num;
    bool tied_head;    // an equal copy of the embedding in a file, lm_head.weight, is ignored
    const char *file;  // name of the weights; NULL: model.safetensors or its index
    size_t block;
    void *context;
    void (*put)(void *context, ParameterArena arena, size_t offset, const float *values, size_t n);
    void (*get)(void *context, ParameterArena arena, size_t offset, float *values, size_t n);
} Parameters;

// Random initial values that depend only on the seed, the parameter's name and the element, not on
// the order of the list, the block size or the number of ranks.
void weights_init(Parameters p, uint64_t seed);

// Does the Hugging Face directory hold these parameters, with these shapes, and no others? Exit 3.
// Reads no values.
bool weights_check(Parameters p, const char *dir, Error *err);

// Weights from a Hugging Face directory, as F32, BF16, F16 or F64, or the moments of a checkpoint.
// Exit 7 when values are NaN or Inf, 9 when moments belong to another model or optimizer.
#define MOMENTS_FILE "optimizer.safetensors"
bool parameters_load(Parameters p, bool moments, const char *path, Error *err);

// Weights, or the moments as "m.<name>" and "v.<name>", into a .safetensors file; *w then has its
// size and checksum. dtype: "F32", or "BF16", rounded to nearest even. NaN and Inf are refused with
// exit 7. All blocks are read even after a failure, so that `get` may be a collective operation;
// path NULL: blocks are read but not written, for the other ranks.
bool parameters_save(Parameters p, bool moments, const char *dtype, const char *path, FileWriter *w,
                     Error *err);
