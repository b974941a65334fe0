#include "agree.h"

#include <assert.h>
#include <string.h>

#include "../../data/base/error.h"
#include "../../data/base/file.h"
#include "../../data/base/hash.h"
#include "../../data/base/memory.h"
#include "../kernels.h"
#include "comm.h"
#include "world.h"

void rank_field(RankFields *f, const char *name, const void *data, size_t bytes) {
    assert(f->n < MAX_RANK_FIELDS);
    text_copy(f->field[f->n].name, sizeof f->field->name, name);
    f->field[f->n++].hash = crc32c(0, data, bytes);
}

void rank_field_text(RankFields *f, const char *name, const char *text) {
    rank_field(f, name, text, strlen(text));
}

void rank_field_options(RankFields *f, const OptionSet *set) {
    char buffer[OPTION_TEXT_MAX];
    for (const Option *option = set->table; option->name; option++) {
        if (!is_option(option)) continue;
        const char *text = option_text(set, option, buffer);
        rank_field_text(f, option->name, text ? text : "(none)");
    }
}

void rank_field_file(RankFields *f, const char *name, const char *path) {
    unsigned char digest[32] = {0};
    file_sha256(path, digest, &(Error){0});
    rank_field(f, name, digest, sizeof digest);
}

void rank_field_device(RankFields *f, const char *name, const void *device, size_t bytes) {
    enum { MOST = 1 << 20 };  // at a time
    uint32_t crc = 0;
    AUTO_FREE char *part = host_calloc(1, MOST, "weights");
    for (size_t at = 0, n; at < bytes; at += n) {
        n = bytes - at < MOST ? bytes - at : MOST;
        comm_progress();
        device_download(part, (const char *)device + at, n);
        crc = crc32c(crc, part, n);
    }
    rank_field(f, name, &crc, sizeof crc);
}

void rank_fields_agree(const RankFields *own, const char *what, const char *hint) {
    const size_t all = (size_t)comm_num_ranks() * MAX_RANK_FIELDS;
    char differing[400] = "";
    AUTO_FREE RankField *fields = host_calloc(all, sizeof *fields, "ranks");
    comm_all_gather_host(fields, own->field, sizeof own->field);
    for (size_t i = MAX_RANK_FIELDS; i < all; i++) {
        const RankField *first = &fields[i % MAX_RANK_FIELDS], *other = &fields[i];
        if (memcmp(first, other, sizeof *first) != 0)
            text_list(differing, sizeof differing, "%.31s (rank %zu)",
                      first->name[0] ? first->name : other->name, i / MAX_RANK_FIELDS);
    }
    if (differing[0])
        exit_with(EXIT_CHECKPOINT_MISFIT, hint,
                  "ranks: expected %s of every rank as of rank 0, found differences in %s", what,
                  differing);
}

// ---- Where each rank runs -----------------------------------------------------------------------

// "0-3,8": the cores that this process may use, as Linux lists them
static void cores_text(char *out, size_t capacity) {
    char line[4096], list[4096] = "?";
    AUTO_CLOSE FILE *status = fopen("/proc/self/status", "re");
    while (status && fgets(line, sizeof line, status))
        if (sscanf(line, "Cpus_allowed_list: %4095s", list) == 1) break;
    text_copy(out, capacity, list);
}

void rank_places_print(void) {
    enum { MOST = 384 };
    const int ranks = comm_num_ranks();
    char own[MOST] = "", cores[64];
    AUTO_FREE char *all = host_calloc((size_t)ranks, MOST, "ranks");
    cores_text(cores, sizeof cores);
    snprintf(own, sizeof own, "%s, cores %s: %s", world.host, cores, device_describe());
    text_sanitize(own, sizeof own);
    comm_all_gather_host(all, own, sizeof own);
    for (int r = 0, last; r < ranks; r = last + 1) {
        const char *place = all + (size_t)r * MOST;
        for (last = r; last + 1 < ranks; last++)
            if (strcmp(place, all + (size_t)(last + 1) * MOST) != 0) break;
        printf("  rank %d", r);
        if (last > r) printf("-%d", last);
        printf(" on %s\n", place);
    }
}
