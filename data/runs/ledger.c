#include "ledger.h"

#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../base/dir.h"
#include "../base/file.h"
#include "../base/hash.h"
#include "../base/memory.h"

typedef struct {
    char magic[8];
    uint32_t version, kind;
    int64_t step;
    uint64_t num_entries;
} BlockHead;
static const char magic[8] = "UNPADLGR";
enum { VERSION = 1 };
_Static_assert(sizeof(BlockHead) == 32 && sizeof(LedgerEntry) == 48, "as in the file");

static uint32_t source_of(const Sources *s, int64_t doc) {
    uint32_t i = 0;
    while ((int32_t)i + 1 < s->n && doc >= s->list[i + 1].first_doc) i++;
    return i;
}

static LedgerEntry entry_of(const DocIndex *index, const Segment *c, double loss) {
    const int64_t targets = stream_targets(index, c);
    return (LedgerEntry){
        .doc = c->doc,
        .tok_off = c->tok_off,
        .loss = loss,
        .weight = index->weights ? index->weights(index->context, c) : (double)targets,
        .tokens = (uint32_t)c->length,
        .targets = (uint32_t)targets,
        .epoch = (uint32_t)c->epoch,
        .source = source_of(index->sources, c->doc)};
}

// A block in memory that the caller frees, and its size
static char *block_of(LedgerKind kind, int64_t step, const LedgerEntry *entries, uint64_t n,
                      size_t *bytes) {
    const size_t size = n * sizeof *entries;
    BlockHead head = {.version = VERSION, .kind = kind, .step = step, .num_entries = n};
    memcpy(head.magic, magic, sizeof magic);
    char *block = host_calloc(sizeof head + size + 4, 1, "a ledger");
    memcpy(block, &head, sizeof head);
    if (n > 0) memcpy(block + sizeof head, entries, size);
    const uint32_t crc = crc32c(0, block, sizeof head + size);
    memcpy(block + sizeof head + size, &crc, 4);
    *bytes = sizeof head + size + 4;
    return block;
}

// Does a whole block of a step up to `last` begin at `offset`? Its size is added to *offset.
static bool block_is_kept(const File *f, uint64_t *offset, int64_t last) {
    BlockHead head;
    uint32_t crc;
    const uint64_t left = f->size_bytes - *offset;
    if (left < sizeof head + 4 || !file_read_at(f, &head, sizeof head, *offset, &(Error){0}) ||
        memcmp(head.magic, magic, sizeof magic) != 0 || head.version != VERSION ||
        head.step > last || head.num_entries > (left - sizeof head - 4) / sizeof(LedgerEntry))
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
           (keep_step < 0 || cut(&l->file, keep_step, err)) && dir_sync(dir, err);
}

const double *ledger_add(Ledger *l, LedgerKind kind, int64_t step, const Dataset *ds,
                         const StepPlan *plan, const double *losses) {
    const DocIndex index = dataset_doc_index(ds);
    const int64_t n = plan->num_segments;
    double sums[MAX_SOURCES] = {0}, weights[MAX_SOURCES] = {0};
    size_t bytes;
    if (!losses) return NULL;
    array_grow(l->entries, &l->capacity, (size_t)n, "a ledger");
    for (int64_t i = 0; i < n; i++) {
        const LedgerEntry e = entry_of(&index, &plan->segments[i], losses[i] / plan->weight_scale);
        sums[e.source] += e.loss;
        weights[e.source] += e.weight;
        l->entries[i] = e;
    }
    for (int32_t i = 0; i < ds->sources.n; i++)
        l->source_losses[i] = weights[i] > 0 ? sums[i] / weights[i] : (double)NAN;
    if (l->file.open) {
        AUTO_FREE char *block = block_of(kind, step, l->entries, (uint64_t)n, &bytes);
        log_append(&l->file, block, bytes);
    }
    return ds->sources.n > 1 ? l->source_losses : NULL;
}

bool ledger_write(const char *path, const Dataset *ds, const Segment *segments, int64_t n,
                  const double *losses, Error *err) {
    const DocIndex index = dataset_doc_index(ds);
    AUTO_FREE LedgerEntry *entries = host_calloc((size_t)n, sizeof *entries, "a ledger");
    size_t bytes;
    for (int64_t i = 0; i < n; i++) entries[i] = entry_of(&index, &segments[i], losses[i]);
    AUTO_FREE char *block = block_of(LEDGER_EVAL, 0, entries, (uint64_t)n, &bytes);
    return file_replace(path, block, bytes, err);
}
