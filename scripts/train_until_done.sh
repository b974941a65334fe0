#!/usr/bin/env bash
# Starts a training again, each time with --resume, until it is done:
#   scripts/train_until_done.sh mpirun -n 8 ./train_llama --out run --save-every 500 ...
# RESTARTS=5   restarts in a row that bring no new checkpoint, after which it gives up
# PAUSE=10     seconds before each, for a machine that comes back
# Ends with the exit code of the last start.
set -u
if [ $# -eq 0 ]; then
    echo "error: expected the command that trains" >&2
    echo "hint: scripts/train_until_done.sh mpirun -n 8 ./train_llama --out run" >&2
    exit 2
fi
restarts=${RESTARTS:-5} pause=${PAUSE:-10} without_progress=0 out=out/demo previous=
for word in "$@"; do
    case $word in --out=*) out=${word#--out=} ;; esac
    [ "$previous" = --out ] && out=$word
    previous=$word
done
newest() { ls -d "$out"/step-* 2> /dev/null | tail -n 1; }

while :; do
    before=$(newest)
    "$@" --resume
    code=$?
    case $code in
        0) exit 0 ;;
        # flags, input files, disk, memory, diverged, misfit, directory in use: the same next time
        2 | 3 | 4 | 5 | 6 | 7 | 9 | 10) break ;;
        75 | 130 | 143) break ;;        # somebody stopped it: the training, or its launcher
        126 | 127) break ;;             # no such command
    esac                                # 8 rank lost, 11 device, 137 killed, what launchers say
    if [ "$(newest)" != "$before" ]; then without_progress=0; fi
    if [ $((without_progress += 1)) -gt "$restarts" ]; then break; fi
    echo "train_until_done: exit code $code; starting again in $pause s ($without_progress of" \
        "$restarts without a new checkpoint)" >&2
    sleep "$pause"
done
echo "train_until_done: exit code $code, which ends it; newest checkpoint: $(newest)" >&2
exit $code
