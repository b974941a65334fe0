#include "machine.h"

#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "memory.h"

// The first number that a format of one %zu finds in a line of the file
static size_t number_in(const char *dir, const char *name, const char *format, size_t otherwise) {
    char path[4096], line[128];
    size_t n = otherwise;
    bool found = false;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    AUTO_CLOSE FILE *f = fopen(path, "r");
    while (f && !found && fgets(line, sizeof line, f)) found = sscanf(line, format, &n) == 1;
    return n;
}

// The bytes that a control group of version 2, or else 1, still allows
static size_t bytes_left(const char *dir) {
    const size_t most = number_in(dir, "memory.max", "%zu",
                                  number_in(dir, "memory.limit_in_bytes", "%zu", SIZE_MAX)),
                 used = number_in(dir, "memory.current", "%zu",
                                  number_in(dir, "memory.usage_in_bytes", "%zu", 0)),
                 cache = number_in(dir, "memory.stat", "total_inactive_file %zu",
                                   number_in(dir, "memory.stat", "inactive_file %zu", 0)) +
                         number_in(dir, "memory.stat", "total_active_file %zu",
                                   number_in(dir, "memory.stat", "active_file %zu", 0)),
                 taken = used > cache ? used - cache : 0;
    return most == SIZE_MAX ? most : most > taken ? most - taken : 0;
}

// The cores of its CPU quota. Without one a file says "max", or -1, which is read as SIZE_MAX.
static size_t cores_of_quota(const char *dir) {
    const size_t quota_us = number_in(dir, "cpu.max", "%zu",
                                      number_in(dir, "cpu.cfs_quota_us", "%zu", SIZE_MAX)),
                 us = number_in(dir, "cpu.max", "%*s %zu",
                                number_in(dir, "cpu.cfs_period_us", "%zu", 100000));
    return quota_us == SIZE_MAX ? quota_us : (quota_us + us - 1) / us;
}

// The least of all groups: ancestors limit a group too. In a container only the root exists: the
// path is the host's.
static size_t least_of_groups(size_t (*left)(const char *dir)) {
    size_t least = SIZE_MAX;
    char line[2048], dir[4096];
    AUTO_CLOSE FILE *f = fopen("/proc/self/cgroup", "r");
    while (f && fgets(line, sizeof line, f)) {
        char *path = line;
        strsep(&path, ":");  // the number; then controllers, which version 2 does not name
        const int top = snprintf(dir, sizeof dir, "/sys/fs/cgroup/%s", strsep(&path, ":"));
        snprintf(dir + top, sizeof dir - (size_t)top, "%s", strsep(&path, "\n"));
        for (char *end = dir + strlen(dir); end; end = strrchr(dir + top, '/')) {
            *end = 0;
            if (left(dir) < least) least = left(dir);
        }
    }
    return least;
}

size_t host_memory_free(void) {
    enum { LEAST = 1 << 20 };  // also divided by ranks, it is not 0
    const size_t all = 1024 * number_in("/proc", "meminfo", "MemAvailable: %zu", 0),
                 allowed = least_of_groups(bytes_left);
    return all < allowed ? all : allowed > LEAST ? allowed : LEAST;
}

int machine_cores(void) { return (int)sysconf(_SC_NPROCESSORS_ONLN); }

int cores_allowed(void) {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : machine_cores();
}

static int number_of_environment(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

int machine_threads(int asked, int share, int ranks, const char **limit) {
    const int usual = number_of_environment("OMP_NUM_THREADS"),
              most = number_of_environment("OMP_THREAD_LIMIT");
    const size_t quota = (least_of_groups(cores_of_quota) - 1) / (size_t)ranks + 1;
    int n = share;
    *limit = share < cores_allowed() ? "shared by ranks" : "CPU affinity";
    if (quota < (size_t)n) n = (int)quota, *limit = "CPU quota";
    if (usual > 0) n = usual < 4096 ? usual : 4096, *limit = "OMP_NUM_THREADS";
    if (asked > 0) n = asked, *limit = "--threads";
    if (most > 0 && most < n) n = most, *limit = "OMP_THREAD_LIMIT";
    return n;
}
