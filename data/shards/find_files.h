// Which files --train and --val name: files, glob patterns, directories.
#ifndef UNPAD_FIND_FILES_H
#define UNPAD_FIND_FILES_H

#include <stdbool.h>
#include <stddef.h>

#include "../base/error.h"

// -------------------------------------------------------------------------------------------------
// Which files

typedef struct {
    char **items;
    size_t n, capacity;
} PathList;

void path_list_free(PathList *list);

// The whole of spec when it exists, else its parts between commas.
bool path_list_expand(PathList *list, const char *spec, const char *split, Error *err);

#endif
