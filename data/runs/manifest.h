// manifest.json of a checkpoint: the size and CRC32C of every file. Its own last line is the CRC32C
// of all bytes before it, so that no flipped bit is missed.
#ifndef UNPAD_MANIFEST_H
#define UNPAD_MANIFEST_H

#include "../base/error.h"

enum { MANIFEST_MAX_FILES = 512, MANIFEST_NAME_MAX = 128 };

typedef struct {
    char name[MANIFEST_NAME_MAX];
    uint64_t size_bytes;
    uint32_t crc;
} ManifestFile;

typedef struct {
    int64_t step;
    int num_files;
    ManifestFile files[MANIFEST_MAX_FILES];
} Manifest;  // starts as {.step = step}

// False if the name is not a plain file name or was added before, or if there are too many.
bool manifest_add(Manifest *m, const char *name, uint64_t size_bytes, uint32_t crc);

// Writes and fsyncs <dir>/manifest.json, which must not exist.
bool manifest_write(const Manifest *m, const char *dir, Error *err);

// Checks the manifest of `dir` and every file's size and CRC32C. step may be NULL.
bool manifest_verify(const char *dir, int64_t *step, Error *err);

#endif
