#!/usr/bin/env python3
"""Do the tests notice faults? Makes faults in the C files by itself, builds the tree once with each
behind a switch, then runs the suites with one fault at a time until one is red.

usage: dev/mutants.py [--files GLOB ...] [--per-file N] [--seed N] [--suites TEXT] [--jobs N]

--files GLOB   sources, such as data/batches/*.c (default: all of SUITES below)
--per-file N   faults of each file, at most (default: 8), drawn with --seed
--suites TEXT  only suites whose name contains it: asan/ leaves out the slow ones
A fault deletes a statement, flips a comparison or a connective, drops a term, swaps two operands or
arguments, or moves a constant. A survivor is a line that no test holds, or a fault without an
effect: read it. Survivors are listed in build/mutants/survivors.txt.
"""
import argparse, collections, concurrent.futures, fnmatch, os, random, re, shutil, subprocess, sys, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TREE = os.path.join(ROOT, "build/mutants")
LIMIT_S = 600   # of a suite without a fault; with one it gets three times as long as without, and 20 s
# The suites that should notice a fault, the likeliest first; the first pattern that fits a file counts.
SUITES = """
data/base/options.*         asan/test_options asan/test_schedule test_cli.sh
data/base/*                 asan/test_io asan/test_checkpoint asan/test_config asan/test_safetensors
data/batches/batch.*        asan/test_batch asan/test_loader asan/test_llama
data/batches/loader.*       asan/test_loader asan/test_plan
data/batches/*              asan/test_plan asan/test_batch asan/test_loader asan/test_llama
data/models/[btc]*[re].[ch] asan/test_tokenizer asan/test_fuzz test_texts.sh test_generate.sh
data/models/chat.[ch]       asan/test_tokenizer:system asan/test_fuzz test_chat.sh test_generate.sh
data/models/*               asan/test_config asan/test_safetensors asan/test_fuzz asan/test_llama test_lora.sh
data/shards/*               asan/test_documents asan/test_loader asan/test_fuzz test_data_cli.sh test_convert.sh
data/texts/*                asan/test_documents asan/test_fuzz test_texts.sh test_chat.sh test_data_cli.sh
data/runs/*                 asan/test_checkpoint asan/test_state asan/test_log asan/test_schedule test_cli.sh test_out_dir.sh
data/use/*                  asan/test_samples asan/test_batch:scored test_generate.sh test_benchmark.sh test_cli.sh
kernels/comm/zero.*         asan/test_llama test_ranks.sh test_cuda_ranks.sh
kernels/comm/nccl.cu        emu/test_cuda_nccl test_cuda_ranks.sh
kernels/comm/*              test_ranks.sh test_ranks_failure.sh
kernels/cpu/attention*      asan/test_ops:forward_avx2 asan/test_ops:backward_avx2 asan/test_ops:work_lists asan/test_llama
kernels/cpu/*               asan/test_ops asan/test_llama
kernels/cuda/attention*     emu/test_ops:sm80 emu/test_ops:sm90 emu/test_ops:work_lists test_cuda_modes.sh
kernels/cuda/*              emu/test_ops test_cuda_modes.sh test_cuda_train.sh
kernels/*.h                 asan/test_ops asan/test_llama test_lora.sh
llama.h                     asan/test_llama test_ranks.sh test_lora.sh test_generate.sh
train_llama.cu              test_cli.sh test_ranks.sh test_out_dir.sh test_generate.sh
"""
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
Mutant = collections.namedtuple("Mutant", "number file first last line old new")  # text[first:last] is old
OPERAND = r"!?[\w.]+(?:->\w+|\.\w+|\[[^\[\]]*\]|\([^()]*\))*"
FLIP = {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == ",
        " && ": " || ", " || ": " && ", " + ": " - ", " - ": " + "}
# The edits of an expression: a pattern, and the text that replaces a match
EDITS = [
    (re.compile("|".join(map(re.escape, FLIP))), lambda m: FLIP[m[0]]),
    (re.compile(rf" (?:[-+*/%]|&&|\|\|) {OPERAND}(?= |\)|,|$)"), lambda m: ""),
    (re.compile(rf"({OPERAND})( [-/%<>] |, )({OPERAND})"), lambda m: m[3] + m[2] + m[1]),
    (re.compile(r"(?<![\w.])\d+(?![\w.])"), lambda m: str(int(m[0]) + (1 if m[0] in "01" else -1))),
]


def blanked(text):
    """Comments, strings and preprocessor lines become spaces, so that offsets stay."""
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\])+\'|^[ \t]*#(?:\\\n|[^\n])*',
                  lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.S | re.M)


def expression_end(code, first):
    """The offset of the comma, semicolon or bracket that ends the expression which begins at `first`."""
    depth = 0
    for i in range(first, len(code)):
        depth += (code[i] in "([{") - (code[i] in ")]}")
        if depth < 0 or depth == 0 and code[i] in ",;":
            return i


def slots(code):
    """(first, last, is_statement): the places of functions where a fault can be."""
    for function in re.finditer(r"\) \{ *\n(.*?)^\}", code, re.S | re.M):
        begin, end = function.span(1)
        for m in re.compile(r"(?<=[;{}])\s*\n\s*([A-Za-z_*(][^;{}]*;)").finditer(code, begin - 1, end):
            if not re.match(r"\w+ \**\w|(?:if|else|for|while|do|switch|break|continue|return|_Alignas|static_assert|assert)\b", m[1]):
                yield *m.span(1), True
        for m in re.compile(r"\b(?:if|while) \(|\bfor \([^;]*; |\breturn |[\w\])] [-+*/|&]?= ").finditer(code, begin, end):
            last = expression_end(code, m.end())
            if last and not re.search(r"\{|^\s*;|static|constexpr", code[code.rfind("\n", 0, m.start()) + 1:m.start()] + code[m.end():last]):
                yield m.end(), last, False


