#!/usr/bin/env bash
# The README's results section: it is what scripts/results_page.py makes of dev/results; figures, charts
# and links come from the files there; what has no file is listed as not measured. dev/scaling.py and
# dev/training.py on tiny ones, the steps of `make results`, and peers that are not installed.
. "$(dirname "$0")/lib.sh"
scratch results
page() { PAGE_ROOT=$work/page python3 "$root/scripts/results_page.py" "$@"; }
readme=$work/page/README.md

check the_page_is_what_the_files_say python3 "$root/scripts/results_page.py" --check
mkdir -p page/dev/results
printf 'before\n<!-- scripts/results_page.py writes from here, out of dev/results -->\nold\n<!-- to here -->\nafter\n' \
    > "$readme"
outcome a_page_without_files 0 'wrote README.md' page
has nothing_is_measured 'Not measured yet on the CPU: .*bench-peers.*, repad .*, independence .*, scaling .*, real training ' "$readme"
has nothing_on_a_gpu 'Not measured yet on a GPU: .*gpu-day.*, repad ' "$readme"
lacks the_old_text_is_gone '^old$' "$readme"
check the_rest_stays test "$(sed -n '1p;$p' "$readme" | tr '\n' ' ')" = 'before after '

# Scaling, recorded into the page's directory
scaling() { TRAIN=$root/build/cpu/train_llama RESULTS=$work/page/dev/results python3 "$root/dev/scaling.py" "$@"; }
expect scaling 0 '^giant +100.0 % ' scaling --record --models demo --least-tokens 64 --tokens 64 \
    --model-tokens 64 --repeats 1
today=$(date +%Y-%m-%d)
check_python scaling_runs "page/dev/results/scaling-cpu-$today.csv" <<'PY'
import csv, sys
runs = list(csv.DictReader(open(sys.argv[1])))
lengths = [r for r in runs if r["sweep"] == "lengths"]
assert len(lengths) == 3 * 7 and [r["sweep"] for r in runs].count("tokens") == 2, runs
assert sum(r["sweep"] == "model" for r in runs) == 2
for r in runs:
    assert float(r["step_ms_min"]) <= float(r["step_ms"]) <= float(r["step_ms_max"]), r
    assert float(r["peak_mib"]) <= 1.01 * float(r["planned_mib"]), r
    rows = int(r["documents"]) * int(r["row_len"]) if r["layout"] == "padded" else 0
    if rows:
        assert abs(float(r["fill"]) - int(r["tokens"]) / rows) < 1e-4, r
        assert int(r["pairs"]) == int(r["documents"]) * int(r["row_len"]) * (int(r["row_len"]) + 1) // 2
by = {(r["lengths"], r["layout"]): r for r in lengths}
seed = by["seed", "packed"]
assert (seed["documents"], seed["tokens"], seed["pairs"]) == ("6", "1395", "178399"), seed
assert all(by[law, "padded"]["loss"][:5] == by[law, "packed"]["loss"][:5] for law, _ in by), by
PY

# Real training for seconds: packed and padded take the same steps to the same loss
uneven_texts texts 12
check prepare_data prepare texts --out data --val-frac 0.2
training() {
    TRAIN=$root/build/cpu/train_llama RESULTS=$work/page/dev/results python3 "$root/dev/training.py" \
        --data "$work/data" --out "$work/training" --max-seqlen 128 --micro-batch-tokens 512 \
        --batch-tokens 512 --val-every 1 --seeds 1 "$@"
}
expect training 0 '^ours +at equal time packed reaches .* by at most 0[.]0000$' training --minutes 0.02 --record
has training_by_length '^  [0-9]+ to [0-9]+ tokens [(][0-9]+[)] +[0-9.]+ +[0-9.]+ +[0-9.]+$' "page/dev/results/training-cpu-$today.txt"
check_python training_points "page/dev/results/training-cpu-$today.csv" <<'PY'
import csv, sys
points = list(csv.DictReader(open(sys.argv[1])))
by = {layout: {p["step"]: p for p in points if p["layout"] == layout}
      for layout in ("packed", "rows", "padded")}
for of in by.values():
    assert len(of) > 2 and float(of["0"]["train_s"]) == 0, of
    assert max(float(p["train_s"]) for p in of.values()) < 60, of
same = set(by["packed"]) & set(by["padded"])
assert len(same) > 2, by
for step in same:
    packed, padded = by["packed"][step], by["padded"][step]
    assert packed["tokens"] == padded["tokens"] == by["rows"].get(step, packed)["tokens"], step
    assert abs(float(packed["val_loss"]) - float(padded["val_loss"])) < 1e-4, (packed, padded)
