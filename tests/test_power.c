// The power fails: what whole runs write is recorded, and each state of the disk that they may leave is
// given to the program's own reader. Nothing half is taken, nothing that was reported saved is lost.
//
// What a crash keeps, beyond what was fsynced: of each file all, none, half or zeros in place of what
// was written since; of the names, in order, as many as one likes (a journal), or of one
// directory's any at all.
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "whole_runs.h"

enum { MAX_OPS = 1 << 13, MAX_BYTES = 1 << 26, MAX_NAMES = 1 << 9, MAX_STATES = 1 << 20 };

// ------------------------------------------------------------------------------------------------
// What a run does to files, as its process sees it

typedef struct {
    char what[8], path[120], to[120];
    int fd;
    int64_t at;
    size_t n, data;
} Op;

static struct {
    int n;
    size_t used;
    Op ops[MAX_OPS];
    unsigned char bytes[MAX_BYTES];
} *tape;

static void tape_add(const char *what, int fd, const char *path, const char *to, const void *data, size_t n,
                     off_t at) {
    Op *op = &tape->ops[__atomic_fetch_add(&tape->n, 1, __ATOMIC_RELAXED)];
    *op = (Op){.fd = fd, .at = at, .n = n, .data = __atomic_fetch_add(&tape->used, n, __ATOMIC_RELAXED)};
    if (op >= tape->ops + MAX_OPS || op->data + n > MAX_BYTES) abort();
    text_copy(op->what, sizeof op->what, what);
    text_copy(op->path, sizeof op->path, path);
    text_copy(op->to, sizeof op->to, to ? to : "");
    if (n > 0) memcpy(tape->bytes + op->data, data, n);
}

static void start_tape(void) { fault_watch = tape_add; }

// ------------------------------------------------------------------------------------------------
// The same with inodes

enum { LINK, MOVE, DROP, DATA, CUT, SYNC };
typedef struct {
    int type, dir, name, from, inode;
    int64_t at;
    size_t n, data;
} Event;

typedef struct {
    int dir, name, inode;
} Entry;

typedef struct {
    int n;
    Entry list[MAX_NAMES];
} Names;

static Event events[MAX_OPS];
static int num_events, num_inodes, num_words;
static bool is_dir[MAX_OPS];
static char words[MAX_NAMES][64];
static Names live;

static int word(const char *text) {
    int i = 0;
    while (i < num_words && strcmp(words[i], text) != 0) i++;
    CHECK(i < MAX_NAMES);
    if (i == num_words) text_copy(words[num_words++], sizeof *words, text);
    return i;
}

static Entry *find(Names *t, int dir, int name) {
    for (Entry *e = t->list; e < t->list + t->n; e++)
        if (e->dir == dir && e->name == name) return e;
    return NULL;
}

static void drop(Names *t, int dir, int name) {
    Entry *e = find(t, dir, name);
    if (e) *e = t->list[--t->n];
}

static void apply(Names *t, const Event *e) {
    drop(t, e->dir, e->name);
    if (e->type == MOVE) drop(t, e->dir, e->from);
    if (e->type != DROP) t->list[t->n++] = (Entry){e->dir, e->name, e->inode};
}

static void event(Event e) {
    CHECK(num_events < MAX_OPS);
    events[num_events++] = e;
    if (e.type <= DROP) apply(&live, &e);
}

// The inode, -1: none; of a path that is none of ours too. *dir: -1 if it has none.
static int look(const char *path, int *dir, int *name) {
    char text[120], *part;
    int inode = 0;
    *dir = -1;
    text_copy(text, sizeof text, path);
    for (char *rest = text; (part = strsep(&rest, "/"));) {
        *dir = inode;
        *name = word(part);
        const Entry *e = inode < 0 ? NULL : find(&live, inode, *name);
        inode = e ? e->inode : -1;
    }
    return inode;
}

static void make(int dir, int name, bool directory) {
    is_dir[num_inodes] = directory;
    event((Event){.type = LINK, .dir = dir, .name = name, .inode = num_inodes++});
}

