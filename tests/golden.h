// Arrays of the golden files, for tests of the model and of its texts
#pragma once

#include "../data/models/safetensors.h"
#include "test.h"

// An array of at most so many int32; returns how many it has.
__attribute__((unused)) static int read_ints(const SafetensorsSet *set, const char *name,
                                             int32_t *out, size_t most) {
    const TensorInfo *info = safetensors_find(set, name);
    const size_t n = info ? (size_t)tensor_num_elements(info) : most + 1;
    CHECK_MSG(n <= most && strcmp(info->dtype, "I32") == 0, "%s", name);
    MUST(file_read_at(&set->files[info->file], out, n * 4, info->begin, &err));
    return (int)n;
}
