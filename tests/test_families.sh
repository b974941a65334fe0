#!/usr/bin/env bash
# Each family that README names, from text to text: a tiny random model with a tokenizer and a chat template of its
# kind is trained on texts and chats, evaluated, asked, given an adapter and exported; transformers, where it is
# installed, reads the same files and computes the same loss and the same greedy text.
. "$(dirname "$0")/lib.sh"
train=$release
transformers=true && with_package as_transformers transformers || transformers=false
gguf=true && with_package llama_cpps_files gguf || gguf=false
tiny_model tiny 96 64 16 1000
for i in $(seq 40); do
    echo "{\"text\": \"line $i of the theory, naïve and 東京\"}"
    echo "{\"messages\": [{\"role\": \"user\", \"content\": \"What is $i?\"}, {\"role\": \"assistant\", \"content\": \"The theory of $i.\"}]}"
done > mixed.jsonl
head -n 1 mixed.jsonl > one.jsonl
run=("$train" --steps 2 --val-every 0 --num-samples 0 --max-seqlen 256 --micro-batch-tokens 1024 --lr 1e-2)
# family NAME TOKENIZER TEMPLATE BOS EOS CHANGES
family() {
    cp -r tiny "$1" && cp "$root/tests/golden/tokenizers/$2/tokenizer.json" "$1"
    [ "$3" = - ] || cp "$root/tests/golden/chat/templates/$3.jinja" "$1/chat_template.jinja"
    edit "$1/config.json" "j.update(json.loads('''$6'''))"
    python "$1" "$4" "$5" << 'PY'
directory, bos, eos = sys.argv[1:]
path = directory + "/tokenizer.json"
tokenizer = json.load(open(path))
known = {**tokenizer["model"]["vocab"], **{t["content"]: t["id"] for t in tokenizer["added_tokens"]}}
for name in (bos, eos):
    if name not in known:
        known[name] = max(known.values()) + 1
        tokenizer["added_tokens"].append(dict(tokenizer["added_tokens"][0], id=known[name], content=name))
json.dump(tokenizer, open(path, "w"))
json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}, open(directory + "/tokenizer_config.json", "w"))
config = json.load(open(directory + "/config.json"))
json.dump(dict(config, bos_token_id=known[bos], eos_token_id=known[eos]), open(directory + "/config.json", "w"))
PY
    local data=mixed.jsonl
    [ "$3" != - ] || { grep '"text"' mixed.jsonl > texts.jsonl && data=texts.jsonl; }
    expect "${1}_takes_texts_and_chats" 0 '^done' "${run[@]}" --model "$1" --from-scratch --train $data --out "$1.run"
    expect "${1}_is_evaluated" 0 '^all +1 ' "$train" --model "$1.run/final" --eval --val one.jsonl
    grep '^all' out.txt > eval.txt
    expect "${1}_is_asked" 0 '' "$train" --model "$1.run/final" --generate --prompt "of the theory" --temperature 0 --sample-tokens 8
    [ "$3" = - ] || expect "${1}_answers" 0 '' "$train" --model "$1.run/final" --generate --chat --prompt "What is 7?" --sample-tokens 8
    expect "${1}_takes_an_adapter" 0 '^done' "${run[@]}" --model "$1.run/final" --train $data --lora 4 --out "$1.lora"
    ! $gguf || { rm -f model.gguf; expect "${1}_as_gguf" 0 ^wrote python3 "$root/scripts/export_gguf.py" "$1.run/final" model.gguf --type f32; }
    ! $transformers || check_python "${1}_is_that_of_transformers" "$1.run/final" "$train" << 'PY'
import subprocess, torch, transformers
directory, trainer = sys.argv[1:]
tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
text = json.loads(open("one.jsonl").read())["text"]
ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]])
loss = model(input_ids=ids, labels=ids).loss.item()
ours = float(open("eval.txt").read().split()[3])
assert abs(loss - ours) < 2e-4, (loss, ours)
ids = torch.tensor([tokenizer("of the theory", add_special_tokens=False)["input_ids"]])
whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, pad_token_id=0)[0]
found = subprocess.run([trainer, "--model", directory, "--generate", "--prompt", "of the theory", "--temperature", "0",
                        "--sample-tokens", "8"], capture_output=True, text=True).stdout
print(repr(found), repr(tokenizer.decode(whole)))
assert tokenizer.decode(whole).replace("of the theory", "", 1).strip() in found or tokenizer.eos_token_id in whole[ids.shape[1]:]
PY
}
# name, tokenizer, template (-: none is known), BOS, EOS, config.json
while read -r name tokenizer template bos eos changes; do
    family "$name" "$tokenizer" "$template" "$bos" "$eos" "$changes"
done << 'FAMILIES'
llama2 llama2 llama2 <s> </s> {}
tinyllama llama2 tinyllama <s> </s> {}
llama3 llama3 llama3.2 <|begin_of_text|> <|eot_id|> {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}}
smollm3 llama3 smollm3 <|endoftext|> <|im_end|> {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "pad_token_id": null, "num_hidden_layers": 4}
mistral mistral mistral-7b-v3 <s> </s> {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": null}
qwen2 qwen qwen2.5 <|endoftext|> <|im_end|> {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
qwen3 qwen qwen3 <|endoftext|> <|im_end|> {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
minicpm llama2 - <s> </s> {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "auto_map": {"AutoModel": "modeling_minicpm.MiniCPMModel"}, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
granite llama3 granite3.3 <|end_of_text|> <|end_of_text|> {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.0625, "logits_scaling": 8}
granite4 llama3 granite4.0 <|end_of_text|> <|end_of_text|> {"model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.0625, "logits_scaling": 8, "layer_types": ["attention", "attention"], "num_local_experts": 0, "position_embedding_type": "rope", "shared_intermediate_size": 160, "mamba_n_heads": 1}
FAMILIES
expect gate_needs_up_where_they_are_one 2 'gate and up together' "${run[@]}" --model granite4.run/final --train mixed.jsonl --lora 4 --lora-targets q,gate
finish
