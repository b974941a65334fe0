#include "ledger.h"

#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "../base/dir.h"
#include "../base/file.h"
#include "../base/hash.h"
#include "../base/memory.h"

// A block of the file; a CRC32C of it follows.
typedef struct {
    char magic[8];
    uint32_t version, kind;
    int64_t step;
    uint64_t num_entries;
    LedgerEntry entries[];
} Block;
static const Block empty = {.magic = "UNPADLGR", .version = 1};
_Static_assert(sizeof(Block) == 32 && sizeof(LedgerEntry) == 48, "as in the file");

static LedgerEntry entry_of(const DocIndex *index, const Segment *c, double loss) {
    const int64_t targets = stream_targets(index, c);
    int32_t source = index->sources->n - 1;
    while (c->doc < index->sources->list[source].first_doc) source--;
    return (LedgerEntry){
        .doc = c->doc,
        .tok_off = c->tok_off,
        .loss = loss,
        .weight = index->weights ? index->weights(index->context, c) : (double)targets,
        .tokens = (uint32_t)c->length,
        .targets = (uint32_t)targets,
        .epoch = (uint32_t)c->epoch,
        .source = (uint32_t)source};
}

// A block and its checksum in memory that the caller frees, and their size
static Block *block_of(LedgerKind kind, int64_t step, const Dataset *ds, const StepPlan *plan,
                       const double *losses, size_t *bytes) {
    const DocIndex index = dataset_doc_index(ds);
    const int64_t n = plan->num_segments;
    const size_t size = sizeof(Block) + (size_t)n * sizeof(LedgerEntry);
    Block *b = host_calloc(size + 4, 1, "a ledger");
    *b = empty;
    b->kind = kind, b->step = step, b->num_entries = (uint64_t)n;
    for (int64_t i = 0; i < n; i++)
        b->entries[i] = entry_of(&index, &plan->segments[i], losses[i] / plan->weight_scale);
    const uint32_t crc = crc32c(0, b, size);
    memcpy(&b->entries[n], &crc, 4);
    *bytes = size + 4;
    return b;
}

// Does a whole block of a step up to `last` begin at `offset`? Its size is added to *offset.
static bool block_is_kept(const File *f, uint64_t *offset, int64_t last) {
    Block head;
    uint32_t crc;
    const uint64_t left = f->size_bytes - *offset;
    if (left < sizeof head + 4 || !file_read_at(f, &head, sizeof head, *offset, &(Error){0}) ||
        memcmp(&head, &empty, offsetof(Block, kind)) != 0 || head.step > last ||
        head.num_entries > (left - sizeof head - 4) / sizeof(LedgerEntry))
        return false;
    const uint64_t size = sizeof head + head.num_entries * sizeof(LedgerEntry);
    AUTO_FREE char *block = host_calloc(size + 4, 1, "a ledger");
    if (!file_read_at(f, block, size + 4, *offset, &(Error){0})) return false;
    memcpy(&crc, block + size, 4);
    *offset += size + 4;
    return crc == crc32c(0, block, size);
}

static bool cut(RunLog *log, int64_t keep_step, Error *err) {
    OPEN_FILE file = {.fd = -1};
    if (!file_open(&file, log->path, "", err)) return false;
    uint64_t end = 0;
    while (block_is_kept(&file, &end, keep_step)) log->size_bytes = (int64_t)end;
    if ((uint64_t)log->size_bytes < file.size_bytes)
        warning("%s: kept the whole blocks up to step %ld, %ld of %lu bytes", log->path, keep_step,
                log->size_bytes, file.size_bytes);
    return ftruncate(log->fd, (off_t)log->size_bytes) == 0 ||
           disk_error(err, log->path, "cannot shorten");
}

bool ledger_open(Ledger *l, const char *dir, int64_t keep_step, Error *err) {
    return log_open_file(&l->file, dir, "ledger.bin", keep_step < 0, err) &&
           (keep_step < 0 || cut(&l->file, keep_step, err));
}

const double *ledger_add(Ledger *l, LedgerKind kind, int64_t step, const Dataset *ds,
                         const StepPlan *plan, const double *losses) {
    double sums[MAX_SOURCES] = {0}, weights[MAX_SOURCES] = {0};
    size_t bytes;
    if (!losses) return NULL;
    AUTO_FREE Block *b = block_of(kind, step, ds, plan, losses, &bytes);
    for (uint64_t i = 0; i < b->num_entries; i++) {
        sums[b->entries[i].source] += b->entries[i].loss;
        weights[b->entries[i].source] += b->entries[i].weight;
    }
    for (int32_t i = 0; i < ds->sources.n; i++)
        l->source_losses[i] = weights[i] > 0 ? sums[i] / weights[i] : (double)NAN;
    if (l->file.open) log_append(&l->file, b, bytes);
    return ds->sources.n > 1 ? l->source_losses : NULL;
}

bool ledger_write(const char *path, const Dataset *ds, const StepPlan *plan, const double *losses,
                  Error *err) {
    size_t bytes;
    AUTO_FREE Block *block = block_of(LEDGER_EVAL, 0, ds, plan, losses, &bytes);
    return file_replace(path, block, bytes, err);
}
