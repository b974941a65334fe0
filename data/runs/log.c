#include "log.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "../base/dir.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/path.h"

// ------------------------------------------------------------------------------------------------
// Lines

bool lines_open(LineFile *f, const char *path, bool empty, Error *err) {
    struct stat st;
    f->fd = -1;
    f->size_bytes = f->lost = 0;
    if (!path_printf(f->path, sizeof f->path, err, "%s", path)) return false;
    f->fd = io_open(path, O_RDWR | O_CREAT | (empty ? O_TRUNC : 0), 0666);
    if (f->fd < 0) return disk_error(err, path, "cannot open");
    if (fstat(f->fd, &st) == 0) f->size_bytes = (int64_t)st.st_size;
    return true;
}

void lines_close(LineFile *f) {
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
}

bool lines_cut(LineFile *f, int64_t keep_bytes, int64_t *removed, Error *err) {
    char chunk[1 << 12];
    const File file = {f->fd, (uint64_t)f->size_bytes, f->path};
    int64_t kept = 0, last = 0;  // where the last line to keep ends, and the last of all
    *removed = 0;
    for (int64_t at = 0, n; at < f->size_bytes; at += n) {
        n = f->size_bytes - at < (int64_t)sizeof chunk ? f->size_bytes - at : (int64_t)sizeof chunk;
        if (!file_read_at(&file, chunk, (uint64_t)n, (uint64_t)at, err)) return false;
        for (int64_t i = 0; i < n; i++) {
            if (chunk[i] != '\n') continue;
            last = at + i + 1;
            if (last <= keep_bytes) kept = last;
            *removed += last > keep_bytes;
        }
    }
    *removed += last < f->size_bytes;
    if (kept < f->size_bytes && ftruncate(f->fd, (off_t)kept) != 0)
        return disk_error(err, f->path, "cannot shorten");
    f->size_bytes = kept;
    return true;
}

bool lines_append(LineFile *f, const char *line, size_t n, Error *err) {
    if (lseek(f->fd, (off_t)f->size_bytes, SEEK_SET) >= 0 && io_write_all(f->fd, line, n)) {
        f->size_bytes += (int64_t)n;
        return true;
    }
    disk_error(err, f->path, "a line could not be written");
    f->lost++;
    const int cut = ftruncate(f->fd, (off_t)f->size_bytes);
    (void)cut;  // when it fails, the next line overwrites the fragment
    return false;
}

bool lines_sync(const LineFile *f, Error *err) {
    return f->fd < 0 || io_fsync(f->fd) || disk_error(err, f->path, "fsync failed");
}

// ------------------------------------------------------------------------------------------------
// log.jsonl

// Warns when the length of the log is not that at the checkpoint of `step`.
static void log_warn_cut(const RunLog *log, int64_t step, int64_t kept, int64_t found,
                         int64_t removed) {
    if (found < kept)
        warning("%s: expected %ld bytes at step %ld, found %ld: records are missing",
                log->lines.path, kept, step, found);
    else if (removed > 0)
        warning("%s: removed %ld record%s (%ld bytes) after step %ld", log->lines.path, removed,
                text_plural(removed), (found - log->lines.size_bytes), step);
}

bool log_open(RunLog *log, const char *dir, int64_t keep_bytes, int64_t step, Error *err) {
    char path[IO_PATH_MAX];
    int64_t removed = 0;
    if (!path_join(path, sizeof path, dir, "log.jsonl", err) ||
        !lines_open(&log->lines, path, keep_bytes < 0, err))
        return false;
    log->open = true;
    const int64_t found = log->lines.size_bytes;
    if (keep_bytes >= 0) {
        if (!lines_cut(&log->lines, keep_bytes, &removed, err)) return false;
        log_warn_cut(log, step, keep_bytes, found, removed);
    }
    return dir_sync(dir, err);
}

bool log_sync(const RunLog *log, Error *err) { return !log->open || lines_sync(&log->lines, err); }

int64_t log_bytes(const RunLog *log) { return log->open ? log->lines.size_bytes : 0; }

