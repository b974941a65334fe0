#!/usr/bin/env bash
# Restarts a training run with --resume until it finishes:
#   scripts/train_until_done.sh mpirun -n 8 ./train_llama --out run --save-every 500 ...
# RESTARTS=5   gives up after this many restarts in a row without a new checkpoint
# PAUSE=10     seconds before each restart, e.g. for a machine that reboots
# Exits with the exit code of the last run.
set -u
usage='expected a training command
hint: scripts/train_until_done.sh mpirun -n 8 ./train_llama --out run'
[ $# -ge 1 ] || { printf "error: $usage\n" >&2; exit 2; }
restarts=${RESTARTS:-5} pause=${PAUSE:-10} without_progress=0 out=out/demo previous= resume=--resume
for word in "$@"; do
    case $word in --out=*) out=${word#--out=} ;; --resume=*) resume=$word ;; esac
    [ "$previous" = --out ] && out=$word
    previous=$word
done
newest() { ls -d "$out"/step-???????? 2> /dev/null | tail -n 1; }

while :; do
    before=$(newest)
    [ "$before" ] && resume=--resume    # from then on, not from another run
    "$@" "$resume"
    code=$?
    case $code in
        0) exit 0 ;;
        # options, input files, disk, memory, diverged, mismatch, directory in use: would fail again
        2 | 3 | 4 | 5 | 6 | 7 | 9 | 10) break ;;
        75 | 130 | 143) break ;;        # stopped by a signal to the trainer or its launcher
        126 | 127) break ;;             # no such command
    esac                                # 8 rank lost, 11 device, 137 killed, codes of launchers
    if [ "$(newest)" != "$before" ]; then without_progress=0; fi
    if [ $((without_progress += 1)) -gt "$restarts" ]; then break; fi
    echo "train_until_done: exit code $code; restarting in $pause s ($without_progress of" \
        "$restarts without a new checkpoint)" >&2
    sleep "$pause"
done
newest=$(newest)
echo "train_until_done: exit code $code, giving up; newest checkpoint: ${newest:-none}" >&2
exit $code
