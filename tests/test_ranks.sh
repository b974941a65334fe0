#!/usr/bin/env bash
# Several ranks on one machine, one thread each: with --deterministic the same bits on 1 to 4 of them,
# otherwise the same losses; checkpoints that any number of ranks can resume; starts that are refused.
# Runs the release build, because the sanitizer would report MPI's own leaks.
. "$(dirname "$0")/lib.sh"
train=${TRAIN:-$root/build/cpu/train_llama}
with_ranks ranks "$train" || finish
# ---- a tiny model, an uneven corpus, and a single giant document -----------------------------------
tiny_model tiny 24 40 8
uneven_texts text 31
mkdir giant
seq 1 3000 > giant/all.txt
for c in text giant; do prepare $c --out "$c.bin" --val-frac 0.1; done
common=(--model tiny --from-scratch --train text.bin --max-seqlen 128 --micro-batch-tokens 256
        --batch-tokens 1536 --val-tokens 1024 --val-every 4 --num-samples 1 --sample-tokens 2
        --schedule constant --warmup-steps 0 --lr 1e-3 --keep 0 --threads 1)
run=("$train" "${common[@]}")
exact=("${run[@]}" --deterministic)
# ---- the same bits: 6 micro-batches, divided evenly among 2 ranks but not among 4 --------------------
ranks 1 "${exact[@]}" --out d1 --steps 8 --save-every 4
for n in 2 4; do
    ranks $n "${exact[@]}" --out d$n --steps 8 --save-every 4
    same_state "deterministic_on_${n}_ranks" d1/step-00000008 d$n/step-00000008
done
same_losses deterministic_logs_are_equal 0 0 8 d1 d2 d4
ranks 2 "${exact[@]}" --out e --resume=d1/step-00000004 --steps 6
ranks 4 "${exact[@]}" --out e --resume --steps 8
same_state resume_on_1_2_4_ranks d1/step-00000008 e/step-00000008
# ---- Muon: no shard cuts a matrix; one moment of each, which AdamW does not take -----------------------
for n in 1 3; do ranks $n "${exact[@]}" --optimizer muon --out mu$n --steps 4; done
same_state muon_on_3_ranks {mu1,mu3}/step-00000004
differ muon_is_not_adamw {mu1,d1}/final/model.safetensors
expect muon_resumed_by_adamw 9 'missing: v.model.layers.0.self_attn.q_proj.weight' \
    "$train" --resume --out mu1 --steps 7 --optimizer adamw
expect adamw_resumed_by_muon 9 'moments do not fit the optimizer; unknown: 14$' \
    "$train" --resume --out d1 --steps 9 --optimizer muon
# Moments in bf16, in checkpoints too: rounded by the seed, the step and the element, not by the rank; and
# biases, which a shard may cut
cp -r tiny qwen2 && sed -i 's/"llama"/"qwen2"/; s/Llama/Qwen2/' qwen2/config.json
for n in 1 3; do ranks $n "${exact[@]}" --model qwen2 --moments bf16 --out bf$n --steps 4 --save-every 2; done
mkdir bfe && cp -r bf3/step-00000002 bfe/
ranks 2 "$train" --resume --out bfe --steps 4
for d in bf3 bfe; do same_state "bf16_moments_$d" bf1/step-00000004 $d/step-00000004; done
check_python moments_are_stored_as_bf16 <<'PY'
found = tensors("bf1/step-00000004/optimizer.safetensors")
assert len(found) == 52 and {dtype for dtype, _, _ in found.values()} == {"BF16"}, found.keys()
PY
check bf16_moments_become_fp32 "$train" --resume --out bf1 --steps 5 --moments fp32
check fp32_moments_become_bf16 "$train" --resume --out bf1 --steps 6 --moments bf16
# ---- under a loss mask: documents, segments and micro-batches without a target ----------------------
cp -r text.bin masked.bin && shards mask masked.bin 'd % 3 > 0 and i // 40 % 2'
for n in 1 3; do ranks $n "${exact[@]}" --train masked.bin --out md$n --steps 8; done
same_state masked_on_3_ranks {md1,md3}/step-00000008
differ a_mask_changes_the_weights {md1,d1}/step-00000008/model.safetensors
# ---- shared prefixes, next to texts without any: fewer micro-batches, the same bits on any number of ranks ----
mkdir alike
for i in $(seq 60); do
    for _ in $(seq $((6 + i % 2 * 4))); do echo 'Answer in one line, and be kind.'; done > "alike/$i"
    for _ in $(seq $((i % 9 + 1))); do echo "a number, $i"; done >> "alike/$i"
