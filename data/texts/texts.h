// Text in, no Python: --train and --val may name text files, directories of them and JSON records.
// They become shards in a directory of --out, and are tokenized again only when the texts or the
// tokenizer have changed.
#pragma once

#include "../runs/out_dir.h"
#include "../runs/run_options.h"

typedef struct {
    const Options *o;    // threads, train_on; what trains nothing makes temporary shards if need be
    const char *model;   // the directory whose tokenizer.json is used, or "demo": bytes
    int32_t vocab_size;  // of the model
    bool writes;         // rank 0; others only learn the name of the directory
    bool replaces_run;   // the data of an earlier run in *out may be replaced
    OutDir *out;         // locked before anything is written; NULL: below TMPDIR, removed at exit
} Texts;

// If *spec names texts, makes their shards and sets it to OUT/name, or for a mixture OUT/name-1-web
// and so on; shards stay as they are. *spec is allocated, also after a failure. val_frac: the share
// of documents, chosen by content, that become validation documents, at least one of ten; except
// for validation files there are none when no others would be left, or with NO_VALIDATION. Prints a
// line about the texts, and progress on stderr. After a failure each source has either all its
// files or none.
enum { NO_VALIDATION = -1 };
bool texts_to_shards(const char **spec, const char *name, double val_frac, const Texts *t,
                     Error *err);
