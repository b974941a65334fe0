#!/usr/bin/env bash
# Whole runs of tiny models of the other types (Qwen2, Qwen3, Mistral, SmolLM3): checkpoints that
# resume, also with --recompute and on two ranks, files that are again of their type, and the CUDA
# backend, emulated. That they compute what transformers does is shown by the goldens.
. "$(dirname "$0")/lib.sh"
cpu=$root/build/cpu/train_llama cuda=("${TRAIN:-$root/build/emu/train_llama}")
[ "${TRAIN:-}" ] || cuda+=(--attention sm90)     # no probe in each start
tiny_model llama 64 96 64
corpus 5
python << 'PY'
types = {
    "qwen2": dict(architectures=["Qwen2ForCausalLM"], sliding_window=64, use_sliding_window=False),
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False),
    "mistral": dict(architectures=["MistralForCausalLM"], sliding_window=96,
                    rope_scaling=dict(rope_type="linear", factor=2.0)),
    "smollm3": dict(architectures=["SmolLM3ForCausalLM"], no_rope_layers=[1, 0],
                    rope_scaling=dict(rope_type="yarn", factor=4.0)),
}
llama = json.load(open("llama/config.json"))
for name, keys in types.items():
    os.mkdir(name)
    json.dump({**llama, "model_type": name, **keys}, open(name + "/config.json", "w"))
PY

common=(--from-scratch --train corpus --max-seqlen 96 --micro-batch-tokens 128 --batch-tokens 256
        --val-every 0 --num-samples 0 --lr 1e-2 --warmup-steps 1 --steps 2 --keep 0 --threads 1)
for type in qwen2 qwen3 mistral smollm3; do
    run=("$cpu" --model $type "${common[@]}")
    check ${type}_trains "${run[@]}" --out $type-off --recompute off --save-every 1
    mkdir $type-full && cp -r $type-off/step-00000001 $type-full/
    check ${type}_resumes_and_recomputes "${run[@]}" --out $type-full --resume --recompute full
    same_state ${type}_resumed_has_the_same_bits $type-{off,full}/step-00000002
    check ${type}_packed_is_alone "$cpu" --model $type-off/final --train corpus --check-packing \
        --max-seqlen 96
    check ${type}_on_a_gpu "${cuda[@]}" --model $type "${common[@]}" --out $type-cuda --recompute on
    same_losses ${type}_on_a_gpu_has_the_losses 0.00390625 0.03125 2 $type-{off,cuda}
done
check smollm3_on_an_older_gpu "${cuda[@]}" --model smollm3 "${common[@]}" --attention sm80 --out older
same_losses smollm3_on_an_older_gpu_has_the_losses 0.00390625 0.03125 2 smollm3-off older

# Mistral's window of 96 is full attention here, and would not be for longer documents.
check_python the_window_is_written_back <<'PY'
assert json.load(open("mistral-off/final/config.json"))["sliding_window"] == 96
PY
longer=(--max-seqlen 97 --train corpus)
expect a_longer_document 3 'sliding_window: expected at least --max-seqlen 97, found 96' \
    "$cpu" --model mistral --from-scratch "${longer[@]}" --out longer
expect a_longer_text 3 'hint: lower --max-seqlen' "$cpu" --model mistral-off/final --max-seqlen 97 --generate --prompt a
expect a_longer_evaluation 3 'found 96' "$cpu" --model mistral-off/final --eval "${longer[@]}"
check a_shorter_text "$cpu" --model mistral-off/final --max-seqlen 96 --generate --prompt a --sample-tokens 4

if with_ranks ranks "$cpu"; then
    for type in qwen2 qwen3; do
        for n in 1 2; do
            check "${type}_on_$n" "${mpi[@]}" -n $n "$cpu" --model $type "${common[@]}" \
                --deterministic --out $type-ranks$n
        done
        same_state ${type}_shards_have_the_same_bits $type-ranks{1,2}/step-00000002
    done
fi
finish
