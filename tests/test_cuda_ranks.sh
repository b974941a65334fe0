#!/usr/bin/env bash
# Several ranks on the CUDA backend, emulated (with dev/emu's NCCL) or real: TRAIN=build/cuda/
# train_llama RANKS="2 4". With --deterministic the same bits on any number of ranks, otherwise the
# same losses; overlapped communication changes no bit; a failure of one rank ends the job.
. "$(dirname "$0")/lib.sh"
train=${TRAIN:-$root/build/emu/train_llama} cpu=$root/build/cpu/train_llama
bin=$(dirname "$train")
read -ra counts <<< "${RANKS:-2 4}"
emulated=$([ -z "${TRAIN:-}" ] && echo yes)
export EMU_DEVICES=4 TMPDIR=$work       # TMPDIR: for the emulated NCCL
with_ranks ranks "$train" || finish
tiny_model tiny 64 96 64
corpus 5
common=(--model tiny --from-scratch --train corpus --max-seqlen 64 --micro-batch-tokens 64
        --batch-tokens 384 --val-tokens 64 --val-every 2 --num-samples 0 --lr 1e-3
        --warmup-steps 0 --schedule constant --keep 0 --ledger)
run=("$train" "${common[@]}" ${emulated:+--attention sm90})    # no probe in each start
exact=("${run[@]}" --deterministic)
end=step-00000002
# ---- NCCL's calls ------------------------------------------------------------------------------------
calls() {       # calls NAME N [CASES]
    expect "$1" 0 '^[1-9][0-9]* passed, 0 failed, 0 skipped$' "${mpi[@]}" -n "$2" "$bin/test_cuda_nccl" --filter "${3:-}"
}
for n in "${counts[@]}"; do calls "calls_of_${n}_ranks" "$n"; done
# NCCL's log, also of ranks without standard output
NCCL_DEBUG=INFO expect log_of_rank_1 0 'NCCL INFO .*rank 1 ' "${mpi[@]}" -n 2 "$bin/test_cuda_nccl" --filter collected_rows
expect a_part_beyond_the_buffer 8 'rank 0 in .*: MPI_ERR_TRUNCATE' "${mpi[@]}" -n 2 "$bin/test_cuda_nccl" --beyond
# ---- the same bits: 6 micro-batches, divided evenly among 2 ranks but not among 4 --------------------
within "${exact[@]}" --out d1 --steps 2 --save-every 1 || bad one_rank "exit code $?"
for n in "${counts[@]}"; do
    ranks "$n" "${exact[@]}" --out "d$n" --steps 2
    same_state "deterministic_on_${n}_ranks" d1/$end "d$n/$end"
    same "documents_on_${n}_ranks" d1/ledger.bin "d$n/ledger.bin"
done
ranks 2 "${exact[@]}" --out e --steps 2 --resume=d1/step-00000001
same_state resume_on_2_ranks {d1,e}/$end
# ---- memory. ZeRO-1: of the bf16 weights all, of their low bits a half on each of 2 ranks -------------
larger=("${exact[@]/#tiny/demo}" --out p --dry-run)
within "${larger[@]}"
cp out.txt p1.txt
ranks 2 "${larger[@]}"
check low_bits_are_sharded awk '$1 == "weights" { w[FILENAME] = $2 }
    END { r = w["out.txt"] / w["p1.txt"]; exit !(r > 0.7 && r < 0.8) }' p1.txt out.txt
# ---- the same losses: distributed by work. Only the order of fp32 sums differs: 1e-7 of a gradient,
# which changes the rounding to bf16 of about one weight in 1e5 per step
for n in 1 "${counts[@]}"; do ranks "$n" "${run[@]}" --out "w$n" --steps 2; done
within "$cpu" "${common[@]}" --out cpu --steps 2 || bad cpu "exit code $?"
logs=("${counts[@]/#/w}")
same_losses by_work_losses_agree_to_1e-5 1e-5 inf 4 w1 "${logs[@]}"
same_losses losses_match_the_cpu_backend_to_bf16 0.00390625 inf 4 cpu "${logs[@]}"
# if the order of a sum did not change its bits, the tests above would show nothing
differ order_of_a_sum_changes_bits {w1,"${logs[-1]}"}/$end/model.safetensors
# ---- a rank without a micro-batch: two documents of 30 tokens are one row of 64
"$root/dev/bench.py" --write whole --lengths 10x30 > out.txt || bad shard "exit code $?"
one_row=("${run[@]}" --train whole --boundary-token 0 --batch-tokens 128 --layout rows --fill 0.5 --val-every 0 --steps 2)
within "${one_row[@]}" --out i1 || bad one_row "exit code $?"
ranks 2 "${one_row[@]}" --out i2
ranks 2 "${one_row[@]}" --deterministic --out i3
same_losses a_rank_without_a_document_adds_nothing 0.00390625 0.00390625 2 i1 i2 i3
[ -n "$emulated" ] || finish    # nvcc links no train_llama_faulty
plan=(--max-seqlen 2048 --micro-batch-tokens 8192 --batch-tokens 65536 --out p --dry-run)
EMU_DEVICES=8 EMU_MEMORY=$((78 << 30)) expect 8b_fits_8_gpus_of_80_gb 0 \
    '^recompute .* full 6.* \(chosen\)$' "${mpi[@]}" -n 8 "${run[@]/#tiny/llama-3.1-8b}" "${plan[@]}"
