// What the ranks of a job must have in common, when they start and whenever they save; and where
// each of them runs.
#ifndef UNPAD_TRAIN_RANKS_H
#define UNPAD_TRAIN_RANKS_H

#include "../data/options.h"  // defines: Option
#include "../llama.h"         // defines: LlamaModel
#include "weights.h"          // defines: llama_list

// ------------------------------------------------------------------------------------------------
// Fields: names and hashes that are compared across ranks

typedef struct {
    char name[32];
    uint64_t hash;
} RankField;
enum { MAX_RANK_FIELDS = 128 };

// The rest of the array stays zero, so that another version's longer list differs too.
typedef struct {
    RankField field[MAX_RANK_FIELDS];
    int n;
} RankFields;

static inline void rank_field(RankFields *f, const char *name, const void *data, size_t bytes) {
    assert(f->n < MAX_RANK_FIELDS);
    text_copy(f->field[f->n].name, sizeof f->field->name, name);
    f->field[f->n++].hash = crc32c(0, data, bytes);
}

static inline void rank_field_text(RankFields *f, const char *name, const char *text) {
    rank_field(f, name, text, strlen(text));
}

static inline void rank_field_options(RankFields *f, const Option *table) {
    char text[8192];
    for (const Option *option = table; option->name; option++) {
        JsonWriter w;
        if (!option->address) continue;
        json_writer_init(&w, text, sizeof text, 0);
        json_begin(&w, NULL, '{');
        options_write_one(option, &w);
        rank_field(f, option->name, text, w.n);
    }
}

// What a file holds; one that cannot be read counts as empty.
static inline void rank_field_file(RankFields *f, const char *name, const char *path) {
    unsigned char bytes[1 << 14];
    uint32_t crc = 0;
    FILE *file = fopen(path, "rbe");
    for (size_t n; file && (n = fread(bytes, 1, sizeof bytes, file)) > 0;)
        crc = crc32c(crc, bytes, n);
    if (file) fclose(file);
    rank_field(f, name, &crc, sizeof crc);
}

// The file that runs, even when another has taken its name.
static inline void rank_field_program(RankFields *f) {
    rank_field_file(f, "the program file", "/proc/self/exe");
}

// Its manifest has the checksums of all its files, which the rank has verified. dir "": none.
static inline void rank_field_checkpoint(RankFields *f, const char *dir) {
    Error err = {0, "", ""};
    char path[IO_PATH_MAX];
    rank_field_text(f, "checkpoint", dir);
    if (!dir[0]) return;
    must(path_join(path, sizeof path, dir, "manifest.json", &err), &err);
    rank_field_file(f, "files of the checkpoint", path);
}

// All weights as fp32, the exact master: those that this rank computes with.
static inline void rank_field_weights(RankFields *f, const LlamaModel *m) {
    float *chunk = (float *)host_calloc(m->sizes.io_chunk, sizeof(float), "weights");
    uint32_t crc = 0;
    for (size_t at = 0, n; at < m->num_elements; at += n) {
        n = m->num_elements - at < m->sizes.io_chunk ? m->num_elements - at : m->sizes.io_chunk;
        comm_progress();
        weights_to_host(chunk, m->weights + at, m->master_lo ? m->master_lo + at : NULL, n);
        crc = crc32c(crc, chunk, n * sizeof(float));
    }
    free(chunk);
    rank_field(f, "weights", &crc, sizeof crc);
}

// Ends all ranks with exit code 9 and the list of what differs, if anything does. All ranks call
// it. what: "the same program, flags and files"
static inline void rank_fields_agree(const RankFields *own, const char *what, const char *hint) {
    Error err = {0, "", ""};
    const size_t all = (size_t)comm_num_ranks() * MAX_RANK_FIELDS;
    char differing[400] = "";
    RankField *fields = (RankField *)host_calloc(all, sizeof *fields, "ranks");
    comm_all_gather_host(fields, own->field, sizeof own->field);
    for (size_t i = MAX_RANK_FIELDS; i < all; i++) {
        const RankField *first = &fields[i % MAX_RANK_FIELDS], *other = &fields[i];
        char text[64];
        if (memcmp(first, other, sizeof *first) == 0) continue;
        snprintf(text, sizeof text, "%s (rank %zu)", first->name[0] ? first->name : other->name,
                 i / MAX_RANK_FIELDS);
        llama_list(differing, sizeof differing, text);
    }
    free(fields);
    if (!differing[0]) return;
    error_set(&err, EXIT_CHECKPOINT_MISFIT, hint,
              "ranks: expected %s of every rank as of rank 0, found differences in %s", what,
              differing);
    error_exit(&err);
}

// ------------------------------------------------------------------------------------------------
// Where each rank runs

typedef struct {
    char host[64], device[192], cores[64];
    int32_t local_rank;
} RankPlace;

// "0-3,8": the cores that this process may use, as Linux lists them
static inline void cores_text(char *out, size_t capacity) {
    char line[4096], list[4096] = "?";
    FILE *status = fopen("/proc/self/status", "re");
    while (status && fgets(line, sizeof line, status))
        if (sscanf(line, "Cpus_allowed_list: %4095s", list) == 1) break;
    if (status) fclose(status);
    text_copy(out, capacity, list);
}

static inline void rank_place(RankPlace *p) {
    memset(p, 0, sizeof *p);
    if (gethostname(p->host, sizeof p->host - 1) != 0) text_copy(p->host, sizeof p->host, "?");
    text_sanitize(p->host, sizeof p->host);
    text_copy(p->device, sizeof p->device, device_describe());
    cores_text(p->cores, sizeof p->cores);
    p->local_rank = comm_local_rank();
}

// One line for neighbours that differ in nothing but their number on the machine.
static inline void rank_places_print(void) {
    const int ranks = comm_num_ranks();
    RankPlace own, *all = (RankPlace *)host_calloc((size_t)ranks, sizeof own, "ranks");
    rank_place(&own);
    comm_all_gather_host(all, &own, sizeof own);
    for (int r = 0, last; r < ranks; r = last + 1) {
        const RankPlace *p = &all[r];
        for (last = r; last + 1 < ranks; last++) {
            const RankPlace *next = &all[last + 1];
            if (next->local_rank != all[last].local_rank + 1 ||
                memcmp(next, p, offsetof(RankPlace, local_rank)) != 0)
                break;
        }
        printf("  rank %d", r);
        if (last > r) printf("-%d", last);
        printf(" on %s, local %d", p->host, p->local_rank);
        if (last > r) printf("-%d", all[last].local_rank);
        printf(", cores %s: %s\n", p->cores, p->device);
    }
    free(all);
}

#endif