static void convert(void) {
    static int of_fd[FAULT_MAX_FD];
    for (const Op *op = tape->ops; op < tape->ops + tape->n; op++) {
        int dir, name, to_dir, to = 0, inode = op->path[0] ? look(op->path, &dir, &name) : of_fd[op->fd];
        const char *w = op->what;
        if (op->path[0] && dir < 0) inode = -1;
        if ((strcmp(w, "create") == 0 || strcmp(w, "mkdir") == 0) && inode < 0 && dir >= 0)
            make(dir, name, w[0] == 'm');
        if (strcmp(w, "fd") == 0) of_fd[op->fd] = inode;
        if (strcmp(w, "rename") == 0 && inode >= 0 && (look(op->to, &to_dir, &to), to_dir == dir))
            event((Event){.type = MOVE, .dir = dir, .name = to, .from = name, .inode = inode});
        if ((strcmp(w, "unlink") == 0 || strcmp(w, "rmdir") == 0) && inode >= 0)
            event((Event){.type = DROP, .dir = dir, .name = name, .inode = inode});
        if (inode < 0) continue;
        if (strcmp(w, "data") == 0)
            event((Event){.type = DATA, .inode = inode, .at = op->at, .n = op->n, .data = op->data});
        if (strcmp(w, "cut") == 0 || (strcmp(w, "fd") == 0 && op->at))
            event((Event){.type = CUT, .inode = inode, .at = w[0] == 'c' ? op->at : 0});
        if (strcmp(w, "sync") == 0) event((Event){.type = SYNC, .inode = inode});
    }
}

// ------------------------------------------------------------------------------------------------
// States of the disk

enum { KEPT, LOST, HALF, ZEROS, EACH = -1 };
static int version[MAX_OPS], durable[MAX_OPS];  // of an inode: writes so far, and up to its fsync

// Entries that the root leads to come first, a directory before what is in it.
static int reachable(Names *t) {
    bool found[MAX_OPS] = {[0] = true};
    int n = 0;
    for (int i = 0; i < t->n; i++) {
        if (!found[t->list[i].dir]) continue;
        const Entry e = t->list[i];
        found[e.inode] = true;
        t->list[i] = t->list[n];
        t->list[n++] = e;
        i = n - 1;
    }
    return n;
}

static uint64_t state_key(const Names *t, int n, int target, int how) {
    uint64_t sum = 0;
    for (int i = 0; i < n; i++) {
        const Entry *e = &t->list[i];
        const bool pending = !is_dir[e->inode] && version[e->inode] > durable[e->inode] && how != KEPT && (target == EACH || target == e->inode);
        const int part[] = {e->dir, e->name, e->inode, is_dir[e->inode] ? 0 : how == LOST && pending ? durable[e->inode] : version[e->inode], pending && how != LOST ? how : 0};
        sum += fnv1a(FNV1A_START, part, sizeof part);
    }
    return sum;
}

// The file as it is after events up to upto
static void put_file(const char *path, int inode, int upto, int how) {
    static unsigned char bytes[1 << 22];
    size_t size = 0;
    int k = 0;
    for (int i = 0; i <= upto; i++) {
        const Event *e = &events[i];
        if (e->inode != inode || (e->type != DATA && e->type != CUT)) continue;
        const bool pending = ++k > durable[inode];
        if (pending && how == LOST) break;
        size_t n = pending && how == HALF && k == version[inode] ? e->n / 2 : e->n, end = (size_t)e->at + (e->type == DATA ? n : 0);
        CHECK(end <= sizeof bytes);
        if (end > size) memset(bytes + size, 0, end - size);
        if (e->type == CUT || end > size) size = end;
        if (e->type == DATA && !(pending && how == ZEROS)) memcpy(bytes + e->at, tape->bytes + e->data, n);
    }
    const int fd = __real_open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    CHECK(fd >= 0 && __real_write(fd, bytes, size) == (ssize_t)size && __real_close(fd) == 0);
}

static void put_state(const Names *t, int n, int upto, int target, int how) {
    static char paths[MAX_OPS][200];
    shell("rm -rf out");
    text_copy(paths[0], sizeof *paths, scratch_root.dir);
    for (int i = 0; i < n; i++) {
        const Entry *e = &t->list[i];
        Error err = {0};
        CHECK(path_join(paths[e->inode], sizeof *paths, paths[e->dir], words[e->name], &err));
        if (is_dir[e->inode]) CHECK(__real_mkdir(paths[e->inode], 0777) == 0);
        else put_file(paths[e->inode], e->inode, upto, target == EACH || target == e->inode ? how : KEPT);
    }
}

