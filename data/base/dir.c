#include "dir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"
#include "file.h"

bool dir_create_all(const char *path, Error *err) {
    char parent[IO_PATH_MAX];
    if (!path_parent(parent, path, err)) return false;
    if (!path_is_dir(parent) && !dir_create_all(parent, err)) return false;
    if (mkdir(path, 0777) == 0) return access(parent, R_OK) != 0 || dir_sync(parent, err);
    const int why = errno;
    if (why == EEXIST && path_is_dir(path)) return true;
    if (why == EEXIST || why == ENOTDIR)
        return error_set(err, EXIT_USAGE, "give another directory, or remove that file",
                         "%s: expected a directory, found a file", path);
    errno = why;
    return disk_error(err, path, "cannot create the directory");
}

bool dir_sync(const char *path, Error *err) {
    int fd = io_open(path, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0) return disk_error(err, path, "cannot open the directory");
    bool ok = io_fsync(fd) || errno == EINVAL;  // EINVAL: a file system without directory fsync
    if (!ok) disk_error(err, path, "fsync of the directory failed");
    close(fd);
    return ok;
}

bool io_rename(const char *from, const char *to, Error *err) {
    return rename(from, to) == 0 || disk_error(err, to, "rename failed");
}

// A name in the open directory `at`; path: the same, for messages. By descriptors, so that no link
// is followed, even one that takes the place of a directory meanwhile.
static bool remove_at(int at, const char *name, const char *path, int depth, Error *err) {
    char below[IO_PATH_MAX];
    struct stat st;
    if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT || disk_error(err, path, "cannot look at it");
    const bool is_dir = S_ISDIR(st.st_mode) || (depth == 0 && !S_ISLNK(st.st_mode));
    if (depth > 9) return error_set(err, EXIT_DISK, "", "%s: directories nested too deep", path);
    const int fd = is_dir ? openat(at, name, O_RDONLY | O_CLOEXEC | O_DIRECTORY | O_NOFOLLOW) : -1;
    if (is_dir && fd < 0 && errno == ENOENT) return true;
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    bool ok = dir || !is_dir || disk_error(err, path, "cannot open the directory");
    for (struct dirent *e; dir && ok && (e = readdir(dir));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            ok = path_join(below, path, e->d_name, err) &&
                 remove_at(fd, e->d_name, below, depth + 1, err);
    if (dir) closedir(dir);
    if (!dir && fd >= 0) close(fd);
    return ok && (unlinkat(at, name, is_dir ? AT_REMOVEDIR : 0) == 0 || errno == ENOENT ||
                  disk_error(err, path, "cannot remove"));
}

bool dir_remove_tree(const char *path, Error *err) {
    return remove_at(AT_FDCWD, path, path, 0, err);
}

bool file_replace(const char *path, const void *data, uint64_t n, Error *err) {
    char partial[IO_PATH_MAX];
    if (!path_printf(partial, err, "%s" FILE_REPLACED, path)) return false;
    unlink(partial);  // of a run that was killed
    if (file_create(partial, data, n, err) && io_rename(partial, path, err)) return true;
    unlink(partial);
    return false;
}

bool dir_free_name(char name[IO_PATH_MAX], const char *path, const char *mark, Error *err) {
    bool exists = true;
    for (long n = (long)getpid(); exists; n++)
        if (!path_printf(name, err, "%s%s%ld", path, mark, n) || !path_find(name, &exists, err))
            return false;
    return true;
}

bool dir_probe(const char *dir, Error *err) {
    const char *path = PATH_IN(dir, ".probe" FILE_REPLACED);
    if (!file_replace(path, "probe\n", strlen("probe\n"), err)) return false;
    const bool ok = dir_sync(dir, err);
    return (unlink(path) == 0 || disk_error(err, path, "cannot remove")) && ok;
}

// ---- One writer per directory -------------------------------------------------------------------

static bool dir_lock_refused(int fd, const char *path, Error *err) {
    char owner[256] = "an unknown process";
    ssize_t n = pread(fd, owner, sizeof owner - 1, 0);
    if (n > 0) owner[n] = 0;
    owner[strcspn(owner, "\n")] = 0;
    return error_set(err, EXIT_DIR_IN_USE, "wait for it, stop it, or choose another directory",
                     "%s: directory in use by %s", path, owner);
}

// A killed process keeps its lock until its last write has ended, and may outlive its mpirun.
static bool lock_in_time(int fd) {
    for (int ms = 0; flock(fd, LOCK_EX | LOCK_NB) != 0; ms += 50) {
        if (errno != EWOULDBLOCK || ms >= 5000) return false;
        sleep_ms(50);
    }
    return true;
}

bool dir_lock(DirLock *lock, const char *dir, Error *err) {
    const char *path = PATH_IN(dir, ".lock");
    char owner[8], host[128] = "?";
    struct stat st;
    lock->fd = lock->dir_fd = -1;
    const int fd = io_open_own(path, O_RDWR | O_CREAT, err);
    if (fd < 0) return false;
    const bool locked = lock_in_time(fd), taken = !locked && errno == EWOULDBLOCK;
    if (taken)
        dir_lock_refused(fd, dir, err);
    else if (!locked)
        warning("%s: this file system has no locks: nothing keeps a second run out", dir);
    if (!locked) close(fd);
    if (taken) return false;
    lock->dir_fd = io_open(dir, O_RDONLY | O_DIRECTORY, 0);
    if (!locked) return true;
    lock->fd = fd;
    // A snapshot by `cp -rl` has it too. This one stays locked for processes that wait.
    if (fstat(fd, &st) == 0 && st.st_nlink > 1 && unlink(path) == 0)
        return dir_lock(lock, dir, err);
    const ssize_t found = pread(fd, owner, sizeof owner, 0);
    if (found > 0 && memcmp(owner, "process ", (size_t)found) != 0) return true;  // not our text
    gethostname(host, sizeof host - 1);
    if (ftruncate(fd, 0) == 0) dprintf(fd, "process %ld on %s\n", (long)getpid(), host);
    return true;  // on a full disk, too: it is locked nevertheless
}

bool dir_lock_check(const DirLock *lock, const char *dir, Error *err) {
    struct stat ours, found;
    if (lock->dir_fd < 0 || fstat(lock->dir_fd, &ours) != 0) return true;
    const int status = stat(dir, &found);
    if (status == 0 && found.st_dev == ours.st_dev && found.st_ino == ours.st_ino) return true;
    if (status != 0 && errno != ENOENT && errno != ENOTDIR)
        return disk_error(err, dir, "cannot look at it");
    return error_set(err, EXIT_DISK, "put it back where it was",
                     "%s: expected the directory that this run locked, found it renamed, removed "
                     "or replaced",
                     dir);
}
