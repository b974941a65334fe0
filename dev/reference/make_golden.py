"""Makes tests/golden/: tiny models and what PyTorch + transformers say about them.

    python dev/reference/make_golden.py            writes tests/golden/*
    python dev/reference/make_golden.py --check    computes again, compares, writes nothing
    python dev/reference/make_golden.py NAME ...   only these models

Each document of the packed batch runs ALONE through transformers' AutoModelForCausalLM, so the
expected values know nothing of packing, masks or padding. They are computed in fp64 and rounded
once.

A `.double()` model of transformers is not fp64 inside: RMSNorm, RoPE and softmax go through fp32.
fp64_inside() below lifts those three. Unmodified transformers in fp32 is run as well, each
document alone and as a padded batch with an attention mask; all three must agree, and the
differences are printed: they say what a tolerance can mean. So is unmodified transformers in bf16.
"""
import argparse
import contextlib
import copy
import json
import math
import pathlib
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
LENGTHS = [1, 2, 17, 5, 33, 64, 9]
EMPTY_AT = [0, 3, 3, 7]       # places where cu_seqlens_empty has a document of no tokens
NEW_TOKENS, LEAST_MARGIN = 12, 1e-3    # of the greedy continuations
STEPS, LR, BETAS, EPS, DECAY, CLIP = 10, 3e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
RECIPE = {"adamw": f"steps {STEPS} lr {LR} betas {BETAS[0]} {BETAS[1]} eps {EPS} "
                   f"weight_decay {DECAY} (ndim >= 2) grad_clip {CLIP}"}    # one key: no order

COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "num_hidden_layers": 2,
    "max_position_embeddings": 512, "initializer_range": 0.02, "bos_token_id": 0,
    "eos_token_id": 0, "torch_dtype": "float32", "use_cache": True, "rope_scaling": None,
}
CONFIGS = {
    # SmolLM2-135M's ratio of heads, tied; heads * head_dim is not hidden_size
    "gqa3_tied": {
        "hidden_size": 24, "intermediate_size": 48, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0, "tie_word_embeddings": True},
    # every head its own key and value, separate head
    "mha_untied": {
        "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False},
    # head_dim 128; of the 64 frequencies 7 are kept, 10 interpolated, 47 divided by 8
    "llama3_rope": {
        "hidden_size": 16, "intermediate_size": 48, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    # odd sizes, no head_dim key (hidden_size / heads), two keys of SmolLM2's file to be ignored
    "odd_sizes": {
        "hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 1,
        "num_key_value_heads": 1, "vocab_size": 97, "rms_norm_eps": 1e-6, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "is_llama_config": True, "rope_interleaved": False},
}

def variant(model_type, architecture, **keys):
    """Of another type of model, without the keys that such a file does not have."""
    common = {k: v for k, v in COMMON.items() if k not in ("attention_bias", "mlp_bias")}
    return {**common, "model_type": model_type, "architectures": [architecture],
            "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 48, "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0, **keys}


CONFIGS.update({
    # no head_dim key, as in the published files; their window is not in use
    "qwen2": variant("qwen2", "Qwen2ForCausalLM", hidden_size=64, num_attention_heads=1,
                     head_dim=None, tie_word_embeddings=True, use_sliding_window=False,
                     sliding_window=64, max_window_layers=1, use_mrope=False),
    "qwen3": variant("qwen3", "Qwen3ForCausalLM", tie_word_embeddings=False, attention_bias=False,
                     use_sliding_window=False, sliding_window=None, max_window_layers=2),
    "mistral_linear_rope": variant(
        "mistral", "MistralForCausalLM", tie_word_embeddings=False, sliding_window=None,
        rope_scaling={"type": "linear", "factor": 3.0}),
    # RoPE in layers 0 and 2; tied, as no key says otherwise. Of 32 frequencies YaRN keeps 6,
    # interpolates 7 and divides 19.
    "smollm3_yarn_rope": variant(
        "smollm3", "SmolLM3ForCausalLM", num_hidden_layers=3, no_rope_layers=[1, 0, 1],
        no_rope_layer_interval=2, attention_bias=False, mlp_bias=False, pretraining_tp=2,
        pad_token_id=None,      # by default above this vocabulary
        use_sliding_window=False, sliding_window=None, max_window_layers=28,
        layer_types=["full_attention"] * 3,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0,
                      "original_max_position_embeddings": 256}),
    # multipliers other than 1, and attention's not 1 / sqrt(head_dim)
    "granite": variant("granite", "GraniteForCausalLM", tie_word_embeddings=True, attention_bias=False, mlp_bias=False,
                       embedding_multiplier=3.0, residual_multiplier=0.7, attention_multiplier=0.25,
                       logits_scaling=4.0, rms_norm_eps=0.01),
    "granite4": variant("granitemoehybrid", "GraniteMoeHybridForCausalLM", hidden_size=64, num_attention_heads=1,
                        head_dim=None, tie_word_embeddings=True, position_embedding_type="rope", logits_scaling=4.0,
                        layer_types=["attention"] * 2, num_local_experts=0, shared_intermediate_size=40,
                        embedding_multiplier=3.0, residual_multiplier=0.7, attention_multiplier=0.25),
})
del CONFIGS["qwen2"]["head_dim"], CONFIGS["granite4"]["head_dim"]
FINAL_FOR = ["gqa3_tied"]     # final.* of one model is enough, and keeps the files small


def exact_inv_freq(config):
    """The rotation frequencies in fp64, from the definition, and the factor of cos and sin."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    base, pair = config.rope_theta, torch.arange(0, dim // 2, dtype=torch.float64)
    freq, scaling = base ** (-2 * pair / dim), config.rope_scaling or {"rope_type": "default"}
    kind, factor = scaling.get("rope_type") or scaling["type"], scaling.get("factor")
    if kind == "linear":
        return freq / factor, 1.0
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)    # 0: divide, 1: keep
        return freq * ((1 - smooth) / factor + smooth), 1.0
    if kind == "yarn":
        context = scaling["original_max_position_embeddings"]

        def pair_of(turns):
            return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))
        first = max(0, math.floor(pair_of(scaling.get("beta_fast", 32))))
        last = min(dim - 1, math.ceil(pair_of(scaling.get("beta_slow", 1))))
        ramp = ((pair - first) / (last - first)).clamp(0, 1)   # 0: keep, 1: divide
        return freq * ((1 - ramp) + ramp / factor), 0.1 * math.log(factor) + 1
    assert kind == "default"
    return freq, 1.0


@contextlib.contextmanager
def fp64_inside(model):
    """Its RMSNorm, RoPE and softmax in the dtype of their input."""
    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)
                                              + self.variance_epsilon))

    def rope(self, x, position_ids):
        freq, factor = exact_inv_freq(self.config)
        angle = position_ids[..., None].to(x.dtype) * freq.to(x.dtype)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos() * factor, angle.sin() * factor

    saved, softmax = {}, F.softmax
    for kind in {type(part) for part in model.modules()}:
        for ending, forward in ("RMSNorm", norm), ("RotaryEmbedding", rope):
            if kind.__name__.endswith(ending):
                saved[kind], kind.forward = kind.forward, forward
    assert len(saved) == 2
    F.softmax = lambda x, dim=None, dtype=None, **_: softmax(x, dim=dim)
    try:
        yield
    finally:
        for kind, forward in saved.items():
            kind.forward = forward
        F.softmax = softmax


def random_weights(config, rng):
    """Weights large enough that every gradient matters; each is exact in bf16 as well as fp32."""
    state = {}
    for name, shape in AutoModelForCausalLM.from_config(config).state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        w = rng.standard_normal(tuple(shape.shape))
        if name.endswith(".bias"):
            w = 0.5 * w
        elif len(shape.shape) == 1:
            w = 1 + 0.3 * w
        elif "embed" in name or "lm_head" in name:
            w = 2.4 * w / math.sqrt(shape.shape[1])
        else:
            w = w / math.sqrt(shape.shape[1])
        state[name] = torch.from_numpy(w).to(torch.bfloat16).float()
    return state


def documents(batch):
    ends = batch["cu_seqlens"].tolist()
    return [batch["tokens"][a:b].long() for a, b in zip(ends, ends[1:])]


def each_alone(model, docs):
    """(sum of token losses / number of targets, packed logits)"""
    total, targets, logits = 0, 0, []
    for doc in docs:
        out = model(input_ids=doc[None], use_cache=False).logits[0]
        logits.append(out)
        if len(doc) > 1:
            total = total + F.cross_entropy(out[:-1], doc[1:], reduction="sum")
            targets += len(doc) - 1
    return total / targets, torch.cat(logits)


def padded(model, docs):
    ids = torch.nn.utils.rnn.pad_sequence(docs, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in docs], batch_first=True)
    out = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    target = ids.masked_fill(mask == 0, -100)
    loss = F.cross_entropy(out[:, :-1].flatten(0, 1), target[:, 1:].flatten(), ignore_index=-100)
    return loss, torch.cat([out[i, :len(d)] for i, d in enumerate(docs)])


def greedy(model, docs):
    """Returns the tokens that generate() writes after each document alone, (documents, NEW_TOKENS); -1 after the end."""
    out = torch.full((len(docs), NEW_TOKENS), -1, dtype=torch.int32)
    for i, doc in enumerate(docs):
        text = model.generate(doc[None], attention_mask=torch.ones_like(doc)[None],
                              do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)[0]
        out[i, :len(text) - len(doc)] = text[len(doc):]
        # no token may be a matter of rounding: the likeliest leads by far more than fp32's error
        logits = model(input_ids=text[None, :-1], use_cache=False).logits[0, len(doc) - 1:]
        best = logits.topk(2, dim=-1)
        assert torch.equal(best.indices[:, 0], text[len(doc):])
        margin = (best.values[:, 0] - best.values[:, 1]).min().item()
        assert margin >= LEAST_MARGIN, f"document {i}: a margin of {margin:.1e}"
    return out


def backward(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def train(model, docs):
    groups = [{"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": DECAY},
              {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for _ in range(STEPS):
        loss, _ = each_alone(model, docs)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        losses.append(loss.item())
        optimizer.step()
    return losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()}


def expected(path, batch, keep_final):
    """Everything of expected.safetensors, and the differences between the witnesses."""
    docs = documents(batch)
    single = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    assert next(single.parameters()).dtype == torch.float32
    double = copy.deepcopy(single).double()
    with fp64_inside(double):
        loss, logits = each_alone(double, docs)
        grads = backward(double, loss)
        losses, norms, final = train(copy.deepcopy(double), docs)
    hf_loss, hf_logits = each_alone(single, docs)
    hf_grads = backward(single, hf_loss)
    continued = greedy(single, docs)
    pad_loss, pad_logits = padded(single, docs)
    pad_grads = backward(single, pad_loss)
    hf_losses, hf_norms, hf_final = train(copy.deepcopy(single), docs)
    half = copy.deepcopy(single).bfloat16()
    half_loss, half_logits = each_alone(half, docs)
    half_grads = backward(half, half_loss)
    inv_freq = single.model.rotary_emb.inv_freq

    def far(a, b):      # largest difference of any tensor, in units of its largest element
        return max(((a[n].double() - b[n].double()).abs().max() / b[n].double().abs().max()).item()
                   for n in b)

    def apart(a, b):    # largest difference of two lists of numbers
        return max(abs(x - y) for x, y in zip(a, b))

    measured = {
        "padded - alone: loss": abs((pad_loss - hf_loss).item()),
        "padded - alone: logits": (pad_logits - hf_logits).abs().max().item(),
        "padded - alone: grads, relative": far(pad_grads, hf_grads),
        "fp32 - fp64: loss": abs(hf_loss.item() - loss.item()),
        "fp32 - fp64: logits": (hf_logits - logits).abs().max().item(),
        "fp32 - fp64: grads, relative": far(hf_grads, grads),
        "fp32 - fp64: inv_freq, relative":
            (inv_freq / exact_inv_freq(single.config)[0] - 1).abs().max().item(),
        "fp32 - fp64: train_losses": apart(hf_losses, losses),
        "fp32 - fp64: grad_norms": apart(hf_norms, norms),
        "fp32 - fp64: final, relative": far(hf_final, final),
        "bf16 - fp64: loss": abs(half_loss.item() - loss.item()),
        "bf16 - fp64: logits": (half_logits - logits).abs().max().item(),
        "bf16 - fp64: grads, relative": far(half_grads, grads),
    }
    for what, limit in [("padded - alone: loss", 1e-5), ("padded - alone: logits", 1e-4),
                        ("padded - alone: grads, relative", 1e-4), ("fp32 - fp64: loss", 1e-5),
                        ("fp32 - fp64: logits", 1e-4), ("fp32 - fp64: grads, relative", 1e-4),
                        ("fp32 - fp64: inv_freq, relative", 1e-6)]:
        assert measured[what] <= limit, f"{path.name}: {what} {measured[what]:.1e} > {limit:.0e}"

    out = dict(batch)
    out["loss"] = loss.detach().reshape(1).float()
    out["loss_fp64"] = loss.detach().reshape(1)
    out["loss_hf_fp32"] = hf_loss.detach().reshape(1)
    out["logits"] = logits.detach().float()
    out["greedy"] = continued
    out["inv_freq"] = exact_inv_freq(single.config)[0].float()
    for name, values in ("train_losses", losses), ("grad_norms", norms):
        out[name] = torch.tensor(values, dtype=torch.float64).float()
        out[name + "_fp64"] = torch.tensor(values, dtype=torch.float64)
    out.update({"grad." + n: g.float() for n, g in grads.items()})
    if keep_final:
        out.update({"final." + n: p.float() for n, p in final.items()})
    return {n: t.contiguous() for n, t in out.items()}, measured


def make_inputs(name, seed):
    """config.json, model.safetensors and the batch; numpy's generator, so no PyTorch decides."""
    rng = np.random.Generator(np.random.PCG64(seed))
    path = GOLDEN / name
    path.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, **CONFIGS[name]}
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    state = random_weights(AutoConfig.from_pretrained(path), rng)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    tokens = rng.integers(0, config["vocab_size"], sum(LENGTHS))
    lengths = list(LENGTHS)
    for at in reversed(EMPTY_AT):
        lengths.insert(at, 0)
    return {"tokens": torch.from_numpy(tokens).int(),
            "cu_seqlens": torch.tensor(np.cumsum([0] + LENGTHS)).int(),
            "cu_seqlens_empty": torch.tensor(np.cumsum([0] + lengths)).int()}


