#!/usr/bin/env python3
"""Do the tests notice faults? Builds the tree once with every fault of dev/mutants.txt behind a
switch, then runs the suites with one fault at a time until one is red.

usage: dev/mutants.py [--only TEXT] [--suites TEXT] [--jobs N] [--check]

--only TEXT    faults whose file, old or new line contains it
--suites TEXT  suites whose name contains it: asan/ for a first look, without those in shell
--check        compiles all and runs the suites without a fault: they must be green
What was killed, and by which suite, goes to build/mutants/verdicts.txt; a run takes up from there
what has not changed since. exit status: 0 when every fault is killed, else 1.
"""
import argparse, collections, concurrent.futures, hashlib, os, re, shutil, subprocess, sys, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TREE = os.path.join(ROOT, "build/mutants")
LIMIT_S = 600   # of a suite without a fault; with one it gets three times as long as without, and 20 s
# A global of each file, set before main: in the loops of kernels, emulated ones too, it costs a compare
HEAD = """#ifndef MUTANT
#include <stdlib.h>
static int mutant_number;
__attribute__((constructor)) static void mutant_read(void) {
    const char *number = getenv("MUTANT");
    mutant_number = number ? atoi(number) : 0;
}
#define MUTANT(n_) __builtin_expect(mutant_number == (n_), 0)
#endif
#line 1
"""
Mutant = collections.namedtuple("Mutant", "number file behind old new suites")


def read_list(path):
    """[file] suites; then a line a fault: "old ==> new", "text |> old ==> new": old is the first one
    behind this text."""
    mutants, file, suites = [], None, []
    for n, line in enumerate(open(path), 1):
        old, arrow, new = line.rstrip("\n").partition(" ==>")
        behind, bar, rest = old.partition(" |> ")
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("["):
            file, _, words = line[1:].partition("]")
            suites = words.split()
        elif arrow:
            mutants.append(Mutant(len(mutants) + 1, file, behind if bar else "", rest if bar else old,
                                  new[1:], suites))
        else:
            sys.exit("error: %s:%d: expected [file], or a fault with ==>" % (path, n))
    return mutants


def switched(old, group):
    """The old code, or that of the mutant that is switched on."""
    statement = ";" in old and old.rstrip().endswith((";", "}"))
    code = "{ %s }" % old if statement else "(%s)" % old
    for m in reversed(group):
        if statement:
            code = "{ if (MUTANT(%d)) { %s } else %s }" % (m.number, m.new, code)
        else:
            code = "(MUTANT(%d) ? (%s) : %s)" % (m.number, m.new, code)
    return code


