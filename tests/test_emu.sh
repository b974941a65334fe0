#!/usr/bin/env bash
# Kernels with planted bugs (dev/emu/bugs) under the emulator: the expected modes find each bug and the
# others do not, and the kernels without a bug pass everywhere.
. "$(dirname "$0")/lib.sh"
cd "$root" || exit 1
evidence() { :; }
unset $(compgen -v EMU_)       # each run sets its own
out=$work/out.txt broken=$work/broken.txt
: > "$broken"

if ! make -s BACKEND=cpu build/emu/bugs > "$out" 2>&1; then
    tail -20 "$out"
    bad build 'make build/emu/bugs'
    finish
fi
if make -s BACKEND=cpu build/tsan/bugs > "$out" 2>&1; then no_tsan=
else no_tsan='no compiler here links -fsanitize=thread'; fi
# ThreadSanitizer needs address space randomisation off
run="$(command -v setarch > /dev/null && echo "setarch -R") timeout 60"
$run true 2> /dev/null || run="timeout $limit_s"

# seen CASE [VARIABLE=VALUE...]: the comparison or the emulator reports an error in CASE. A run that
# times out or ends without a report has found nothing, and fails the suite.
seen() {
    env EMU_TIMEOUT="$limit_s" "${@:2}" build/emu/bugs "$1" > "$out" 2>&1
    case $? in
        0) return 1 ;;
        1) grep -q ': WRONG$' "$out" && return ;;
        97 | 98) grep -qE '^EMU (ERROR|DEADLOCK)' "$out" && ! grep -q time-out "$out" && return ;;
    esac
    echo "$*: $(head -c 200 "$out")" >> "$broken"
    return 1
}
seeds() {       # seeds CASE SCHEDULE NUMBER: how many of NUMBER seeds expose it
    local seed n=0
    for seed in $(seq "$3"); do
        seen "$1" EMU_SCHED="$2" EMU_SEED="$seed" EMU_PROXY="${4:-0}" && n=$((n + 1))
    done
    echo $n
}
races() {       # races CASE: number of ThreadSanitizer's reports
    TSAN_OPTIONS='halt_on_error=0 report_signal_unsafe=0 history_size=4' \
        $run build/tsan/bugs "$1" > "$out" 2>&1
    grep -c 'WARNING: ThreadSanitizer' "$out"
}
yes_no() { if "$@"; then echo yes; else echo no; fi; }

# at_least FOUND LEAST: LEAST = 0 means none at all
at_least() { [ "$1" -ge "$2" ] && { [ "$2" -gt 0 ] || [ "$1" -eq 0 ]; }; }

# bug NAME FIFO RANDOM PRIO PROXY TSAN PATTERN
#   FIFO           found with threads in order: yes or no     PROXY   the same with EMU_PROXY=1
#   RANDOM, PRIO   found with at least this many of 10 seeds; 0: none
#   TSAN           ThreadSanitizer reports a race: yes, no, or - for either
#   PATTERN        matches the report of the first mode that finds it
bug() {
    local name=$1 fifo random prio proxy wrong='' report=''
    fifo=$(yes_no seen "$name")
    [ "$fifo" = no ] || report=$(cat "$out")
    random=$(seeds "$name" random 10)
    [ -n "$report" ] || report=$(cat "$out")
    prio=$(seeds "$name" prio 10)
    proxy=$(yes_no seen "$name" EMU_PROXY=1)
    [ "$proxy" = yes ] && [ "$fifo" = no ] && report=$(cat "$out")
    [ "$fifo" = "$2" ] || wrong+=" fifo $fifo, not $2;"
    at_least "$random" "$3" || wrong+=" random $random of 10, not $3;"
    at_least "$prio" "$4" || wrong+=" prio $prio of 10, not $4;"
    [ "$proxy" = "$5" ] || wrong+=" proxy $proxy, not $5;"
    grep -qE "$7" <<< "$report" || wrong+=" no '$7' in: $(head -c 200 <<< "$report")"
    judge "$name" "$wrong"
    [ "$6" = - ] && return
    if [ -n "$no_tsan" ]; then skip "${name}_tsan" "$no_tsan"
    elif [ "$(yes_no test "$(races "$name")" -gt 0)" = "$6" ]; then ok "${name}_tsan"
    else bad "${name}_tsan" "$(grep -c 'WARNING: Thr' "$out") race reports"; fi
}

right() {       # right NAME: no mode reports anything
    local random prio
    random=$(seeds "$1" random 20 1)
    prio=$(seeds "$1" prio 20 1)
    if ! seen "$1" && ! seen "$1" EMU_ASYNC=eager && ! seen "$1" EMU_EXACT=1 &&
        ! seen "$1" EMU_THREADS=2 && [ "$random$prio" = 00 ]; then ok "$1"
    else bad "$1" "random $random of 20, prio $prio of 20: $(head -c 200 "$out")"; fi
    if [ -n "$no_tsan" ]; then skip "${1}_tsan" "$no_tsan"
    elif [ "$(races "$1")" -eq 0 ] && ! grep -q WRONG "$out"; then ok "${1}_tsan"
    else bad "${1}_tsan" "$(grep -m 3 -E 'WARNING|WRONG|FATAL' "$out")"; fi
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
