// Paths in bounded buffers: one that does not fit is an error, never a shorter path.
#pragma once

#include "error.h"

enum { IO_PATH_MAX = 4096 };  // bytes, NUL included; Linux's own limit

// The first four write a path into out; one that is too long is EXIT_USAGE.

// printf into a path buffer.
__attribute__((format(printf, 3, 4))) bool path_printf(char out[IO_PATH_MAX], Error *err,
                                                       const char *format, ...);

// "dir/name", without a second slash where dir ends in one.
bool path_join(char out[IO_PATH_MAX], const char *dir, const char *name, Error *err);

// The same, in a buffer of the block that calls it, for a file that the program itself names: one
// that is too long ends the program.
const char *path_in(char out[IO_PATH_MAX], const char *dir, const char *name);
#define PATH_IN(dir_, name_) path_in((char[IO_PATH_MAX]){0}, dir_, name_)

// "path/name" where path is a directory, else path itself.
bool path_inside(char out[IO_PATH_MAX], const char *path, const char *name, Error *err);

// The directory that holds a path: "a/b" -> "a", "b" -> ".", "/b" -> "/".
bool path_parent(char out[IO_PATH_MAX], const char *path, Error *err);

// Only path_is_dir follows symbolic links. A path that cannot be examined counts as existing and as
// a directory: opening it will say why.
bool path_is_dir(const char *path);
bool path_exists(const char *path);

// Does it exist? For decisions that must not rest on a guess: EXIT_DISK if it cannot be examined.
bool path_find(const char *path, bool *exists, Error *err);

// Are both one file? One that does not exist is no other's. EXIT_DISK if they cannot be examined.
bool path_is_same(const char *a, const char *b, bool *same, Error *err);

bool path_ends_with(const char *path, const char *ending);

// Is it a plain file name: no slash, no leading dot, not empty, printable?
bool path_is_plain_name(const char *name);
