"""A step as the GPU ran it, from the file that libtrace.so writes: trace.py FILE. clip_scale_kernel, which runs
once a step, tells steps apart; the table is that of the median step."""
import collections
import re
import subprocess
import sys


def kernel(name):
    """Without arguments and namespaces; those of cuBLASLt are marked"""
    name = re.sub(r"\(anonymous namespace\)::|<unnamed>::|^void ", "", name)
    return ("cuBLASLt " + name[:50] if re.match(r"nvjet|cutlass|sm\d+_|gemm|cublas|gemv|splitK", name)
            else name.split("(")[0])


rows = sorted((int(start), int(end), name) for start, end, name in
              (line.rstrip("\n").split(" ", 2) for line in open(sys.argv[1])))
names = sorted({name for _, _, name in rows})
plain = subprocess.run("c++filt || cat", shell=True, input="\n".join(names), stdout=subprocess.PIPE, text=True).stdout
names = dict(zip(names, map(kernel, plain.splitlines())))
marks = [i for i, (_, _, name) in enumerate(rows) if "clip_scale" in name]
if len(marks) < 3:
    sys.exit(f"trace: {len(rows)} records of {len(marks)} steps, expected three steps")
steps = []
for first, last in zip(marks[1:], marks[2:]):       # without the first step, which starts everything
    begin = until = rows[first][0]
    gaps, times = [], collections.defaultdict(list)
    for start, end, name in rows[first:last + 1]:
        gaps.append(max(0, start - until))
        until = max(until, end)
        times[names[name]].append(end - start)
    times[names[name]].pop()
    steps.append((start - begin, gaps, times))
steps.sort(key=lambda step: step[0])
wall, gaps, times = steps[len(steps) // 2]
long_gaps = [gap for gap in gaps if gap > 5000]
print(f"trace   step {wall / 1e6:.3f} ms (of {len(steps)}), busy {100 - 100 * sum(gaps) / wall:.1f} %, {len(gaps) - 1} launches, "
      f"gaps {sum(gaps) / 1e6:.3f} ms, {len(long_gaps)} above 5 us of {sum(long_gaps) / 1e6:.3f} ms")
for part, which in ("products", "cuBLASLt"), ("attention", ".*attention"), ("others", "(?!cuBLASLt|.*attention)"):
    ns = sum(sum(t) for name, t in times.items() if re.match(which, name))
    print(f"trace   {part:9} {ns / 1e6:9.3f} ms {100 * ns / wall:5.1f} %")
for name, t in sorted(times.items(), key=lambda item: -sum(item[1]))[:32]:
    print(f"trace   {sum(t) / 1e6:9.3f} ms {100 * sum(t) / wall:5.1f} %  {len(t):5} x {sum(t) / len(t) / 1e3:9.1f} us  {name}")
