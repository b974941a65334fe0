#!/usr/bin/env bash
# The trainer's check of its kernels on a GPU, emulated: made at the first start only, finds wrong
# kernels (tests/kernel_fault.c) and names them, replaces fast attention kernels that are wrong.
. "$(dirname "$0")/lib.sh"
unset $(compgen -v EMU_)
scratch 'self check'
cuda=$root/build/emu/train_llama faulty=$root/build/emu/train_llama_faulty
[ -x "$cuda" ] && [ -x "$faulty" ] || { bad program "$cuda or its _faulty is not built" && finish; }
export XDG_CACHE_HOME=$work/cache TMPDIR=$work         # TMPDIR: for the emulated NCCL
tiny_model tiny 64 96 64
uneven_texts text 20
prepare text --out corpus --val-frac 0.1
common=(--model tiny --from-scratch --train corpus --max-seqlen 200 --micro-batch-tokens 256
        --val-every 0 --num-samples 0)
dry=("$cuda" "${common[@]}" --dry-run)
checked='^self-check of all kernels passed in [0-9.]+ s$'

# ---- once for each GPU, driver and program ---------------------------------------------------------
unchecked() {   # unchecked NAME COMMAND...: it succeeds without a check
    check "$@"
    lacks "$1_unchecked" "$checked" out.txt
}
for arch in 80 86 90 120; do
    outcome "first_start_on_sm_$arch" 0 "$checked" env EMU_ARCH=$arch "${dry[@]}"
done
unchecked second_start "${dry[@]}"
outcome another_driver 0 "$checked" env EMU_DRIVER=14000 "${dry[@]}"
outcome other_attention_kernels 0 "$checked" "${dry[@]}" --attention sm80
outcome another_program 0 "$checked" "$faulty" "${common[@]}" --dry-run
unchecked the_first_again "${dry[@]}"
check a_file_for_each test "$(ls cache/unpad | grep -c '^seen-[0-9a-f]*$')" -eq 7
XDG_CACHE_HOME=$work/longer "$cuda" --self-check > longer.txt 2>&1 &
longer=$!
expect none_on_the_cpu 2 'this is the CPU backend' "$root/build/cpu/train_llama" --self-check

# ---- a cache that is damaged, or not there -----------------------------------------------------------
for content in '' 'kernels checked: ' "$(head -c 4000 /dev/urandom | base64)"; do
    for f in cache/unpad/seen-*; do printf '%s' "$content" > "$f"; done
    outcome "a_file_of_${#content}_bytes" 0 "$checked" "${dry[@]}"
    unchecked "after_a_file_of_${#content}_bytes" "${dry[@]}"
done
touch file
for i in 1 2; do
    outcome "unwritable_cache_$i" 0 "$checked" env XDG_CACHE_HOME="$work/file" "${dry[@]}"
    lacks "unwritable_cache_${i}_is_no_error" 'error|warning' out.txt
done
outcome no_cache_at_all 0 "$checked" env -u XDG_CACHE_HOME -u HOME "${dry[@]}"
outcome cache_in_home 0 "$checked" env -u XDG_CACHE_HOME HOME="$work/home" "${dry[@]}"
check cache_in_home_is_written ls home/.cache/unpad/seen-*

# ---- wrong kernels: the operation is named ------------------------------------------------------------
export XDG_CACHE_HOME=$work/file
wrong() {       # wrong NAME NAMED OPERATION OPTION...: exit code 11, and NAMED is the operation
    local name=$1 named=$2 operation=$3
    shift 3
    expect "$name" 11 "^error: self-check: $named: [0-9]+ .*: expected .*, found " \
        env WRONG="$operation" "$faulty" "${common[@]}" --out refused "$@"
}
for operation in $(grep -o '^WRAP.[a-z_]*' "$root/tests/kernel_fault.c" | cut -c6- | grep -v comm_); do
    case $operation in
        attention_*ward) for path in sm80 sm90; do
                wrong "${operation}_$path" "$operation .$path." "$operation" --attention $path
            done
            wrong "$operation" "$operation .sm80." "$operation" ;;
        *) wrong "$operation" "$operation" "$operation" ;;
    esac
done
check wrong_kernels_train_nothing test ! -e refused

# Hopper's kernels alone are wrong: the run has the bits of --attention sm80
export XDG_CACHE_HOME=$work/fallback
train() { "$faulty" "${common[@]}" --steps 3 "$@"; }
check sm80 train --attention sm80 --out sm80
export WRONG=attention_backward:sm90
for i in 1 2; do
    outcome "fall_back_$i" 0 '^warning: the sm90 attention kernels are wrong on this GPU, sm80 ones' \
        train --out "fallen$i"
    has "fall_back_${i}_names_the_kernel" 'place: attention_backward .sm90.: .* found' out.txt
    same_state "fall_back_${i}_has_the_bits_of_sm80" sm80/step-00000003 "fallen$i/step-00000003"
done
unset WRONG
check sm90 "$cuda" "${common[@]}" --steps 3 --out sm90
differ sm90_has_other_bits {sm80,sm90}/step-00000003/model.safetensors

# ---- two ranks: every rank checks its GPU; collectives ----------------------------------------------
jobs=0
two_ranks() {   # two_ranks COMMAND...: exit code of rank 0, output of both
    local other status
    jobs=$((jobs + 1))
    set -- env EMU_DEVICES=2 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID="$$-$jobs" \
        timeout -k 5 "$limit_s" "$@" "${common[@]}" --batch-tokens 512 --steps 1
    RANK=1 LOCAL_RANK=1 "$@" > other.txt 2>&1 &
    other=$!
    RANK=0 LOCAL_RANK=0 "$@"
    status=$?
    wait $other
    cat other.txt
    return $status
}
export XDG_CACHE_HOME=$work/ranks
outcome ranks 0 "$checked" two_ranks "$faulty" --out two
unchecked ranks_again two_ranks "$faulty" --out again
export XDG_CACHE_HOME=$work/file WRONG WRONG_RANK=1
for WRONG in comm_collect comm_all_gather comm_sum_in_order comm_reduce_begin rmsnorm_forward
do
    expect "$WRONG" 11 "error: .*self-check: $WRONG: " two_ranks "$faulty" --out refused
done
WRONG=attention_forward:sm90
outcome fall_back_of_all_ranks 0 'warning: the sm90 .* place: found by another rank' \
    two_ranks "$faulty" --out two80
has all_ranks_have_the_same_kernels 'attention sm80' out.txt
wait $longer
has longer "$checked" longer.txt
check failures_train_nothing test ! -e refused
finish
