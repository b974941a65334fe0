#include "find_files.h"

#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>

#include "../base/memory.h"
#include "../base/path.h"

void path_list_add(PathList *list, const char *path) {
    array_grow(list->items, &list->capacity, list->n + 1, "paths");
    list->items[list->n++] = (FoundPath){host_copy(path, "a path"), 0};
}

void path_list_free(PathList *list) {
    for (size_t i = 0; i < list->n; i++) free(list->items[i].path);
    free(list->items);
    *list = (PathList){0};
}

static int path_compare(const void *a, const void *b) {
    return strcmp(((const FoundPath *)a)->path, ((const FoundPath *)b)->path);
}

bool path_list_add_dir(PathList *list, const char *dir, const void *pattern, Error *err) {
    DIR *d = opendir(dir);
    if (!d) return bad_input(err, "%s: cannot list: %s", dir, strerror(errno));
    for (struct dirent *entry; (entry = readdir(d));)
        if (fnmatch(pattern, entry->d_name, FNM_PERIOD) == 0)
            path_list_add(list, PATH_IN(dir, entry->d_name));
    closedir(d);
    return true;
}

bool path_list_add_shards(PathList *list, const char *dir, const void *split, Error *err) {
    static const char *const patterns[] = {"%s_*.bin", "*_%s_*.bin"};
    const size_t before = list->n;
    for (size_t i = 0; i < 2 && list->n == before; i++) {
        char pattern[64];
        snprintf(pattern, sizeof pattern, patterns[i], (const char *)split);
        if (!path_list_add_dir(list, dir, pattern, err)) return false;
    }
    return true;
}

// A name that exists is never a pattern.
static bool expand_one(PathList *list, const char *item, const Search *s, Error *err) {
    const size_t before = list->n;
    const bool is_dir = path_is_dir(item), is_file = !is_dir && path_exists(item);
    glob_t found = {0};
    if (is_dir && !s->add_dir(list, item, s->context, err)) return false;
    if (is_file) path_list_add(list, item);
    if (!is_dir && !is_file) glob(item, 0, NULL, &found);
    for (size_t i = 0; i < found.gl_pathc; i++) path_list_add(list, found.gl_pathv[i]);
    globfree(&found);
    if (list->n == before)
        return is_dir ? error_set(err, EXIT_BAD_INPUT, s->hint, "%s: expected %s, found none", item,
                                  s->expected)
                      : error_set(err, EXIT_BAD_INPUT,
                                  "check the path, which is relative to this directory; --train "
                                  "says where moved data is",
                                  "%s: expected a file or a directory, found nothing", item);
    for (size_t i = before; is_dir && i < list->n; i++) list->items[i].dir_bytes = strlen(item);
    qsort(list->items + before, list->n - before, sizeof(FoundPath), path_compare);
    return true;
}

bool path_list_expand(PathList *list, const char *spec, const Search *search, Error *err) {
    if (path_exists(spec) || !strchr(spec, ',')) return expand_one(list, spec, search, err);
    AUTO_FREE char *copy = host_copy(spec, "paths");
    char *rest = copy;
    for (char *item; (item = strsep(&rest, ","));)
        if (item[0] && !expand_one(list, item, search, err)) return false;
    return list->n > 0 || bad_input(err, "%s: expected paths, found none", spec);
}
