"""Ten steps of TRL's DPOTrainer and of ./train_llama on the same pairs, model and optimizer.

    python dev/reference/compare_trl.py        exit 0: the losses agree to 1e-5

Every step is all of the pairs, so that their order does not matter. The template that TRL gets writes no
newline after the last message: TRL trains on it, ./train_llama, as most trainers of chats, does not.
"""
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS, PAIRS, LR, BETA = 10, 12, 3e-3, 0.3
CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
          "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
OF_TRL = CHATML.replace("+ '\n'}}", "+ ('' if loop.last else '\n')}}").replace("{{ '<", "{{ '\n<")


def make_model(path):
    for name in "tokenizer.json", "tokenizer_config.json":
        shutil.copy(ROOT / "tests/golden/chat" / name, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = CHATML
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, max_position_embeddings=512))
    model.save_pretrained(path)
    tokenizer.chat_template = OF_TRL
    return tokenizer


def make_pairs():
    words, rng = "the cat sat on a mat and saw some birds fly over their house".split(), random.Random(2)
    text = lambda most: " ".join(rng.choices(words, k=rng.randint(1, most)))
    return [{"prompt": [{"role": "user", "content": text(30)}], **{
        key: [{"role": "assistant", "content": text(20)}] for key in ("chosen", "rejected")}} for _ in range(PAIRS)]


def train_ours(path, pairs):
    own = AutoTokenizer.from_pretrained(path)
    tokens = sum(len(own.apply_chat_template(p["prompt"] + p[key], tokenize=True, return_dict=False))
                 for p in pairs for key in ("chosen", "rejected"))     # so that they just fill a step
    (path / "pairs.jsonl").write_text("".join(json.dumps(p) + "\n" for p in pairs))
    subprocess.run(
        [ROOT / "train_llama", "--model", path, "--train", path / "pairs.jsonl", "--val", path / "pairs.jsonl", "--out",
         path / "run", "--preference", "dpo", "--beta", str(BETA), "--lr", str(LR),
         "--schedule", "constant", "--warmup-steps", "0", "--steps", str(STEPS), "--val-every", "0", "--num-samples",
         "0", "--max-seqlen", "512", "--micro-batch-tokens", str(tokens)], check=True, stdout=subprocess.DEVNULL)
    return [r for r in map(json.loads, open(path / "run/log.jsonl")) if "event" not in r]


def train_trl(path, tokenizer, pairs):
    args = DPOConfig(
        output_dir=str(path / "trl"), per_device_train_batch_size=PAIRS, max_steps=STEPS, learning_rate=LR, beta=BETA,
        use_cpu=True, model_init_kwargs={"dtype": "float32"}, lr_scheduler_type="constant", adam_beta2=0.95,
        weight_decay=0, logging_steps=1, save_strategy="no", bf16=False,
        report_to=[], disable_dropout=True, max_length=None, gradient_checkpointing=False)
    trainer = DPOTrainer(model=str(path), args=args, train_dataset=Dataset.from_list(pairs),
                         processing_class=tokenizer)
    trainer.train()
    return [r for r in trainer.state.log_history if "loss" in r]


def main():
    with tempfile.TemporaryDirectory() as name:
        path = pathlib.Path(name)
        tokenizer = make_model(path)
        pairs = make_pairs()
        ours, theirs = train_ours(path, pairs), train_trl(path, tokenizer, pairs)
    worst = 0
    for a, b in zip(ours, theirs, strict=True):
        worst = max(worst, abs(a["loss"] - float(b["loss"])))
        print(f"step {a['step']:2}: loss {a['loss']:.6f} {b['loss']}, margin {a['margin']:.6f} {b['rewards/margins']}, "
              f"accuracy {a['accuracy']:.3f} {b['rewards/accuracies']}, norm {a['grad_norm']:.5f} {b['grad_norm']}")
    print(f"largest difference of a loss: {worst:.2g}")
    return 0 if len(ours) == STEPS and worst < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
