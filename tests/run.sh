#!/usr/bin/env bash
# Runs the suites given by `make test` or `make test-dev`, six at a time, the slow ones first, and adds
# up their last lines. Prints a line a suite, and every ten seconds which ones are running. Lists skips
# by reason; those that tests/expected_skips.txt does not expect fail the run if CI=true.
#
#   JOBS=6               suites at a time: those of several ranks wait more than they compute
#   SUITE_LIMIT_S=1800   time limit of a suite: 50 times its time on an idle machine
#
# A suite that ends without its totals as the last line counts as a failure, and so does one that ran
# no case, printed a FAILED line that its totals do not count, or vanished. What it leaves running is
# killed, and its files are removed.
set -u
cd "$(dirname "$0")/.." || exit 1
slow='gpu_day ranks ops export cuda_ranks ranks_failure texts cli llama cuda_modes cuda_train ptx emu tensor_cores
    convert chat faults out_dir lora prepare recipes power benchmark data_cli plan plot generate run'
limit_s=${SUITE_LIMIT_S:-1800} jobs=${JOBS:-6}
passed=0 failed=0 skipped=0 done=0 said_s=0
top=$(mktemp -d "${TMPDIR:-/tmp}/unpad-run-XXXXXX") || exit 1
# in memory if possible: a busy disk takes seconds for an fsync. Often mounted noexec, so only for the
# C suites.
memory=$(mktemp -d /dev/shm/unpad-run-XXXXXX 2> /dev/null) || memory=$top
: > "$top/skips"
# waiting threads sleep: on a busy machine, spinning ones starve the others
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1    # for suites that do not choose
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:abort_on_error=0}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}

