#!/usr/bin/env bash
# Runs with --lora: adapters that PEFT's names and a resumed run find again, merged weights that write
# the same texts, ranks, the CUDA backend (emulated), and starts that are refused. That they compute
# what PEFT does is shown by the goldens of test_llama.c.
. "$(dirname "$0")/lib.sh"
train=${TRAIN:-$root/build/cpu/train_llama} cuda=("${CUDA:-$root/build/emu/train_llama}")
[ "${CUDA:-}" ] || cuda+=(--attention sm90)     # no probe in each start
tiny_model llama 64 96 64
corpus 5
common=(--train corpus --max-seqlen 96 --micro-batch-tokens 256 --batch-tokens 512 --keep 0
        --num-samples 0 --warmup-steps 1 --threads 1)
check the_base_is_trained "$train" --model llama --from-scratch "${common[@]}" --lr 1e-2 --steps 60 \
    --val-every 60 --save-every 8 --out base-run
mv base-run/final base && cp base/model.safetensors base.safetensors
run=(--model base "${common[@]}" --lora 12 --lr 1e-2 --steps 4 --val-every 4)
# ---- adapters alone are trained, in PEFT's files, of a rank that is no multiple of 8 ------------------
check trains "$train" "${run[@]}" --save-every 2 --out full
same the_base_is_as_it_was base/model.safetensors base.safetensors
check_python it_learns_and_starts_from_the_base <<'PY'
config = json.load(open("full/final/adapter_config.json"))
assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 12, 24)
found = tensors("full/final/adapter_model.safetensors")
assert len(found) == 28 and all(12 in shape for _, shape, _ in found.values()), found
assert config["base_model_name_or_path"] == os.path.realpath("base") and len(config["target_modules"]) == 7
def val(run): return [v["loss"] for v in events(run, "val")]
before, after = val("full")
assert before == val("base-run")[-1] and after < before - 0.005, (before, after)
PY
# resumes NAME RUN COPY OPTIONS...: from step 2 of 4, to the same bits
resumes() {
    mkdir "$3" && cp -r "$2/step-00000002" "$3"
    check "resumes_$1" "$train" --resume --out "$3" "${@:4}"
    same_state "${1}_has_the_same_bits" {"$2","$3"}/step-00000004
}
resumes to_merge full half --lora-merge
outcome a_dry_run_says_what_is_trained 0 '^lora +rank 12, scale 2, beside 14 linear layers .* 0.04 M' \
    "$train" "${run[@]}" --dry-run
