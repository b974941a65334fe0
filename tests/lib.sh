# Sourced first by every shell suite: environment, counters, checks, the last line that tests/run.sh
# reads, and a tiny model with text to train on. Sets $root, the repository, and enters $work.
set -u
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# the program with sanitizers, or another one; without them, for several ranks: they report MPI's leaks
train=${TRAIN:-$root/build/asan/train_llama} release=$root/build/cpu/train_llama
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
# several ranks on one machine, more than it has cores
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_hwloc_base_binding_policy=none
mpi=(mpirun --allow-run-as-root --oversubscribe)
passed=0 failed=0 skipped=0
# A command that takes longer counts as hung. Generous, so that a busy machine does not fail.
limit_s=${LIMIT_S:-600}

ok() { passed=$((passed + 1)) && echo "ok      $1"; }
# Printed after a failed case; a suite may redefine it.
evidence() {
    grep -avE '^ +(0x|=>|Stack|Global|Poison|Array|Intra|ASan|Left|Right|Shadow|Heap|Freed|Addr)' \
        "$work/out.txt" | tail -n 12
}
bad() {         # bad NAME WHY
    failed=$((failed + 1))
    echo "FAILED  $1: ${2:-}"
    evidence "$1" 2> /dev/null
    return 0
}
skip() { skipped=$((skipped + 1)) && echo "skipped $1: $2"; }
finish() {
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ]
    exit
}
# with_...: can what follows run? If not, it is skipped under this name. A chroot may have no /dev/pts.
with_terminals() { python3 -S -c 'import os; os.openpty()' 2> /dev/null || ! skip "$1" 'no pseudo-terminals here'; }
with_package() { python3 -c "import $2" 2> /dev/null && plain= || ! skip "$1" "the Python package $2 is not installed"; }
with_program() { command -v "$2" > /dev/null || ! skip "$1" "$2 is not installed"; }
with_ranks() {          # with_ranks NAME PROGRAM: as several ranks under mpirun
    local why=
    if ! command -v mpirun > /dev/null; then why='mpirun is not installed'
    elif [ ! -x "$2" ]; then why="$2 is not built"
    elif ! ldd "$2" | grep -q libmpi; then why="$2 is built without MPI"; fi
    [ -z "$why" ] || ! skip "$1" "$why"
}

# $work, a new directory with a space in its path. Removed at exit, with the shared memory files that
# killed MPI ranks leave behind, after the end of $job (below) and of processes with a path in it.
work=$(mktemp -d "${TMPDIR:-/tmp}/unpad $(basename "$0" .sh) XXXXXX")
trap 'kill -9 ${job:-} $(pids_of "$work/") 2> /dev/null; rm -rf "$work"' EXIT
cd "$work" || exit 1
export OMPI_MCA_btl_vader_backing_directory=${OMPI_MCA_btl_vader_backing_directory:-$work}
export OMPI_MCA_btl_sm_backing_directory=${OMPI_MCA_btl_sm_backing_directory:-$work}

# within COMMAND...: runs it with its output in out.txt (which the command may still read), for at
# most $limit_s seconds (shell functions and builtins: without a limit)
within() {
    local limit=(timeout -k 10 "$limit_s") status
    [ "$(type -t "$1")" = file ] || limit=()
    "${limit[@]}" "$@" > "$work/.out" 2>&1 < /dev/null
    status=$?
    mv "$work/.out" "$work/out.txt"
    return $status
}
# beside NAME COMMAND...: in the background, with at most $most - 1 others. After `wait`, ended NAME gives
# its output (NAME.txt) and its exit code (NAME.code).
most=7
beside() {
    while [ "$(jobs -pr | wc -l)" -ge $most ]; do wait -n; done
    { timeout -k 10 "$limit_s" "${@:2}" < /dev/null > "$work/$1.txt" 2>&1; echo $? > "$work/$1.code"; } &
}
ended() { cat "$work/$1.txt" && return "$(cat "$work/$1.code")"; }
exit_code() { if [ "$1" -eq 124 ]; then echo "timed out after $limit_s s"; else echo "exit code $1"; fi; }

