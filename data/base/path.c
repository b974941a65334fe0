#include "path.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

bool path_printf(char out[IO_PATH_MAX], Error *err, const char *format, ...) {
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(out, IO_PATH_MAX, format, args);
    va_end(args);
    return (n >= 0 && n < IO_PATH_MAX) ||
           error_set(err, EXIT_USAGE, "use a shorter path", "%.200s...: path longer than %d bytes",
                     out, IO_PATH_MAX - 1);
}

bool path_join(char out[IO_PATH_MAX], const char *dir, const char *name, Error *err) {
    size_t n = strlen(dir);
    const bool slash = n > 0 && dir[n - 1] != '/';
    return path_printf(out, err, "%s%s%s", dir, slash ? "/" : "", name);
}

const char *path_in(char out[IO_PATH_MAX], const char *dir, const char *name) {
    must(path_join(out, dir, name, &err));
    return out;
}

bool path_inside(char out[IO_PATH_MAX], const char *path, const char *name, Error *err) {
    return path_is_dir(path) ? path_join(out, path, name, err) : path_printf(out, err, "%s", path);
}

bool path_parent(char out[IO_PATH_MAX], const char *path, Error *err) {
    const char *slash = strrchr(path, '/');
    if (!slash) return path_printf(out, err, ".");
    const int n = slash == path ? 1 : (int)(slash - path);
    return path_printf(out, err, "%.*s", n, path);
}

static bool found(int status) {
    return status == 0 || (errno != ENOENT && errno != ENOTDIR && errno != ENAMETOOLONG);
}

bool path_is_dir(const char *path) {
    struct stat st = {.st_mode = S_IFDIR};
    return found(stat(path, &st)) && S_ISDIR(st.st_mode);
}

bool path_exists(const char *path) {
    struct stat st;
    return found(lstat(path, &st));
}

bool path_find(const char *path, bool *exists, Error *err) {
    struct stat st;
    const int status = lstat(path, &st);
    *exists = found(status);
    return status == 0 || !*exists || disk_error(err, path, "cannot look at it");
}

bool path_is_same(const char *a, const char *b, bool *same, Error *err) {
    struct stat x, y;
    *same = false;
    if (stat(a, &x) != 0 || stat(b, &y) != 0)
        return errno == ENOENT || errno == ENOTDIR || disk_error(err, a, "cannot be compared");
    *same = x.st_dev == y.st_dev && x.st_ino == y.st_ino;
    return true;
}

bool path_ends_with(const char *path, const char *ending) {
    const size_t n = strlen(path), k = strlen(ending);
    return n >= k && strcmp(path + n - k, ending) == 0;
}

bool path_is_plain_name(const char *name) {
    if (!name[0] || name[0] == '.' || strlen(name) > 255) return false;
    for (const unsigned char *p = (const unsigned char *)name; *p; p++)
        if (*p == '/' || *p < 0x20 || *p == 0x7f) return false;
    return true;
}