// ------------------------------------------------------------------------------------------------

typedef struct {
    int step;
    bool final, tokens;
} Promise;
static Promise promises[MAX_OPS];
static uint64_t known[MAX_STATES];
static int first_event, num_states, num_bad;
static uint64_t expected;
static const char *command, *again;

static const char *wrong(const Promise *p) {
    Error err = {0};
    static char text[300];
    if (p->final && !checkpoint_verify(scratch("out/final"), NULL, &err)) return "final/ is lost";
    const int code = run(command, again, NULL);
    const char *start = strstr(said, "start   out/step-");
    const int step = start ? atoi(start + strlen("start   out/step-")) : 0;
    if (code != 0) { snprintf(text, sizeof text, "exit code %d: %.200s", code, said); return text; }
    if (step < p->step) return "a checkpoint that was reported saved is lost";
    if (strstr(said, "skipping")) return "half a checkpoint under its name";
    if (strstr(said, "are missing")) return "the log is shorter than the checkpoint says";
    if (p->tokens && strstr(said, "texts   ")) return "shards are lost";
    return results() == expected ? NULL : "other results";
}

static bool is_new(uint64_t key) {
    size_t at = key % MAX_STATES;
    while (known[at] && known[at] != key) at = (at + 1) % MAX_STATES;
    if (known[at] == key) return false;
    known[at] = key;
    return true;
}

static bool consider(const Names *base, int from, int upto, const bool *lost, int most, int skip) {
    Names t = *base;
    for (int i = from; i <= upto; i++)
        if (events[i].type <= DROP && !lost[i]) apply(&t, &events[i]);
    const int n = reachable(&t);
    for (int how = KEPT; how <= most; how++)
        for (int target = EACH; target < (how == KEPT ? 0 : n); target++) {
            const int inode = target < 0 ? EACH : t.list[target].inode;
            if (target >= 0 && (is_dir[inode] || version[inode] == durable[inode])) continue;
            if (!is_new(fnv1a(state_key(&t, n, inode, how), &promises[upto], sizeof *promises))) continue;
            num_states++;
            if (getenv("COUNT")) continue;
            put_state(&t, n, upto, inode, how);
            const char *why = wrong(&promises[upto]);
            if (!why) continue;
            num_bad++;
            if (skip < 0) {
                printf("BAD after event %d, how %d, target %d: %s\n", upto, how, inode, why);
                for (int i = from; i <= upto; i++) if (lost[i]) printf("    lost %d %s/%s\n", events[i].type, words[0], words[events[i].name]);
            }
            if (skip >= 0) return true;
        }
    return false;
}

// Whether a state is bad. skip: an fsync that only pretends; then ends at the first one.
static bool explore(int skip) {
    static bool lost[MAX_OPS], settled[MAX_OPS];
    Names base = {0};
    int from = 0;
    memset(lost, 0, sizeof lost);
    memset(settled, 0, sizeof settled);
    memset(version, 0, sizeof version);
    memset(durable, 0, sizeof durable);
    for (int i = 0; i < num_events; i++) {
        const Event *e = &events[i];
        if (e->type == DATA || e->type == CUT) version[e->inode]++;
        if (i < first_event) durable[e->inode] = version[e->inode], settled[i] = true;
        if (e->type == SYNC && i != skip) {
            durable[e->inode] = version[e->inode];
            for (int k = 0; k < i; k++) settled[k] |= events[k].type <= DROP && events[k].dir == e->inode;
        }
        settled[i] |= e->type > DROP;
        for (; from <= i && settled[from]; from++)
            if (events[from].type <= DROP) apply(&base, &events[from]);
        if (i + 1 < first_event || i < skip) continue;
        int pending[MAX_OPS], n = 0, bound = 0;
        for (int k = from; k <= i; k++) {
            if (!settled[k]) pending[n++] = k;
            else if (events[k].type <= DROP) bound = n;
        }
        for (int kept = bound; kept <= n; kept++) {
            for (int k = 0; k < n; k++) lost[pending[k]] = k >= kept;
            if (consider(&base, from, i, lost, ZEROS, skip)) return true;
        }
        for (int d = 0; d < n; d++) {
            int own[MAX_OPS], m = 0;
            bool seen_before = false;
            for (int k = 0; k < n; k++)
                if (events[pending[k]].dir == events[pending[d]].dir) {
                    seen_before |= k < d;
                    own[m++] = pending[k];
                }
            if (seen_before) continue;
            for (int others = 0; others < 2; others++)
                for (int set = 0; set < (m <= 4 ? 1 << m : 2 * m); set++) {
                    for (int k = 0; k < n; k++) lost[pending[k]] = others;
                    for (int k = 0; k < m; k++)
                        lost[own[k]] = m <= 4 ? set >> k & 1 : set < m ? k == set : k >= set - m;
                    if (consider(&base, from, i, lost, LOST, skip)) return true;
                }
        }
        for (int k = 0; k < n; k++) lost[pending[k]] = false;
    }
    return num_bad > 0;
}

