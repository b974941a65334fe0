// Which format a file has.
#ifndef UNPAD_FORMATS_H
#define UNPAD_FORMATS_H

#include <stdbool.h>

#include "../base/error.h"
#include "dataset.h"
#include "shard.h"

// -------------------------------------------------------------------------------------------------
// Which format

bool shard_open(Shard *s, const DatasetOptions *options, Error *err);

#endif
