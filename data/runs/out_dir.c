#include "out_dir.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <math.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "../base/file.h"
#include "../base/memory.h"
#include "checkpoint.h"

bool out_dir_lock(OutDir *out, Error *err) {
    const char *path = PATH_IN(out->path, "log.jsonl");
    if (out->locked) return true;
    if (!dir_lock(&out->lock, out->path, err)) return false;
    out->locked = true;
    const bool found = path_exists(path);
    AUTO_CLOSE FILE *log = found ? io_read_own(path, err) : NULL;
    return (log || !found) && checkpoint_recover(out->path, err);
}

// ---- --resume -----------------------------------------------------------------------------------

// A later --resume takes the newest checkpoint: there must be none newer than the one named.
static bool check_is_newest(const char *out, const char *resume, int64_t step, Error *err) {
    STEPS steps = {0};
    if (!checkpoint_list(&steps, out, err)) return false;
    return steps.n == 0 || steps.list[0] <= step ||
           error_set(err, EXIT_USAGE, "remove the newer ones first, or give another --out",
                     "--resume=%s: expected the newest checkpoint of --out, found %s/step-%08ld",
                     resume, out, steps.list[0]);
}

bool out_dir_find_resume(const char *out, const char *resume, bool trains, ResumePoint *point,
                         Error *err) {
    char own[IO_PATH_MAX];
    const bool newest = strcmp(resume, "newest") == 0;
    const char *from = newest ? out : resume, *manifest = PATH_IN(from, "manifest.json");
    int64_t step = -1;
    *point = (ResumePoint){0};
    if (path_is_dir(from) && (newest || !path_exists(manifest)) &&
        !checkpoint_find_newest(from, point->dir, &step, err))
        return false;
    if (step < 0 && newest) return true;
    if (step < 0 && !path_exists(manifest))
        return error_set(
            err, EXIT_BAD_INPUT,
            "--resume=DIR names a run or a step-NNNNNNNN in it; without DIR it is --out",
            "%s: expected a checkpoint or a run, found %s", resume,
            path_exists(resume) ? "neither" : "nothing");
    if (step < 0 &&
        (!checkpoint_verify(resume, &step, err) || !path_printf(point->dir, err, "%s", resume)))
        return false;
    checkpoint_step_path(own, out, step);
    if (!path_is_same(own, point->dir, &point->in_place, err)) return false;
    return !point->in_place || newest || !trains || check_is_newest(out, resume, step, err);
}

bool out_dir_last_step(const char *out, int64_t *last, Error *err) {
    const char *path = PATH_IN(out, "log.jsonl");
    AUTO_FREE char *line = NULL;
    size_t capacity = 0;
    int64_t step;
    bool found, begun = false, ours = false;
    *last = -1;
    if (!path_find(path, &found, err)) return false;
    AUTO_CLOSE FILE *file = found ? io_read_own(path, err) : NULL;
    if (!file) return !found;
    *last = 0;
    for (ssize_t n; (n = getline(&line, &capacity, file)) > 0;) {
        if (strncmp(line, "{\"event\": \"start\"", 17) == 0) *last = 0;
        if (sscanf(line, "{\"step\": %ld", &step) == 1 && step > *last) *last = step;
        // a power loss may leave zeros
        begun |= line[0] != 0;
        ours |= strncmp(line, "{\"event\": ", 10) == 0 || *last > 0;
    }
    return ours || !begun ||
           error_set(err, EXIT_USAGE, "move it elsewhere, or give another --out",
                     "%s: expected the log of a run, found another file", path);
}

bool out_dir_start_from_scratch(const char *out, bool train_given, int64_t save_every, Error *err) {
    const bool finished = path_exists(PATH_IN(out, "final"));
    char hint[sizeof err->hint];
    int64_t last;
    if (!out_dir_last_step(out, &last, err)) return false;
    // A run survives fewer failed saves, and begins none before the last one has ended.
    if (finished || (save_every > 0 && (last - 1) / (MAX_FAILED_SAVES + 1) >= save_every))
        return error_set(err, EXIT_BAD_INPUT,
                         "restore the step-* directories; --overwrite starts over",
                         "%s: expected a checkpoint beside %s, found none", out,
                         finished ? "final/" : "log.jsonl, whose run saved some");
    if (!train_given && last < 0)
        return error_set(err, EXIT_BAD_INPUT, "check --out; --train starts a run there",
                         "%s: no run here", out);
    snprintf(hint, sizeof hint, "--options %.150s/options --out %.150s --overwrite starts it again",
             out, out);
    if (!train_given)
        return error_set(err, EXIT_BAD_INPUT, hint, "%s: a run without a checkpoint, %ld step%s",
                         out, last, text_plural(last));
    warning("%s: no checkpoint to resume from: training starts from scratch", out);
    return true;
}

