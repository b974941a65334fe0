#include "seen.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dir.h"
#include "file.h"
#include "hash.h"
#include "path.h"

// The file of a text: its name is a hash of the text, its content the text itself.
static bool path_of(char *dir, char *path, const char *text) {
    Error err = {0};
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    const bool by_home = !cache || cache[0] != '/';  // as the XDG specification demands
    if (by_home && (!home || home[0] != '/')) return false;
    return path_printf(dir, IO_PATH_MAX, &err, "%s%s/unpad", by_home ? home : cache,
                       by_home ? "/.cache" : "") &&
           path_printf(path, IO_PATH_MAX, &err, "%s/seen-%016lx", dir,
                       fnv1a(FNV1A_START, text, strlen(text)));
}

bool seen_before(const char *text) {
    Error err = {0};
    char dir[IO_PATH_MAX], path[IO_PATH_MAX];
    uint64_t n;
    if (!path_of(dir, path, text) || !path_exists(path)) return false;
    char *found = file_read_all(path, IO_BUFFER, &n, "", &err);
    const bool same = found && strcmp(found, text) == 0;
    free(found);
    return same;
}

void seen_add(const char *text) {
    Error err = {0};
    char dir[IO_PATH_MAX], path[IO_PATH_MAX];
    if (path_of(dir, path, text) && dir_create_all(dir, &err))
        file_write_all(path, text, strlen(text), &err);
}
