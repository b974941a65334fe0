// Text in, no Python: what --train and --val name may be text files, directories of them and JSON
// records. They become shards in a directory of --out, and again only when the texts or the
// tokenizer have changed.
#ifndef UNPAD_TEXTS_H
#define UNPAD_TEXTS_H

#include "../base/error.h"
#include "../runs/run_options.h"

typedef struct {
    const Options *o;    // threads, train_on; dry_run: shards that are not in *out are temporary
    const char *model;   // the directory whose tokenizer.json is used, or "demo": bytes
    int32_t vocab_size;  // of the model
    bool writes;         // rank 0; others only learn the name of the directory
    bool replaces_run;   // what a run in *out was trained on may be replaced
    OutDir *out;         // locked before anything is written; NULL: below TMPDIR, removed at exit
} Texts;

// Where *spec names texts it becomes OUT/name after the shards are there, or of a mixture
// OUT/name-1-web and so on; shards stay what they are. *spec is allocated, also after a failure.
// val_frac: the share of documents that become validation documents there, chosen by their content;
// none when no other would be left, nor with NO_VALIDATION, but for validation files. Prints a line
// about the texts, and progress on stderr. Of each source either all files are there, or none.
enum { NO_VALIDATION = -1 };
bool texts_to_shards(const char **spec, const char *name, double val_frac, const Texts *t,
                     Error *err);

#endif