outcome an_alpha_is_taken 0 'rank 12, scale 0.5,' "$train" "${run[@]}" --lora-alpha 6 --dry-run
# ---- base plus adapters, and both merged: the same texts and losses ----------------------------------
greedy=(--generate --prompt 'line 1' --temperature 0 --sample-tokens 40 --threads 1 --max-seqlen 96)
text_of() { within "$train" "${greedy[@]}" "${@:2}" || bad "$1" 'failed'; grep -av ' tokens/s' out.txt > "$1"; }
loss_of() {
    within "$train" "${@:2}" --eval --val corpus --max-seqlen 96 --threads 1 || bad "$1" 'failed'
    grep -a '^all' out.txt > "$1"
}
# same_by HOW NAME FILE ARGUMENTS...: text_of or loss_of, with these, gives what is in the file
same_by() { "$1" found "${@:4}"; same "$2" "$3" found; }
text_of plain-text --model base
text_of adapted-text --adapter full/final
same_by text_of merged_writes_the_same_text adapted-text --model half/final
same_by text_of the_adapter_names_its_base adapted-text --model base --adapter full/final
differ the_adapter_matters adapted-text plain-text
loss_of adapted-loss --adapter full/final
same_by loss_of merged_has_the_same_loss adapted-loss --model half/final
# ---- on a base in NF4 --------------------------------------------------------------------------------
check trains_beside_nf4 "$train" "${run[@]}" --lora 8 --base nf4 --save-every 2 --out nf4
has nf4_shows_in_the_plan '^lora .*frozen model in NF4' out.txt
resumes nf4_to_merge nf4 nf4-half --lora-merge
loss_of nf4-loss --adapter nf4/final
check_python nf4_is_another_base_and_learns <<'PY'
def val(run): return [v["loss"] for v in events(run, "val")]
(full, _), (before, after) = val("full"), val("nf4")
assert 0 < abs(before - full) < 0.02 and after < before - 0.005, (full, before, after)
said = json.load(open("nf4/final/adapter_config.json"))["quantization_config"]
assert said == {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": False}, said
assert open("nf4-loss").read().split()[3] == "%.4f" % after      # --eval takes the base of the run
PY
loss_of full-loss --adapter nf4/final --base full
same_by loss_of nf4_can_be_asked_for nf4-loss --adapter nf4/final --base nf4
differ it_matters nf4-loss full-loss
same_by loss_of nf4_is_merged_into_the_weights_as_they_are full-loss --model nf4-half/final
# ---- adapters that are merged, and trained further ---------------------------------------------------
check they_are_merged "$train" --adapter full/final --lora-merge --out merged
same_by loss_of merging_alone_has_the_loss adapted-loss --model merged/final
more=(--adapter full/final "${common[@]}" --lr 1e-2 --steps 3 --val-every 3 --save-every 1)
check adapters_are_trained_further "$train" "${more[@]}" --out more
check_python they_start_where_they_were <<'PY'
end, start = [[v["loss"] for v in events(run, "val")][i] for run, i in (("full", -1), ("more", 0))]
assert end == start, (end, start)
assert json.load(open("more/final/adapter_config.json"))["r"] == 12
PY
mkdir again && mv more/step-00000001 again/ && mv full/final elsewhere
check without_the_old_ones_it_resumes "$train" --resume --out again
same_state resumed_further_has_the_same_bits {more,again}/step-00000003
mv elsewhere full/final
check its_options_start_a_twin "$train" --options again/options --out twin --dry-run
mkdir whole && cp -r base whole/final
expect a_merge_over_its_model 2 '^error: --overwrite: .* found whole/final$' \
    "$train" --adapter full/final --model whole/final --lora-merge --out whole --overwrite
expect a_merge_over_its_adapter 2 'final' "$train" --adapter again/final --lora-merge --out again --overwrite
# ---- other ranks, and the CUDA backend --------------------------------------------------------------
few=("${run[@]}" --micro-batch-tokens 128 --batch-tokens 256 --val-every 0 --steps 2
     --model base-run/step-00000008)    # its gradients are large
check on_a_gpu "${cuda[@]}" "${few[@]}" --out gpu
check on_a_cpu "$train" "${few[@]}" --out cpu
same_losses a_gpu_has_the_losses 0.00390625 0.03125 2 gpu cpu
few+=(--lora 8 --base nf4)
check nf4_on_a_gpu "${cuda[@]}" "${few[@]}" --out nf4-gpu
check nf4_on_a_cpu "$train" "${few[@]}" --out nf4-cpu
same_losses a_gpu_has_the_losses_of_nf4 0.00390625 0.03125 2 nf4-gpu nf4-cpu
check a_gpu_resumes "${cuda[@]}" --resume --out gpu --steps 3
if with_ranks ranks "$train"; then
    for n in 1 2; do
        check "nf4_on_$n" "${mpi[@]}" -n $n "$train" "${run[@]}" --deterministic --out ranks$n --base nf4 --lora-merge \
            --lora-targets q,v,up
    done
    mkdir here there && cp -r base here/b && cp -r base-run/step-00000008 there/b
    same=("${run[@]}" --base nf4 --model b --train "$work/corpus" --out "$work/refused")
    expect ranks_beside_other_codes 9 'codes of NF4 \(rank 1\), scales of NF4 \(rank 1\)$' \
        "${mpi[@]}" -n 1 --wdir here "$train" "${same[@]}" : -n 1 --wdir there "$train" "${same[@]}"
    same_state ranks_have_the_same_bits ranks{1,2}/step-00000004
    same ranks_merge_alike ranks{1,2}/final/model.safetensors
fi
# ---- refused ----------------------------------------------------------------------------------------
no() { expect "$1" "$2" "$3" "$train" "${common[@]}" --out refused "${@:4}"; }
no a_model_without_weights 2 'expected a model with weights' --lora 8
no from_scratch 2 'expected a model with weights' --model base --from-scratch --lora 8
for t in head ga ''; do no "no_target_$t" 2 "found \"$t\"" --model base --lora 8 --lora-targets q,$t; done
for option in '--lora-targets q' --lora-merge '--lora-alpha 8' '--base nf4'; do
    no "no_lora_${option% *}" 2 'belong to adapters' --model base $option
done
expect nf4_without_adapter 2 '--lora and --adapter only' "$train" --model base --base nf4 "${greedy[@]}"
tiny_model odd 20 10 6
expect matrices_of_part_blocks 3 'found k_proj of 120 and up_proj of 200' "$train" --model odd "${common[@]}" --lora 8 --base nf4
no muon 2 'expected at most one of them' --model base --lora 8 --optimizer muon
no new_and_old_adapters 2 'than its own: 12, 24, q_proj' --model base --adapter full/final --lora 24
expect merging_with_steps 2 '^error: --lora-merge and --steps: expected at most one' "$train" --adapter full/final --lora-merge --steps 4
expect adapters_for_nothing 2 '^hint: give --train TEXTS' "$train" --adapter full/final
expect a_run_as_adapters 3 '^hint: --adapter full/final' "$train" --adapter full "${greedy[@]}"
expect adapters_that_would_be_removed 2 'expected a --adapter' "$train" "${common[@]}" --adapter full/final --out full --overwrite
no dropout 2 'lora-dropout' --model base --lora 8 --lora-dropout 0.1
no an_adapter_as_a_model 3 'for --adapter, or resume their run with --lora-merge' --model full/final
for other in '--lora 0' '--lora-targets q' '--lora-alpha 4' '--base nf4'
do expect "another_${other%% *}" 9 'expected --lora 12 --lora-alpha 0 --lora-targets all --base full, found' "$train" --resume --out half $other; done
expect adapters_of_a_whole_model 9 'expected --lora 0' "$train" --resume --out base-run --lora 8
within env -C full "$train" --adapter final "${greedy[@]}"
grep -av ' tokens/s' out.txt > found
same a_base_is_found_from_elsewhere adapted-text found
cp -r base other && cp half/final/model.safetensors other/ && rm other/manifest.json
expect another_base 9 'that the adapters were trained beside' "$train" --resume --out half --model other --steps 9
said adapters_beside_another_base 0 '^warning: full/final: trained beside /.*/base, found --model other$' \
    "$train" --model other --adapter full/final "${greedy[@]}"
expect a_given_model_is_taken 3 'nowhere' "$train" --model nowhere --adapter full/final "${greedy[@]}"
expect a_model_instead_of_adapters 3 'adapter_config.json' "$train" --adapter base "${greedy[@]}"
while read -r key value; do
    rm -rf foreign && cp -r full/final foreign
    edit foreign/adapter_config.json "j['$key'] = json.loads('$value')"
    expect "foreign_$key" 3 "adapter_config.json: $key" "$train" --adapter foreign "${greedy[@]}"
    [[ $value != *.* ]] || has a_regular_expression_is_named 'found the regular expression [.][*].q.v._proj$' out.txt
done << 'KEYS'
use_dora true
use_rslora true
bias "all"
modules_to_save ["lm_head"]
rank_pattern {"q_proj":16}
init_lora_weights "pissa"
target_modules "all-linear"
target_modules ".*(q|v)_proj"
target_modules ["embed_tokens"]
peft_type "IA3"
peft_type null
quantization_config {"load_in_4bit":true,"bnb_4bit_quant_type":"fp4"}
quantization_config {"load_in_4bit":true,"bnb_4bit_quant_type":"nf4","bnb_4bit_use_double_quant":true}
r 0
r null
lora_alpha null
KEYS
finish
