# Sourced by the shell suites: counting, checks, the last line that tests/run.sh reads, and a tiny
# model with text to train on. The suite has set $root, the repository.
passed=0 failed=0 skipped=0
# One command may take this long before it counts as hung: far more than it needs on an idle
# machine, because a busy one must not fail.
limit_s=${LIMIT_S:-600}

ok() { passed=$((passed + 1)) && echo "ok      $1"; }
# What a failed case leaves to look at; a suite may define another.
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
skip_all() { skip "$@" && finish; }

# scratch NAME: enters a directory of its own, $work, with a space in its path; removed at exit, and
# with it what MPI leaves of ranks that were killed
scratch() {
    work=$(mktemp -d "${TMPDIR:-/tmp}/unpad $1 XXXXXX")
    trap 'rm -rf "$work"' EXIT
    cd "$work" || exit 1
    export OMPI_MCA_btl_vader_backing_directory=${OMPI_MCA_btl_vader_backing_directory:-$work}
    export OMPI_MCA_btl_sm_backing_directory=${OMPI_MCA_btl_sm_backing_directory:-$work}
}

# within COMMAND...: runs it for at most $limit_s seconds (shell functions and builtins: as long as
# they take), its output in out.txt
within() {
    local limit=(timeout -k 10 "$limit_s")
    [ "$(type -t "$1")" = file ] || limit=()
    "${limit[@]}" "$@" > "$work/out.txt" 2>&1 < /dev/null
}
exit_code() { if [ "$1" -eq 124 ]; then echo "timed out after $limit_s s"; else echo "exit code $1"; fi; }

# check NAME COMMAND...: the command succeeds
check() {
    local name=$1 status
    shift
    within "$@"
    status=$?
    if [ $status -eq 0 ]; then ok "$name"; else bad "$name" "$(exit_code $status)"; fi
}

# outcome NAME EXIT_CODE PATTERN COMMAND...: the exit code, and a line with the pattern
outcome() {
    local name=$1 why
    shift
    why=$(mismatch "$@")
    if [ -z "$why" ]; then ok "$name"; else bad "$name" "$why"; fi
}
mismatch() {
    local code=$1 pattern=$2 status
    shift 2
    within "$@"
    status=$?
    if [ $status -ne "$code" ]; then echo "$(exit_code $status), expected $code"
    elif ! grep -aqE -e "$pattern" "$work/out.txt"; then echo "no line matches $pattern"; fi
}
# expect NAME EXIT_CODE PATTERN COMMAND...: outcome, and of a failure exactly one error: line and one
# hint: line, whatever the number of ranks
expect() {
    local name=$1 why
    shift
    why=$(mismatch "$@")
    if [ -z "$why" ] && [ "$1" -ge 2 ] && [ "$1" -ne 75 ] &&
        ! [ "$(grep -ac 'error: ' "$work/out.txt") $(grep -ac 'hint: ' "$work/out.txt")" = '1 1' ]; then
        why='expected one error: line and one hint: line'
    fi
    if [ -z "$why" ]; then ok "$name"; else bad "$name" "$why"; fi
}

# check_python NAME ARGUMENTS...: the script on standard input raises nothing
check_python() {
    local name=$1
    shift
    if python3 - "$@" > "$work/out.txt" 2>&1; then ok "$name"; else bad "$name" ''; fi
}

same() {        # same NAME FILE FILE
    if cmp -s "$2" "$3"; then ok "$1"; else bad "$1" "$2 and $3 differ"; fi
}
# differ NAME FILE FILE: both are there, and not the same
differ() {
    cmp -s "$2" "$3"
    case $? in
        0) bad "$1" "$2 and $3 have the same bytes" ;;
        1) ok "$1" ;;
        *) bad "$1" "$2 or $3 cannot be read" ;;
    esac
}
# lacks NAME PATTERN FILE...: every file has lines, and none of them matches
lacks() {
    local name=$1 pattern=$2 f
    shift 2
    for f in "$@"; do [ -s "$f" ] || { bad "$name" "$f is missing or empty" && return; }; done
    if grep -aqE -e "$pattern" "$@"; then bad "$name" "a line matches $pattern"; else ok "$name"; fi
}
# same_state NAME CHECKPOINT CHECKPOINT: weights and optimizer state
same_state() {
    local f
    for f in model.safetensors optimizer.safetensors; do
        cmp "$2/$f" "$3/$f" > "$work/out.txt" 2>&1 || { bad "$1" "$f differs" && return; }
    done
    ok "$1"
}

# pids of processes whose command line holds $1
pids_of() {
    local p
    for p in /proc/[0-9]*; do
        tr '\0' ' ' 2> /dev/null < "$p/cmdline" | grep -qF -- "$1" && echo "${p#/proc/}"
    done
}

# await_line PID PATTERN FILE: until FILE has such a line; false when process PID is gone before
await_line() {
    until grep -aqE -e "$2" "$3" 2> /dev/null; do
        kill -0 "$1" 2> /dev/null || { grep -aqE -e "$2" "$3" 2> /dev/null; return; }
        sleep 0.02
    done
}
# await_gone TEXT: until no process's command line holds TEXT; false after $limit_s seconds
await_gone() {
    local start=$SECONDS
    while [ -n "$(pids_of "$1")" ]; do
        [ $((SECONDS - start)) -lt "$limit_s" ] || return 1
        sleep 0.1
    done
}

# tiny_model DIR HIDDEN_SIZE INTERMEDIATE_SIZE HEAD_DIM: config.json of two layers, three heads, one
# kv head, for the byte tokenizer
tiny_model() {
    mkdir "$1"
    cat > "$1/config.json" << JSON
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
 "vocab_size": 264, "hidden_size": $2, "intermediate_size": $3, "num_hidden_layers": 2,
 "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": $4,
 "max_position_embeddings": 2048, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
 "tie_word_embeddings": true, "initializer_range": 0.05, "bos_token_id": 256,
 "eos_token_id": 257}
JSON
}

# uneven_texts DIR MOST_LINES: 60 documents of 1 to MOST_LINES lines
uneven_texts() {
    local i
    mkdir "$1"
    for i in $(seq 1 60); do
        for _ in $(seq 1 $((i * 7 % $2 + 1))); do echo "line $i of $((i * i))"; done > "$1/doc $i.txt"
    done
}

# index_without_checksums FILE.idx...: version 1 of the format, where nothing watches over the tokens
index_without_checksums() {
    python3 - "$root" "$@" << 'PY'
import struct, sys
sys.path.insert(0, sys.argv[1] + "/data")
from prepare import crc32c
for path in sys.argv[2:]:
    data = open(path, "rb").read()
    count = struct.unpack_from("<Q", data, 16)[0]
    body = data[:8] + struct.pack("<I", 1) + data[12:32] + data[40:40 + 8 * count]
    open(path, "wb").write(body + struct.pack("<I", crc32c(body)))
PY
}