judge() { if [ -z "$2" ]; then ok "$1"; else bad "$1" "$2"; fi; }    # judge NAME WHY: right without a WHY
# check NAME COMMAND...: the command succeeds
check() { if within "${@:2}"; then ok "$1"; else bad "$1" "$(exit_code $?)"; fi; }
# outcome NAME EXIT_CODE PATTERN COMMAND...: it exits with this code, and a line matches
outcome() { judge "$1" "$(mismatch "${@:2}")"; }
mismatch() {
    local code=$1 pattern=$2 status
    within "${@:3}"
    status=$?
    if [ $status -ne "$code" ]; then echo "$(exit_code $status), expected $code"
    elif ! grep -aqE -e "$pattern" "$work/out.txt"; then echo "no line matches $pattern"; fi
}
# expect NAME EXIT_CODE PATTERN COMMAND...: the same, and a failure prints exactly one error: line
# and one hint: line, for any number of ranks
expect() {
    local why
    why=$(mismatch "${@:2}")
    if [ -z "$why" ] && [[ $2 != @(0|1|75|137) ]] &&
        ! [ "$(grep -ac 'error: ' "$work/out.txt") $(grep -ac 'hint: ' "$work/out.txt")" = '1 1' ]; then
        why='expected one error: line and one hint: line'
    fi
    judge "$1" "$why"
}

# said NAME ...: expect, with its output kept in said.txt for the checks that follow
said() { expect "$@" && cp out.txt said.txt; }

# python ARGUMENTS...: the script on standard input, with the imports that most of them need. Without the
# packages of the site, which take longer to find than most scripts run; with_package brings them in.
plain=-S
python() {
    { echo 'import glob, html, json, os, re, shards, struct, sys; from runs import *' && cat; } |
        PYTHONPATH=$root/tests${PYTHONPATH:+:$PYTHONPATH} python3 $plain - "$@"
}
# check_python NAME ARGUMENTS...: it succeeds; it may read out.txt
check_python() {
    if python "${@:2}" > "$work/.out" 2>&1; then ok "$1" && return; fi
    mv "$work/.out" "$work/out.txt"
    bad "$1" 'the script failed'
}

