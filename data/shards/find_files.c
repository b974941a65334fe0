#include "find_files.h"

#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <glob.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "../base/error.h"
#include "../base/memory.h"
#include "../base/path.h"

void path_list_add(PathList *list, const char *path) {
    const size_t size = strlen(path) + 1;
    char *copy = host_calloc(size, 1, "a path");
    memcpy(copy, path, size);
    list->items = host_grow(list->items, &list->capacity, list->n + 1, sizeof(char *), "paths");
    list->items[list->n++] = copy;
}

void path_list_free(PathList *list) {
    for (size_t i = 0; i < list->n; i++) free(list->items[i]);
    free(list->items);
    memset(list, 0, sizeof *list);
}

static int path_compare(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

void path_list_sort(PathList *list, size_t from) {
    if (list->n > from) qsort(list->items + from, list->n - from, sizeof(char *), path_compare);
}

static bool path_list_add_dir(PathList *list, const char *dir, const char *pattern, Error *err) {
    const size_t before = list->n;
    char path[IO_PATH_MAX];
    DIR *d = opendir(dir);
    if (!d) return error_set(err, EXIT_BAD_INPUT, "", "%s: cannot list: %s", dir, strerror(errno));
    bool ok = true;
    for (struct dirent *entry; ok && (entry = readdir(d));) {
        if (fnmatch(pattern, entry->d_name, FNM_PERIOD) != 0) continue;
        const int n = snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        ok = n > 0 && (size_t)n < sizeof path;
        if (ok)
            path_list_add(list, path);
        else
            error_set(err, EXIT_BAD_INPUT, "", "%s/%s: path too long", dir, entry->d_name);
    }
    closedir(d);
    path_list_sort(list, before);
    return ok;
}

// DIR/train_*.bin, else DIR/*_train_*.bin (modded-nanogpt), else DIR/*.ds (datatrove) or DIR/*.npy
// (OLMo), which are refused with a hint.
static bool path_list_expand_dir(PathList *list, const char *dir, const char *split, Error *err) {
    const size_t before = list->n;
    char pattern[64];
    snprintf(pattern, sizeof pattern, "%s_*.bin", split);
    if (!path_list_add_dir(list, dir, pattern, err)) return false;
    snprintf(pattern, sizeof pattern, "*_%s_*.bin", split);
    if (list->n == before && !path_list_add_dir(list, dir, pattern, err)) return false;
    if (strcmp(split, "train") != 0) return true;
    return (list->n > before || path_list_add_dir(list, dir, "*.ds", err)) &&
           (list->n > before || path_list_add_dir(list, dir, "*.npy", err));
}

void path_list_expand_glob(PathList *list, const char *pattern) {
    const size_t before = list->n;
    glob_t found;
    if (glob(pattern, 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) path_list_add(list, found.gl_pathv[i]);
        globfree(&found);
    }
    path_list_sort(list, before);
}

// A directory, a file or a glob pattern, in this order: a name that exists is never a pattern.
static bool path_list_expand_one(PathList *list, const char *item, const char *split, Error *err) {
    struct stat st;
    const size_t before = list->n;
    const bool exists = stat(item, &st) == 0;
    if (exists && S_ISDIR(st.st_mode)) {
        if (!path_list_expand_dir(list, item, split, err)) return false;
    } else if (exists) {
        path_list_add(list, item);
    } else {
        path_list_expand_glob(list, item);
    }
    if (list->n > before) return true;
    return error_set(err, EXIT_BAD_INPUT,
                     "name a directory of text files or JSON Lines, or one with such shards",
                     "%s: expected token shards (%s_*.bin), found none", item, split);
}

bool path_list_expand(PathList *list, const char *spec, const char *split, Error *err) {
    struct stat st;
    if (stat(spec, &st) == 0 || !strchr(spec, ','))
        return path_list_expand_one(list, spec, split, err);
    const size_t size = strlen(spec) + 1;
    char *copy = host_calloc(size, 1, "a path");
    memcpy(copy, spec, size);
    bool ok = true;
    char *rest = copy, *item;
    while (ok && (item = strsep(&rest, ",")) != NULL)
        ok = item[0] == 0 || path_list_expand_one(list, item, split, err);
    free(copy);
    if (ok && list->n == 0)
        return error_set(err, EXIT_BAD_INPUT, "", "data: expected a path, found '%s'", spec);
    return ok;
}
