// The files that --train and --val name: files, glob patterns, directories.
#ifndef UNPAD_FIND_FILES_H
#define UNPAD_FIND_FILES_H

#include <stdbool.h>
#include <stddef.h>

#include "../base/error.h"

typedef struct {
    char **items;  // (n) owned paths; {0}: empty
    size_t n, capacity;
} PathList;

void path_list_free(PathList *list);

void path_list_add(PathList *list, const char *path);
void path_list_expand_glob(PathList *list, const char *pattern);

// Those from `from` on, by bytes, so that the order of documents does not depend on the locale.
void path_list_sort(PathList *list, size_t from);

// Adds the files that `spec` names: the whole of it when that exists, else its parts between
// commas. Each is a file, a glob pattern or a directory (its SPLIT_*.bin, else *_SPLIT_*.bin, else
// for "train" *.ds, else *.npy); patterns and directories in byte order. A part that names no file
// is EXIT_BAD_INPUT.
bool path_list_expand(PathList *list, const char *spec, const char *split, Error *err);

#endif
