#!/usr/bin/env bash
# 64 documents of 512 tokens: attention scores and step time packed, in rows of 512, 2048 and 4096,
# and padded; and why a d24 model gains only 1.8 %. On two CPU cores 8 documents, which fill one row
# of 4096, in a quarter of an hour; MODEL=demo takes all 64.
#   --record (or RECORD=1)   writes dev/results/scores-BACKEND-DATE.txt
#   MODEL=demo               a small model: seconds. --help lists the other options
set -euo pipefail
cd "$(dirname "$0")/.."
[ -n "${TRAIN:-}" ] || make -s reproduce-programs
exec python3 dev/reproduce.py scores "$@"