done
prepare text --out texts && prepare alike --out chats
alike=("${exact[@]}" --train chats:0.7,texts:0.3 --max-seqlen 512 --micro-batch-tokens 1024 --batch-tokens 6144 --save-every 3)
for n in 1 3; do ranks $n "${alike[@]}" --layout shared --out sh$n --steps 6; done
ranks 2 "${alike[@]}" --layout shared --resume=sh1/step-00000003 --out shr --steps 6
same_state shared_on_3_ranks {sh1,sh3}/step-00000006
same_state shared_resumed_on_2_ranks {sh1,shr}/step-00000006
ranks 2 "${alike[@]}" --out shp --steps 6
has packed_says_what_shared_saves '^shared prefixes: [2-6][0-9] % .*; --layout shared computes them once' out.txt
same_losses shared_has_the_losses_of_packed 1e-5 inf 6 sh1 shp
check_python shared_computes_less <<'PY'
for s in steps("sh1"): assert 0.3 < s["computed_tokens"] / s["real_tokens"] < 0.85, s
for s in steps("shp"): assert s["computed_tokens"] == s["real_tokens"], s
PY
expect check_packing_of_shared 0 'packing does not change' "${alike[@]}" --layout shared --check-packing --out none
has rows_that_several_documents_share '[0-9]+ documents, [0-9]+ tokens, shared in [0-9]+ rows against each alone' out.txt
has their_losses_are_bit_for_bit "max .delta. of a token's loss .*bit for bit" out.txt
# ---- the same losses: distributed by work; the same bits in every run -----------------------------
for n in 4 6; do ranks $n "${run[@]}" --out w$n --steps 8; done
same_losses by_work_as_in_order_to_1e-5 1e-5 inf 8 d1 w4 w6
ranks 4 "${run[@]}" --out again --steps 8
same_state by_work_has_the_same_bits_in_every_run {w4,again}/step-00000008
# if the order of a sum did not change its bits, the tests above would show nothing
differ order_of_a_sum_changes_bits {w4,d1}/step-00000008/model.safetensors
# ---- balance, predicted and measured: 6 micro-batches on 4 ranks, of which two have two and two have one.
# The median of the steps: a machine that is busy may make one or another look even.
expect balance 0 'fill .* \| imbalance [0-9.]{5} \([0-9.]{5}\)$' "${mpi[@]}" -n 4 "${run[@]}" --out balance \
    --micro-batch-tokens 1024 --batch-tokens 6144 --steps 6
check_python the_log_has_the_balance << 'PY'
first, *rest = steps("balance")
assert "imbalance_measured" not in first       # it is that of the step before
assert all(1 <= s["imbalance_measured"] < 4 and 0 <= s["slowest_rank"] < 4 for s in rest), rest
for name in "planned", "measured":
    assert sorted(s["imbalance_" + name] for s in rest)[2] > 1.2, rest
PY
lacks no_imbalance_on_one_rank imbalance d1/log.jsonl
# ---- validation and samples only -------------------------------------------------------------------------
for n in 1 3; do
    ranks $n "${exact[@]}" --out nothing --steps 0
    grep -A 2 '^val after step 0' out.txt > "e$n.txt" || bad "steps_0_on_$n" 'no validation'
done
same steps_0_on_3_ranks e1.txt e3.txt
check steps_0_writes_nothing test ! -e nothing
# ---- ranks that were started differently ------------------------------------------------------------
expect different_options 9 'differences in lr \(rank 1\)' \
    "${mpi[@]}" -n 1 "${run[@]}" --out m --steps 1 : -n 1 "${run[@]}" --out m --steps 1 --lr 2e-3
expect resume_of_one_rank_only 9 'differences in .*resume \(rank 1\)' \
    "${mpi[@]}" -n 1 "${run[@]}" --out m --resume : -n 1 "${run[@]}" --out m
# the same names, other files
mkdir here there && ln -s ../text.bin here/data && ln -s ../giant.bin there/data
named=("${run[@]}" --model "$work/tiny" --train data --val "$work/text.bin" --out "$work/m" --steps 1)
expect different_data 9 'differences in training data \(rank 1\)$' \
    "${mpi[@]}" -n 1 --wdir here "${named[@]}" : -n 1 --wdir there "${named[@]}"
expect different_tasks 9 'differences in out \(rank 1\), eval \(rank 1\)' \
    "${mpi[@]}" -n 1 "${run[@]}" --out m --steps 1 : -n 1 "${run[@]}" --steps 1 --eval
for n in 1 2; do
    expect "help_on_one_of_$n" 9 "ranks: rank $n has ended, expected it to run as the others do" \
        "${mpi[@]}" -n $n "${run[@]}" --out m --steps 1 : -n 1 "$train" --help
done
[ ! -x "${train}_faulty" ] || expect different_programs 9 'differences in .*the program file \(rank 1\)$' \
    "${mpi[@]}" -n 1 "${run[@]}" --out m --steps 1 : -n 1 "${train}_faulty" "${common[@]}" --out m --steps 1
