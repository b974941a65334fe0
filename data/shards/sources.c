#include "sources.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../base/memory.h"
#include "../base/path.h"

void sources_free(Sources *s) {
    while (s->n > 0) free(s->list[--s->n].spec);
}

// Cuts the weight off a part of a spec; false: it has none.
static bool take_weight(char *part, double *weight) {
    char *colon = strrchr(part, ':'), *end;
    if (!colon || path_exists(part)) return false;
    *weight = strtod(colon + 1, &end);
    if (end == colon + 1 || *end || !(*weight >= 0 && *weight < 1e300)) return false;
    *colon = 0;
    return true;
}

bool sources_parse(Sources *s, const char *spec, Error *err) {
    double weights[MAX_SOURCES], sum = 0, part_sum = 0;
    char *copy = host_copy(path_exists(spec) ? "" : spec, "paths"), *rest = copy;
    char bad[200] = "only 0";
    int32_t parts = 0;
    *s = (Sources){0};
    for (char *part; (part = strsep(&rest, ","));) {
        part += strspn(part, " ");
        parts += part[0] != 0;
        if (s->n == MAX_SOURCES || !take_weight(part, &weights[s->n])) {
            if (part[0]) text_copy(bad, sizeof bad, part);
            continue;
        }
        sum += weights[s->n];
        s->list[s->n++].spec = host_copy(part, "paths");
    }
    free(copy);
    if (s->n == 0)
        s->list[s->n++] = (Source){.spec = host_copy(spec, "paths"), .weight = ALL_WEIGHTS};
    else if (s->n < parts || sum == 0)
        return error_set(err, EXIT_USAGE,
                         "weigh all sources, at most 32, or none, as in web:0.7,code:0.3",
                         "%s: expected a weight for each source, one above 0, found %s", spec, bad);
    // round the running sum: shares add up to ALL_WEIGHTS, and parsing their text gives the same
    int64_t before = 0;
    for (int32_t i = 0; sum > 0 && i < s->n; i++) {
        const int64_t now = llround((part_sum += weights[i]) / sum * ALL_WEIGHTS);
        s->list[i].weight = now - before;
        before = now;
    }
    return true;
}
