#!/usr/bin/env bash
# What the machine code for Hopper promises (dev/gpu_model): no register spilled, no wgmma
# serialised, and no prediction more than 3 % slower than dev/results/gpu-model.txt says. Where it is
# meant to be slower: make gpu-model, and commit the report.
. "$(dirname "$0")/lib.sh"
scratch gpu_model
cd "$root" || exit 1

# The model's work list of the seed batch: as many products as the kernel does in the emulator.
# 12 wgmma of each of 4 warps for a pass of a consumer; three consumers, for the three heads.
work_list() {
    EMU_STATS=1 build/emu/test_cuda_attention --filter seed_batch_sm90 > "$work/stats" 2>&1 &&
        PYTHONPATH=dev/gpu_model python3 - "$work/stats" << 'PY'
import re, sys
import attention, step
dq = next(k for k in attention.kernels() if k.key() == "attention_backward_q_sm90 hd64")
passes = sum(attention.items_of(dq, step.SEED, 3, 1)) * dq.warps
done = re.search(r"backward_q_sm90_kernel.* wgmma/warp (\d+)", open(sys.argv[1]).read()).group(1)
print(f"{passes * 12 * 4:.0f} by the list, {done} done")
sys.exit(passes * 12 * 4 != int(done))
PY
}
check work_lists_are_the_kernels work_list

nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2> /dev/null) ||
    skip_all gpu_model 'nvcc is not installed'
"$nvcc" --list-gpu-arch | grep -qx compute_90 || skip_all gpu_model 'this nvcc does not know sm_90a'
CUOBJDUMP=${CUOBJDUMP:-$(command -v cuobjdump || ls "$(dirname "$nvcc")/cuobjdump" 2> /dev/null)} ||
    skip_all gpu_model 'cuobjdump is not installed'
export CUOBJDUMP

check cubins_build make -s BACKEND=cpu gpu-model-cubins
outcome no_prediction_is_slower 0 '^[0-9]+ predictions|^times are not compared' \
    make -s BACKEND=cpu gpu-model-check
grep -aE '^[0-9]+ predictions|^times are not' "$work/out.txt"
compared=$(grep -ac '^[0-9]* predictions' "$work/out.txt")

# The faults that it is there for, planted in a copy: each must show
cp -r Makefile kernels "$work"
plant() {       # plant FILES FROM TO: the first such place
    local file
    file=$(grep -l -- "$2" "$work/kernels/cuda/"$1.cu* | head -n 1) && [ -n "$file" ] &&
        sed -i "0,/$2/s//$3/" "$file"
}
cubin() { make -s -C "$work" BACKEND=cpu WERROR= "build/gpu_model/$1.cubin"; }
serialised() { ! cubin attention_sm90; }
check slow_planted plant attention_sm90 'wgmma_wait<1>();' 'wgmma_wait<0>();'
check slow_builds cubin attention_sm90
check spill_planted plant attention_sm80 '_bounds__(THREADS, 2)' '_bounds__(THREADS, 3)'
check spill_builds cubin attention_sm80
others=()
for f in build/gpu_model/*.cubin; do
    case $f in */attention_sm[89]0.cubin) ;; *) others+=("$f") ;; esac
done
outcome a_spill_shows 1 '^error: .*attention_forward_kernel.* spilled registers$' \
    python3 dev/gpu_model/gpu_model.py --check dev/results/gpu-model.txt "${others[@]}" \
    "$work"/build/gpu_model/attention_sm[89]0.cubin
if [ "$compared" -eq 0 ]; then
    skip a_slow_down_shows 'the report is of another compiler'
elif grep -aqE '^error: 135M R65, attention forward: .*% slower than' "$work/out.txt"; then
    ok a_slow_down_shows
else
    bad a_slow_down_shows 'no line says what is slower'
fi
check too_few_registers plant attention_sm90 '? 160 : 232' '? 152 : 232'
check serialised_wgmma_does_not_build serialised
finish
