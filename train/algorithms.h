// Which matmul algorithms a run uses, kept in its checkpoints: another algorithm adds in another
// order, so a resumed run that chose anew might not go on bit for bit.
#ifndef UNPAD_ALGORITHMS_H
#define UNPAD_ALGORITHMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "../data/base/error.h"
#include "../data/base/file.h"
#include "../data/base/memory.h"
#include "../data/base/path.h"
#include "../data/runs/checkpoint.h"
#include "../kernels/kernels.h"  // defines: matmul_choices, matmul_repeat_choices

static const char MATMUL_CHOICES_FILE[] = "matmul.txt";

// No file when the backend has nothing to choose.
static inline bool save_matmul_choices(Checkpoint *ck, Error *err) {
    const size_t n = matmul_choices(NULL, 0);
    if (n == 0) return true;
    char *text = (char *)host_calloc(n + 1, 1, "matmul choices");
    matmul_choices(text, n + 1);
    bool ok = checkpoint_write_file(ck, MATMUL_CHOICES_FILE, text, n, err);
    free(text);
    return ok;
}

// The choices of checkpoint `dir`, if it has any. Where they cannot be repeated training goes on,
// and says so: that costs bits, not correctness.
static inline void repeat_matmul_choices(const char *dir) {
    const uint64_t max_bytes = 1 << 22;
    Error err = {0, "", ""};
    char path[IO_PATH_MAX];
    uint64_t n = 0;
    must(path_join(path, sizeof path, dir, MATMUL_CHOICES_FILE, &err), &err);
    if (!path_exists(path)) return;
    char *text = file_read_all(path, max_bytes, &n, "", &err);
    must(text != NULL, &err);
    const char *why = matmul_repeat_choices(text);
    free(text);
    if (!why) return;
    fprintf(stderr, "warning: %s: matmul algorithms are chosen anew, bits may differ: %s\n", path,
            why);
}

#endif
