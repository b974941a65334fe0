// Megatron: NAME.bin with NAME.idx.
#ifndef UNPAD_MEGATRON_H
#define UNPAD_MEGATRON_H

#include <stdbool.h>
#include <stddef.h>

#include "../base/error.h"
#include "../base/file.h"
#include "shard.h"

// -------------------------------------------------------------------------------------------------
// Megatron: raw tokens, and sequences with lengths and byte offsets in NAME.idx

bool shard_open_megatron(Shard *s, const File *f, Error *err);

// True when NAME.idx beside NAME.bin is Megatron's; *f is then open.
bool shard_find_megatron(const Shard *s, char *path, size_t capacity, File *f);

#endif