# Processes that a suite has left running inherit UNPAD_TEST_RUN; an empty $1 means of any suite.
end_processes_left() {
    local left i files
    for i in 1 2 3 4 5 6 7 8 9 10; do       # a grace period for those that are about to end
        files=$(env -u UNPAD_TEST_RUN grep -slzF "UNPAD_TEST_RUN=$top/$1" /proc/[0-9]*/environ)
        left=${files//[^0-9$'\n']/}
        [ -n "$left" ] || return 0
        [ "$i" -lt 10 ] && sleep 0.3
    done
    # shellcheck disable=SC2086
    { echo "   still running, killed:" $left; kill -9 $left 2> /dev/null; }
}
clean_up() {
    # shellcheck disable=SC2046
    kill -9 $(jobs -p) 2> /dev/null
    end_processes_left '' > "$top/left"
    rm -rf "$top" "$memory"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# start N: suite N in the background; its status and seconds come into the file `status`, at once
start() {
    local suite=${suites[$1]} dir=$top/$1/ files=$memory/$1.files began=$SECONDS
    mkdir -p "$dir" "$files"
    case $suite in *.sh) files=$dir ;; esac
    printf '%s' "$began" > "$dir/began"
    { UNPAD_TEST_RUN=$dir TMPDIR=$files OMPI_MCA_btl_vader_backing_directory=$memory \
          OMPI_MCA_btl_sm_backing_directory=$memory timeout -k 10 "$limit_s" "$suite" > "$dir/log" 2>&1 < /dev/null
      echo "$? $((SECONDS - began))" > "$dir/status.new"
      mv "$dir/status.new" "$dir/status"; } &
    pids[$1]=$!
}
# report N: the line of a suite that has ended, and its log if it failed
report() {
    local suite=${suites[$1]} dir=$top/$1/ status='' seconds=0 why='' last p=0 f=1 s=0
    [ ! -e "$dir/status" ] || read -r status seconds < "$dir/status"
    end_processes_left "$1/"
    last=$(tail -n 1 "$dir/log" | tr -d '\0')
    if [ -z "$status" ]; then why='LOST: the job that ran it died'
    elif [ "$seconds" -ge "$limit_s" ] && [ "$status" -ne 0 ]; then
        why="TIMED OUT after $limit_s s; it had last printed: $last"
    elif [[ $last =~ ^([0-9]+)\ passed,\ ([0-9]+)\ failed,\ ([0-9]+)\ skipped$ ]]; then
        p=${BASH_REMATCH[1]} f=${BASH_REMATCH[2]} s=${BASH_REMATCH[3]}
        # a crash after the last case; `bad` in a subshell
        if [ $((p + f + s)) -eq 0 ] || [ "$status" -ne 0 ] || grep -aq '^FAILED ' "$dir/log"; then
            [ "$f" -gt 0 ] || f=1
        fi
    else why="NO TOTALS: it ended with status $status"
    fi
    done=$((done + 1)) passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    [ "$f" -eq 0 ] || cat "$dir/log"
    printf '[%d/%d] %s %d passed%s%s %d s%s\n' $done ${#suites[@]} "${suite#build/}" "$p" \
        "$([ "$f" -eq 0 ] || echo ", $f FAILED,")" "$([ "$s" -eq 0 ] || echo ", $s skipped,")" \
        "$seconds" "${why:+ $why}"
    # "SUITE CASE: REASON" for every skip
    awk -v suite="$(basename "$suite")" '/^ +skipped: / { sub(/^ +skipped: /, ""); why = $0; next }
        /^skipped [^:]+: / { sub(/^skipped /, ""); print suite " " $0; next }
        /^skipped / { print suite " " $2 ": " why }' "$dir/log" >> "$top/skips"
    rm -rf "$dir" "$memory/$1.files"
}
say_who_runs() {
    local n
    [ $((SECONDS - said_s)) -ge 10 ] || return
    printf '        running:'
    for n in "${!pids[@]}"; do
        printf ' %s %d s' "$(basename "${suites[$n]}")" $((SECONDS - $(cat "$top/$n/began")))
    done
    echo
    said_s=$SECONDS
}

# shellcheck disable=SC2317      # used by the conditions of expected_skips.txt
lacks() { ! command -v "$1"; }
# shellcheck disable=SC2317
lacks_python() { ! python3 -c "import $1"; }
# The patterns of tests/expected_skips.txt that match a skip, and whose condition holds on this machine
expected_skips() {
    local condition pattern
    PATH=$PATH:/usr/local/cuda/bin
    while IFS=$'\t' read -r condition pattern; do
        [[ $condition == '#'* || -z $condition ]] && continue
        grep -qE -e "$pattern" "$top/skips" || continue
        if eval "$condition" > /dev/null 2>&1 < /dev/null; then echo "$pattern"; fi
    done < tests/expected_skips.txt
}

pids=() next=0
mapfile -t suites < <(printf '%s\n' "$@" | awk -v slow="$slow" '
    BEGIN { for (n = split(slow, names); n; n--) at[names[n]] = n }
    { name = $0; gsub(/.*test_|\.sh$/, "", name); print (name in at ? at[name] : 99) "\t" $0 }' |
    sort -ns | cut -f 2)
while [ $next -lt ${#suites[@]} ] || [ ${#pids[@]} -gt 0 ]; do
    while [ ${#pids[@]} -lt "$jobs" ] && [ $next -lt ${#suites[@]} ]; do
        start $next
        next=$((next + 1))
    done
    for n in "${!pids[@]}"; do
        if [ -e "$top/$n/status" ] || ! kill -0 "${pids[$n]}" 2> /dev/null; then
            report "$n"
            unset "pids[$n]"
            said_s=$SECONDS
        fi
    done
    say_who_runs
    sleep 0.1
done

# every reason once, with the number of cases and the names of the first three
sed 's/^\([^:]*\): \(.*\)/\2\t\1/' "$top/skips" | sort | awk -F '\t' '
    { n[$1]++; if (n[$1] <= 3) names[$1] = names[$1] (n[$1] > 1 ? ", " : "") $2 }
    END { for (why in n) printf("skipped %3d  %s (%s%s)\n", n[why], why, names[why],
                                (n[why] > 3) ? ", ..." : "") }' | sort -k 3
unexpected=
if [ -s "$top/skips" ]; then
    expected_skips > "$top/expected"
    unexpected=$(grep -vE -f "$top/expected" "$top/skips" | sed 's/^/unexpected skip: /')
fi
[ -z "$unexpected" ] || echo "$unexpected"
echo "$passed passed, $failed failed, $skipped skipped"
[ "${CI:-}" != true ] || [ -z "$unexpected" ] || exit 1
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
