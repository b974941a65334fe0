#!/usr/bin/env bash
# dev/gpu_day.sh without a GPU: it says so and writes nothing; a dry run goes through the parts that
# the emulated build can run, and fails where they fail. And the clock behind a rate.
. "$(dirname "$0")/lib.sh"
scratch gpu_day
cd "$root" || exit 1

# nvidia-smi as on a machine without a GPU, and of an H200
mkdir "$work/none" "$work/h200"
printf '#!/bin/sh\nexit 9\n' > "$work/none/nvidia-smi"
printf '#!/bin/sh\nwhile :; do echo "NVIDIA H200, 1500, 600.5, 60"; sleep 0.05; done\n' \
    > "$work/h200/nvidia-smi"
chmod +x "$work"/*/nvidia-smi
no_gpu() { PATH=$work/none:$PATH OUT=$work/day dev/gpu_day.sh "$@"; }
dry() { DRY=1 OUT=$work/dry dev/gpu_day.sh "$@"; }
nothing_in() { [ ! -e "$1" ] || [ -z "$(ls -A "$1")" ]; }

for part in build kernels runs sanitizer guesses bench peers training pretrain; do
    outcome "${part}_without_a_gpu" 11 "^$part: no GPU" no_gpu $part
done
check nothing_was_written nothing_in "$work/day"
expect an_unknown_part 2 'no such part' no_gpu build peer

outcome dry_build 0 '^build: 5 passed, 0 failed' dry build
outcome dry_kernels 0 '^kernels: 4 passed, 0 failed' dry kernels
outcome dry_runs 0 '^runs: 2 passed, 0 failed' dry runs
outcome dry_guesses 0 '^guesses: 2 passed, 0 failed' dry guesses
check the_branch_is_among_the_guesses grep -q 'saves .* us   (OVERLAP' "$work/dry/dry-guesses.txt"
outcome what_is_left_out_is_no_pass 1 '^bench: 0 passed, 0 failed, .* 1 not run' dry bench
for part in training pretrain; do
    outcome "$part"_needs_a_gpu 1 "^NOT RUN $part: an emulated GPU" dry $part
done
files=$(cd "$work/dry" && echo *)
check a_file_for_each test "$files" = "$(echo dry-{bench,build,guesses,kernels,pretrain,runs,training}.txt)"
says_dry() { [ "$(cat "$work"/dry/* | grep -cx 'DRY RUN .*no figure below is a measurement')" -eq 8 ]; }
check each_says_that_nothing_is_measured says_dry

# What fails must show: a device that is not there, and a part that has no time left
export EMU_DEVICES=0
outcome a_failure_shows 1 '^FAILED  conformance: ' dry build
unset EMU_DEVICES
export PART_LIMIT_S=0
outcome a_part_ends_in_time 1 "^FAILED  build: the part's 0 s are over" dry build
unset PART_LIMIT_S

clock() { PATH=$work/$1:$PATH dev/gpu_clock.py "${@:2}"; }
outcome share_of_the_peak_at_the_clock 0 \
    '^ours 494.7 TFLOP/s   \[50.0% of 989 and 61.0% of the peak at 1,500 MHz\]$' \
    clock h200 sh -c 'sleep 0.5; echo "ours 494.7 TFLOP/s"'
printf 'layout     step ms   TFLOP/s        loss\npacked       149.0     247.35    5.678\n' > "$work/table"
outcome share_in_a_table 0 '^packed .*\[25.0% of 989 and 30.5% of the peak at 1,500 MHz\]$' \
    clock h200 sh -c 'sleep 0.5; cat "$1"' sh "$work/table"
outcome the_clock_of_the_whole_command 0 '^clock   1,500 MHz .*600 W, 60 C' clock h200 sleep 0.5
outcome no_clock_no_share 0 '^ours 1 TFLOP/s$' clock none echo 'ours 1 TFLOP/s'
outcome the_commands_exit_code 7 '^clock   not sampled' clock none sh -c 'exit 7'
finish
