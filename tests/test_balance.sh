#!/usr/bin/env bash
# Load balance across ranks: packsim's predictions against the targets and simpler packers, the same
# figures and measurements in the trainer's log, and calibrate's fit against least squares.
. "$(dirname "$0")/lib.sh"
scratch balance
bin=${BIN:-$root/build/cpu}
cat > table.py <<'PY'
def table(path):
    """packsim's table: {ranks: (planned, deterministic, arrival, next_fit)}, each (mean, worst)"""
    rows = {}
    for line in open(path):
        words = line.split()
        if len(words) == 6 and words[0].isdigit():
            rows[int(words[0])] = [tuple(map(float, w.split("/"))) for w in words[2:]]
    return rows
PY

# ---- packsim: drawn lengths ----------------------------------------------------------------------------
for law in r65 web; do
    expect "packsim_$law" 0 '^padding +none; in padded rows of 8192 tokens 9[0-9]' "$bin/packsim" \
        --lengths $law --docs 100000 --max-seqlen 8192 --micro-batch-tokens 32768 --steps 30
    check_python "packsim_${law}_reaches_the_targets" out.txt <<'PY'
import sys
from table import table
rows = table(sys.argv[1])
assert sorted(rows) == [1, 2, 4, 8, 64], rows
for ranks, row in rows.items():
    planned, deterministic, arrival, next_fit = row
    assert all(1 <= mean <= worst <= ranks for mean, worst in row), row
    assert planned[0] <= (1.02 if ranks == 64 else 1.01), row
    assert ranks == 1 or planned[0] <= deterministic[0] < min(arrival[0], next_fit[0]), row
assert rows[64][2][0] > 1.2 and rows[64][3][0] > 1.2, rows      # simpler packers are far off
PY
done
expect packsim_more_ranks_than_micro_batches 0 '^ +64 .*more ranks than micro-batches' \
    "$bin/packsim" --docs 1000 --batch-tokens 131072 --steps 1
for cost in 100:745 100:200; do       # a plan by wrong costs is worse
    "$bin/packsim" --docs 20000 --max-seqlen 8192 --micro-batch-tokens 32768 --steps 10 \
        --work-cost $cost --true-cost 100:745 > "cost $cost.txt" 2>&1
done
check_python packsim_true_cost 'cost 100:745.txt' 'cost 100:200.txt' <<'PY'
import sys
from table import table
right, wrong = (table(path) for path in sys.argv[1:])
for ranks in (8, 64):
    assert 1 < right[ranks][0][0] < wrong[ranks][0][0] < right[ranks][3][0], (right, wrong)
    assert right[ranks][2:] == wrong[ranks][2:]
PY
expect packsim_ranks_are_numbers 2 'error: --ranks' "$bin/packsim" --ranks 8,
expect packsim_work_cost 2 'error: costs: ' "$bin/packsim" --work-cost 0:0
expect packsim_missing_shards 3 'error: nowhere' "$bin/packsim" --train nowhere

# ---- packsim and the trainer on the same shards ------------------------------------------------------
python3 "$root/dev/shard.py" --dist r65 --tokens 40000 --cap 2048 --vocab 258 --out shards > out.txt ||
    bad shard 'not made'
tiny_model tiny 24 40 8
plan=(--train shards --boundary-token 0 --max-seqlen 512 --micro-batch-tokens 1024 --batch-tokens 6144)
train=("$bin/train_llama" --model tiny --from-scratch "${plan[@]}" --val-every 0 --num-samples 0
       --schedule constant --lr 1e-3 --keep 0)
expect packsim_reads_shards 0 '^documents +[0-9]+, 40000 tokens' \
    "$bin/packsim" "${plan[@]}" --ranks 1,2,4 --steps 6
cp out.txt packsim.txt
expect work_cost_is_two_numbers 2 'error: --work-cost' "${train[@]}" --out x --work-cost 5
expect work_cost_is_not_negative 2 'error: work: expected' "${train[@]}" --out x --work-cost 5:-1
expect train_on_one_rank 0 '^done' "${train[@]}" --out alone --steps 6
lacks no_imbalance_on_one_rank imbalance alone/log.jsonl out.txt
expect resume_with_other_costs 9 'work_tile \(was 745, is 7\)' \
    "${train[@]}" --out alone --resume --work-cost 100:7
if ! ranks_can_run "$bin/train_llama"; then skip ranks "$no_ranks"
else
    screen='fill .* \| imbalance [0-9.]{5} \([0-9.]{5}\) \| eta'
    expect two_ranks 0 "$screen" "${mpi[@]}" -n 2 "${train[@]}" --out by_work2 --steps 6
    expect four_ranks 0 "$screen" "${mpi[@]}" -n 4 "${train[@]}" --out by_work4 --steps 6
    expect two_ranks_deterministic 0 "$screen" "${mpi[@]}" -n 2 "${train[@]}" --out exact2 --steps 6 \
        --deterministic
    # a lower fill, so that documents fit in arrival order too and both runs have the same ones
    expect without_costs 0 'fill .* \| imbalance \([0-9.]{5}\) \| eta' "${mpi[@]}" -n 2 \
        "${train[@]}" --out arrival --steps 6 --work-cost 0:0 --fill 0.7
    expect with_costs 0 "$screen" "${mpi[@]}" -n 2 "${train[@]}" --out costs --steps 6 --fill 0.7
    check_python the_log_agrees_with_packsim packsim.txt <<'PY'
