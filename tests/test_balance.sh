#!/usr/bin/env bash
# Load balance across ranks: predicted and measured, in the trainer's log.
. "$(dirname "$0")/lib.sh"
bin=${BIN:-$root/build/cpu}
"$root/dev/bench.py" --write shards --dist r65 --tokens 40000 --cap 2048 > out.txt ||
    bad shard 'not made'
tiny_model tiny 24 40 8
plan=(--train shards --boundary-token 0 --max-seqlen 512 --micro-batch-tokens 1024 --batch-tokens 6144)
train=("$bin/train_llama" --model tiny --from-scratch "${plan[@]}" --val-every 0 --num-samples 0
       --schedule constant --lr 1e-3 --keep 0)
expect train_on_one_rank 0 '^done' "${train[@]}" --out alone --steps 6
lacks no_imbalance_on_one_rank imbalance alone/log.jsonl out.txt
if with_ranks ranks "$bin/train_llama"; then
    screen='fill .* \| imbalance [0-9.]{5} \([0-9.]{5}\) \| eta'
    expect two_ranks 0 "$screen" "${mpi[@]}" -n 2 "${train[@]}" --out by_work2 --steps 6
    expect four_ranks 0 "$screen" "${mpi[@]}" -n 4 "${train[@]}" --out by_work4 --steps 6
    expect two_ranks_deterministic 0 "$screen" "${mpi[@]}" -n 2 "${train[@]}" --out exact2 --steps 6 \
        --deterministic
    check_python the_log_has_the_balance <<'PY'
for name, ranks in (("by_work2", 2), ("by_work4", 4), ("exact2", 2)):
    assert len(steps(name)) == 6
    assert all(1 <= s["imbalance_planned"] <= ranks for s in steps(name)), steps(name)
    assert "imbalance_measured" not in steps(name)[0]       # it is that of the step before
    for s in steps(name)[1:]:
        assert 1 <= s["imbalance_measured"] < ranks and 0 <= s["slowest_rank"] < ranks, s
# 6 micro-batches on 4 ranks: two ranks have two, two have one. Of the five steps that are measured,
# a machine that is busy may make one or another look even.
for name, which in ("planned", 2), ("measured", 4):
    assert sorted(s["imbalance_" + name] for s in steps("by_work4")[1:])[which] > 1.15, steps("by_work4")
PY
    # as dev/SCALE.md has it
    expect memory_of_a_rank 0 '^ranks ' "${mpi[@]}" -n 2 "$bin/train_llama" --model demo \
        --train shards --boundary-token 0 --batch-tokens 8192 --dry-run
    check_python memory_is_as_on_paper <<'PY'
text = open("out.txt").read()
P = float(re.search(r"([0-9.]+) M parameters", text).group(1)) * 1e6
for name, bytes_each in (("weights", 4), ("gradients", 4), ("optimizer", 8 / 2)):
    found = float(re.search(name + r" +([0-9.]+) MiB", text).group(1)) * 2**20
    assert abs(found / (bytes_each * P) - 1) < 0.02, (name, found, bytes_each * P)  # shards are rounded
PY
fi
finish
