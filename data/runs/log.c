#include "log.h"

#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../base/dir.h"
#include "../base/file.h"
#include "../base/json.h"
#include "../base/memory.h"

// ---- log.jsonl ----------------------------------------------------------------------------------

// A log with more names than one, as `cp -rl` gives it, becomes a file of its own.
static bool log_unshare(const char *path, Error *err) {
    struct stat st;
    uint64_t n;
    if (lstat(path, &st) != 0 || !S_ISREG(st.st_mode) || st.st_nlink == 1) return true;
    AUTO_FREE char *text = file_read_all(path, INT64_MAX, &n, "", err);
    return text && file_replace(path, text, n, err);
}

// Keeps the lines that end within the first keep_bytes.
static bool log_cut(RunLog *log, int64_t keep_bytes, int64_t step, Error *err) {
    AUTO_FREE char *line = NULL;
    size_t capacity = 0;
    int64_t found = 0, removed = 0;
    AUTO_CLOSE FILE *file = io_read_own(log->path, err);
    if (!file) return false;
    for (ssize_t n; (n = getline(&line, &capacity, file)) > 0;) {
        found += n;
        if (found <= keep_bytes && line[n - 1] == '\n')
            log->size_bytes = found;
        else
            removed++;
    }
    if (ferror(file)) return disk_error(err, log->path, "cannot read");
    if (removed > 0 && ftruncate(log->fd, (off_t)log->size_bytes) != 0)
        return disk_error(err, log->path, "cannot shorten");
    if (found < keep_bytes)
        warning("%s: expected %ld bytes at step %ld, found %ld: records are missing", log->path,
                keep_bytes, step, found);
    else if (removed > 0)
        warning("%s: removed %ld record%s (%ld bytes) after step %ld", log->path, removed,
                text_plural(removed), found - log->size_bytes, step);
    return true;
}

bool log_open_file(RunLog *log, const char *dir, const char *name, bool empty, Error *err) {
    *log = (RunLog){0};
    if (!log_unshare(path_in(log->path, dir, name), err)) return false;
    log->fd = io_open_own(log->path, O_RDWR | O_CREAT | (empty ? O_TRUNC : 0), err);
    log->open = log->fd >= 0;
    return log->open;
}

bool log_open(RunLog *log, const char *dir, int64_t keep_bytes, int64_t step, Error *err) {
    return log_open_file(log, dir, "log.jsonl", keep_bytes < 0, err) &&
           (keep_bytes < 0 || log_cut(log, keep_bytes, step, err)) && dir_sync(dir, err);
}

bool log_sync(const RunLog *log, Error *err) {
    return !log->open || io_fsync(log->fd) || disk_error(err, log->path, "fsync failed");
}

void log_append(RunLog *log, const void *data, size_t n) {
    Error err = {0};
    if (lseek(log->fd, (off_t)log->size_bytes, SEEK_SET) >= 0 && io_write_all(log->fd, data, n)) {
        log->size_bytes += (int64_t)n;
        if (log->lost > 0)
            warning("%s: written again, %ld record%s were lost", log->path, log->lost,
                    text_plural(log->lost));
        log->lost = 0;
    } else {
        disk_error(&err, log->path, "a record could not be written");
        if (log->lost++ == 0) warning("%s; records are dropped until it can", err.what);
        const int cut = ftruncate(log->fd, (off_t)log->size_bytes);
        (void)cut;  // when it fails, the next record overwrites the fragment
    }
}

void log_write(RunLog *log, json_t *record) {
    if (!log->open) return json_decref(record);
    AUTO_FREE char *text = json_write(record, 0);
    log_append(log, text, strlen(text));
}

// Seconds since 1970
static json_t *wall_time(void) { return json_integer((json_int_t)time(NULL)); }