import json, sys
from table import table
def steps(name):
    return [l for l in map(json.loads, open(name + "/log.jsonl")) if "loss" in l and "event" not in l]
rows = table(sys.argv[1])
for name, ranks, column in (("by_work2", 2, 0), ("by_work4", 4, 0), ("exact2", 2, 1)):
    planned = [s["imbalance_planned"] for s in steps(name)]
    assert len(planned) == 6
    mean, worst = rows[ranks][column]
    assert abs(sum(planned) / 6 - mean) < 1e-4 and abs(max(planned) - worst) < 1e-4, (name, planned)
    for s in steps(name):
        assert 1 <= s["imbalance_measured"] <= ranks and 0 <= s["slowest_rank"] < ranks, s
# 6 micro-batches on 4 ranks: two ranks have two, two have one. Noise only adds to the imbalance.
measured = sorted(s["imbalance_measured"] for s in steps("by_work4"))
assert rows[4][0][0] > 1.2 and measured[3] > 1.15, measured
PY
    check_python the_same_documents_without_costs <<'PY'
import json
def losses(name):
    lines = map(json.loads, open(name + "/log.jsonl"))
    return [(l["docs"], l["loss"]) for l in lines if "loss" in l and "event" not in l]
a, b = losses("arrival"), losses("costs")
assert len(a) == len(b) == 6
for x, y in zip(a, b):
    assert x[0] == y[0] and abs(x[1] - y[1]) <= 1e-5 * abs(y[1]), (x, y)
PY
fi

# ---- the paper study: dev/SCALE.md -----------------------------------------------------------------
python3 "$root/dev/scale_sim.py" > tables.txt 2> out.txt || bad scale_sim "exit code $?"
grep '^|' tables.txt > simulated.txt
grep -xFf simulated.txt "$root/dev/SCALE.md" > written.txt
if [ "$(wc -l < simulated.txt)" -gt 20 ] && cmp -s simulated.txt written.txt
then ok tables_of_SCALE_are_up_to_date
else diff simulated.txt written.txt > out.txt; bad tables_of_SCALE_are_up_to_date ''; fi
if [ -z "$no_ranks" ]; then
    expect memory_of_a_rank 0 '^ranks ' "${mpi[@]}" -n 2 "$bin/train_llama" --model demo \
        --train shards --boundary-token 0 --batch-tokens 8192 --dry-run
    check_python memory_is_as_on_paper out.txt <<'PY'
import re, sys
text = open(sys.argv[1]).read()
P = float(re.search(r"([0-9.]+) M parameters", text).group(1)) * 1e6
for name, bytes_each in (("weights", 4), ("gradients", 4), ("optimizer", 8 / 2)):
    found = float(re.search(name + r" +([0-9.]+) MiB", text).group(1)) * 2**20
    assert abs(found / (bytes_each * P) - 1) < 0.02, (name, found, bytes_each * P)  # shards are rounded
PY
fi

# ---- calibrate ------------------------------------------------------------------------------------------
expect calibrate 0 '^--work-cost 10000:[1-9][0-9]*:[0-9]+$' "$bin/calibrate" --model tiny \
    --max-seqlen 1024 --micro-batch-tokens 2048 --runs 3
cp out.txt calibrate.txt
check_python calibrate_finds_the_least_squares calibrate.txt <<'PY'
import re, sys
rows, text = [], open(sys.argv[1]).read()
for line in text.split("not part of the fit")[0].splitlines():
    found = re.match(r"\d+ x \d+ +(\d+) +(\d+) +([0-9.]+) ", line)
    if found:
        rows.append(tuple(map(float, found.groups())))
assert len(rows) >= 10, text
def loss(a, b, c):
    return sum(((a * tokens + b * tiles + c) / ms - 1) ** 2 for tokens, tiles, ms in rows)
numbers = re.search(r"token ([0-9.]+) us, tile ([0-9.]+) us, micro-batch (-?[0-9.]+) ms", text).groups()
a, b, c = (float(x) / k for x, k in zip(numbers, (1e3, 1e3, 1)))
least = loss(a, b, c)       # no neighbour is better
for step in (0.97, 1.03):
    assert least < loss(a * step, b, c) and least < loss(a, b * step, c), (step, least)
cost = int(re.search(r"^--work-cost 10000:(\d+):", text, re.M).group(1))
assert abs(cost - 1e4 * b / a) < 2 + 0.01 * cost, (cost, 1e4 * b / a)
PY
expect the_trainer_takes_the_costs 0 '^cost +10000 of a token, [0-9]+ of an attention tile' "${train[@]}" --out x --dry-run \
    --work-cost "$(sed -n 's/^--work-cost //p' calibrate.txt)"
expect calibrate_without_room 2 'error: --max-seqlen' "$bin/calibrate" --max-seqlen 8192
finish