// ---- Opening ------------------------------------------------------------------------------------

bool out_dir_keeps_model(const char *out, const char *option, const char *model, Error *err) {
    char full[IO_PATH_MAX], parent[IO_PATH_MAX];
    int64_t step;
    bool same;
    if (!realpath(model, full)) return true;
    const char *name = strrchr(full, '/') + 1;
    if (!path_parent(parent, full, err) || !path_is_same(parent, out, &same, err)) return false;
    return !same || (strcmp(name, "final") != 0 && !checkpoint_parse_step(name, &step)) ||
           error_set(err, EXIT_USAGE, "copy it elsewhere first, or give another --out",
                     "--overwrite: expected a --%s that it does not remove, found %s", option,
                     model);
}

bool out_dir_is_outside_models(const char *out, Error *err) {
    char at[IO_PATH_MAX], parent[IO_PATH_MAX];
    bool found;
    for (snprintf(parent, sizeof parent, "%s", out);;) {
        const char *path = PATH_IN(strcpy(at, parent), "manifest.json");
        if (!path_parent(parent, at, err) || !path_find(path, &found, err)) return false;
        if (found)
            return error_set(err, EXIT_USAGE, "give another --out",
                             "%s: expected a directory outside of models, found %s", out, path);
        if (strcmp(parent, at) == 0 || strcmp(basename(at), "..") == 0) return true;
    }
}

bool out_dir_is_free(const char *out, bool overwrite, Error *err) {
    bool has_log, has_final;
    STEPS steps = {0};
    if (overwrite)
        return !path_is_dir(out) ||
               (out_dir_last_step(out, &(int64_t){0}, err) && checkpoint_may_remove_all(out, err));
    if (!path_find(PATH_IN(out, "log.jsonl"), &has_log, err) ||
        !path_find(PATH_IN(out, "final"), &has_final, err) ||
        (path_is_dir(out) && !checkpoint_list(&steps, out, err)))
        return false;
    return (!has_log && !has_final && steps.n == 0) ||
           error_set(err, EXIT_USAGE,
                     "--resume continues it, --out DIR starts elsewhere, --overwrite replaces it",
                     "%s: expected an empty directory, found %s", out,
                     has_log || steps.n > 0 ? "a run" : "final/");
}

// A later run may write none, and would leave that of another one.
static bool remove_ledger(const char *out, Error *err) {
    const char *path = PATH_IN(out, "ledger.bin");
    return unlink(path) == 0 || errno == ENOENT || disk_error(err, path, "cannot remove");
}

bool out_dir_open(OutDir *out, bool continues, bool overwrite, Error *err) {
    return dir_create_all(out->path, err) && out_dir_lock(out, err) && dir_probe(out->path, err) &&
           (continues || out_dir_is_free(out->path, overwrite, err)) &&
           (!overwrite || (checkpoint_remove_all(out->path, err) && remove_ledger(out->path, err)));
}

// The oldest checkpoint is removed after the newest is complete.
bool out_dir_check_space(const char *out, uint64_t checkpoint_bytes, uint64_t final_bytes,
                         int64_t steps, int64_t save_every, int keep, Error *err) {
    const double final = (double)final_bytes, whole = (double)checkpoint_bytes;
    STEPS old = {0};
    int64_t saves = steps > 0;
    struct statvfs disk;
    if (steps > 0 && save_every > 0) saves = (steps - 1) / save_every + 1;
    if (steps > 0 && save_every < 0) saves = keep + 1;  // by time: all that are kept
    checkpoint_list(&old, out, &(Error){0});
    const bool prunes = keep > 0 && old.n >= keep;
    const int64_t room = keep + 1 - old.n;
    if (keep > 0 && saves > room) saves = room > 1 ? room : 1;
    const double needed = (double)saves * whole + final, least = steps <= 0 ? final
                                                                 : prunes   ? whole
                                                                            : whole + final;
    const double left_bytes =
        statvfs(out, &disk) == 0 ? (double)disk.f_bavail * (double)disk.f_frsize : INFINITY;
    if (needed <= left_bytes) return true;
    if (least > left_bytes)
        return error_set(err, EXIT_DISK, "free some space, or write to another disk",
                         "%s: expected %.1f MiB free for a checkpoint and final/, found %.1f MiB",
                         out, least / 1048576, left_bytes / 1048576);
    warning(
        "%s: checkpoints will take %.1f MiB (%ld of %.1f MiB, and final/), found %.1f MiB free%s",
        out, needed / 1048576, saves, whole / 1048576, left_bytes / 1048576,
        save_every == 0 ? "; the first save is after the last step, see --save-every" : "");
    return true;
}
