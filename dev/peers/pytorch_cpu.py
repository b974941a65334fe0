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
gets its fastest kernels: on non-Intel processors MKL falls back to AVX2; the script forces AVX-512,
which about doubles its speed, and huge pages. PyTorch 2.5 or later.
"""
import argparse
import atexit
import importlib.metadata
import importlib.util
import itertools
import json
import math
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
    help="each mode with torch.compile of each layer too (packed: of at most 16 documents, as "
         "compiling attention to each takes minutes)")
add("--ours", type=pathlib.Path, metavar="PROGRAM", help="build/cpu/bench_step")
add("--json", type=pathlib.Path, help="write the results here too")
options = parser.parse_args()
if {"padded", "hf"}.intersection(options.modes) and min(options.row_len) < max(options.lengths):
    parser.error("--row-len is less than the longest document")


def start_again():
    """Gives the peer its best: left alone, OpenBLAS <= 0.3.21 and ATen take AVX2 on cores that they
    do not know, MKL on all but Intel's, unless this function of its own is replaced, and tensors do
    without huge pages. Libraries read these at their start, hence the new one."""
    threads = {"OMP_NUM_THREADS": str(options.threads), "MKL_NUM_THREADS": str(options.threads)}
    env = {**os.environ, **threads, "THP_MEM_ALLOC_ENABLE": "1", STARTED: tempfile.mkdtemp()}
    if "avx512f" in pathlib.Path("/proc/cpuinfo").read_text():
        env = {"OPENBLAS_CORETYPE": "SKYLAKEX", "ATEN_CPU_CAPABILITY": "avx512", **env}
        library = env[STARTED] + "/mkl_avx512.so"
        if shutil.which("cc"):
            subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], check=True,
                           text=True, input="int mkl_serv_intel_cpu_true(void) { return 1; }")
            env["LD_PRELOAD"] = ":".join([library] + [x for x in [env.get("LD_PRELOAD")] if x])
        else:
            print("MKL cannot be made to take AVX-512 here: no C compiler")
    os.execve(sys.executable, [sys.executable, *sys.argv], env)


STARTED = "UNPAD_PEERS"
if STARTED not in os.environ:
    start_again()
atexit.register(shutil.rmtree, os.environ[STARTED], ignore_errors=True)
import torch  # noqa: E402  (reads the lines above)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from turns import Program  # noqa: E402


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
        config = torch._dynamo.config       # a version for each list of lengths
        setattr(config, "recompile_limit" if hasattr(config, "recompile_limit") else
                "cache_size_limit", 64)
        for layer in compiled.model["layers"]:
            layer.compile(dynamic=False)
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

    def gradient(self):
        """Leaves it in the model, clipped; returns the loss and the norm"""
        self.optimizer.zero_grad(set_to_none=True)
        total = 0
        for p in self.passes:
            loss = self.loss(*p)
            loss.backward()
            total += loss.detach()
        return total, torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def step(self):
        """The seconds of one training step"""
        start = time.perf_counter()
        self.gradient()
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
    """Our program on the same weights and tokens"""
    def __init__(self, dtype, folder):
        self.name, self.dtype, self.speeds = "ours", dtype, []
        self.program = Program("ours", options.threads, options.ours, "--turns", "--model", folder,
                               "--weights", folder, "--threads", options.threads, "--lengths",
                               ",".join(map(str, options.lengths)),
                               *["--bf16-matmul"] * (dtype == "bf16"))

    def step(self):
        seconds, self.loss_of_step = self.program.step()
        return seconds


def version(package):
    found = importlib.util.find_spec(package)
    return f"{package} {importlib.metadata.version(package)}" if found else f"no {package}"


def gflops():
    """Of one product, to see whether the peer has its best kernels"""
    a = torch.randn(1024, 1024)
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2e-9 * 1024 ** 3 / statistics.median(seconds)


def must_agree(what, values, limit):
    """{mode: value}: finite, and within `limit` of their size"""
    if not values:
        return
    most = max(map(abs, values.values()))
    if not all(map(math.isfinite, values.values())) or \
            max(values.values()) - min(values.values()) > limit * most:
        sys.exit(f"FAILED: the {what} differs by more than {limit:.0e} of its size: {values}")


def say_what_cannot_run():
    """Removes modes that cannot run here and prints why; also for PyTorch's varlen_attn"""
    try:
        from torch.nn.attention.varlen import varlen_attn
        q, cu = torch.zeros(4, 1, 64), torch.tensor([0, 4], dtype=torch.int32)
        varlen_attn(q, q, q, cu, cu, 4, 4)
    except Exception as error:      # whichever it has for this
        reason = str(error).strip().split(". ")[0]
        print(f"varlen_attn cannot run here: {reason[:100]}")
    if not importlib.util.find_spec("transformers"):
        if {"hf", "hf-flat"}.intersection(options.modes):
            print("hf and hf-flat cannot run here: transformers is not installed")
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
    said = str(options.lengths) if len(docs) <= 16 else \
        f"{len(docs)} of {min(options.lengths)} to {max(options.lengths)} tokens"
    head = (f"torch {torch.__version__}, {version('transformers')}, {kernels} kernels, "
            f"{options.threads} threads, product of 1024 x 1024 at {gflops():.0f} GFLOP/s, "
            f"{count:,} parameters, documents {said}")
    print(head, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        if options.ours:
            write_model(models["own"][0], d, pathlib.Path(folder))
        ours = [Ours(dtype, folder) for dtype in options.dtype if options.ours]
        for m in ours:
            m.step()
            m.first_loss = m.loss_of_step
    for m in modes:
        m.first_loss, m.first_norm = (x.item() for x in m.gradient())
    must_agree("gradient norm", {m.name: m.first_norm for m in modes if m.dtype == "fp32"}, 1e-4)
    modes += ours
    for dtype, limit in ("fp32", 1e-5), ("bf16", 1e-2):
        must_agree("loss", {m.name: m.first_loss for m in modes if m.dtype == dtype}, limit)
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
        if not others:
            continue
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
