// The files that --train and --val name: files, glob patterns, directories.
#pragma once

#include "../base/error.h"

typedef struct {
    char *path;        // owned
    size_t dir_bytes;  // of its start that are the named directory; 0: the file itself was named
} FoundPath;

typedef struct {
    FoundPath *items;  // (n)
    size_t n, capacity;
} PathList;

// PATH_LIST list = {0}: freed at the end of its block
void path_list_free(PathList *list);
#define PATH_LIST __attribute__((cleanup(path_list_free))) PathList
void path_list_add(PathList *list, const char *path);

// The entries of a directory whose names match, except hidden ones.
bool path_list_add_dir(PathList *list, const char *dir, const void *pattern, Error *err);

// The shards of a directory: its SPLIT_*.bin, else *_SPLIT_*.bin (modded-nanogpt).
bool path_list_add_shards(PathList *list, const char *dir, const void *split, Error *err);

typedef struct {
    bool (*add_dir)(PathList *list, const char *dir, const void *context, Error *err);
    const void *context;
    const char *expected, *hint;  // where there are no files
} Search;

// Adds the files that `spec` names: all of it as one path if that exists, else each part between
// commas. A part is a file, a directory or a glob pattern. Files of the last two are in byte order,
// so that the order of documents does not depend on the locale. A part that names no file is
// EXIT_BAD_INPUT.
bool path_list_expand(PathList *list, const char *spec, const Search *search, Error *err);
