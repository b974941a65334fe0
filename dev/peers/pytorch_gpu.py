"""Training speed of PyTorch and transformers on a GPU, the same documents in every mode.

    python dev/peers/pytorch_gpu.py                          SmolLM2-135M dimensions, batch R65
    python dev/peers/pytorch_gpu.py --compile --steps 50 --json peers.json
    python dev/peers/pytorch_gpu.py --device cpu --model tiny --dist seed --no-autocast --steps 1

    hf-padded        transformers, rows padded to a common length, attention mask, SDPA
    hf-varlen        transformers, one packed row, flash_attention_2 with cu_seq_lens
    hf-packed-sdpa   transformers, one packed row by position_ids alone, SDPA
    hf-torch-varlen  transformers, one packed row, PyTorch's varlen_attn registered as attention
    torch-padded     plain Llama, rows padded to a common length, causal SDPA
    torch-unpad      plain Llama, unpadded once, torch.nn.attention.varlen.varlen_attn
    torch-flex       plain Llama, unpadded once, FlexAttention with a document mask
    torch-perdoc     plain Llama, unpadded once, SDPA document by document (only when asked for)

One step is forward, backward, clipping and fused AdamW. The batch lies on the GPU before the clock
starts; all else is timed, FlexAttention's block mask too. All modes share one set of weights and
one optimizer, so their losses, and the gradients of the first layer's q, k and v, must agree before
any time is shown. The modes take turns, step by step. Tokens are real tokens, padding is never
counted. A mode that cannot run says why. A step whose batch does not fit is done in more and
smaller passes, and that is shown. The lengths never change here, so torch.compile pays for no new
shape: a best case for it.
"""
import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import pathlib
import random
import statistics
import sys
import time

with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # modes differ in their sizes
    new = [int(x) for x in importlib.metadata.version("torch").split(".")[:2]] >= [2, 9]
    os.environ.setdefault("PYTORCH_ALLOC_CONF" if new else "PYTORCH_CUDA_ALLOC_CONF",
                          "expandable_segments:True")
import torch  # noqa: E402  (reads the lines above)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

MODES = ["hf-padded", "hf-varlen", "hf-packed-sdpa", "hf-torch-varlen", "torch-padded",
         "torch-unpad", "torch-flex", "torch-perdoc"]
SEED = [220, 217, 295, 183, 130, 350]
MODELS = {
    "tiny": dict(num_hidden_layers=2, hidden_size=96, intermediate_size=256, vocab_size=300,
                 num_attention_heads=6, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5,
                 rope_theta=1e4, tie_word_embeddings=True),
    "smollm2-135m": dict(num_hidden_layers=30, hidden_size=576, intermediate_size=1536,
                         vocab_size=49152, num_attention_heads=9, num_key_value_heads=3,
                         head_dim=64, rms_norm_eps=1e-5, rope_theta=1e5, tie_word_embeddings=True),
}
# |a - b| / |b|. The gradient is that of the first layer's q, k, v weights, as one vector:
# a lost mask moves it by 1, and the loss of random weights by only 2e-4.
LIMITS = {"bf16": dict(loss=5e-4, gradient=0.3), "fp32": dict(loss=1e-5, gradient=1e-4)}


class CannotRun(Exception):
    pass


