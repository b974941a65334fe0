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