// Writes a record, which it frees, whole or not at all. Records that do not fit on the disk are
// dropped, with a warning at the first, and another one when the disk has space again.
static void log_write(RunLog *log, json_t *record) {
    Error err = {0};
    const int64_t lost = log->lines.lost;
    char *text = json_write(record, 0);
    if (!log->open) {
        free(text);
        return;
    }
    const bool written = lines_append(&log->lines, text, strlen(text), &err);
    free(text);
    if (!written && lost == 0) warning("%s; log records are dropped until it can", err.what);
    if (!written || lost == 0) return;
    warning("%s: written again, %ld record%s were lost", log->lines.path, lost, text_plural(lost));
    log->lines.lost = 0;
}

bool log_read_progress(const char *dir, int64_t *last_step, int64_t *first_save, Error *err) {
    char path[IO_PATH_MAX], *line = NULL;
    size_t capacity = 0;
    int64_t number;
    *last_step = 0;
    *first_save = INT64_MAX;
    if (!path_join(path, sizeof path, dir, "log.jsonl", err)) return false;
    FILE *file = fopen(path, "re");
    if (!file) return errno == ENOENT || disk_error(err, path, "cannot open");
    while (getline(&line, &capacity, file) > 0) {
        const bool start = strncmp(line, "{\"event\": \"start\"", 17) == 0;
        const char *save = start ? strstr(line, "\"save-every\": ") : NULL;
        if (save && sscanf(save, "\"save-every\": %ld", &number) == 1 && number > 0)
            *first_save = number;
        if (sscanf(line, "{\"step\": %ld", &number) == 1 && number > *last_step)
            *last_step = number;
    }
    free(line);
    fclose(file);
    return true;
}

void log_start(RunLog *log, const char *event, const char *version, const char *device,
               int64_t step, const LlamaConfig *config, const DataSummary *train,
               const DataSummary *val, const Option *options) {
    log_write(log, json_pack("{s:s, s:s, s:o, s:I, s:I, s:{s:o, s:o}, s:o}", "event", event,
                             "version", version, "device", json_text(device), "step", step,
                             "parameters", (int64_t)llama_config_num_params(config), "data",
                             "train", data_summary_json(train), "val", data_summary_json(val),
                             "options", options_json(options)));
}

// ------------------------------------------------------------------------------------------------
// A step

bool loss_is_spike(LossTrend *t, double loss) {
    enum { FIRST_LOSSES = 5, MEMORY = 20 };
    const double most = t->mean + fmax(1, 3 * t->deviation);
    if (!isfinite(loss)) return true;
    const bool spike = t->num_losses >= FIRST_LOSSES && loss > most;
    if (spike) loss = most;  // so that a loss that stays at its new level soon stops being one
    if (t->num_losses == 0) t->mean = loss;
    if (t->num_losses < MEMORY) t->num_losses++;
    t->deviation += (fabs(loss - t->mean) - t->deviation) / (double)t->num_losses;
    t->mean += (loss - t->mean) / (double)t->num_losses;
    return spike;
}

static double fill_of(const StepPlan *p) {
    return (double)p->real_tokens / (double)p->buffer_tokens;
}

void print_duration(double seconds) {
    int64_t s = (int64_t)seconds;
    if (s >= 3600)
        printf("%ld:%02ld:%02ld", (s / 3600), (s / 60 % 60), (s % 60));
    else
        printf("%ld:%02ld", (s / 60), (s % 60));
}

// NaN has a sign, which means nothing.
static double plain_nan(double x) { return isnan(x) ? (double)NAN : x; }

static void print_balance(const StepBalance *b) {
    if (b->measured == 0) return;
    if (b->planned > 0)
        printf(" | imbalance %.3f (%.3f)", b->planned, b->measured);
    else
        printf(" | imbalance (%.3f)", b->measured);
}

static json_t *balance_json(const StepBalance *b) {
    json_t *balance = b->measured == 0 ? json_object()
                                       : json_pack("{s:o, s:i}", "imbalance_measured",
                                                   json_float((float)b->measured), "slowest_rank",
                                                   b->slowest_rank);
    if (b->planned > 0)
        json_object_set_new(balance, "imbalance_planned", json_float((float)b->planned));
    return balance;
}