def write_tree(mutants):
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n")[:-1]
    of_file = collections.defaultdict(lambda: collections.defaultdict(list))
    for m in mutants:
        of_file[m.file][m.behind, m.old].append(m)
    for name in files:
        source, target = os.path.join(ROOT, name), os.path.join(TREE, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        data = open(source, "rb").read()
        if name in of_file:
            text = data.decode()
            places = []
            for (behind, old), group in of_file[name].items():
                if text.count(behind or old) != 1:
                    sys.exit("error: %s: expected once, found %d times: %s" % (name, text.count(behind or old), behind or old))
                at = text.find(old, text.find(behind) + len(behind))
                if at < 0:
                    sys.exit("error: %s: not behind %s: %s" % (name, behind, old))
                places.append((at, old, group))
            places.sort(key=lambda place: place[0], reverse=True)
            for (at, old, _), (before, other, _) in zip(places, places[1:]):
                if before + len(other) > at:
                    sys.exit("error: %s: overlap: %s and %s" % (name, other, old))
            for at, old, group in places:
                text = text[:at] + switched(old, group) + text[at + len(old):]
            data = (HEAD + text).encode()
        if not os.path.exists(target) or open(target, "rb").read() != data:
            open(target, "wb").write(data)
            shutil.copymode(source, target)
    unknown = set(of_file) - set(files)
    if unknown:
        sys.exit("error: dev/mutants.txt: no such file: " + ", ".join(sorted(unknown)))


def build(suites):
    programs = ["build/" + s for s in suites if not s.endswith(".sh")]
    shell = "build/asan/train_llama build/cpu/train_llama build/emu/train_llama build/cpu/train_llama_faulty " \
            "build/emu/train_llama_faulty build/emu/test_ops build/emu/test_cuda_nccl train_llama"
    shell = shell.split() if any(s.endswith(".sh") for s in suites) else []
    subprocess.run(["make", "-s", "-j2", "BACKEND=cpu", "WARN=-w", *programs, *shell], cwd=TREE, check=True)


def run(suite, number, limit_s):
    """Seconds; negative: it was red or took too long."""
    words = suite.split(":")
    path = "tests/" + words[0] if words[0].endswith(".sh") else "build/" + words[0]
    more = ["--filter", words[1]] if len(words) > 1 else []
    work = os.path.join(TREE, "tmp", "%d-%d" % (number, time.monotonic_ns()))
    os.makedirs(work)
    began = time.monotonic()
    env = dict(os.environ, MUTANT=str(number), TMPDIR=work, OMP_WAIT_POLICY="passive", OMP_NUM_THREADS="2")
    log = open(os.path.join(TREE, "tmp", "%d.log" % number), "w+b")
    job = subprocess.Popen([path, *more], cwd=TREE, env=env, stdin=subprocess.DEVNULL, stdout=log,
                           stderr=subprocess.STDOUT, start_new_session=True)
    status, seen = None, b""
    while status is None:  # until it ends, has a first red case, or takes too long
        time.sleep(0.05)
        status = job.poll()
        seen += os.pread(log.fileno(), 1 << 20, len(seen))
        if b"\nFAILED " in b"\n" + seen or time.monotonic() - began > limit_s:
            status = 1
    log.close()
    subprocess.run(["pkill", "-9", "-s", str(job.pid)])  # its session: timeout(1) makes a group of its own
    job.wait()
    shutil.rmtree(work, ignore_errors=True)
    seconds = max(time.monotonic() - began, 0.01)
    return seconds if status == 0 else -seconds


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--only", default="")
    p.add_argument("--suites", default="")
    p.add_argument("--jobs", type=int, default=2)
    p.add_argument("--check", action="store_true")
    a = p.parse_args()
    mutants = read_list(os.path.join(ROOT, "dev/mutants.txt"))
    write_tree(mutants)
    chosen = [m._replace(suites=[s for s in m.suites if a.suites in s]) for m in mutants
              if a.only in m.file or a.only in m.old or a.only in m.new]
    verdicts_path = os.path.join(TREE, "verdicts.txt")
    known = dict(line.rstrip("\n").split("\t")[:2] for line in open(verdicts_path)) if os.path.exists(verdicts_path) else {}
    key = lambda m: hashlib.sha256(repr((m.file, m.behind, m.old, m.new)).encode()).hexdigest()[:16]
    to_try = [m for m in chosen if known.get(key(m), "survived") == "survived"]
    suites = sorted({s for m in (chosen if a.check else to_try) for s in m.suites})
    build(sorted({s.split(":")[0] for s in suites}))
    took = {s: run(s, 0, LIMIT_S) for s in suites}
    red = [s for s in suites if took[s] < 0]
    if red:
        sys.exit("error: red without a fault: " + " ".join(red))
    print("%d faults; %d suites are green without one, in %.0f s" % (len(chosen), len(suites), sum(took.values())), flush=True)
    if a.check:
        return

    def verdict(m):
        for s in m.suites:
            if run(s, m.number, 3 * took[s] + 20) < 0:
                return s
        return "survived"

    counts = collections.defaultdict(collections.Counter)
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool, open(verdicts_path, "a") as out:
        waiting = {pool.submit(verdict, m): m for m in to_try}
        found = {m.number: known.get(key(m)) for m in chosen}
        for i, job in enumerate(concurrent.futures.as_completed(waiting), 1):
            m = waiting[job]
            found[m.number] = job.result()
            out.write("%s\t%s\t%s\t%s\n" % (key(m), found[m.number], m.file, m.old))
            out.flush()
            print("[%d/%d] %s %s: %s -> %s" % (i, len(waiting), found[m.number], m.file, m.old.strip(), m.new.strip()), flush=True)
    for m in chosen:
        kind = "survived" if found[m.number] == "survived" else "killed"
        counts[os.path.dirname(m.file) or m.file][kind] += 1
    print("%-20s %8s %9s" % ("room", "killed", "survived"))
    total = sum(counts.values(), collections.Counter())
    for room, c in sorted(counts.items()) + [("total", total)]:
        print("%-20s %8d %9d" % (room, c["killed"], c["survived"]))
    print("%.1f %% of the faults are killed" % (100 * total["killed"] / max(1, total["killed"] + total["survived"])))
    sys.exit(total["survived"] > 0)


if __name__ == "__main__":
    main()
