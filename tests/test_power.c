// The power fails: each state of the disk that it may leave is made, and the program's own reader
// started in it. Nothing half is taken, and nothing is lost that was reported saved. Then the same
// without one fsync at a time: each of them must be missed.
//
// A state keeps what was fsynced. Of the rest, model A keeps the names up to a moment, as a journal
// does; model B any of one directory, with all or none of the others. Of files written since
// their fsync it keeps all, nothing, all but half of the last write, or zeros.
#include <pthread.h>
#include <sys/mman.h>

#include "whole_runs.h"

// No room for a snapshot: a save during training would make its calls in another order each time.
size_t __wrap_host_memory_free(void) { return 0; }

enum { PARTS = 40, MAX_WORDS = 512 };
enum { MAX_EVENTS = 1 << 13, MAX_BYTES = 1 << 26, MAX_STATES = 1 << 20 };

// before: what makes `out`, in which the first byte of `damaged` then changes. reader: must lead to
// the results of the command; to overwrite the run that is there may need the command again. saved:
// the step of a good checkpoint in `before`
static const struct {
    const char *name, *before, *damaged, *command, *reader;
    int saved, states;  // as many at least
} runs[] = {
    {"a new run", NULL, NULL, NEW "--steps 3", NEW "--steps 3 --resume", 0, 1500},
    {"a step saved again", NEW "--steps 2 --keep 2", "out/step-00000002/config.json",
     "--out out --resume", "--out out --resume", 1, 800},
    {"overwrite", NEW "--steps 2 --seed 7", NULL, NEW "--seed 8 --steps 1 --overwrite",
     NEW "--seed 8 --steps 1 --resume", 0, 1000},
    {"texts", NULL, NULL, TEXTS, TEXTS, 0, 180},
    {"other texts", TRAIN "--from-scratch --train more.jsonl --steps 0", NULL, TEXTS, TEXTS, 0,
     240},
};

// ---- What runs do to files, by inodes; in memory that their processes share ---------------------
// Inode 0 is the root.

enum { LINK, MOVE, DROP, DATA, CUT, SYNC };  // the first three change names
typedef struct {
    int type, dir, name, from, inode;
    int64_t at;
    size_t n, data;
} Event;

typedef struct {
    int n;
    struct Entry {
        int dir, name, inode;
    } list[MAX_WORDS];
} Names;

static struct {
    int num_events, num_inodes, num_words, of_fd[FAULT_MAX_FD];
    size_t used;
    Names now;
    Event events[MAX_EVENTS];
    bool is_dir[MAX_EVENTS];
    char words[MAX_WORDS][64];
    unsigned char bytes[MAX_BYTES];
} * w;

static int word(const char *text) {
    int i = 0;
    while (i < w->num_words && strcmp(w->words[i], text) != 0) i++;
    if (i == MAX_WORDS) abort();
    if (i == w->num_words) text_copy(w->words[w->num_words++], sizeof *w->words, text);
    return i;
}

static struct Entry *find(Names *t, int dir, int name) {
    for (struct Entry *e = t->list; e < t->list + t->n; e++)
        if (e->dir == dir && e->name == name) return e;
    return NULL;
}

static void apply(Names *t, const Event *e) {
    struct Entry *old = e->type <= DROP ? find(t, e->dir, e->name) : NULL;
    if (old) *old = t->list[--t->n];
    if (e->type == MOVE && (old = find(t, e->dir, e->from))) *old = t->list[--t->n];
    if (e->type <= MOVE) t->list[t->n++] = (struct Entry){e->dir, e->name, e->inode};
}

static void add_event(Event e) {
    if (w->num_events == MAX_EVENTS) abort();
    w->events[w->num_events++] = e;
    apply(&w->now, &e);
}

// The inode, -1: none. *dir: where its name is, -1 when that does not exist.
static int look_up(const char *path, int *dir, int *name) {
    char text[300], *part;
    int inode = 0;
    *dir = -1;
    text_copy(text, sizeof text, path);
    for (char *rest = text; (part = strsep(&rest, "/"));) {
        if (strcmp(part, ".") == 0) continue;
        *dir = inode;
        *name = word(part);
        const struct Entry *e = inode < 0 ? NULL : find(&w->now, inode, *name);
        inode = e ? e->inode : -1;
    }
    return inode;
}

