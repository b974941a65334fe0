#!/usr/bin/env bash
# dev/gpu_day with the emulated GPU, in a folder and without the repository: all steps but those that need other
# GPU programs, then steps that hang, crash or start too late: the day must continue.
. "$(dirname "$0")/lib.sh"
limit_s=1500
mkdir gpu
cat > gpu/nvidia-smi << 'SMI'
#!/bin/sh
case "$*" in
*-lms*) while :; do echo "$(date '+%Y/%m/%d %H:%M:%S.%3N'), 1500, 300.5, 90"; sleep 0.2; done ;;
*) echo 'GPU 0: emulated' ;;
esac
SMI
chmod +x gpu/nvidia-smi
export PATH=$work/gpu:$PATH
check the_kit_is_built env VARIANT=emu "$root/dev/gpu_day/build.sh" "$work/kit"
[ "$failed" -eq 0 ] || finish
# Where root may do it, without the repository and a network
bare=()
unshare -mn mount -t tmpfs tmpfs "$root" 2> /dev/null && bare=(unshare -mn sh -c "mount -t tmpfs tmpfs '$root' && cd / && exec \"\$@\"" sh)
nothing_runs() {
    local pids
    pids=$(pids_of "$work/kit/bin"; pids_of "$work/gpu"; pids_of "$nap")
    [ -z "$pids" ] || { ps -o pid,ppid,args -p "${pids//$'\n'/,}" && return 1; }
}
day() { OUT=$work/$1 "${bare[@]}" python3 "$work/kit/day.py" "${@:2}"; }

outcome a_rehearsal_passes 0 '^ok .*  training$' day out 1400
steps=$(sed -n '1s/.* s: \(.*\), EMULATED$/\1/p' out/summary.txt)
check it_has_these_steps test "$steps" = 'machine wrappers checks long claim reference attention guesses variants'
for step in $steps; do has "${step}_begins" "^---- [0-9]+ s, $step: " out/summary.txt; done
has the_table_of_operations '^operations: ([0-9]{2}) of \1 as expected$' out/summary.txt
has whole_runs '^training: ([0-9]{2}) of \1 as expected$' out/summary.txt
has clocks_are_known '^---- [0-9]+ s, clock 1500 MHz .median., at most 300 W$' out/summary.txt
lacks nothing_fails '^FAILED|^SKIPPED' out/summary.txt
check at_most_eight_files test "$(find out -type f | wc -l)" -le 8
lacks results_name_no_folder "$work" out/*

# One that hangs with its child and ignores SIGTERM, one that crashes, one without time, and then a good one
sed -i 's/"patience": 4/"patience": 0.1/' kit/kit.json
nap=98765.$$     # seconds, found again as an argument
printf '#!/bin/sh\ntrap "" TERM\nsleep %s &\nwhile :; do sleep 1; done\n' $nap > kit/bin/test_conform
printf '#!/bin/sh\nkill -SEGV $$\n' > kit/bin/test_tensor_cores
printf '#!/bin/sh\necho "kernel     answers"\n' > kit/bin/bench
outcome a_day_with_faults_goes_on 1 '^ok .*  attention ' day bad 40 machine wrappers peers attention
has a_hung_step_is_named '^FAILED +[0-9]+ s  conform: no end within 6 s$' bad/summary.txt
has a_crash_is_named '^FAILED .* tensor_cores: exit code -11' bad/summary.txt
has a_late_step_is_skipped '^SKIPPED .* peers: [0-9]+ s are left, it should have 60$' bad/summary.txt
has the_next_call_is_named '^next: peers$' bad/summary.txt
check nothing_is_left_running nothing_runs
sed -i 's/"patience": 0.1/"patience": 4/' kit/kit.json
outcome the_end_of_the_day_is_no_failure 1 '^SKIPPED .* conform: no end within 1[0-9] s' day short 20 wrappers
day ended 40 wrappers > ended.txt 2>&1 &
job=$!
until [ -n "$(pids_of "$work/kit/bin/test_conform")" ] || ! kill -0 $job; do sleep 0.1; done
kill -TERM "$(pids_of "$work/kit/day.py" | head -n 1)"
wait $job
check a_signal_ends_all nothing_runs
job=

expect an_unknown_step 2 'error: nonsense: no such step' day none 40 nonsense
rm kit/bin/bench
expect a_missing_part 2 'error: .*bin/bench: missing' day none 40
printf '#!/bin/sh\nexit 9\n' > gpu/nvidia-smi
expect no_gpu 11 'error: no GPU' day none
expect no_gpu_in_the_repository 11 'error: no GPU' "$root/dev/gpu_day/day.py"
check nothing_was_written test ! -e none
finish
