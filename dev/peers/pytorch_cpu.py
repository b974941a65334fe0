"""Training speed of PyTorch on the CPU, for the same batch in several layouts.

    python dev/peers/pytorch_cpu.py                          demo dimensions, random weights
    python dev/peers/pytorch_cpu.py --model smollm2-135m --dtype fp32 bf16 --row-len 350 512

    padded  every document in a row of --row-len tokens, everything computed on the padding
    alone   every document in its own forward and backward, gradients added
    packed  one row of real tokens; linear layers on all of it, attention document by document
    hf      transformers' LlamaForCausalLM on the padded batch with an attention mask
    hf-flat the same on what DataCollatorWithFlattening makes: one row, position_ids that restart
    ours    with --ours PROGRAM: build/cpu/bench_step on the same weights and tokens, packed

One step is forward, backward, clipping and AdamW. Every mode's loss must agree before any time is
shown. The modes take turns, step by step, so that all share a busy moment of the machine. What
cannot run here says why: PyTorch's varlen_attn, and transformers if it is not installed. PyTorch
gets its fastest kernels: MKL is told to use AVX-512 on processors of other makers than Intel, which
it does not do by itself and which doubles its speed.
"""
import argparse
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

MODES = ["padded", "alone", "packed", "hf", "hf-flat"]
COMMON = dict(head_dim=64, rms_norm_eps=1e-5, rope_theta=100000.0, tie_word_embeddings=True)
MODELS = {
    "demo": dict(num_hidden_layers=6, hidden_size=192, intermediate_size=512, vocab_size=264,
                 num_attention_heads=3, num_key_value_heads=1, **COMMON),
    "smollm2-135m": dict(num_hidden_layers=30, hidden_size=576, intermediate_size=1536,
                         vocab_size=49152, num_attention_heads=9, num_key_value_heads=3, **COMMON),
}


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
add = parser.add_argument
add("--model", choices=MODELS, default="demo", help="dimensions, random weights")
add("--hf-dir", type=pathlib.Path, help="dimensions and weights from here instead")
add("--lengths", type=int, nargs="+", default=[220, 217, 295, 183, 130, 350])
add("--modes", nargs="+", choices=MODES, default=MODES[:3])
add("--row-len", type=int, nargs="+", default=[350, 512])
add("--dtype", nargs="+", choices=["fp32", "bf16"], default=["fp32"], help="bf16: autocast")
add("--steps", type=int, default=5, help="timed steps of each mode")
add("--threads", type=int, default=2)
add("--compile", action="store_true",
    help="each mode with torch.compile of each layer too (packed: of at most 16 documents)")
add("--ours", type=pathlib.Path, metavar="PROGRAM", help="build/cpu/bench_step")
add("--json", type=pathlib.Path, help="write the results here too")
options = parser.parse_args()
if {"padded", "hf"}.intersection(options.modes) and min(options.row_len) < max(options.lengths):
    parser.error("--row-len is less than the longest document")


def with_avx512():
    """Gives the peer its best kernels: left alone, OpenBLAS <= 0.3.21 and ATen take AVX2 on cores
    that they do not know, and MKL on all but Intel's, unless this function of its own is replaced.
    The loader does that, hence the new start."""
    os.environ.setdefault("OPENBLAS_CORETYPE", "SKYLAKEX")
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx512")
    if "LD_PRELOAD" in os.environ or not shutil.which("cc"):
        return
    library = os.path.join(tempfile.mkdtemp(), "mkl_avx512.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], check=True, text=True,
                   input="int mkl_serv_intel_cpu_true(void) { return 1; }")
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": library})


os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
if "avx512f" in pathlib.Path("/proc/cpuinfo").read_text():
    with_avx512()
import torch  # noqa: E402  (reads the lines above)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402


