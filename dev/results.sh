#!/usr/bin/env bash
# `make results`: every measurement that the README shows, in order, each into its file in
# dev/results, then the README's results section and its charts. About two and a half hours on two idle CPU
# cores, with 16 GB of memory. Nothing else may run: the load is shown first.
#   PYTHON=...     an interpreter with PyTorch and transformers, for the peers
#   MODEL_DIR=...  SmolLM2-135M-Instruct; default: models/, fetched there once
#   FROM=N         starts at step N         LIST=1  shows the steps and runs none
set -euo pipefail
cd "$(dirname "$0")/.."
export RECORD=1
unset MODEL
backend=$(PYTHONPATH=dev python3 -c 'import measure; print(measure.backend())')
bench='25 dev/peers/cpu_table.sh' training='70 dev/training.py'
[ "$backend" = cpu ] || bench='18 dev/gpu_day.sh bench peers' training='16 dev/gpu_day.sh training pretrain'
steps=(     # minutes on two idle cores, command
    "$bench"
    '27 scripts/reproduce_repad.sh'
    '1  scripts/reproduce_independence.sh'
    '13 scripts/reproduce_scores.sh'
    '4  env MODEL=demo scripts/reproduce_scores.sh'
    '10 dev/scaling.py'
    "$training"
    '0  scripts/results_page.py'
)
from=${FROM:-1} minutes=0
for ((i = from - 1; i < ${#steps[@]}; i++)); do minutes=$((minutes + ${steps[i]%% *})); done
printf 'about %d minutes on two idle CPU cores, less on a GPU; load now %s on %d cores\n' \
    $minutes "$(cut -d' ' -f1 /proc/loadavg)" "$(nproc)"
for ((i = from - 1; i < ${#steps[@]}; i++)); do
    read -r expected command <<< "${steps[i]}"
    printf '\n== step %d of %d, about %d minutes: %s\n' $((i + 1)) ${#steps[@]} "$expected" "$command"
    [ -z "${LIST:-}" ] || continue
    start=$SECONDS
    $command || { echo "step $((i + 1)) failed; continue with: make results FROM=$((i + 1))" >&2; exit 1; }
    printf '== took %d:%02d minutes\n' $(((SECONDS - start) / 60)) $(((SECONDS - start) % 60))
done
