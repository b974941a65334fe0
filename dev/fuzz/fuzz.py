#!/usr/bin/env python3
"""Runs the targets of dev/fuzz/fuzz.c with libFuzzer, one after another: `make fuzz`.

usage: dev/fuzz/fuzz.py [--seconds N] [--runs N] [--target NAME] [--fast] [--merge]

tests/golden/fuzz/NAME.txt has an input a line, in which \\xNN is a byte: above the empty line those
that show a fault, one that was there or a planted one, below it what reaches as much code as 24 KiB
can. A run begins with these and with what earlier ones left in build/fuzz/NAME. --merge writes the
lines below again, from there. --fast takes build/fast/fuzz, without
AddressSanitizer, and then gives it what was found. exit status: 0 without a finding.
"""
import argparse, glob, hashlib, os, re, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def pack(data):
    return "".join(chr(b) if 31 < b < 127 and b != 92 else "\\x%02x" % b for b in data) + "\n"


def unpack(line):
    return re.sub(rb"\\x(..)", lambda m: bytes.fromhex(m[1].decode()), line.encode("ascii"))


def run(name, *more, program="fuzz"):
    flags = ["-timeout=20", "-rss_limit_mb=2000", "-print_final_stats=1", "-dict=build/fuzz/words",
             "-max_len=%d" % (1024 if name == "tokenizer" else 4096), "-entropic_scale_per_exec_time=1",
             "-artifact_prefix=build/fuzz/%s-" % name]
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # targets write what they read
    with tempfile.TemporaryDirectory(dir=memory) as scratch:
        return subprocess.call(["build/%s/fuzz" % program] + flags + list(more),
                               env=dict(os.environ, FUZZ_TARGET=name, TMPDIR=scratch,
                                        GLIBC_TUNABLES="glibc.malloc.mmap_threshold=400000")) == 0


def merge(name, path, found):
    with tempfile.TemporaryDirectory() as few:
        run(name, "-merge=1", few, "build/fuzz/" + name)
        lines = sorted((pack(open(f, "rb").read()) for f in glob.glob(few + "/*")), key=len)
    while sum(map(len, lines)) > 24 << 10:
        lines.pop()
    open(path, "w").writelines([found, "\n"] + sorted(lines))
    return True


os.chdir(ROOT)
names = re.findall(r'{"(\w+)",\s+fuzz_', open("dev/fuzz/fuzz.c").read())
parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=int, default=60)
parser.add_argument("--runs", type=int)
parser.add_argument("--target", choices=names)
parser.add_argument("--fast", action="store_true")
parser.add_argument("--merge", action="store_true")
args = parser.parse_args()
words = {r"\x0a~~\x0a", r"\\ud800", "9007199254740993", "1e999", r"\":"}
for file in glob.glob("data/*/*.c"):  # the words of the readers are those of the formats
    words |= set(re.findall(r'"([\w.|<>/+-]{2,24})"', open(file).read()))
open("build/fuzz/words", "w").writelines('"%s"\n' % w for w in sorted(words))
failed, limit = [], "-runs=%d" % args.runs if args.runs else "-max_total_time=%d" % args.seconds
for name in [args.target] if args.target else names:
    path = "tests/golden/fuzz/%s.txt" % name
    text = open(path).read()
    os.makedirs("build/fuzz/" + name, exist_ok=True)
    for data in map(unpack, text.splitlines()):
        open("build/fuzz/%s/%s" % (name, hashlib.sha1(data).hexdigest()), "wb").write(data)
    ok = merge(name, path, text[:("\n" + text).index("\n\n")]) if args.merge else \
        not args.fast or run(name, limit, "build/fuzz/" + name, program="fast")
    ok = ok and (args.merge or run(name, "-runs=0" if args.fast else limit, "build/fuzz/" + name))
    failed += [] if ok else [name]
sys.exit("error: the inputs of findings are in build/fuzz: " + ", ".join(failed) if failed else 0)