def attention(q, k, v):
    """Causal; (rows, heads, tokens, head_dim). In bf16 the products below were the faster way."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if q.dtype == torch.float32 and hasattr(F, "scaled_dot_product_attention"):    # PyTorch 2
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    future = torch.full((q.shape[2], q.shape[2]), float("-inf")).triu(1)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + future
    return scores.float().softmax(-1).to(v.dtype) @ v


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Layer(nn.Module):
    """Names as in a Hugging Face file, so its weights load as they are."""
    def __init__(self, d):
        def linears(**sizes):
            return nn.ModuleDict({n: nn.Linear(*size, bias=False) for n, size in sizes.items()})

        super().__init__()
        self.heads, self.kv = d["num_attention_heads"], d["num_key_value_heads"]
        hidden, ffn, self.hd = d["hidden_size"], d["intermediate_size"], d["head_dim"]
        wide, narrow = self.heads * self.hd, self.kv * self.hd
        self.input_layernorm = RMSNorm(hidden, d["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(hidden, d["rms_norm_eps"])
        self.self_attn = linears(q_proj=(hidden, wide), k_proj=(hidden, narrow),
                                 v_proj=(hidden, narrow), o_proj=(wide, hidden))
        self.mlp = linears(gate_proj=(hidden, ffn), up_proj=(hidden, ffn), down_proj=(ffn, hidden))

    def forward(self, x, cos, sin, lengths):
        def heads(name, n):
            return at[name](h).view(rows, tokens, n, self.hd).transpose(1, 2)

        def rope(u):
            a, b = u.chunk(2, dim=-1)
            return u * cos + torch.cat((-b, a), dim=-1) * sin

        (rows, tokens, _), at, mlp = x.shape, self.self_attn, self.mlp
        h = self.input_layernorm(x)
        v = heads("v_proj", self.kv)
        q = rope(heads("q_proj", self.heads)).to(v.dtype)      # under autocast rope is in fp32
        k = rope(heads("k_proj", self.kv)).to(v.dtype)
        parts = zip(*(u.split(lengths, dim=2) for u in (q, k, v)))
        o = torch.cat([attention(*part) for part in parts], dim=2)
        x = x + at["o_proj"](o.transpose(1, 2).reshape(rows, tokens, -1))
        h = self.post_attention_layernorm(x)
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))


class Llama(nn.Module):
    def __init__(self, d):
        super().__init__()
        vocab, hidden, hd = d["vocab_size"], d["hidden_size"], d["head_dim"]
        layers = nn.ModuleList([Layer(d) for _ in range(d["num_hidden_layers"])])
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(vocab, hidden), "layers": layers,
                                    "norm": RMSNorm(hidden, d["rms_norm_eps"])})
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        for w in self.parameters():
            if w.ndim == 2:
                nn.init.normal_(w, std=0.02)
        if d["tie_word_embeddings"]:
            self.lm_head.weight = self.model["embed_tokens"].weight
        self.inv_freq = d["rope_theta"] ** (-torch.arange(0, hd, 2).double() / hd)

    def forward(self, tokens, lengths):
        """tokens (rows, T); each row holds documents of these lengths, one after another."""
        position = torch.cat([torch.arange(n) for n in lengths])
        angle = torch.cat([position[:, None] * self.inv_freq] * 2, dim=-1)
        cos, sin = angle.cos().float(), angle.sin().float()
        x = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            x = layer(x, cos, sin, lengths)
        return self.lm_head(self.model["norm"](x))


def with_adamw(model):
    groups = [{"params": [p for p in model.parameters() if (p.ndim >= 2) == decayed],
               "weight_decay": 0.1 * decayed} for decayed in (True, False)]
    new = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 4)
    fused = {"fused": True} if new else {}
    return model, torch.optim.AdamW(groups, lr=1e-6, betas=(0.9, 0.95), **fused)


def make_models():
    """{name: (model, optimizer)}, and their configuration; the same weights in each."""
    d, state = MODELS[options.model], {}
    if options.hf_dir:
        d = json.loads((options.hf_dir / "config.json").read_text())
        d.setdefault("head_dim", d["hidden_size"] // d["num_attention_heads"])
        if d["model_type"] != "llama" or d.get("rope_scaling"):
            sys.exit(f"{options.hf_dir}: only Llama without rope_scaling")
        from safetensors.torch import load_file
        for file in options.hf_dir.glob("model*.safetensors"):
            state.update(load_file(file))
        if d["tie_word_embeddings"]:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.manual_seed(0)
    model = Llama(d)
    model.load_state_dict(state or model.state_dict())
    models = {"own": with_adamw(model)}
    if {"hf", "hf-flat"}.intersection(options.modes):
        from transformers import LlamaConfig, LlamaForCausalLM
        hf = LlamaForCausalLM(LlamaConfig(**{"max_position_embeddings": 8192, **d}))
        hf.load_state_dict(model.state_dict())
        models["hf"] = with_adamw(hf)
    if options.compile:
        compiled = Llama(d)
        compiled.load_state_dict(model.state_dict())
        torch._dynamo.config.recompile_limit = 64       # a version for each list of lengths
        for layer in compiled.model["layers"]:
            layer.compile()
        models["compiled"] = with_adamw(compiled)
    return models, d


class Mode:
    """One way of giving the documents to a model: a list of forward passes and their targets."""
    def __init__(self, name, model, optimizer, docs, row_len, dtype):
        self.name, self.model, self.optimizer, self.dtype = name, model, optimizer, dtype
        nexts = [F.pad(doc[1:], (0, 1), value=-100) for doc in docs]
        if row_len:
            def fill(docs, value):
                return torch.stack([F.pad(d, (0, row_len - len(d)), value=value) for d in docs])
            self.mask = fill([torch.ones_like(d) for d in docs], 0)
            self.passes = [(fill(docs, 0), [row_len], fill(nexts, -100))]
        elif name == "hf-flat":
            from transformers import DataCollatorWithFlattening
            flat = DataCollatorWithFlattening()([{"input_ids": d.tolist()} for d in docs])
            self.passes = [(flat["input_ids"], flat["position_ids"], torch.cat(nexts)[None])]
        elif name == "alone":
            self.passes = [(d[None], [len(d)], t[None]) for d, t in zip(docs, nexts)]
        else:
            self.passes = [(torch.cat(docs)[None], [len(d) for d in docs], torch.cat(nexts)[None])]
        self.num_targets, self.speeds = sum(len(d) - 1 for d in docs), []

    def loss(self, tokens, lengths, targets):
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == "bf16"):
            if self.name == "hf-flat":      # lengths: its position_ids
                out = self.model(tokens, position_ids=lengths, use_cache=False).logits
            elif self.name.startswith("hf"):
                out = self.model(tokens, self.mask, use_cache=False).logits
            else:
                out = self.model(tokens, lengths)
        total = F.cross_entropy(out.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        return total / self.num_targets

    def step(self):
        start = time.perf_counter()     # returns the seconds of one training step
        self.optimizer.zero_grad(set_to_none=True)
        for p in self.passes:
            self.loss(*p).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return time.perf_counter() - start


def splitmix64(x):
    mask = (1 << 64) - 1
    x = (x + 0x9e3779b97f4a7c15) & mask
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9 & mask
    x = (x ^ x >> 27) * 0x94d049bb133111eb & mask
    return x ^ x >> 31


def write_model(model, d, folder):
    """As a Hugging Face directory, for our program."""
    head, at, state = {}, 0, model.state_dict()
    if d["tie_word_embeddings"]:
        del state["lm_head.weight"]
    for name, w in state.items():
        end = at + 4 * w.numel()
        head[name], at = dict(dtype="F32", shape=list(w.shape), data_offsets=[at, end]), end
    text = json.dumps(head).encode()
    with open(folder / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for w in state.values():
            f.write(w.contiguous().numpy().tobytes())
    config = dict(d, model_type="llama", hidden_act="silu", max_position_embeddings=8192)
    (folder / "config.json").write_text(json.dumps(config))


class Ours:
    """Our program on the same weights and tokens. It does a step for each line that it is sent."""
    def __init__(self, dtype, folder):
        self.name, self.dtype, self.speeds = "ours", dtype, []
        command = [options.ours, "--turns", "--model", folder, "--weights", folder,
                   "--threads", str(options.threads),
                   "--lengths", ",".join(map(str, options.lengths))]
        env = {k: v for k, v in os.environ.items()
               if "NUM_THREADS" not in k and k != "LD_PRELOAD"}
        self.process = subprocess.Popen(command + ["--bf16-matmul"] * (dtype == "bf16"), env=env,
                                        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def step(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"FAILED: {options.ours} ended")
        seconds, self.loss_of_step = map(float, line.split())
        return seconds


def say_what_cannot_run():
    """Takes such modes out, and says why they and PyTorch's varlen_attn are not here"""
    try:
        from torch.nn.attention.varlen import varlen_attn
        q, cu = torch.zeros(4, 1, 64), torch.tensor([0, 4], dtype=torch.int32)
        varlen_attn(q, q, q, cu, cu, 4, 4)
    except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        print(f"varlen_attn cannot run here: {reason[:100]}")
    if not importlib.util.find_spec("transformers"):
        if {"hf", "hf-flat"}.intersection(options.modes):
            print("hf, hf-flat cannot run here: transformers is not installed")
        options.modes = [m for m in options.modes if not m.startswith("hf")]


