#!/usr/bin/env bash
# Runs the test programs given by `make test`, then all shell suites, two at a time, and adds up their
# last lines. Lists skips by reason; reports those that tests/expected_skips.txt does not expect, and
# fails because of them if CI=true.
#
#   JOBS=2               suites at a time
#   SUITE_LIMIT_S=1800   time limit of a suite: 50 times its time on an idle machine
#   SUITES='a b'         run only these instead of all tests/test_*.sh
#
# A suite that ends without its totals as the last line counts as a failure, and so does one that ran
# no case, printed a FAILED line that its totals do not count, or was lost with the job that ran it.
# Its remaining processes are killed and its files removed in any case.
set -u
cd "$(dirname "$0")/.." || exit 1
limit_s=${SUITE_LIMIT_S:-1800} jobs=${JOBS:-2}
passed=0 failed=0 skipped=0 unexpected=0 suite_pid=
top=$(mktemp -d "${TMPDIR:-/tmp}/unpad-run-XXXXXX") || exit 1
# in memory if possible: a busy disk takes seconds for an fsync. Often mounted noexec, so only for the
# C suites.
memory_top=$(mktemp -d /dev/shm/unpad-run-XXXXXX 2> /dev/null) || memory_top=$top/memory
skips=$top/skips totals=$top/totals queue=$top/queue
: > "$skips" > "$totals"

# Processes started by the job whose directory this is, or by all: they inherit UNPAD_TEST_RUN.
processes_left() {
    local files
    files=$(env -u UNPAD_TEST_RUN grep -slzF "UNPAD_TEST_RUN=$1/" /proc/[0-9]*/environ)
    echo "${files//[^0-9$'\n']/}"
}
# Kills them, after a grace period for those that are about to end.
end_processes_left() {
    local left i
    for i in 1 2 3 4 5 6 7 8 9 10; do
        left=$(processes_left "$run_dir")
        [ -n "$left" ] || return 0
        [ "$i" -lt 10 ] && sleep 0.3
    done
    printf '   still running, killed: %s\n' \
        "$(for p in $left; do tr '\0' ' ' < "/proc/$p/cmdline" | head -c 80; done 2> /dev/null)"
    # shellcheck disable=SC2086
    kill -9 $left 2> /dev/null
}
clean_up() {
    local left
    # shellcheck disable=SC2046
    kill $(jobs -p) 2> /dev/null
    wait
    left=$(processes_left "$top")
    # shellcheck disable=SC2086
    [ -z "$left" ] || kill -9 $left 2> /dev/null
    rm -rf "$top" "$memory_top"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# waiting threads sleep: on a busy machine, spinning ones starve the others
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:abort_on_error=0}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}