static void add_call(const char *call, int fd, const char *path, const char *to, const void *data,
                     size_t n, off_t at) {
    Event e = {.at = at, .n = n, .data = w->used};
    int to_dir;
    const bool makes_dir = strcmp(call, "mkdir") == 0;
    e.inode = path[0] ? look_up(path, &e.dir, &e.name) : w->of_fd[fd];
    if (e.inode < 0 && e.dir >= 0 && (makes_dir || strcmp(call, "create") == 0)) {
        w->is_dir[e.inode = ++w->num_inodes] = makes_dir;
        add_event(e);  // LINK is 0
    }
    if (strcmp(call, "fd") == 0) w->of_fd[fd] = e.inode;
    if (e.inode < 0) return;
    if (strcmp(call, "rename") == 0) {
        e.from = e.name;
        look_up(to, &to_dir, &e.name);
    }
    if (n > 0) memcpy(w->bytes + w->used, data, n);
    if ((w->used += n) > MAX_BYTES / 2) abort();
    e.type = strcmp(call, "rename") == 0                                   ? MOVE
             : strcmp(call, "unlink") == 0 || strcmp(call, "rmdir") == 0   ? DROP
             : strcmp(call, "data") == 0                                   ? DATA
             : strcmp(call, "cut") == 0 || (strcmp(call, "fd") == 0 && at) ? CUT
             : strcmp(call, "sync") == 0                                   ? SYNC
                                                                           : LINK;
    if (e.type == CUT && strcmp(call, "fd") == 0) e.at = 0;
    if (e.type != LINK) add_event(e);
}

static void add_call_of_a_thread(const char *call, int fd, const char *path, const char *to,
                                 const void *data, size_t n, off_t at) {
    static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&one);
    add_call(call, fd, path, to, data, n, at);
    pthread_mutex_unlock(&one);
}

static void record(void) { fault_watch = add_call_of_a_thread; }

enum { KEPT, LOST, HALF, ZEROS, ALL = -1 };
static int version[MAX_EVENTS], durable[MAX_EVENTS];  // of inodes: writes, and up to the fsync

// To the front: the entries that the root leads to, a directory before what is in it. Their number
static int reachable(Names *t) {
    bool found[MAX_EVENTS] = {true};
    int n = 0;
    for (int i = 0; i < t->n; i++) {
        const struct Entry e = t->list[i];
        if (!found[e.dir]) continue;
        found[e.inode] = true;
        t->list[i] = t->list[n];
        t->list[n++] = e;
        i = n - 1;
    }
    return n;
}

static bool suffers(int inode, int target) {
    return (target == ALL || target == inode) && version[inode] > durable[inode];
}

// The same for the same contents under the same names
static uint64_t state_key(const Names *t, int n, int target, int how) {
    uint64_t sum = 0;
    for (const struct Entry *e = t->list; e < t->list + n; e++) {
        const bool hurt = how != KEPT && suffers(e->inode, target), cut = hurt && how == LOST;
        const int facts[] = {e->dir, e->name, e->inode, (cut ? durable : version)[e->inode],
                             hurt && !cut ? how : 0};
        sum += mix64(fnv1a(FNV1A_START, facts, sizeof facts));  // FNV hardly mixes the last fact
    }
    return sum;
}

static void put_inode(const char *path, int inode, int last, int how) {
    static unsigned char bytes[1 << 22];
    size_t size = 0;
    int k = 0;
    for (const Event *e = w->events; e <= w->events + last; e++) {
        if (e->inode != inode || (e->type != DATA && e->type != CUT)) continue;
        const bool pending = ++k > durable[inode];
        if (pending && how == LOST) break;
        const size_t n = how == HALF && pending && k == version[inode] ? e->n / 2 : e->n,
                     end = (size_t)e->at + n;
        CHECK(end <= sizeof bytes);
        if (end > size) memset(bytes + size, 0, end - size);
        if (end > size || e->type == CUT) size = end;
        if (!pending || how != ZEROS) memcpy(bytes + e->at, w->bytes + e->data, n);
    }
    put_file(path, bytes, size);
}

static void put_state(const Names *t, int n, int last, int target, int how) {
    static char paths[MAX_EVENTS][IO_PATH_MAX];
    Error err = {0};
    MUST(dir_remove_tree(scratch("out"), &err));
    text_copy(paths[0], sizeof *paths, scratch_root.dir);
    for (const struct Entry *e = t->list; e < t->list + n; e++) {
        CHECK(path_join(paths[e->inode], paths[e->dir], w->words[e->name], &err));
        if (w->is_dir[e->inode])
            CHECK(mkdir(paths[e->inode], 0777) == 0);
        else
            put_inode(paths[e->inode], e->inode, last, suffers(e->inode, target) ? how : KEPT);
    }
}

// The work that a run has reported done: the last step saved, final/, and the shards of texts
typedef struct {
    int step, final, tokens;
} Promise;
static Promise promises[MAX_EVENTS];