# the same directory name, other weights: the last byte of the last one differs
for d in here there; do cp -r d1/final $d/m; done
shards flip there/m/model.safetensors -1
loaded=("$train" --model m "${common[@]:3}" --train "$work/text.bin" --out "$work/m" --steps 1)
expect different_weights 9 'found differences in weights \(rank 1\)$' \
    "${mpi[@]}" -n 1 --wdir here "${loaded[@]}" : -n 1 --wdir there "${loaded[@]}"
check nothing_is_written_before_ranks_agree test ! -e m
# ---- errors are said once ---------------------------------------------------------------------------------
expect unknown_flag 2 'layot: unknown option' "${mpi[@]}" -n 4 "$train" --layot packed
expect more_ranks_than_micro_batches 2 'start at most 2' "${mpi[@]}" -n 4 "${run[@]}" --batch-tokens 512 --out m
expect one_micro_batch_a_rank 0 '^done' "${mpi[@]}" -n 2 "${run[@]}" --batch-tokens 0 --out two --steps 1
expect a_full_segment_a_rank 0 'fill 100.0 % \| 4 docs ' "${mpi[@]}" -n 4 "${run[@]}" --train giant.bin --val text.bin \
    --micro-batch-tokens 128 --batch-tokens 0 --out four --steps 1
for n in 1 2; do expect "epochs_on_$n" 0 '^epochs  2\.' "${mpi[@]}" -n $n "${run[@]}" --batch-tokens 512 --epochs 2 --out ep$n --dry-run && cp out.txt ep$n.txt; done
same epochs_on_two_ranks <(grep ^epochs ep1.txt) <(grep ^epochs ep2.txt)
expect resume_on_more_ranks_than_micro_batches 2 'hint: start at most 2' \
    "${mpi[@]}" -n 3 "$train" --resume --out two --steps 2
expect resume_on_one_rank 0 '^done' "$train" --resume --out two --steps 2
expect compare_on_several_ranks 2 'one rank only' "${mpi[@]}" -n 2 "${run[@]}" --compare
# ---- one of several that MPI has not started must not train alone -----------------------------------
expect mpi_finds_no_others 2 'started as one of 2, but MPI finds 1' env OMPI_COMM_WORLD_SIZE=2 "${run[@]}" --out m
expect torchrun_is_refused 2 "found torchrun's WORLD_SIZE 8" env WORLD_SIZE=8 RANK=0 LOCAL_RANK=0 "${run[@]}" --out m
has torchrun_gets_the_right_line '^hint: mpirun -n 8 ./train_llama' out.txt
asan=$root/build/asan/train_llama
# alone, since each of two ranks may say it
[ ! -x "$asan" ] || expect built_without_mpi 2 'built without MPI' env OMPI_COMM_WORLD_SIZE=2 "$asan" "${common[@]}" --out m
# a single process starts no MPI: without its configuration MPI_Init could not
expect a_single_process_starts_no_mpi 0 '^done' \
    env OMPI_MCA_ess=nothing OMPI_MCA_btl=nothing "${run[@]}" --out alone --steps 1
# ---- the plan ---------------------------------------------------------------------------------------------
mkdir away
expect plan_of_texts 0 '^texts .* 60 documents' \
    env TMPDIR="$work/away" "${mpi[@]}" -n 2 "${run[@]/#tiny/demo}" --train text --out dry --dry-run
check plan_of_texts_leaves_nothing eval 'rmdir away && test ! -e dry'
core=$(sed -n 's/^Cpus_allowed_list:[^0-9]*\([0-9]*\).*/\1/p' /proc/self/status)
expect plan_reports_the_share_and_cores 0 '^ranks +2, .* rank 0 updates [0-9.]+ %' \
    "${mpi[@]}" -n 2 taskset -c "$core" "${run[@]}" --dry-run --lr 0.5
has plan_reports_cores "rank 0-1 on .*, cores $core: " out.txt
check only_rank_0_prints test "$(grep -cE '^(ranks|warning:)' out.txt)" -eq 3
# two ranks of a machine have half of its memory each; a quarter of slack for what else runs here
found_mib() { sed -n 's/^error: memory: .* found \([0-9]*\).* MiB.*$/\1/p' out.txt; }
large=("${run[@]}" --micro-batch-tokens 200000000)
outcome too_large_for_the_machine 5 'error: memory' "${large[@]}" --batch-tokens 200000000 --out m
all_mib=$(found_mib)
outcome too_large_for_two_ranks 5 'error: memory' "${mpi[@]}" -n 2 "${large[@]}" --batch-tokens 400000000 --out m
half_mib=$(found_mib)
check ranks_share_the_machines_memory test "$((4 * half_mib))" -lt "$((3 * all_mib))"
finish