def make_mutants(names, per_file, seed):
    """Faults of one file do not overlap, so that one build holds all."""
    mutants = []
    for name in names:
        rng, text, chosen = random.Random(f"{seed} {name}"), open(os.path.join(ROOT, name)).read(), []
        code = blanked(text)
        places = list(slots(code))
        rng.shuffle(places)
        for first, last, whole in places:
            edits = [text[first:m.start()] + new(m) + text[m.end():last] for pattern, new in EDITS
                     for m in pattern.finditer(code, first, last)]
            edits = [""] if whole else [e for e in edits if e != text[first:last]]
            if len(chosen) < per_file and edits and all(last <= m.first or first >= m.last for m in chosen):
                chosen.append(Mutant(len(mutants) + len(chosen) + 1, name, first, last, text.count("\n", 0, first) + 1,
                                     text[first:last], rng.choice(edits)))
        mutants += chosen
    return mutants


def switched(m):
    """The code as it is, or with the fault that is switched on."""
    return f"(MUTANT({m.number}) ? ({m.new}) : ({m.old}))" if m.new else f"{{ if (!MUTANT({m.number})) {{ {m.old} }} }}"


def write_tree(mutants):
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n")[:-1]
    for name in files:
        source, target = os.path.join(ROOT, name), os.path.join(TREE, name)
        data = open(source, "rb").read()
        own = sorted((m for m in mutants if m.file == name), key=lambda m: -m.first)
        if own:
            text = data.decode()
            for m in own:
                text = text[:m.first] + switched(m) + text[m.last:]
            data = (HEAD + text).encode()
        if not os.path.exists(target) or open(target, "rb").read() != data:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "wb").write(data)
            shutil.copymode(source, target)


def build(mutants, suites):
    """Returns the faults that compile: lines with errors lose them."""
    programs = ["build/" + s for s in suites if not s.endswith(".sh")]
    if len(programs) < len(suites):
        programs += "build/asan/train_llama build/cpu/train_llama build/emu/train_llama build/cpu/train_llama_faulty " \
                    "build/emu/train_llama_faulty build/emu/test_ops build/emu/test_cuda_nccl train_llama".split()
    while True:
        write_tree(mutants)
        make = subprocess.run(["make", "-sk", "-j2", "BACKEND=cpu", "WARN=-w", *programs], cwd=TREE, text=True,
                              stderr=subprocess.PIPE)
        wrong = {(os.path.normpath(f), int(n)) for f, n in re.findall(r"^([\w./]+):(\d+):\d+: error", make.stderr, re.M)}
        kept = [m for m in mutants if not any((m.file, m.line + i) in wrong for i in range(m.old.count("\n") + 1))]
        if make.returncode == 0:
            return mutants
        if len(kept) == len(mutants):
            sys.exit(make.stderr)
        mutants = kept


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


def suites_of(name, text):
    rows = [line.split() for line in SUITES.strip().splitlines()]
    return next(([s for s in suites if text in s] for pattern, *suites in rows if fnmatch.fnmatch(name, pattern)), [])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--files", nargs="+", default=["*"])
    p.add_argument("--per-file", type=int, default=8)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--suites", default="")
    p.add_argument("--jobs", type=int, default=2)
    a = p.parse_args()
    names = [f for f in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
             if suites_of(f, a.suites) and f.endswith((".c", ".h", ".cu", ".cuh")) and any(fnmatch.fnmatch(f, g) for g in a.files)]
    suites = sorted({s for f in names for s in suites_of(f, a.suites)})
    mutants = build(make_mutants(names, a.per_file, a.seed), sorted({s.split(":")[0] for s in suites}))
    took = {s: run(s, 0, LIMIT_S) for s in suites}
    red = [s for s in suites if took[s] < 0]
    if red:
        sys.exit("error: red without a fault: " + " ".join(red))
    print(f"{len(mutants)} faults in {len(names)} files; {len(suites)} suites are green without one, in {sum(took.values()):.0f} s", flush=True)

    def verdict(m):
        return next((s for s in suites_of(m.file, a.suites) if run(s, m.number, 3 * took[s] + 20) < 0), "survived")

    counts = collections.defaultdict(collections.Counter)
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool, open(os.path.join(TREE, "survivors.txt"), "w") as out:
        waiting = {pool.submit(verdict, m): m for m in mutants}
        for job in concurrent.futures.as_completed(waiting):
            m, by = waiting[job], job.result()
            counts[os.path.dirname(m.file) or m.file][by == "survived"] += 1
            line = " ".join(f"{by} {m.file}:{m.line}: {m.old} -> {m.new or 'deleted'}".split())
            print(line, flush=True)
            if by == "survived":
                print(line, file=out, flush=True)
    print("%-20s %8s %9s" % ("room", "killed", "survived"))
    total = sum(counts.values(), collections.Counter())
    for room, c in sorted(counts.items()) + [("total", total)]:
        print("%-20s %8d %9d" % (room, c[False], c[True]))


if __name__ == "__main__":
    main()
