// Fields that all ranks of a job must agree on, at the start and at every save: names, and hashes
// that are compared. Also prints where each rank runs.
//
//   RankFields own = {0};
//   rank_field_text(&own, "version", "1.0");
//   rank_field_file(&own, "the program file", "/proc/self/exe");
//   rank_fields_agree(&own, "the same program", "start every rank with the same program");
#pragma once

#include "../../data/base/options.h"

enum { MAX_RANK_FIELDS = 128 };

typedef struct {
    char name[32];
    uint64_t hash;
} RankField;

// Zero-initialised; unused entries stay zero, so a longer list of another version differs too.
typedef struct {
    RankField field[MAX_RANK_FIELDS];
    int n;
} RankFields;

// Adds a field; its name is cut to 31 characters. At most MAX_RANK_FIELDS of them.
void rank_field(RankFields *f, const char *name, const void *data, size_t bytes);
void rank_field_text(RankFields *f, const char *name, const char *text);
// The content of a file of at most 1 GiB; all that cannot be read are alike.
void rank_field_file(RankFields *f, const char *name, const char *path);
// Bytes in device memory
void rank_field_device(RankFields *f, const char *name, const void *device, size_t bytes);
// One field per option, with its value.
void rank_field_options(RankFields *f, const OptionSet *set);

// All ranks call it. If anything differs, ends all with exit code 9 and a list of the differences.
// what: "the same program, flags and files"
void rank_fields_agree(const RankFields *own, const char *what, const char *hint);

// Prints host, cores and device of each rank, one line for consecutive identical ones. All ranks
// call it; only rank 0 prints.
void rank_places_print(void);