static void make_promises(int first, Promise p) {
    const Event *moved = NULL;
    for (int i = first; i < w->num_events; promises[i++] = p) {
        if (w->events[i].type == MOVE) moved = &w->events[i];
        if (w->events[i].type != SYNC || !moved || moved->dir != w->events[i].inode) continue;
        const char *name = w->words[moved->name];
        if (strlen(name) == 13 && strncmp(name, "step-", 5) == 0) p.step = atoi(name + 5);
        if (strncmp(name, "final", 5) == 0) p.final = !name[5];
        p.tokens |= strcmp(name, "tokens") == 0;
    }
}

static const char *wrong(int r, const Promise *p, uint64_t expected) {
    if (p->final && !checkpoint_verify(scratch("out/final"), NULL, &(Error){0}))
        return "final/ is lost";
    int code = run(runs[r].reader, "", NULL);
    if (!runs[r].damaged && strstr(said, "skipping")) return "half a checkpoint has its name";
    const bool old_or_none =
        code == EXIT_CHECKPOINT_MISFIT || strstr(said, "--overwrite starts over");
    if (old_or_none && p->step == 0) code = run(runs[r].command, "", NULL);
    const char *start = strstr(said, "start   out/step-");
    if (code != 0) return printed("exit code %d: %.500s", code, said);
    if ((start ? atoi(start + 17) : 0) < p->step)
        return "a checkpoint that was reported saved is lost";
    if (strstr(said, "are missing")) return "the log is shorter than the checkpoint says";
    if (p->tokens && strstr(said, "texts   ")) return "the shards of texts are lost";
    // what trains nothing and has its tokens takes no lock, and removes nothing
    if (strstr(runs[r].reader, "--steps 0")) MUST(checkpoint_recover(scratch("out"), &(Error){0}));
    if (!checkpoint_may_remove_all(scratch("out"), &(Error){0}) ||
        (path_exists(scratch("out/tokens")) &&
         !checkpoint_is_ours(scratch("out/tokens"), &(Error){0})))
        return "--overwrite is refused";
    return results(true) == expected ? NULL : "other results";
}

typedef struct {
    int run, first;  // event of the run
    int left_out;    // the fsync that only pretends; -1: none, and all bad states count
    int states, tried, bad;
    uint64_t expected;
} Crash;

static uint64_t known[MAX_STATES];

static bool is_new(uint64_t key) {
    size_t at = key % MAX_STATES;
    while (known[at] && known[at] != key) at = (at + 1) % MAX_STATES;
    const bool new = !known[at];
    known[at] = key;
    return new;
}

static bool takes_turn(int n) { return all_parts() || n % PARTS == part_of(PARTS); }

// Tries the states after event `last` that lack these changes of names. base: before event `from`.
// Ends at a bad one with an fsync left out.
static bool try_states(Crash *s, const Names *base, int from, int last, const bool *lost,
                       int most) {
    Names t = *base;
    for (int i = from; i <= last; i++)
        if (!lost[i]) apply(&t, &w->events[i]);
    const int n = reachable(&t);
    for (int how = KEPT; how <= most; how++)
        for (int i = -1; i < (how == KEPT ? 0 : n); i++) {
            const int target = i < 0 ? ALL : t.list[i].inode;
            const uint64_t key = state_key(&t, n, target, how);
            if (i >= 0 && !suffers(target, target)) continue;
            if (!is_new(fnv1a(key, &promises[last], sizeof *promises))) continue;
            if (!takes_turn(s->states++) && s->left_out < 0) continue;
            put_state(&t, n, last, target, how);
            const char *why = wrong(s->run, &promises[last], s->expected);
            s->tried++;
            if (!why) continue;
            s->bad++;
            if (s->left_out >= 0) return true;
            printf("    %s, after event %d: %s\n", runs[s->run].name, last, why);
        }
    return false;
}

// Model B; where a directory has many changes, without one of them, or without all after one.
static bool try_directory(Crash *s, const Names *base, int from, int last, const int *pending,
                          int n, int dir) {
    bool lost[MAX_EVENTS] = {false};
    int own[MAX_EVENTS], m = 0;
    for (int k = 0; k < n; k++)
        if (w->events[pending[k]].dir == dir) own[m++] = pending[k];
    for (int others = 0; others < 2; others++)
        for (int set = 0; set < (m <= 4 ? 1 << m : 2 * m); set++) {
            for (int k = 0; k < n; k++) lost[pending[k]] = others;
            for (int k = 0; k < m; k++)
                lost[own[k]] = m <= 4 ? set >> k & 1 : set < m ? k == set : k >= set - m;
            if (try_states(s, base, from, last, lost, LOST)) return true;
        }
    return false;
}