def make_sharded(name, source):
    """The same weights as bf16 (they are exact in it), in two shards with an index."""
    path = GOLDEN / name
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads((GOLDEN / source / "config.json").read_text())
    config["torch_dtype"] = "bfloat16"
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    state = {n: w.to(torch.bfloat16) for n, w in load_file(GOLDEN / source / "model.safetensors")
             .items()}
    names, weight_map = sorted(state), {}
    half = len(names) // 2
    for i, part in enumerate((names[:half], names[half:])):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({n: state[n] for n in part}, path / file, metadata={"format": "pt"})
        weight_map.update({n: file for n in part})
    size = sum(w.numel() * w.element_size() for w in state.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    AutoModelForCausalLM.from_pretrained(path)


def compare(name, new):
    """Largest difference of each kind of tensor from the stored file; False if one is too large."""
    stored = load_file(GOLDEN / name / "expected.safetensors")
    assert sorted(stored) == sorted(new), f"{name}: tensors differ"
    worst, same = {}, True
    for n, a in stored.items():
        b = new[n]
        assert a.shape == b.shape and a.dtype == b.dtype, f"{name}: {n} differs in shape or dtype"
        kind = n.split(".")[0]
        scale = max(1e-30, float(a.double().abs().max()))
        apart = float((a.double() - b.double()).abs().max()) / scale
        worst[kind] = max(worst.get(kind, 0.0), apart)
        same = same and torch.equal(a, b)
    print(f"{name}: stored - new, relative to the largest element"
          f"{'; every bit the same' if same else ''}")
    for kind, value in worst.items():
        print(f"    {kind:20s} {value:.1e}")
    return all(v <= (1e-6 if k != "final" else 1e-5) for k, v in worst.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    parser.add_argument("names", nargs="*", default=list(CONFIGS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, "
          f"numpy {np.__version__}")
    good = True
    for seed, name in enumerate(CONFIGS):
        if name not in options.names:
            continue
        path = GOLDEN / name
        if options.check:
            stored = load_file(path / "expected.safetensors")
            batch = {n: stored[n] for n in ("tokens", "cu_seqlens", "cu_seqlens_empty")}
        else:
            batch = make_inputs(name, seed)
        tensors, measured = expected(path, batch, name in FINAL_FOR)
        print(f"{name}: loss {float(tensors['loss_fp64']):.9f}")
        print("    train_losses", " ".join(f"{x:.4f}" for x in tensors["train_losses"].tolist()))
        print("    grad_norms  ", " ".join(f"{x:.4f}" for x in tensors["grad_norms"].tolist()))
        for what, value in measured.items():
            print(f"    {what:36s} {value:.1e}")
        if options.check:
            good = compare(name, tensors) and good
        else:
            save_file(tensors, path / "expected.safetensors", metadata=RECIPE)
    if not options.check and "mha_untied" in options.names:
        make_sharded("mha_untied_bf16_sharded", "mha_untied")
    print("ok" if good else "FAILED: see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
