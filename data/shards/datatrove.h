// datatrove: NAME.ds with NAME.ds.index.
#ifndef UNPAD_DATATROVE_H
#define UNPAD_DATATROVE_H

#include <stdbool.h>

#include "../base/error.h"
#include "shard.h"

// -------------------------------------------------------------------------------------------------
// datatrove: raw tokens, and cumulative ends in NAME.ds.index; the width follows from both sizes

bool shard_open_datatrove(Shard *s, Error *err);

#endif