def main():
    say_what_cannot_run()
    models, d = make_models()
    tokens = torch.tensor([splitmix64(i) % d["vocab_size"] for i in range(sum(options.lengths))])
    docs = tokens.split(options.lengths)
    real = sum(options.lengths)
    modes = []
    for dtype, kind in itertools.product(options.dtype, options.modes):
        for row in options.row_len if kind in ("padded", "hf") else [None]:
            name = f"{kind} {len(docs)} x {row}" if row else kind
            owner = "hf" if kind.startswith("hf") else "own"
            modes.append(Mode(name, *models[owner], docs, row, dtype))
            if options.compile and (kind == "padded" or kind == "packed" and len(docs) <= 16):
                modes.append(Mode(f"{name} compiled", *models["compiled"], docs, row, dtype))
    kernels = re.search(r"CPU capability usage: *(\S+)|$", torch.__config__.show())[1]
    count = sum(p.numel() for p in models["own"][0].parameters())
    mkl = ", MKL told to use them" if "mkl_avx512" in os.environ.get("LD_PRELOAD", "") else ""
    head = (f"torch {torch.__version__}, {kernels} kernels{mkl}, "
            f"{options.threads} threads, {count:,} parameters, documents {options.lengths}")
    print(head, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        if options.ours:
            write_model(models["own"][0], d, pathlib.Path(folder))
        ours = [Ours(dtype, folder) for dtype in options.dtype if options.ours]
        for m in ours:
            m.step()
            m.first_loss = m.loss_of_step
    for m in modes:
        m.first_loss = sum(m.loss(*p).item() for p in m.passes)
    modes += ours
    for dtype, limit in ("fp32", 1e-5), ("bf16", 1e-2):
        losses = [m.first_loss for m in modes if m.dtype == dtype]
        if losses and not max(losses) - min(losses) <= limit * max(losses):
            sys.exit(f"FAILED: the {dtype} losses differ by more than {limit:.0e} of their size")
    for _ in range(1 + options.steps):
        for m in modes:
            m.speeds.append(real / m.step())

    print("dtype mode                      real tokens/s  [min-max]              step  loss")
    for m in modes:
        timed = m.speeds[1:]        # the first step allocates
        speed, spread = statistics.median(timed), f"[{min(timed):,.0f}-{max(timed):,.0f}]"
        print(f"{m.dtype:5s} {m.name:25s} {speed:13,.0f}  {spread:18s} "
              f"{1e3 * real / speed:6.0f}ms  {m.first_loss:.6f}")
    for m in ours:
        others = [x for x in modes if x.dtype == m.dtype and x is not m]
        best = max(others, key=lambda x: statistics.median(x.speeds[1:]))
        ratios = [a / b for a, b in zip(m.speeds[1:], best.speeds[1:])]
        print(f"{m.dtype}: ours {statistics.median(ratios):.2f} times the best, {best.name}; "
              f"of single steps {min(ratios):.2f} to {max(ratios):.2f}")
    if options.json:
        rows = [dict(dtype=m.dtype, mode=m.name, loss=m.first_loss, tokens_per_s=m.speeds[1:])
                for m in modes]
        options.json.write_text(json.dumps(dict(what=head, dimensions=d, modes=rows)) + "\n")


if __name__ == "__main__":
    main()
