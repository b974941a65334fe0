#!/usr/bin/env bash
# Kernels with planted bugs (dev/emu/bugs) under the emulator: the expected modes find each bug and the
# others do not, and the kernels without a bug pass everywhere.
. "$(dirname "$0")/lib.sh"
cd "$root" || exit 1
unset $(compgen -v EMU_)       # each run sets its own
out=$work/out.txt broken=$work/broken.txt report=$work/report.txt no_tsan=
: > "$broken"
within make -s BACKEND=cpu build/emu/bugs || { bad build 'make build/emu/bugs' && finish; }
within make -s BACKEND=cpu build/tsan/bugs || no_tsan='no compiler here links -fsanitize=thread'
evidence() { :; }
# ThreadSanitizer needs address space randomisation off
run="$(command -v setarch > /dev/null && echo "setarch -R") timeout 60"
$run true 2> /dev/null || run="timeout $limit_s"
# seen CASE [VARIABLE=VALUE...]: the comparison or the emulator reports an error in CASE; the first one stays
# in $report. A run that times out or ends without a report has found nothing, and fails the suite.
seen() {
    env EMU_TIMEOUT="$limit_s" "${@:2}" build/emu/bugs "$1" > "$out" 2>&1
    case $? in
        0) return 1 ;;
        1) grep -q ': WRONG$' "$out" ;;
        97 | 98) grep -qE '^EMU (ERROR|DEADLOCK)' "$out" && ! grep -q time-out "$out" ;;
        *) false ;;
    esac || { echo "$*: $(head -c 200 "$out")" >> "$broken" && return 1; }
    [ -s "$report" ] || cp "$out" "$report"
}
seeds() {       # seeds CASE SCHEDULE NUMBER [PROXY]: how many of NUMBER seeds expose it
    local seed n=0
    for seed in $(seq "$3"); do
        seen "$1" EMU_SCHED="$2" EMU_SEED="$seed" EMU_PROXY="${4:-0}" && n=$((n + 1))
    done
    echo $n
}
yes_no() { if "$@"; then echo yes; else echo no; fi; }
# at_least FOUND LEAST: LEAST = 0 means none at all
at_least() { [ "$1" -ge "$2" ] && { [ "$2" -gt 0 ] || [ "$1" -eq 0 ]; }; }
tsan() {        # tsan CASE EXPECTED: yes, races, or no, neither these nor wrong results
    local sign='WARNING: ThreadSanitizer'
    [ "$2" = yes ] || sign+='|WRONG|FATAL'
    if [ -n "$no_tsan" ]; then skip "${1}_tsan" "$no_tsan" && return; fi
    TSAN_OPTIONS='halt_on_error=0 report_signal_unsafe=0 history_size=4' $run build/tsan/bugs "$1" > "$out" 2>&1
    judge "${1}_tsan" "$([ "$(yes_no grep -qE "$sign" "$out")" = "$2" ] ||
        grep -m 3 -E "$sign" "$out" || echo 'no race is reported')"
}
# bug NAME FIFO RANDOM PRIO PROXY TSAN PATTERN
#   FIFO           found with threads in order: yes or no     PROXY   the same with EMU_PROXY=1
#   RANDOM, PRIO   found with at least this many of 10 seeds; 0: none
#   TSAN           ThreadSanitizer reports a race: yes, no, or - for either
#   PATTERN        matches the report of the first mode that finds it
bug() {
    local fifo random prio proxy
    rm -f "$report"
    fifo=$(yes_no seen "$1") random=$(seeds "$1" random 10) prio=$(seeds "$1" prio 10)
    proxy=$(yes_no seen "$1" EMU_PROXY=1)
    judge "$1" "$([ "$fifo $proxy" = "$2 $5" ] || echo "fifo $fifo, proxy $proxy; "
        at_least "$random" "$3" && at_least "$prio" "$4" || echo "random $random, prio $prio of 10; "
        grep -qE "$7" "$report" || echo "no '$7' in: $(head -c 200 "$report")")"
    [ "$6" = - ] || tsan "$1" "$6"
}
right() {       # right NAME: no mode reports anything
    local mode kind
    judge "$1" "$(for mode in EMU_PROXY=0 EMU_ASYNC=eager EMU_EXACT=1 EMU_THREADS=2; do
            ! seen "$1" $mode || echo "$mode: $(head -c 200 "$out")"
        done
        for kind in random prio; do at_least "$(seeds "$1" $kind 20 1)" 0 || echo "$kind schedules"; done)"
    tsan "$1" no
}
for kernel in rmsnorm copies gemm; do right $kernel; done
#   name                       fifo random prio proxy tsan  in the report
bug rmsnorm_no_barrier         yes  10     10   yes   yes   'WRONG'
bug rmsnorm_divergent_barrier  yes  10     10   yes   yes   'WRONG|DEADLOCK|divergent'
bug rmsnorm_reads_past_row     yes  10     10   yes   -     'past the end of the 8064-byte block'
bug copies_early_refill        no   4      8    no    yes   'WRONG'
bug copies_wait_too_little     yes  10     10   yes   yes   'WRONG'
bug copies_no_row_guard        yes  10     10   yes   -     'past the end of the'
bug copies_no_barrier          yes  10     10   yes   yes   'WRONG'
bug gemm_ignores_empty         yes  10     10   yes   -     'more arrivals than its count'
bug gemm_wrong_byte_count      yes  10     10   yes   -     'DEADLOCK|tx-count 16'
bug gemm_early_release         yes  10     10   yes   yes   'WRONG'
bug gemm_no_wgmma_fence        yes  10     10   yes   -     'without a preceding wgmma.fence'
bug gemm_no_proxy_fence        no   0      0    yes   no    'WRONG'
bug gemm_one_proxy_fence       no   0      0    yes   no    'WRONG'
bug gemm_too_many_registers    yes  10     10   yes   -     'takes 2048 registers more than'
bug gemm_exits_early           yes  10     10   yes   -     'unfinished TMA store'
bug gemm_no_init_fence         yes  10     10   yes   -     'no fence.mbarrier_init'
bug gemm_one_arrival_per_group no   4      7    no    yes   'WRONG|DEADLOCK|EMU'
judge every_run_ended_with_a_report "$(head -3 "$broken")"
# The table of operations: any thread runs first and copies complete at any time, which some of these
# schedules need to expose a missing barrier. And as predicted for GPUs (dev/results/witnesses): products of whole
# numbers are the same with the rounding of tensor cores.
all_pass=' 0 failed, 0 skipped$'
for seed in $(seq "${SEEDS:-1}"); do
    for kind in random prio; do
        schedule=(env EMU_SCHED=$kind EMU_SEED="$seed" EMU_ASYNC=random)
        outcome "${kind}_seed_$seed" 0 "$all_pass" "${schedule[@]}" build/emu/test_ops --seed "$seed"
        outcome "${kind}_proxy_seed_$seed" 0 "$all_pass" "${schedule[@]}" EMU_PROXY=1 build/emu/test_ops --seed "$seed" \
            --filter sm90 --quick
    done
done
for arch in 80 90; do
    outcome "layout_txt_with_exact_sm_$arch" 0 ' 0 failed' env EMU_EXACT=1 EMU_ARCH=$arch build/emu/test_conform
done
finish