EMU_MEMORY=$((31 << 30)) expect 1.7b_fits_a_gpu_of_32_gb 0 '^recompute .* full 2.* \(chosen\)$' \
    "${run[@]/#tiny/smollm2-1.7b}" "${plan[@]}"
# ---- overlap: the same bits, whichever stream lags -----------------------------------------------------
for slow in 1 2; do     # compute, communication
    EMU_STREAMS=1 EMU_SLOW_STREAM=$slow calls calls_while_stream_${slow}_lags 2
    EMU_STREAMS=1 EMU_SLOW_STREAM=$slow ranks 2 "${run[@]}" --out s$slow --steps 2
    same_state "stream_${slow}_lags" {w2,s$slow}/$end
done
# The order in which the host enqueues work: in the last micro-batch the reduction of layer 1
# before the backward of layer 0; in the next step the forward of layer 0 before the wait for
# the weights of layer 1.
EMU_TRACE=1 ranks 2 bash -c 'exec 2> "trace$OMPI_COMM_WORLD_RANK.txt"; exec "$@"' _ \
    "${run[@]}" --attention sm80 --out t --steps 2 --val-every 0
check_python communication_overlaps_with_other_layers << 'PY'
calls = re.findall(r"EMU TRACE stream (\d) (\w+)", open("trace0.txt").read())
free = calls.index(("0", "cudaMemGetInfo"))     # NCCL has taken its buffers before: not of all kinds
before = [name for _, name in calls[:free] if name.startswith("nccl")]
assert before == ["ncclReduce", "ncclBroadcast", "ncclAllReduce"], before
calls = calls[free:]
def places(name, first, last):
    return [i for i in range(first, last) if calls[i][1] == name]
reduce, gather = places("ncclReduce", 0, len(calls)), places("ncclBroadcast", 0, len(calls))
assert all(calls[i][0] == "2" for i in reduce + gather), "a reduction on the compute stream"
assert len(reduce) == len(gather) == 8, (reduce, gather)    # embedding, norms, two layers; twice
for r, g in (reduce[:4], gather[:4]), (reduce[4:], gather[4:]):
    *_, layer_1, layer_0 = places("attention_backward_kv_kernel", 0, r[3])
    assert layer_1 < r[0] < layer_0 < r[1], (layer_1, layer_0, r)
    assert r[3] < g[0]
layer_0, layer_1 = places("attention_forward_kernel", gather[3], len(calls))[:2]
waits = [i for i in places("wait", gather[3], len(calls)) if calls[i][0] == "1"]
assert waits[2] < layer_0 < waits[3] < layer_1, (waits, layer_0, layer_1)
PY
# ---- failures end all ranks ---------------------------------------------------------------------------
expect too_few_gpus 11 'number [23] of this machine, but only GPUs 0 to 1' \
    "${mpi[@]}" -n 4 env EMU_DEVICES=2 "${run[@]}" --out m
expect no_gpu 11 'no NVIDIA GPU is visible' env EMU_DEVICES=0 "${run[@]}" --out m
planned=("$bin/train_llama_faulty" "${common[@]}" --steps 1 --val-every 0 --out "$work/planned")
outcome all_ranks_take_the_same_kernels 0 '^  rank 0-1 on .*attention sm80$' \
    "${mpi[@]}" -n 1 "${planned[@]}" : -n 1 env WRONG_ATTENTION=crash "${planned[@]}"
has the_rank_is_named '^warning: .* sm90 fail on the GPU of rank 1; sm80' out.txt
judge=("$train" --model t/final --eval --val corpus --max-seqlen 64 --micro-batch-tokens 64)
outcome evaluation_takes_the_same_kernels 0 ' emulated sm_90, .*attention sm80$' \
    "${mpi[@]}" -n 1 "${judge[@]}" : -n 1 env EMU_ARCH=80 "${judge[@]}"
# The watchdog knows what the GPU waits for while the host waits for the GPU. All wait at the same time:
# NAME | FAULT | exit code | a line that matches | options
stopped='^error: ranks: rank 1 on .* was stopped for [0-9]+ s in'
cases="spin|spin:1:backward:2|8|^error: ranks: rank 1 on .* stuck for .* in backward of step 2|
stop|stop:1:forward:2|8|$stopped forward of step 2$|
leave|stop:1:leave:0|8|$stopped leave$|--heartbeat-seconds 5 --steps 2
signal|signal:1:backward:2|75|continues from step 3|"
while IFS='|' read -r name fault _ _ options; do     # mpirun removes a directory that others share
    mkdir "of_$name"
    OMPI_MCA_orte_tmpdir_base=$work/of_$name FAULT=$fault beside "$name" "${mpi[@]}" -n 2 "$bin/train_llama_faulty" "${common[@]}" --attention sm80 \
        --out "$work/$name" --steps 6 --save-every 2 --val-every 0 --heartbeat-seconds 10 $options
done <<< "$cases"
wait
while IFS='|' read -r name _ code pattern _; do
    expect "$name" "$code" "$pattern" ended "$name"
    check "${name}_leaves_no_process" await_gone "$work/$name"
done <<< "$cases"
finish
