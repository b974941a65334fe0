#!/usr/bin/env bash
# Trains SmolLM2-135M on the 8 GPUs of one machine; a rank takes the GPU of its local rank.
#   scripts/run_8gpu.sh [train_llama options]      the last of an option counts: --steps 100
#   RANKS=4 scripts/run_8gpu.sh                    on 4 of them; the same documents in each step
# On the CPU backend (make BACKEND=cpu, MPI) the same line starts 8 ranks; give --threads then.
set -euo pipefail
cd "$(dirname "$0")/.."
options=(
    --model smollm2-135m --train shards --out run
    --max-seqlen 2048 --micro-batch-tokens 32768    # decides the memory
    --batch-tokens 524288                           # 16 micro-batches: 2 a rank, or 1 on 16 GPUs
    --steps 20000 --lr 3e-3 --warmup-steps 500
    --save-every 500
)
# The loop adds --resume, and starts again after a lost rank (exit code 8): a run that was cut short
# goes on, here as with the next call.
exec scripts/train_until_done.sh mpirun -n "${RANKS:-8}" --bind-to none \
    ./train_llama "${options[@]}" "$@"

# Without MPI, on the CUDA backend: whatever sets torchrun's variables for each rank will do.
#   torchrun --nproc-per-node 8 --no-python ./train_llama --model smollm2-135m ...
# or by hand:
#   export WORLD_SIZE=8 MASTER_ADDR=localhost MASTER_PORT=29500
#   for r in 0 1 2 3 4 5 6 7; do RANK=$r LOCAL_RANK=$r ./train_llama ... & done; wait
# Several machines with mpirun: export the address of rank 0's machine, and add
#   --hostfile hosts -x MASTER_ADDR -x MASTER_PORT
