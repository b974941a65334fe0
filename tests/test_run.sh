#!/usr/bin/env bash
# tests/run.sh itself: a suite that dies, lies or disappears makes the whole run fail, and so does,
# under CI=true, a skip whose reason does not hold.
. "$(dirname "$0")/lib.sh"
run() { JOBS=2 "$root/tests/run.sh" "${@/#/$work/}"; }
suite() {       # suite NAME COMMANDS
    printf '#!/usr/bin/env bash\n%s\n' "$2" > "$1" && chmod +x "$1"
}
good='echo "1 passed, 0 failed, 0 skipped"'
suite good "$good"
suite fails 'echo "1 passed, 1 failed, 0 skipped"'
suite kills_itself 'kill -9 $$'
suite has_no_totals 'echo "ok      x"'
suite has_totals_too_early "$good; echo 'ok      x'"
suite crashes_after_its_totals "$good; exit 9"
suite has_no_case 'echo "0 passed, 0 failed, 0 skipped"'
suite fails_in_a_subshell ". '$root/tests/lib.sh'; (bad x y); ok y; finish"
expect good_run 0 '^2 passed, 0 failed, 0 skipped$' run good good
outcome bad_run 1 '^4 passed, 7 failed, 0 skipped$' run good fails kills_itself has_no_totals \
    has_totals_too_early crashes_after_its_totals has_no_case fails_in_a_subshell
has has_no_totals 'has_no_totals 0 passed, 1 FAILED, .* NO TOTALS: it ended with status 0$' out.txt
suite hangs "setsid sleep 100 & sleep 100"
outcome hung_suite 1 '/hangs .* TIMED OUT after 1 s' env SUITE_LIMIT_S=1 "$root/tests/run.sh" "$work/hangs"
has what_it_left_is_killed 'still running, killed: [0-9]+' out.txt
# the job that runs a suite is the parent of its `timeout`
for signal in KILL TERM; do
    suite "job_gets_$signal" "kill -$signal \$(awk '/^PPid/ { print \$2 }' /proc/\$PPID/status); sleep 1; $good"
    outcome "job_gets_$signal" 1 ' LOST: ' run good "job_gets_$signal" good
    has "job_gets_${signal}_totals" '^2 passed, 1 failed, 0 skipped$' out.txt
done
# ---- skips ---------------------------------------------------------------------------------------
# skip_of REASON CI: a run whose suite test_house.sh skips a case
skip_of() {
    suite test_house.sh "echo 'skipped the_format_is_clang_formats: $1'; echo '0 passed, 0 failed, 1 skipped'"
    CI=$2 run good test_house.sh
}
clang_format() {        # clang_format VERSION: another one
    mkdir -p bin && suite bin/clang-format "echo clang-format version $1.0" && PATH=$work/bin:$PATH
}
expect skips_are_listed 0 '^unexpected skip: test_house.sh .*: because$' skip_of because false
outcome unexpected_skip_in_ci 1 '^unexpected skip: test_house.sh .*: because$' skip_of because true
clang_format 13
expect reason_that_holds 0 '^1 passed, 0 failed, 1 skipped$' skip_of 'clang-format 14 is not installed' true
clang_format 14
outcome reason_that_does_not 1 '^unexpected skip: ' skip_of 'clang-format 14 is not installed' true
finish
