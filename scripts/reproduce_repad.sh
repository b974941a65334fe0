#!/usr/bin/env bash
# LLM-Foundry's 20 % slow-down: SmolLM2-135M, six rows of 2048 with 1,395 real tokens. A step of
# `padded`, of `repad` (Hugging Face's unpad and pad in every layer) and of `packed`; what gather and
# scatter cost; the same with a filled batch. On a GPU a minute; on two CPU cores half an hour and
# 15 GB of memory.
#   --record (or RECORD=1)   writes dev/results/repad-BACKEND-DATE.txt
#   MODEL=demo               a small model: seconds. --help lists the other options
set -euo pipefail
cd "$(dirname "$0")/.."
[ -n "${TRAIN:-}" ] || make -s reproduce-programs
exec python3 dev/reproduce.py repad "$@"
