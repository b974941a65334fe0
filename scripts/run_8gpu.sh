#!/usr/bin/env bash
# Pre-trains SmolLM2-135M as published, on the 8 GPUs of one machine, one rank per GPU.
#   scripts/run_8gpu.sh [train_llama options]      these override the ones below: --steps 100
#   RANKS=4 scripts/run_8gpu.sh                    on 4 GPUs; the same documents in each step
# On the CPU backend (make BACKEND=cpu) the same command starts 8 ranks, which share the cores.
set -euo pipefail
cd "$(dirname "$0")/.."
options=(
    --model smollm2-135m --train shards --out run
    --max-seqlen 2048 --micro-batch-tokens 32768    # the main memory knob
    --batch-tokens 1048576                          # 32 micro-batches: 4 per rank
    # Published: 2,000,000 steps, 2 trillion tokens. The schedule adapts to the number of steps:
    # 20,000 are 21 billion tokens. A checkpoint from before the decay, the last fifth, can train
    # for longer: --resume=run/step-00016000 --steps 40000 --out longer
    --steps 20000
    --schedule wsd --lr 3e-3 --warmup-steps 2000 --decay-frac 0.2
    --weight-decay 0.01 --grad-clip 1
    --save-every 500
)
# Adds --resume and restarts after a lost rank (exit code 8, or 137). An interrupted run continues
# when this script is called again.
exec scripts/train_until_done.sh mpirun -n "${RANKS:-8}" --bind-to none \
    ./train_llama "${options[@]}" "$@"

# Several machines: add --hostfile hosts. Under Slurm: scripts/slurm.sbatch.