__attribute__((unused)) static void load_tree(const char *path, int dir) {
    struct dirent **list;
    const int n = scandir(path, &list, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        char name[IO_PATH_MAX];
        Error err = {0};
        uint64_t size;
        const int inode = num_inodes;
        if (strcmp(list[i]->d_name, ".") != 0 && strcmp(list[i]->d_name, "..") != 0) {
            CHECK(path_join(name, sizeof name, path, list[i]->d_name, &err));
            make(dir, word(list[i]->d_name), path_is_dir(name));
            if (is_dir[inode]) load_tree(name, inode);
            else {
                char *text = file_read_all(name, 1 << 22, &size, "", &err);
                CHECK(text);
                memcpy(tape->bytes + tape->used, text, size);
                event((Event){.type = DATA, .inode = inode, .n = size, .data = tape->used});
                tape->used += size;
                free(text);
            }
        }
        free(list[i]);
    }
    free(n < 0 ? NULL : list);
}

static void promise(void) {
    Promise p = {0};
    int moved = -1;
    for (int i = 0; i < num_events; i++) {
        const Event *e = &events[i];
        if (e->type == MOVE) moved = i;
        if (e->type == SYNC && moved >= 0 && events[moved].dir == e->inode) {
            const char *name = words[events[moved].name];
            if (strncmp(name, "step-", 5) == 0 && strlen(name) == 13) p.step = atoi(name + 5);
            p.final |= strcmp(name, "final") == 0;
            p.tokens |= strcmp(name, "tokens") == 0;
        }
        promises[i] = p;
    }
}

TEST(every_state_that_a_power_loss_leaves_is_good) {
    tape = mmap(NULL, sizeof *tape, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    make_inputs();
    static const struct { const char *name, *command, *again; } list[] = {
        {"new", NEW "--steps 3", "--resume"},
        {"texts", TRAIN "--from-scratch --train text --steps 0 --val-every 0", ""},
    };
    for (int r = 0; r < 2; r++) {
        shell("rm -rf out");
        tape->n = 0; tape->used = 0; num_events = num_words = 0; num_inodes = 1; is_dir[0] = true; live.n = 0;
        memset(known, 0, sizeof known); num_states = num_bad = 0;
        command = list[r].command; again = list[r].again;
        CHECK_MSG(run(list[r].command, "", start_tape) == 0, "%s", said);
        expected = results();
        first_event = 0;
        convert();
        promise();
        printf("%s: %d ops, %d events, %d inodes\n", list[r].name, tape->n, num_events, num_inodes);
        explore(-1);
        printf("%d states, %d bad\n", num_states, num_bad);
        if (getenv("COUNT") && atoi(getenv("COUNT")) < 2) continue;
        int needed = 0, all = 0;
        for (int i = 0; i < num_events; i++) {
            if (events[i].type != SYNC) continue;
            num_states = 0;
            const bool bad = explore(i);
            all++; needed += bad;
            const char *name = "?";
            int dir = 0;
            for (int k = 0; k < i; k++) if (events[k].type <= MOVE && events[k].inode == events[i].inode) name = words[events[k].name], dir = events[k].dir;
            const char *parent = "?";
            for (int k = 0; k < i; k++) if (events[k].type <= MOVE && events[k].inode == dir) parent = words[events[k].name];
            printf("fsync %d of %s/%s: %s after %d states\n", i, parent, name, bad ? "needed" : "NOT NEEDED", num_states);
        }
        printf("%d of %d fsyncs needed\n", needed, all);
    }
    munmap(tape, sizeof *tape);
}

TEST_MAIN()