def make_lengths(dist, tokens=None):
    """r65: log-normal quantiles of mean 700, sigma 1.04, at most 8192; 95 documents per 65536."""
    if dist == "seed":
        return SEED * max(1, (tokens or 0) // sum(SEED))
    tokens = tokens or 65536
    if dist == "equal2048":
        return [2048] * max(1, tokens // 2048)
    n, law = max(1, round(95 * tokens / 65536)), statistics.NormalDist(math.log(700) - 1.04**2 / 2,
                                                                       1.04)
    lengths = [min(8192, round(math.exp(law.inv_cdf((i + 0.5) / n)))) for i in range(n)]
    lengths[-1] += tokens - sum(lengths)
    if min(lengths) < 2:
        sys.exit(f"--dist r65 does not work for {tokens} tokens")
    return lengths


def make_varlen():
    """f(q, k, v, cu_seqlens, longest), causal, (tokens, heads, head_dim): varlen_attn's versions
    differ in how they take "causal" and fewer K/V heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise CannotRun(f"torch {torch.__version__} has no torch.nn.attention.varlen") from None
    known = inspect.signature(varlen_attn).parameters
    args = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        args["enable_gqa"] = True
    return lambda q, k, v, cu, longest: varlen_attn(q, k, v, cu, cu, longest, longest, **args)


def sdpa(q, k, v):
    """Causal; (rows, tokens, heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2)


class Layer(nn.Module):
    """Names as in a Hugging Face file, so its weights load as they are."""
    def __init__(self, d):
        def linears(**sizes):
            return nn.ModuleDict({n: nn.Linear(*size, bias=False) for n, size in sizes.items()})

        super().__init__()
        hidden, ffn, self.hd = d["hidden_size"], d["intermediate_size"], d["head_dim"]
        wide, narrow = (d[n] * self.hd for n in ("num_attention_heads", "num_key_value_heads"))
        self.input_layernorm = nn.RMSNorm(hidden, eps=d["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=d["rms_norm_eps"])
        self.self_attn = linears(q_proj=(hidden, wide), k_proj=(hidden, narrow),
                                 v_proj=(hidden, narrow), o_proj=(wide, hidden))
        self.mlp = linears(gate_proj=(hidden, ffn), up_proj=(hidden, ffn), down_proj=(ffn, hidden))

    def forward(self, x, cos, sin, attend):
        def rope(u):
            a, b = u.chunk(2, dim=-1)
            return (u * cos + torch.cat((-b, a), dim=-1) * sin).to(u.dtype)

        at, mlp = self.self_attn, self.mlp
        h = self.input_layernorm(x)
        q, k, v = (at[n](h).unflatten(-1, (-1, self.hd)) for n in ("q_proj", "k_proj", "v_proj"))
        x = x + at["o_proj"](attend(rope(q), rope(k), v).flatten(2))
        h = self.post_attention_layernorm(x)
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))


class Llama(nn.Module):
    def __init__(self, d):
        super().__init__()
        vocab, hidden, hd = d["vocab_size"], d["hidden_size"], d["head_dim"]
        layers = nn.ModuleList([Layer(d) for _ in range(d["num_hidden_layers"])])
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(vocab, hidden), "layers": layers,
                                    "norm": nn.RMSNorm(hidden, eps=d["rms_norm_eps"])})
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        for name, w in self.named_parameters():
            if w.ndim == 2:         # q, k: scores of about 2, so that masks and positions matter
                peaked = "q_proj" in name or "k_proj" in name
                nn.init.normal_(w, std=1.4 * hidden ** -0.5 if peaked else 0.02)
        if d["tie_word_embeddings"]:
            self.lm_head.weight = self.model["embed_tokens"].weight
        inv_freq = d["rope_theta"] ** (-torch.arange(0, hd, 2).float() / hd)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.head = self.head_loss

    def head_loss(self, x, targets):
        logits = self.lm_head(self.model["norm"](x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten(), reduction="sum")

    def forward(self, tokens, positions, targets, attend):
        """The sum of the losses of all targets that are not -100."""
        angle = (positions[..., None].float() * self.inv_freq).repeat(1, 1, 2)[:, :, None]
        x = self.model["embed_tokens"](tokens)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.model["layers"]:
            x = layer(x, cos, sin, attend)
        return self.head(x, targets)


def load(options):
    """Dimensions, and a state dict or None for random weights."""
    if not options.hf_dir:
        return MODELS[options.model], None
    d, state = json.loads((options.hf_dir / "config.json").read_text()), {}
    rope = d.get("rope_parameters") or d.get("rope_scaling") or {}
    d.setdefault("rope_theta", rope.get("rope_theta"))
    d.setdefault("tie_word_embeddings", False)
    d.setdefault("head_dim", d["hidden_size"] // d["num_attention_heads"])
    if d["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
        sys.exit(f"{options.hf_dir}: only Llama without scaled RoPE")
    from safetensors.torch import load_file
    for file in options.hf_dir.glob("model*.safetensors"):
        state.update(load_file(file))
    if d["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return {n: d[n] for n in MODELS["tiny"]}, state


def make_hf(d, weights, kind, device):
    """LlamaForCausalLM on the weights that all modes share."""
    try:
        import transformers
    except ImportError:
        raise CannotRun("transformers is not installed") from None
    name = "flash_attention_2" if kind == "hf-varlen" else "sdpa"
    if kind == "hf-varlen" and not importlib.util.find_spec("flash_attn"):
        raise CannotRun("flash_attn is not installed")
    if kind == "hf-varlen" and device == "cpu":
        raise CannotRun("flash_attn has no CPU kernel")
    if kind == "hf-torch-varlen":
        if not hasattr(transformers, "AttentionInterface"):
            raise CannotRun(f"transformers {transformers.__version__} takes no attention of others")
        name, varlen = "torch_varlen", make_varlen()

        def attend(module, q, k, v, mask, cu_seq_lens_q=None, max_length_q=None, **rest):
            q, k, v = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))
            return varlen(q, k, v, cu_seq_lens_q, max_length_q)[None], None

        transformers.AttentionInterface.register(name, attend)
    if kind == "hf-packed-sdpa":
        masks = importlib.util.find_spec("transformers.masking_utils")
        if not masks or "find_packed" not in pathlib.Path(masks.origin).read_text():
            raise CannotRun(f"transformers {transformers.__version__} packs only with flash_attn")
    config = transformers.LlamaConfig(**d, max_position_embeddings=8192, use_cache=False,
                                      attn_implementation=name)
    hf = transformers.LlamaForCausalLM(config)
    for path, _ in list(hf.named_parameters(remove_duplicate=False)):
        module, _, leaf = path.rpartition(".")
        hf.get_submodule(module)._parameters[leaf] = weights[path]
    return hf.to(device).train()


def make_flex(device, tokens_first=True):
    """f(q, k, v, block_mask), and the maker of the mask of one row with these document numbers."""
    try:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError:
        raise CannotRun(f"torch {torch.__version__} has no FlexAttention") from None
    if device == "cuda":
        flex_attention = torch.compile(flex_attention)
        create_block_mask = torch.compile(create_block_mask)

    def make_mask(number):
        def same_and_before(b, h, i, j):
            return (number[i] == number[j]) & (i >= j)

        n = len(number)
        return create_block_mask(same_and_before, None, None, n, n, device=number.device)

    def attend(q, k, v, mask):
        if not tokens_first:
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return attend, make_mask


class Mode:
    """One way of giving the documents to a model."""
    def __init__(self, kind, compiled, d, own, docs, options):
        self.name, self.kind = kind + " compiled" * bool(compiled), kind
        self.docs, self.options, self.device = docs, options, options.device
        self.padded, self.hf = "padded" in kind, kind.startswith("hf")
        self.num_targets = sum(len(doc) - 1 for doc in docs)
        self.seconds, self.peaks = [], []
        if compiled and kind == "torch-perdoc":
            raise CannotRun("the loop over documents is not compiled")
        weights = dict(own.named_parameters(remove_duplicate=False))
        if self.hf:
            self.model = make_hf(d, weights, kind, self.device)
        else:
            with torch.device("meta"):
                self.model = Llama(d)
            self.model.load_state_dict(weights, assign=True)
            self.model.inv_freq = own.inv_freq
            if d["tie_word_embeddings"]:
                self.model.lm_head.weight = self.model.model["embed_tokens"].weight
            if kind == "torch-flex":
                self.flex, self.make_mask = make_flex(self.device)
            if kind == "torch-unpad":
                self.varlen = make_varlen()
        if compiled == "model":
            self.model.compile()
        elif compiled:
            layers = self.model.model.layers if self.hf else self.model.model["layers"]
            for layer in layers:
                layer.compile()
            if not self.hf:
                self.model.head = torch.compile(self.model.head_loss)

    def lay_out(self, limit):
        """The passes of one step, each of at most `limit` tokens, padding included."""
        row, group, groups = self.options.row_len, [], []
        for doc in self.docs:
            size = sum(map(len, group)) + len(doc)
            if self.padded:
                size = (len(group) + 1) * (row or max(map(len, group + [doc])))
            if group and size > limit:
                groups.append(group)
                group = []
            group = group + [doc]
        self.passes = []
        for group in groups + [group]:
            nexts = [F.pad(doc[1:], (0, 1), value=-100) for doc in group]
            labels = [torch.cat((doc.new_tensor([-100]), doc[1:])) for doc in group]
            places = [torch.arange(len(doc)) for doc in group]
            longest = max(map(len, group))
            if self.padded:
                def fill(parts, value):
                    n = row or longest
                    return torch.stack([F.pad(p, (0, n - len(p)), value=value) for p in parts])
            else:
                def fill(parts, value):
                    return torch.cat(parts)[None]
            p = dict(tokens=fill(group, 0), targets=fill(nexts, -100), labels=fill(labels, -100),
                     positions=fill(places, 0), mask=fill([torch.ones_like(g) for g in group], 0))
            p["cu"] = torch.tensor([0] + [len(g) for g in group]).cumsum(0).int()
            p["number"] = torch.repeat_interleave(torch.tensor([len(g) for g in group])).int()
            p = {name: x.to(self.device) for name, x in p.items()}
            self.passes.append(dict(p, longest=longest, lengths=[len(g) for g in group]))
        self.computed = sum(p["tokens"].numel() for p in self.passes)

    def loss(self, p):
        if not self.hf:
            attend = {"torch-padded": lambda p: sdpa, "torch-flex": self.use_flex,
                      "torch-unpad": self.use_varlen, "torch-perdoc": self.use_each}[self.kind](p)
            total = self.model(p["tokens"], p["positions"], p["targets"], attend)
            return total / self.num_targets
        if self.padded:
            more = dict(attention_mask=p["mask"])
        else:
            more = dict(position_ids=p["positions"])
        if "varlen" in self.kind:
            more.update(cu_seq_lens_q=p["cu"], cu_seq_lens_k=p["cu"], max_length_q=p["longest"],
                        max_length_k=p["longest"])
        return self.model(input_ids=p["tokens"], labels=p["labels"], use_cache=False,
                          num_items_in_batch=self.num_targets, **more).loss

    def use_flex(self, p):
        mask = self.make_mask(p["number"])
        return lambda q, k, v: self.flex(q, k, v, mask)

    def use_varlen(self, p):
        cu, longest, f = p["cu"], p["longest"], self.varlen
        return lambda q, k, v: f(q[0], k[0], v[0], cu, longest)[None]

    def use_each(self, p):
        def attend(*qkv):
            parts = zip(*(x.split(p["lengths"], dim=1) for x in qkv))
            return torch.cat([sdpa(*part) for part in parts], dim=1)

        return attend

    def forward_backward(self):
        """The loss, as a tensor: nothing here waits for the GPU."""
        total = 0
        for p in self.passes:
            on = not self.options.no_autocast and self.options.params == "fp32"
            with torch.autocast(self.device, torch.bfloat16, enabled=on):
                loss = self.loss(p)
            loss.backward()
            total = total + loss.detach()
        return total

    def step(self, weights, optimizer):
        wait(self.device)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        self.forward_backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait(self.device)
        self.seconds.append(time.perf_counter() - start)
        if self.device == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated() / 2**20)

    def fit(self, weights, probe):
        """Find passes that fit, and take loss and gradient of the untouched weights."""
        limit = self.options.pass_tokens
        while True:
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
            for w in weights:
                w.grad = None
            self.lay_out(limit)
            with contextlib.suppress(torch.OutOfMemoryError):
                self.first_loss = self.forward_backward().item()
                self.gradient = torch.cat([w.grad.float().flatten() for w in probe]).cpu()
                break
            if len(self.passes) == len(self.docs):
                raise CannotRun("out of memory, even for one document at a time")
            limit //= 2
        for w in weights:
            w.grad = None


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def version(name):
    try:
        return f"{name} {importlib.import_module(name).__version__}"
    except Exception:       # not there, or built for another torch
        return f"no {name}"


def first_line(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="smollm2-135m", help="dimensions, random weights")
    add("--hf-dir", type=pathlib.Path, help="dimensions and weights from here instead")
    add("--lengths", type=int, nargs="+", help="documents of these lengths")
    add("--dist", choices=["r65", "equal2048", "seed"], default="r65", help="or of these")
    add("--tokens", type=int, help="real tokens of one step (65536; seed: 1395)")
    add("--sort", action="store_true", help="padded passes of like lengths (default: shuffled)")
    add("--row-len", type=int, help="pad to this (default: to the longest of each pass)")
    add("--pass-tokens", type=int, default=65536,
        help="tokens of one forward and backward, padding included; a step has as many as needed")
    add("--modes", nargs="+", choices=MODES, default=MODES[:-1])
    add("--compile", choices=["layers", "model"], nargs="?", const="layers",
        help="run every mode compiled too: each layer (default) or the whole model")
    add("--params", choices=["fp32", "bf16"], default="fp32",
        help="fp32: autocast to bf16; bf16: parameters, gradients and AdamW all bf16")
    add("--no-autocast", action="store_true", help="fp32 throughout: a check, not a benchmark")
    add("--steps", type=int, default=20, help="timed steps of each mode")
    add("--warmup", type=int, default=3)
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--seed", type=int, default=0, help="weights, tokens and the order of the documents")
    add("--json", type=pathlib.Path, help="write the results here too")
    options = parser.parse_args()
    if options.no_autocast and options.params == "bf16":
        parser.error("--no-autocast is for --params fp32")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device (--device cpu --model tiny checks the modes without one)")
    return parser, options


def main():
    parser, options = parse()
    lengths = options.lengths or make_lengths(options.dist, options.tokens)
    if min(lengths) < 2 or (options.row_len and options.row_len < max(lengths)):
        parser.error("a document has fewer than 2 tokens, or more than --row-len")
    if options.sort:
        lengths.sort()
    elif not options.lengths:
        random.Random(options.seed).shuffle(lengths)
    real = sum(lengths)

    d, state = load(options)
    torch.manual_seed(options.seed)
    own = Llama(d)
    if state:
        own.load_state_dict(state)
    own.to(options.device, torch.bfloat16 if options.params == "bf16" else torch.float32)
    own.inv_freq = own.inv_freq.float()
    docs = [torch.randint(d["vocab_size"], (n,)) for n in lengths]
    weights = list(own.parameters())
    probe = [own.model["layers"][0].self_attn[n + "_proj"].weight for n in "qkv"]
    groups = [{"params": [w for w in weights if (w.ndim >= 2) == decayed],
               "weight_decay": 0.1 * decayed} for decayed in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=1e-6, betas=(0.9, 0.95), fused=True)
    config = torch._dynamo.config       # a version for each list of lengths
    setattr(config, "recompile_limit" if hasattr(config, "recompile_limit") else
            "cache_size_limit", 64)

    machine = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    numbers = ("fp32" if options.no_autocast else
               "fp32 parameters, autocast bf16" if options.params == "fp32" else "pure bf16")
    law = "given" if options.lengths else options.dist
    head = (f"{machine}; torch {torch.__version__}, CUDA {torch.version.cuda}; "
            f"{version('transformers')}; {version('flash_attn')}\n"
            f"{sum(w.numel() for w in weights):,} parameters, {numbers}; documents: {law}, "
            f"{len(lengths)} of {min(lengths)} to {max(lengths)} tokens, {real:,} tokens, "
            f"{sum(n * (n + 1) // 2 for n in lengths):,} pairs")
    print(head, flush=True)

    modes, absent = [], {}
    for kind in options.modes:
        for compiled in [None, options.compile] if options.compile else [None]:
            name, reason = kind + " compiled" * bool(compiled), None
            try:
                mode = Mode(kind, compiled, d, own, docs, options)
                mode.fit(weights, probe)
                modes.append(mode)
            except CannotRun as error:
                reason = str(error)
            except Exception as error:      # a peer's failure is a result, not the end
                reason = first_line(error)
            if reason:
                absent[name] = reason
                print(f"{name}: cannot run: {reason}", flush=True)
    if not modes:
        sys.exit("no mode can run")

    limits = LIMITS["fp32" if options.no_autocast else "bf16"]
    first = modes[0]
    print(f"same weights, against {first.name}: losses within {limits['loss']}, gradients of the "
          f"first layer's q, k, v within {limits['gradient']} (relative)")
    wrong = []
    for m in modes:
        m.loss_off = abs(m.first_loss / first.first_loss - 1)
        m.gradient_off = ((m.gradient - first.gradient).norm() / first.gradient.norm()).item()
        if not (m.loss_off <= limits["loss"] and m.gradient_off <= limits["gradient"]):
            wrong.append(m.name)                                                # NaN comes here too
        print(f"  {m.name:24s} loss {m.first_loss:.6f} (off by {m.loss_off:.1e})  "
              f"gradients off by {m.gradient_off:.1e}")
    if wrong:
        sys.exit(f"FAILED: {', '.join(wrong)}: not what {first.name} computed; no times are shown")

    turns = list(modes)
    for turn in range(options.warmup + options.steps):
        for m in list(turns):
            reason = None
            try:
                m.step(weights, optimizer)
            except torch.OutOfMemoryError:
                reason = "out of memory in a timed step (try a lower --pass-tokens)"
            if reason:
                turns.remove(m)
                optimizer.zero_grad(set_to_none=True)
                absent[m.name] = reason
                print(f"{m.name}: cannot run: {reason}", flush=True)

    print(f"\n{options.steps} steps each after {options.warmup} of warm-up. Peak: tensors PyTorch "
          "held, weights, AdamW and batches too.\n"
          f"{'mode':24s} {'ms/step':>9s}  {'[min-max]':17s} {'real tokens/s':>13s} {'peak MiB':>9s}"
          f" {'passes':>6s} {'padding':>7s} {'loss':>9s}")
    rows = []
    for m in turns:
        ms = [1e3 * s for s in m.seconds[options.warmup:]]
        middle, peak = statistics.median(ms), max(m.peaks[options.warmup:], default=0)
        spread = f"[{min(ms):.1f}-{max(ms):.1f}]"
        print(f"{m.name:24s} {middle:9.1f}  {spread:17s} {1e3 * real / middle:13,.0f} "
              f"{peak:9,.0f} {len(m.passes):6d} {1 - real / m.computed:7.1%} {m.first_loss:9.5f}")
        rows.append(dict(mode=m.name, ms=ms, median_ms=middle, tokens_per_s=1e3 * real / middle,
                         peak_mib=peak, passes=len(m.passes), computed_tokens=m.computed,
                         loss=m.first_loss, loss_off=m.loss_off, gradient_off=m.gradient_off))
    for name, reason in absent.items():
        print(f"{name:24s} cannot run: {reason}")
    if options.json:
        settings = {n: str(v) if isinstance(v, pathlib.Path) else v
                    for n, v in vars(options).items() if n != "json"}
        options.json.write_text(json.dumps(dict(what=head, options=settings, lengths=lengths,
                                                dimensions=d, modes=rows, absent=absent)) + "\n")


if __name__ == "__main__":
    main()
