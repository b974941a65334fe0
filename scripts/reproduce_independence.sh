#!/usr/bin/env bash
# Packed sequences do not see each other: the notebook's check, on its own figures and, through
# --check-packing, on the weights of SmolLM2-135M-Instruct. A minute; scripts/get_model.sh fetches the
# weights once.
#   scripts/reproduce_independence.sh [MODEL_DIR]      MODEL=demo: no weights, seconds
#   --record (or RECORD=1)   writes dev/results/independence-BACKEND-DATE.txt
set -euo pipefail
cd "$(dirname "$0")/.."
model=${MODEL:-${MODEL_DIR:-models/smollm2-135m-instruct}}
if [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; then model=$1 && shift; fi
[ -n "${TRAIN:-}" ] || make -s reproduce-programs
[ "$model" != models/smollm2-135m-instruct ] || [ -e "$model" ] ||
    scripts/get_model.sh smollm2-135m-instruct
exec python3 dev/reproduce.py independence --model "$model" "$@"