void log_start(RunLog *log, const char *event, const char *version, const char *device,
               size_t device_bytes, char **command, int64_t step, const LlamaConfig *config,
               const DataSummary *train, const DataSummary *val, const Options *o) {
    char host[256] = "";
    json_t *words = json_array();
    gethostname(host, sizeof host - 1);
    while (*command) json_array_append_new(words, json_text(*command++));
    log_write(log, json_pack("{s:s, s:s, s:o, s:o, s:o, s:o, s:I, s:I, s:o, s:{s:o, s:o}, s:o}",
                             "event", event, "version", version, "device", json_text(device),
                             "host", json_text(host), "time", wall_time(), "command", words, "step",
                             step, "parameters", (int64_t)llama_config_num_params(config),
                             "device_mib", json_float((double)device_bytes / 1048576.0), "data",
                             "train", data_summary_json(train), "val", data_summary_json(val),
                             "options", options_json(&o->set)));
}

// ---- A step -------------------------------------------------------------------------------------

bool loss_is_spike(LossTrend *t, double loss) {
    enum { FIRST_LOSSES = 5, MEMORY = 20 };
    const double margin = fmax(1, 3 * t->deviation),
                 most = t->mean + (t->num_losses < FIRST_LOSSES ? fmax(margin, t->mean) : margin);
    if (!isfinite(loss)) return true;
    const bool spike = t->num_losses > 0 && loss > most;
    if (spike) loss = most;  // so that a loss that stays at its new level soon stops being one
    if (t->num_losses == 0) t->mean = loss;
    if (t->num_losses < MEMORY) t->num_losses++;
    t->deviation += (fabs(loss - t->mean) - t->deviation) / (double)t->num_losses;
    t->mean += (loss - t->mean) / (double)t->num_losses;
    return spike;
}

static double fill_of(const StepPlan *p) {
    return (double)p->computed_tokens / (double)p->buffer_tokens;
}