PY
cp training/packed-1/log.jsonl log.jsonl
outcome training_continued 0 '^ours ' training --minutes 0.02 --continue
same complete_runs_are_kept log.jsonl training/packed-1/log.jsonl
outcome training_with_other_options 0 '^ours ' training --minutes 0.02 --continue --lr 1e-3
has runs_of_other_options_are_not '"lr": 0.001, "schedule"' training/packed-1/log.jsonl
outcome training_that_fails 1 '^error: .*, seed 1: ended too early with exit code [23]' training \
    --minutes 0.02 --model /nowhere

# A file of each kind, of two dates: the newer counts
table() {       # table DATE PACKED
    cat > "page/dev/results/cpu-peers-$1.txt" << TABLE
date     $1
cpu      A processor, 4 cores

== SmolLM2-135M, six documents, 2 thread(s), load 0.1
varlen_attn cannot run here: no CPU
torch 2.15, 2 threads, 134 parameters, documents [220, 217]
fp32  packed compiled                     100  [99-101]            5784ms  10.921228
fp32  ours                                $2  [99-400]            3364ms  10.921228
fp32: ours 1.30 times the best, packed compiled; of single steps 1.21 to 1.35

== layouts of unpad.c, fp32
packed 9379.7 200 0.1
padded 9379.7 100 0.1

Parts of a step, as fractions of the FMA peak measured in between
smollm2-135m, 6 documents of 220,217 tokens, 2 threads, matmul avx512 8x48, attention avx512

part                      GFLOP   CPU s   of CPU   of peak   by wall
matmul forward            375.2   1.806    30.0%     0.877     0.853
step                     1168.8   6.028   100.0%     0.818     0.783
TABLE
}
table 2030-01-01 111
table 2030-01-02 222
printf 'date 2030-01-01\npublished  20 %% slower\nours       5 %% faster\ndiffers    a GPU\n' \
    > page/dev/results/repad-cpu-2030-01-01.txt
outcome a_page 0 'wrote speed.svg' page
has the_newest_file_counts '^. unpad.c packed . 222 .$' "$readme"
lacks the_older_does_not 'unpad.c packed 111' "$readme"
has alt_text '!\[Real tokens per second. fp32: unpad.c packed 222, unpad.c padded 111, PyTorch packed compiled 100\]' "$readme"
has every_shape '^. SmolLM2-135M, six documents . 2 . 222 . PyTorch packed compiled 100 . 1.30 .$' "$readme"
has share_of_the_peak ' takes 0.78 .avx512, 2 threads.; the' "$readme"
has what_cannot_run_is_listed 'yet on the CPU: .*AMX.*varlen_attn, which cannot run there' "$readme"
has published '^. 20 % slower . 5 % faster . a GPU . \[repad-cpu-2030-01-01.txt\]' "$readme"
has where_packing_stops 'there is nothing to gain: .*giant documents [0-9.]+x' "$readme"
lacks what_has_a_file_is_measured 'yet on the CPU: .*repad' "$readme"
check a_page_that_is_up_to_date page --check
check_python charts_are_svg page/dev/results/{speed,scaling,training}.svg <<'PY'
import sys, xml.dom.minidom
for path in sys.argv[1:]:
    assert xml.dom.minidom.parse(path).documentElement.tagName == "svg", path
PY
links_exist() {
    local f
    grep -oE '\]\(dev/[^)]*\)' "$1" | tr -d '])(' | while read -r f; do
        [ -e "$2/$f" ] || { echo "$f" && return 1; }
    done
}
touch page/dev/SPEED.md
check links_of_a_page links_exist "$readme" "$work/page"
check links_of_the_readme links_exist "$root/README.md" "$root"
table 2030-01-03 333
outcome a_new_file_changes_the_page 1 'error: not what dev/results says: README.md, speed.svg' page --check
sed -i '/to here/d' "$readme"
outcome a_page_without_marks 1 'error: README.md: expected the lines' page

steps() { LIST=1 TRAIN=$root/build/cpu/train_llama "$root/dev/results.sh"; }
expect steps 0 '^about [0-9]+ minutes on two idle CPU cores, .*load now' steps
for name in cpu_table.sh training.py reproduce_repad.sh reproduce_independence.sh reproduce_scores.sh \
    scaling.py results_page.py; do
    has "step_$name" "^== step .* minutes: .*$name" "$work/out.txt"
done

# Peers that are not installed say so, and are no failure
cd "$root" || exit 1
outcome llmc_is_not_there 0 '^llm.c: not there: git clone ' env -u LLMC python3 dev/peers/llmc_cpu.py
outcome llmc_is_elsewhere 1 "^FAILED: $work: expected a clone" env LLMC="$work" python3 dev/peers/llmc_cpu.py
outcome llama_cpp_is_not_there 0 '^llama.cpp: not installed: pip install ' python3 -S dev/peers/llama_cpp_cpu.py
finish
