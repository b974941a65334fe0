#include "memory.h"

#include <stdlib.h>
#include <string.h>

#include "error.h"

__attribute__((noreturn)) static void host_refused(size_t count, size_t size, const char *what) {
    exit_with(EXIT_HOST_MEMORY, "close other programs or choose smaller sizes",
              "host memory: %zu x %zu bytes for %s refused", count, size, what);
}

void *host_calloc(size_t count, size_t size, const char *what_for) {
    void *p = calloc(count ? count : 1, size ? size : 1);
    if (!p) host_refused(count, size, what_for);
    return p;
}

// The number on the line that begins with `key`; "": on the first one
static size_t number_in(const char *dir, const char *name, const char *key, size_t otherwise) {
    char path[4096], line[128];
    size_t n = otherwise;
    bool found = false;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    AUTO_CLOSE FILE *f = fopen(path, "r");
    while (f && !found && fgets(line, sizeof line, f))
        if ((found = strncmp(line, key, strlen(key)) == 0))
            sscanf(line + strlen(key), "%zu", &n);  // or "max"
    return n;
}

// Ancestors limit a group too. In a container only the root exists: the path is the host's.
size_t cgroup_memory_free(const char *self, const char *root) {
    char line[2048], dir[4096];
    size_t least = SIZE_MAX;
    AUTO_CLOSE FILE *f = fopen(self, "r");
    while (f && fgets(line, sizeof line, f)) {
        const bool v1 = strstr(line, ":memory:") != NULL;
        if (!v1 && strncmp(line, "0::", 3) != 0) continue;
        line[strcspn(line, "\n")] = 0;
        const size_t skip = v1 ? 0 : strlen("total_");
        const int top = snprintf(dir, sizeof dir, "%s%s", root, v1 ? "/memory" : "");
        snprintf(dir + top, sizeof dir - (size_t)top, "%s", strrchr(line, ':') + 1);
        for (char *end = dir + strlen(dir); end; end = strrchr(dir + top, '/')) {
            *end = 0;
            const size_t most = number_in(dir, v1 ? "memory.limit_in_bytes" : "memory.max", "",
                                          SIZE_MAX),
                         used =
                             number_in(dir, v1 ? "memory.usage_in_bytes" : "memory.current", "", 0),
                         cache = number_in(dir, "memory.stat", &"total_inactive_file "[skip], 0) +
                                 number_in(dir, "memory.stat", &"total_active_file "[skip], 0),
                         taken = used > cache ? used - cache : 0,
                         left = most > taken ? most - taken : 0;
            if (most < SIZE_MAX && left < least) least = left;
        }
    }
    return least;
}

size_t host_memory_free(void) {
    enum { LEAST = 1 << 20 };  // also divided by ranks, it is not 0
    const size_t all = 1024 * number_in("/proc", "meminfo", "MemAvailable:", 0),
                 allowed = cgroup_memory_free("/proc/self/cgroup", "/sys/fs/cgroup");
    return all < allowed ? all : allowed > LEAST ? allowed : LEAST;
}

char *host_copy(const char *text, const char *what_for) {
    const size_t size = strlen(text) + 1;
    return memcpy(host_calloc(size, 1, what_for), text, size);
}

FILE *host_stream(char **text, size_t *size, const char *what_for) {
    FILE *stream = open_memstream(text, size);
    if (!stream) host_refused(1, 1, what_for);
    return stream;
}

void *host_grow(void *old, size_t *capacity, size_t needed, size_t size, const char *what_for) {
    if (needed <= *capacity) return old;
    size_t grown = *capacity + *capacity / 2;
    if (grown < needed) grown = needed;
    uint64_t bytes = 0;
    void *p = checked_mul(grown, size, &bytes) ? realloc(old, (size_t)bytes) : NULL;
    if (!p) host_refused(grown, size, what_for);
    *capacity = grown;
    return p;
}