// "1:02:03" or "2:03", in `text`
static char *duration_text(char text[24], double seconds) {
    const int64_t s = (int64_t)seconds;
    if (s >= 3600)
        snprintf(text, 24, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(text, 24, "%ld:%02ld", s / 60, s % 60);
    return text;
}

// NaN has a sign, which means nothing.
static double plain_nan(double x) { return isnan(x) ? (double)NAN : x; }

static double per_second(int64_t count, const StepReport *r) { return (double)count / r->ms * 1e3; }

static double lr_of(const StepReport *r) { return (double)learning_rate(r->o, r->step - 1); }

enum { LINE_BYTES = 640, SOURCES_BYTES = 320, SOURCE_BYTES = 48 };

// " | web 2.31 | code 1.07": the losses of a mixture's sources
static void source_text(char text[SOURCES_BYTES], const StepReport *r, const Sources *s) {
    size_t used = 0;
    text[0] = 0;
    for (int32_t i = 0; r->source_losses && i < s->n && used + SOURCE_BYTES < SOURCES_BYTES; i++) {
        const char *path = s->list[i].spec, *slash = strrchr(path, '/');
        if (isfinite(r->source_losses[i]))
            used += (size_t)snprintf(text + used, SOURCE_BYTES, " | %.28s %.4f",
                                     slash && slash[1] ? slash + 1 : path, r->source_losses[i]);
    }
}

// " | accuracy 61.2 % | margin 0.041": of the rewards of pairs
static char *pairs_text(char text[64], const PairSums *p) {
    text[0] = 0;
    if (p->pairs > 0)
        snprintf(text, 64, " | accuracy %.1f %% | margin %.4f", 100 * p->right / p->pairs,
                 (p->chosen - p->rejected) / p->pairs);
    return text;
}

static void add_pairs(json_t *record, const PairSums *p) {
    if (p->pairs == 0) return;
    json_object_set_new(record, "accuracy", json_float(p->right / p->pairs));
    json_object_set_new(record, "margin", json_float((p->chosen - p->rejected) / p->pairs));
    json_object_set_new(record, "reward_chosen", json_float(p->chosen / p->pairs));
    json_object_set_new(record, "reward_rejected", json_float(p->rejected / p->pairs));
}

// The figures that matter most come first: a narrow terminal cuts off the end.
static void step_text(char text[LINE_BYTES], const RunTotals *t, const StepReport *r,
                      const StepPlan *p) {
    const StepBalance *b = &r->balance;
    const char *mark = r->skipped ? " | SKIPPED: not finite" : r->spike ? " | SPIKE" : "";
    char trained[48] = "", balance[64] = "", left[24], sources[SOURCES_BYTES], pairs[64];
    const double ms = t->mean_ms + t->pauses_ms / (double)t->steps;
    source_text(sources, r, p->sources);
    duration_text(left, ms * 1e-3 * (double)(r->o->steps - r->step));
    if (p->masked)
        snprintf(trained, sizeof trained, " (%.0f targets/s)", per_second(p->num_targets, r));
    if (b->measured > 0 && b->planned > 0)
        snprintf(balance, sizeof balance, " | imbalance %.3f (%.3f)", b->planned, b->measured);
    else if (b->measured > 0)
        snprintf(balance, sizeof balance, " | imbalance (%.3f)", b->measured);
    snprintf(
        text, LINE_BYTES,
        "step %5ld/%ld | loss %.4f%s%s | eta %s | %.0f tok/s%s%s | lr %.2e | norm %.3f | %.0f ms | "
        "fill %.1f %% | %ld doc%s | pairs %.1f %%%s",
        r->step, r->o->steps, plain_nan(r->loss), mark, pairs_text(pairs, &r->pairs), left,
        per_second(p->real_tokens, r), trained, sources, lr_of(r), plain_nan(r->grad_norm), r->ms,
        100 * fill_of(p), p->num_stream, text_plural(p->num_stream),
        100.0 * (double)p->attention_pairs / (double)p->padded_pairs, balance);
}

static void show_step(const RunTotals *t, const StepReport *r, const StepPlan *p) {
    const int width = terminal_width(stdout);
    const size_t columns = width > 2 ? (size_t)width - 2 : 0;  // room for ^C
    const int64_t every = run_lines_every(r->o);
    const bool due = every > 0 && (r->pauses || r->step % every == 0),
               stays = due || r->skipped || r->spike;
    char text[LINE_BYTES], *last;
    if (!stays && (columns == 0 || every == 0)) return;
    step_text(text, t, r, p);
    while (columns > 0 && strlen(text) >= columns && (last = strrchr(text, '|'))) last[-1] = 0;
    line_erase(stdout);
    printf("%s%s", text, stays ? "\n" : "");
    fflush(stdout);
}

static json_t *sources_json(const StepReport *r, const StepPlan *p) {
    json_t *all = mixture_json(p->sources, &p->cursor_after), *one;
    size_t i;
    json_array_foreach(all, i, one) if (r->source_losses)
        json_object_set_new(one, "loss", json_float(r->source_losses[i]));
    return all;
}

// Other layouts also compute pairs across documents or padding.
static json_t *useful_tflops(const StepReport *r, const StepPlan *p) {
    if (!r->config || r->o->layout != LAYOUT_PACKED) return NULL;
    const double flops = llama_config_flops(r->config, r->o->lora > 0, p->real_tokens,
                                            p->num_targets, p->attention_pairs);
    return json_float(flops / r->ms * 1e-9);
}

// Tokens of the run so far over 20 times its parameters, about the best number (arXiv 2203.15556)
static double chinchilla(const StepReport *r, const StepPlan *p) {
    double tokens = 0;
    for (int32_t i = 0; i < MAX_SOURCES; i++) tokens += (double)p->cursor_after.sources[i].tokens;
    return tokens / (20 * (double)llama_config_num_params(r->config));
}

static void log_step(RunLog *log, const StepReport *r, const StepPlan *p) {
    const StepBalance *b = &r->balance;
    const struct {
        const char *name;
        json_t *value;  // NULL: not known
    } members[] = {
        {"step", json_integer(r->step)},
        {"time", wall_time()},
        {"loss", json_float(r->loss)},
        {"grad_norm", json_float(r->grad_norm)},
        {"lr", json_float(lr_of(r))},
        {"ms", json_float(r->ms)},
        {"read_ms", json_float(r->read_ms)},
        {"passes_ms", json_float(r->passes_ms)},
        {"tokens_per_s", json_float(per_second(p->real_tokens, r))},
        {"trained_tokens_per_s", p->masked ? json_float(per_second(p->num_targets, r)) : NULL},
        {"useful_tflops", useful_tflops(r, p)},
        {"fill", json_float(fill_of(p))},
        {"real_tokens", json_integer(p->real_tokens)},
        {"computed_tokens", json_integer(p->computed_tokens)},
        {"targets", json_integer(p->num_targets)},
        {"docs", json_integer(p->num_stream)},
        {"longest_doc", json_integer(p->longest_segment)},
        {"attention_pairs", json_integer(p->attention_pairs)},
        {"padded_tokens", json_integer(p->padded_tokens)},
        {"padded_pairs", json_integer(p->padded_pairs)},
        {"sources", sources_json(r, p)},
        {"chinchilla", r->config ? json_float(chinchilla(r, p)) : NULL},
        {"skipped", json_boolean(r->skipped)},
        {"spike", json_boolean(r->spike)},
        {"imbalance_measured", b->measured > 0 ? json_float(b->measured) : NULL},
        {"slowest_rank", b->measured > 0 ? json_integer(b->slowest_rank) : NULL},
        {"imbalance_planned", b->planned > 0 ? json_float(b->planned) : NULL},
    };
    json_t *record = json_object();
    for (size_t i = 0; i < sizeof members / sizeof *members; i++)
        if (members[i].value) json_object_set_new(record, members[i].name, members[i].value);
    add_pairs(record, &r->pairs);
    log_write(log, record);
}

void report_step(RunLog *log, RunTotals *t, const StepReport *r, const StepPlan *p) {
    t->mean_ms = t->steps == 0 ? r->ms : t->mean_ms + 0.1 * (r->ms - t->mean_ms);
    t->steps++;
    t->tokens += p->real_tokens;
    t->computed += p->computed_tokens;
    t->targets += p->num_targets;
    t->ms += r->ms;
    show_step(t, r, p);
    log_step(log, r, p);
}

void print_trained(const RunTotals *t, bool masked) {
    char time[24], pauses[24];
    if (t->steps == 0) return;
    line_erase(stdout);
    printf("trained %ld step%s, %ld tokens", t->steps, text_plural(t->steps), t->tokens);
    if (t->computed < t->tokens) printf(", %ld of them computed", t->computed);
    if (masked) printf(", %ld of them targets,", t->targets);
    printf(" in %s; validation, samples and checkpoints %s\n", duration_text(time, t->ms * 1e-3),
           duration_text(pauses, t->pauses_ms * 1e-3));
}

void report_validation(RunLog *log, int64_t step, double loss_sum, const ValidationSet *set,
                       const char *source, const PairSums *pairs) {
    const double loss = loss_sum / (double)set->targets;
    char accuracy[64];
    printf("val after step %ld%s%s | loss %.4f%s | %ld doc%s", step, source ? " of " : "",
           source ? source : "", plain_nan(loss), pairs_text(accuracy, pairs), set->docs,
           text_plural(set->docs));
    printf(pairs->pairs > 0 ? "\n" : " | %ld targets\n", set->targets);
    json_t *bits = set->bytes > 0 ? json_float(loss_sum / (double)set->bytes / M_LN2) : NULL;
    json_t *record =
        json_pack("{s:s, s:I, s:o, s:o*, s:I, s:I, s:I, s:o*}", "event",
                  source ? "val_source" : "val", "step", step, "loss", json_float(loss),
                  "bits_per_byte", bits, "docs", set->docs, "real_tokens", set->tokens, "targets",
                  set->targets, "path", source ? json_text(source) : NULL);
    add_pairs(record, pairs);
    log_write(log, record);
}

void report_sample(RunLog *log, int64_t step, int number, bool ended, const char *text) {
    printf("--- sample %d after step %ld%s\n%s\n", number, step, ended ? " (ended)" : "", text);
    log_write(log, json_pack("{s:s, s:I, s:i, s:b, s:o}", "event", "sample", "step", step, "number",
                             number, "ended", (int)ended, "text", json_text(text)));
}
