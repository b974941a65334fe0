#include "line_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "file.h"

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