// Both models at a moment. pending: changes of names that are not fsynced, of which a journal may
// lack those from `ordered` on
static bool try_moment(Crash *s, const Names *base, int from, int last, const int *pending, int n,
                       int ordered) {
    bool lost[MAX_EVENTS] = {false}, done[MAX_EVENTS] = {false};
    for (int kept = n; kept >= ordered; kept--) {
        if (kept < n) lost[pending[kept]] = true;
        if (try_states(s, base, from, last, lost, ZEROS)) return true;
    }
    for (int k = 0; k < n; k++) {
        const int dir = w->events[pending[k]].dir;
        if (!done[dir] && try_directory(s, base, from, last, pending, n, dir)) return true;
        done[dir] = true;
    }
    return false;
}

static bool try_all(Crash *s) {
    bool settled[MAX_EVENTS] = {false};
    int from = 0;
    Names base = {0};
    memset(version, 0, sizeof version);
    memset(durable, 0, sizeof durable);
    for (int i = 0; i < w->num_events; i++) {
        int pending[MAX_EVENTS], n = 0, ordered = 0;
        const Event *e = &w->events[i];
        const bool syncs = i < s->first || (e->type == SYNC && i != s->left_out);
        version[e->inode] += e->type == DATA || e->type == CUT;
        settled[i] = i < s->first || e->type > DROP;
        if (syncs) durable[e->inode] = version[e->inode];
        for (int k = 0; k < i && syncs; k++) settled[k] |= w->events[k].dir == e->inode;
        for (; from <= i && settled[from]; from++) apply(&base, &w->events[from]);
        for (int k = from; k <= i; k++) {
            if (!settled[k]) pending[n++] = k;
            if (settled[k] && w->events[k].type <= DROP) ordered = n;
        }
        if (i >= s->first && i >= s->left_out && try_moment(s, &base, from, i, pending, n, ordered))
            return true;
    }
    return false;
}

// Is event i an fsync that matters: not of what is tried or begun, nor of nothing but removals?
static bool makes_durable(int i) {
    bool new = false;
    for (int k = i - 1; k >= 0 && w->events[i].type == SYNC; k--) {
        const Event *e = &w->events[k];
        const char *name = e->type <= DROP ? w->words[e->name] : "";
        const bool hidden = name[0] == '.' || (e->type == LINK && strstr(name, ".tmp"));
        if (e->inode == w->events[i].inode && e->type == SYNC) break;
        if (e->inode == w->events[i].inode && e->type == LINK) return new && !hidden;
        new |= e->type <= DROP ? e->dir == w->events[i].inode && !hidden && e->type != DROP
                               : e->inode == w->events[i].inode;
    }
    return new;
}

static void prepare_run(int r) {
    shell("rm -rf out");
    memset(known, 0, sizeof known);
    if (runs[r].before) CHECK_MSG(run(runs[r].before, "", record) == 0, "%s", said);
    if (!runs[r].damaged) return;
    record();
    CHECK(chdir(scratch_root.dir) == 0);
    const int fd = open(runs[r].damaged, O_WRONLY);
    CHECK(fd >= 0 && pwrite(fd, "x", 1, 0) == 1 && close(fd) == 0);
    fault_watch = NULL;
}

static void power_loss(int r) {
    Crash s = {.run = r, .left_out = -1};
    static int all;  // of every run, so that each part has some
    int needed = 0, left_out = 0;
    w = mmap(NULL, sizeof *w, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    w->is_dir[0] = true;
    prepare_run(r);
    s.first = w->num_events;
    CHECK_MSG(run(runs[r].command, "", record) == 0, "%s: %s", runs[r].name, said);
    s.expected = results(true);
    make_promises(s.first, (Promise){runs[r].saved, false, false});
    try_all(&s);
    for (int i = s.first; i < w->num_events; i++) {
        if (!makes_durable(i) || !takes_turn(all++)) continue;
        Crash without = s;
        without.left_out = i;
        left_out++;
        if (try_all(&without))
            needed++;
        else
            printf("    %s: nothing is lost without fsync %d\n", runs[r].name, all);
    }
    printf("    %s: %d of %d states, %d bad; %d fsyncs left out, %d missed\n", runs[r].name,
           s.tried, s.states, s.bad, left_out, needed);
    munmap(w, sizeof *w);
    CHECK(s.bad == 0 && needed == left_out && s.states >= runs[r].states);
}

TEST(every_state_that_a_power_loss_leaves_is_good) {
    make_inputs();
    for (size_t r = 0; r < sizeof runs / sizeof *runs; r++) power_loss((int)r);
}

TEST_MAIN()