# "SUITE CASE: REASON" for every skip of the log
skips_of() {
    awk -v suite="$1" '/^ +skipped: / { sub(/^ +skipped: /, ""); why = $0; next }
        /^skipped [^:]+: / { sub(/^skipped /, ""); print suite " " $0; next }
        /^skipped / { print suite " " $2 ": " why }' "$2"
}
run_suite() {
    local suite=$1 start=$SECONDS status last p=0 f=1 s=0
    case $suite in *.sh) export TMPDIR=$run_dir ;; *) export TMPDIR=$memory_dir ;; esac
    printf -- '== %s\n' "$suite"
    timeout -k 10 "$limit_s" "$suite" > "$log" 2>&1 < /dev/null 8>&- &  # and wait: for signals
    suite_pid=$!
    wait "$suite_pid"
    status=$?
    suite_pid=
    end_processes_left
    last=$(tail -n 1 "$log" | tr -d '\0')
    if [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        p=${BASH_REMATCH[1]} f=${BASH_REMATCH[2]} s=${BASH_REMATCH[3]}
        # a crash after the last case; `bad` in a subshell
        if [ $((p + f + s)) -eq 0 ] || [ "$status" -ne 0 ] || grep -aq '^FAILED ' "$log"; then
            if [ "$f" -eq 0 ]; then f=1; fi
        fi
    else
        last=
    fi
    if [ "$f" -gt 0 ]; then cat "$log"; fi
    if [ $((SECONDS - start)) -ge "$limit_s" ] && [ "$status" -ne 0 ]; then
        printf '   TIMED OUT: %s, after %d s; it had last printed: %s\n' "$suite" "$limit_s" \
            "$(tail -n 1 "$log")"
    elif [ -z "$last" ]; then
        printf '   NO TOTALS: %s ended with status %d\n' "$suite" "$status"
    fi
    printf '   %d passed, %d failed, %d skipped in %d s\n' "$p" "$f" "$s" $((SECONDS - start))
    skips_of "$(basename "$suite")" "$log" >> "$skips"
    echo "$p $f $s $suite" >> "$totals"
    # files of killed cases
    rm -rf "${memory_dir:?}"/* "$run_dir"/unpad* "$run_dir"/tmp.* "$run_dir"/ompi.*
}
# Takes suites from the queue until it is empty. What a suite prints stays together.
run_job() {
    local suite
    run_dir=$top/job$1 memory_dir=$memory_top/job$1 log=$top/job$1/log suite_pid=
    mkdir -p "$run_dir" "$memory_dir"
    export UNPAD_TEST_RUN=$run_dir/
    # MPI's shared memory too (the name has changed with Open MPI 5)
    export OMPI_MCA_btl_vader_backing_directory=$memory_dir
    export OMPI_MCA_btl_sm_backing_directory=$memory_dir
    trap - EXIT INT
    trap '[ -z "$suite_pid" ] || kill -9 "$suite_pid"; exit 143' TERM
    while flock 8 && read -r suite < "$queue"; do
        sed -i 1d "$queue"
        flock -u 8
        run_suite "$suite" > "$run_dir/printed"
        flock 8
        cat "$run_dir/printed"
        flock -u 8
    done
}
# Every reason once, with the number of cases and the names of the first three
list_skips() {
    [ -s "$skips" ] || return 0
    echo '== skipped'
    sed 's/^\([^:]*\): \(.*\)/\2\t\1/' "$skips" | sort | awk -F '\t' '
        { n[$1]++; if (n[$1] <= 3) names[$1] = names[$1] (n[$1] > 1 ? ", " : "") $2 }
        END { for (why in n)
                  printf("   %3d  %s (%s%s)\n", n[why], why, names[why],
                         (n[why] > 3) ? ", ..." : "") }' | sort -k 2
}
lacks() { ! command -v "$1"; }
lacks_python() { ! python3 -c "import $1"; }
# The patterns of tests/expected_skips.txt whose condition holds on this machine
expected_skips() {
    local condition pattern
    PATH=$PATH:/usr/local/cuda/bin
    while IFS=$'\t' read -r condition pattern; do
        [[ $condition == '#'* || -z $condition ]] && continue
        if eval "$condition" > /dev/null 2>&1 < /dev/null; then echo "$pattern"; fi
    done < tests/expected_skips.txt
}
list_unexpected_skips() {
    [ -s "$skips" ] || return 0
    expected_skips > "$top/expected"
    unexpected=$(grep -cvE -f "$top/expected" "$skips")
    grep -vE -f "$top/expected" "$skips" | sed 's/^/unexpected skip: /'
}

# shellcheck disable=SC2086
printf '%s\n' "$@" ${SUITES-tests/test_*.sh} > "$queue"
sort "$queue" > "$top/suites"
for ((job = 0; job < jobs; job++)); do run_job "$job" 8> "$top/lock" & done
wait
while read -r p f s suite; do
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done < "$totals"
while read -r suite; do
    printf '== %s\n   LOST: the job that ran it died\n' "$suite"
    failed=$((failed + 1))
done < <(cut -d ' ' -f 4- "$totals" | sort | comm -23 "$top/suites" -)
list_skips
list_unexpected_skips
echo "$passed passed, $failed failed, $skipped skipped"
[ "$unexpected" -eq 0 ] || [ "${CI:-}" != true ] || failed=$((failed + 1))
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