# edit FILE CODE: a JSON file, j for this Python
edit() { python "$@" <<< 'j = json.load(open(sys.argv[1])); exec(sys.argv[2]); json.dump(j, open(sys.argv[1], "w"))'; }
same() { judge "$1" "$(cmp "$2" "$3" 2>&1)"; }  # same NAME FILE FILE
# differ NAME FILE FILE: both exist and are not the same
differ() { judge "$1" "$(cmp -s "$2" "$3"; [ $? -eq 1 ] || echo "$2 and $3 are the same, or cannot be read")"; }
# has NAME PATTERN FILE: a line matches
has() {         # the file becomes out.txt, for the evidence
    judge "$1" "$(grep -aqE -e "$2" "$3" || { echo "no line of $3 matches $2" && cp "$3" "$work/out.txt" 2> /dev/null; })"
}
# lacks NAME PATTERN FILE...: no file is empty, and no line matches
lacks() {
    judge "$1" "$(for f in "${@:3}"; do [ -s "$f" ] || echo "$f is missing or empty"; done
        grep -anE -e "$2" "${@:3}" 2> /dev/null | head -n 9)"
}
# same_files NAME DIR DIR: of two runs or checkpoints, but for the log, and how and where they were started
same_files() {
    judge "$1" "$(diff -r -x manifest.json -x log.jsonl -x .lock -I '"log_bytes"' "$2" "$3" 2>&1)"
}
# same_state NAME CHECKPOINT CHECKPOINT: weights, or adapters, and optimizer state
same_state() {
    judge "$1" "$(for f in "$2"/*model.safetensors "$2/optimizer.safetensors"; do cmp "$f" "$3/${f##*/}" 2>&1; done)"
}

# same_losses NAME LOSS_BOUND NORM_BOUND LINES RUN...: their logs agree (tests/runs.py)
same_losses() { check "$1" python3 -S "$root/tests/runs.py" "${@:2}"; }

# pids of processes with an argument that contains $1
pids_of() { grep -slzF -f - /proc/[0-9]*/cmdline <<< "$1" | tr -dc '0-9\n'; }
# await_line PID PATTERN FILE: waits until a line of FILE matches; false if process PID ends first
await_line() {
    until grep -aqE -e "$2" "$3" 2> /dev/null; do
        kill -0 "$1" 2> /dev/null || { grep -aqE -e "$2" "$3" 2> /dev/null; return; }
        sleep 0.02
    done
}
# start_long COMMAND...: in the background as $job, until its first step; its output in long.txt
start_long() {
    rm -f long.txt
    "$@" > long.txt 2>&1 &
    job=$!
    await_line $job '^(step|layout)' long.txt || bad "$*" 'ended before its first step'
}
# end_long SIGNAL...: it gets them all at once, perhaps in two threads. Sets $status; its output in out.txt
end_long() {
    local signal
    for signal in STOP "$@" CONT; do kill "-$signal" $job; done
    wait $job
    status=$?
    job=
    cp long.txt out.txt
}
# await_gone TEXT: waits until no argument contains TEXT; false after $limit_s seconds
await_gone() {
    local end=$((SECONDS + limit_s))
    until [ -z "$(pids_of "$1")" ]; do sleep 0.1 && [ $SECONDS -lt $end ] || return; done
}

ranks() { within "${mpi[@]}" -n "$@" || bad "${*: -4}" "$(exit_code $?)"; }    # ranks N COMMAND...

# prepare TEXTS --out DIR [--val-frac SHARE]: shards in bytes of a file or the files of a directory, that
# share of them, chosen by content, for validation
prepare() {
    rm -rf "$work/.texts" "$work/.shards" "$3" && mkdir "$work/.texts"
    python "$1" "${5:-0.01}" "$work/.texts" > "$work/out.txt" 2>&1 << 'PY' &&
import hashlib
source, share, out = sys.argv[1:]
train, val = (open("%s/%s.jsonl" % (out, split), "w") for split in ("train", "val"))
for path in sorted(glob.glob(source + "/*")) or [source]:
    text = open(path, "rb").read()
    chosen = val if int(hashlib.sha256(text).hexdigest()[:16], 16) < float(share) * 2**64 else train
    print(json.dumps({"text": text.decode()}), file=chosen)
PY
        "$release" --train "$work/.texts" --out "$work/.shards" --steps 0 --val-every 0 \
            --num-samples 0 >> "$work/out.txt" 2>&1 &&
        mv "$work/.shards/tokens" "$3" || bad "prepare $*" "exit code $?"
}

# tiny_model DIR HIDDEN_SIZE INTERMEDIATE_SIZE HEAD_DIM [VOCAB_SIZE]: config.json of two layers, three
# heads, one kv head, for the byte tokenizer
tiny_model() {
    mkdir "$1"
    cat > "$1/config.json" << JSON
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
 "vocab_size": ${5:-264}, "hidden_size": $2, "intermediate_size": $3, "num_hidden_layers": 2,
 "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": $4,
 "max_position_embeddings": 2048, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
 "tie_word_embeddings": true, "initializer_range": 0.05, "bos_token_id": 256,
 "eos_token_id": 257}
JSON
}

# corpus MOST_LINES [SHARE]: the directory `text`, and its shards in `corpus`
corpus() { uneven_texts text "$1" && prepare text --out corpus --val-frac "${2:-0.1}"; }
# uneven_texts DIR MOST_LINES: 60 documents of 1 to MOST_LINES lines
uneven_texts() {
    local i
    mkdir "$1"
    for i in $(seq 1 60); do
        for _ in $(seq 1 $((i * 7 % $2 + 1))); do echo "line $i of $((i * i))"; done > "$1/doc $i.txt"
    done
}

shards() { python3 -S "$root/tests/shards.py" "$@"; }      # mask, seal, flip
# in_terminal COLUMNS STEPS COMMAND...: see tests/terminal.py
in_terminal() { timeout -k 10 "$limit_s" python3 -S "$root/tests/terminal.py" "$@"; }