static double per_second(int64_t count, const StepReport *r) { return (double)count / r->ms * 1e3; }

static void print_step(const StepReport *r, const StepPlan *p) {
    char trained[48] = "";
    if (p->masked)
        snprintf(trained, sizeof trained, " (%.0f trained)", per_second(p->num_targets, r));
    printf(
        "step %5ld/%ld | loss %.4f | norm %.3f | lr %.2e | %.0f ms | %.0f tok/s%s | fill %.1f %% | "
        "%ld doc%s | pairs %.1f %%",
        r->step, r->steps, plain_nan(r->loss), plain_nan(r->grad_norm), r->lr, r->ms,
        per_second(p->real_tokens, r), trained, 100 * fill_of(p), p->num_stream,
        text_plural(p->num_stream), 100.0 * (double)p->attention_pairs / (double)p->padded_pairs);
    print_balance(&r->balance);
    printf(" | eta ");
    print_duration(r->mean_ms * 1e-3 * (double)(r->steps - r->step));
    printf("%s\n", r->skipped ? " | SKIPPED: not finite" : r->spike ? " | SPIKE" : "");
}

static void log_step(RunLog *log, const StepReport *r, const StepPlan *p) {
    const struct {
        const char *name;
        double value;
        bool known;
    } numbers[] = {
        {"loss", r->loss, true},
        {"grad_norm", r->grad_norm, true},
        {"lr", r->lr, true},
        {"ms", r->ms, true},
        {"read_ms", r->read_ms, true},
        {"passes_ms", r->passes_ms, true},
        {"tokens_per_s", per_second(p->real_tokens, r), true},
        {"trained_tokens_per_s", per_second(p->num_targets, r), p->masked},
        {"useful_tflops", r->useful_flops / r->ms * 1e-9, r->useful_flops > 0},
        {"fill", fill_of(p), true},
    };
    json_t *record = json_pack("{s:I}", "step", r->step);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i].known)
            json_object_set_new(record, numbers[i].name, json_float((float)numbers[i].value));
    json_object_update_new(
        record, json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:b}", "real_tokens", p->real_tokens,
                          "targets", p->num_targets, "docs", p->num_stream, "longest_doc",
                          (int64_t)p->longest_segment, "attention_pairs", p->attention_pairs,
                          "padded_pairs", p->padded_pairs, "skipped", (int)r->skipped, "spike",
                          (int)r->spike));
    json_object_update_new(record, balance_json(&r->balance));
    log_write(log, record);
}

void report_step(RunLog *log, const StepReport *r, const StepPlan *p) {
    print_step(r, p);
    log_step(log, r, p);
}

void print_validation_set(const ValidationSet *set, const Dataset *ds) {
    if (!set)
        printf("        no validation\n");
    else if (set->docs == ds->num_docs && set->tokens == ds->num_tokens)
        printf("        validation takes all of them\n");
    else
        printf("        validation takes %ld document%s, %ld tokens of them\n", set->docs,
               text_plural(set->docs), set->tokens);
}

void report_validation(RunLog *log, int64_t step, double loss, const ValidationSet *set) {
    printf("val after step %ld | loss %.4f | %ld doc%s | %ld targets\n", step, plain_nan(loss),
           set->docs, text_plural(set->docs), set->targets);
    log_write(log, json_pack("{s:s, s:I, s:o, s:I, s:I, s:I}", "event", "val", "step", step, "loss",
                             json_float((float)loss), "docs", set->docs, "real_tokens", set->tokens,
                             "targets", set->targets));
}

void report_sample(RunLog *log, int64_t step, int number, bool ended, const char *text) {
    printf("--- sample %d after step %ld%s\n%s\n", number, step, ended ? " (ended)" : "", text);
    log_write(log, json_pack("{s:s, s:I, s:i, s:b, s:o}", "event", "sample", "step", step, "number",
                             number, "ended", (int)ended, "text", json_text(text)));
}
