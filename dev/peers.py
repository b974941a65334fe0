#!/usr/bin/env python3
"""Training steps by PyTorch and transformers on the same documents, weights and machine as ours.

    dev/peers.py                                            demo model, CPU, fp32
    dev/peers.py --model smollm2-135m --dtype bf16 --compile
    dev/peers.py --device cuda --model smollm2-135m --dist r65 --dtype bf16 --compile

    padded     PyTorch, every document in a row as long as the longest, causal SDPA
    packed     PyTorch, unpadded once; attention document by document
    varlen     PyTorch, unpadded once; torch.nn.attention.varlen (GPU)
    flex       PyTorch, unpadded once; FlexAttention with a document mask, compiled (GPU)
    hf-padded  transformers, the padded batch with an attention mask, SDPA
    hf-flat    transformers, one row and position_ids that restart, as DataCollatorWithFlattening
               gives them; flash_attention_2 where it is installed, else SDPA
    ours       the trainer, packed

A step is forward, backward, clipping and AdamW. Tokens are real tokens; padding never counts. All
modes share one set of weights, so their losses, and the gradients of the first layer's q, k and v,
must agree before any time is shown. They take turns, step by step. What cannot run says why. The
lengths never change, so torch.compile pays for no new shape: a best case for it. --dtype bf16 is
autocast with fp32 parameters, --params bf16 is bf16 throughout. torch 2.5 or later; varlen 2.10.
"""
import argparse
import contextlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import pathlib
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

from bench import (LAWS, TRAINER, Program, Record, make_documents, make_lengths, packed_options,
                   spread, write_shard)

STARTED = "UNPAD_PEERS"


def start_again():
    """Gives the peer its best on a CPU: left alone, MKL takes AVX2 on all but Intel's, unless this
    function of its own is replaced, and tensors do without huge pages. Libraries read these at
    their start, hence the new one. On a busy machine threads that spin starve each other."""
    env = {"GOMP_SPINCOUNT": "1000", **os.environ, "THP_MEM_ALLOC_ENABLE": "1",
           STARTED: tempfile.mkdtemp()}
    if "avx512f" in pathlib.Path("/proc/cpuinfo").read_text() and shutil.which("cc"):
        library = env[STARTED] + "/mkl_avx512.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], check=True,
                       text=True, input="int mkl_serv_intel_cpu_true(void) { return 1; }")
        env.update(ATEN_CPU_CAPABILITY="avx512", LD_PRELOAD=library)
    os.execve(sys.executable, [sys.executable, *sys.argv], env)


if not importlib.util.find_spec("torch"):
    sys.exit("error: the Python package torch is not installed\nhint: pip install torch transformers")
if STARTED not in os.environ:
    start_again()
shutil.rmtree(os.environ[STARTED], ignore_errors=True)
os.environ.pop("LD_PRELOAD", None)          # not for the programs that this one starts
import torch  # noqa: E402  (reads the lines above)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

COMMON = dict(head_dim=64, rms_norm_eps=1e-5, rope_theta=100000.0, tie_word_embeddings=True)
MODELS = {
    "demo": dict(num_hidden_layers=6, hidden_size=192, intermediate_size=512, vocab_size=264,
                 num_attention_heads=3, num_key_value_heads=1, **COMMON),
    "smollm2-135m": dict(num_hidden_layers=30, hidden_size=576, intermediate_size=1536,
                         vocab_size=49152, num_attention_heads=9, num_key_value_heads=3, **COMMON),
}
# |a - b| / |b| of losses and of gradients: a lost mask moves the gradients by 1, and the loss of
# random weights by only 2e-4
LIMITS = {"bf16": (5e-4, 0.3), "fp32": (1e-5, 1e-4)}
MODES = ["padded", "packed", "varlen", "flex", "hf-padded", "hf-flat"]


class CannotRun(Exception):
    pass


# -------------------------------------------------------------------------------------------------
# The model, with the names of a Hugging Face file

class Layer(nn.Module):
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
        self.lm_head.weight = self.model["embed_tokens"].weight
        self.inv_freq = d["rope_theta"] ** (-torch.arange(0, hd, 2).float() / hd)
        self.head = self.head_loss

    def head_loss(self, x, targets):
        logits = self.lm_head(self.model["norm"](x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten(), reduction="sum")

    def forward(self, tokens, positions, targets, attend):
        """The sum of the losses of all targets that are not -100."""
        angle = positions[..., None].float() * self.inv_freq.to(tokens.device)
        angle = angle.repeat(1, 1, 2)[:, :, None]
        x = self.model["embed_tokens"](tokens)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.model["layers"]:
            x = layer(x, cos, sin, attend)
        return self.head(x, targets)


def write_model(model, d, folder):
    """As a Hugging Face directory, for our program."""
    head, at = {}, 0
    state = {n: w.float().cpu() for n, w in model.state_dict().items() if n != "lm_head.weight"}
    for name, w in state.items():
        end = at + 4 * w.numel()
        head[name], at = dict(dtype="F32", shape=list(w.shape), data_offsets=[at, end]), end
    text = json.dumps(head).encode()
    with open(folder / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for w in state.values():
            f.write(w.contiguous().numpy().tobytes())
    config = dict(d, model_type="llama", hidden_act="silu", max_position_embeddings=8192,
                  architectures=["LlamaForCausalLM"], bos_token_id=0)
    (folder / "config.json").write_text(json.dumps(config))


# -------------------------------------------------------------------------------------------------
# Attention of (rows, tokens, heads, head_dim)

def sdpa(q, k, v):
    """Causal"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cuda":
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if q.dtype == torch.float32:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    # on a CPU in bf16 these products are the faster way
    future = torch.full((q.shape[2], q.shape[2]), float("-inf")).triu(1)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + future
    return (scores.float().softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def by_document(lengths):
    def attend(*qkv):
        parts = zip(*(x.split(lengths, dim=1) for x in qkv))
        return torch.cat([sdpa(*part) for part in parts], dim=1)

    return attend


def varlen(cu, longest):
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        raise CannotRun(f"torch {torch.__version__} has no torch.nn.attention.varlen") from None
    known = inspect.signature(varlen_attn).parameters
    args = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        args["enable_gqa"] = True
    return lambda q, k, v: varlen_attn(q[0], k[0], v[0], cu, cu, longest, longest, **args)[None]


def flex(number):
    if number.device.type == "cpu":
        raise CannotRun("compiled for GPUs")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    compiled, n = torch.compile(flex_attention), len(number)
    mask = torch.compile(create_block_mask)(
        lambda b, h, i, j: (number[i] == number[j]) & (i >= j), None, None, n, n,
        device=number.device)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return attend


# -------------------------------------------------------------------------------------------------
# Whole steps

class Mode:
    """One way of giving the documents to a model: a list of forward and backward passes."""
    def __init__(self, kind, compiled, own, d, docs, o):
        self.kind, self.o, self.name = kind, o, kind + " compiled" * compiled
        self.num_targets, self.seconds = sum(len(doc) - 1 for doc in docs), []
        self.hf, self.padded = kind.startswith("hf"), "padded" in kind
        if compiled and kind == "packed" and len(docs) > 16:
            raise CannotRun("compiling attention to each of so many documents takes minutes")
        self.passes = [self.lay_out(group) for group in self.groups(docs)]
        self.model = make_hf(kind, d, own) if self.hf else own
        if compiled and not self.hf:
            with torch.device("meta"):
                self.model = Llama(d)
            self.model.load_state_dict(own.state_dict(keep_vars=True), assign=True)
            self.model.lm_head.weight = own.lm_head.weight
            self.model.inv_freq = own.inv_freq
            self.model.head = torch.compile(self.model.head_loss)
        if compiled:
            for layer in self.model.model.layers if self.hf else self.model.model["layers"]:
                layer.compile(dynamic=False)

    def groups(self, docs):
        """Documents of passes of at most --pass-tokens, padding included."""
        group = []
        for doc in docs:
            longest = max(map(len, group + [doc]))
            size = (len(group) + 1) * longest if self.padded else sum(map(len, group + [doc]))
            if group and size > self.o.pass_tokens:
                yield group
                group = []
            group.append(doc)
        yield group

    def lay_out(self, group):
        lengths, device = [len(doc) for doc in group], self.o.device
        longest = max(lengths)

        def fill(parts, value):
            if not self.padded:
                return torch.cat(parts)[None].to(device)
            parts = [F.pad(p, (0, longest - len(p)), value=value) for p in parts]
            return torch.stack(parts).to(device)

        p = dict(tokens=fill(group, 0), mask=fill([torch.ones_like(g) for g in group], 0),
                 positions=fill([torch.arange(n) for n in lengths], 0),
                 targets=fill([F.pad(doc[1:], (0, 1), value=-100) for doc in group], -100))
        cu = torch.tensor([0] + lengths).cumsum(0).int().to(device)
        p["cu"], p["longest"] = cu, longest
        if not self.hf:
            number = torch.repeat_interleave(torch.tensor(lengths)).int().to(device)
            p["attend"] = {"padded": lambda: sdpa, "packed": lambda: by_document(lengths),
                           "varlen": lambda: varlen(cu, longest),
                           "flex": lambda: flex(number)}[self.kind]()
        return p

    def loss(self, p):
        if not self.hf:
            return self.model(p["tokens"], p["positions"], p["targets"], p["attend"])
        if self.padded:
            more = dict(attention_mask=p["mask"])
        else:
            more = dict(position_ids=p["positions"])
        if self.model.config._attn_implementation == "flash_attention_2":
            more.update(cu_seq_lens_q=p["cu"], cu_seq_lens_k=p["cu"], max_length_q=p["longest"],
                        max_length_k=p["longest"])
        logits = self.model(input_ids=p["tokens"], use_cache=False, **more).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), p["targets"].flatten(),
                               reduction="sum")

    def forward_backward(self):
        """The loss, as a tensor: nothing here waits for the GPU."""
        total = 0
        for p in self.passes:
            with torch.autocast(self.o.device, torch.bfloat16,
                                enabled=self.o.dtype == "bf16" and self.o.params == "fp32"):
                loss = self.loss(p) / self.num_targets
            loss.backward()
            total = total + loss.detach()
        return total

    def check(self, weights, probe):
        """Loss and gradient of the untouched weights"""
        self.first_loss = self.forward_backward().item()
        self.gradient = torch.cat([w.grad.float().flatten() for w in probe]).cpu()
        for w in weights:
            w.grad = None

    def step(self, weights, optimizer):
        wait(self.o.device)
        start = time.perf_counter()
        self.forward_backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait(self.o.device)
        self.seconds.append(time.perf_counter() - start)


def make_hf(kind, d, own):
    """LlamaForCausalLM on the weights that all modes share"""
    try:
        import transformers
    except ImportError:
        raise CannotRun("transformers is not installed") from None
    device = own.lm_head.weight.device
    fast = kind == "hf-flat" and device.type == "cuda" and importlib.util.find_spec("flash_attn")
    config = transformers.LlamaConfig(**d, max_position_embeddings=8192, use_cache=False,
                                      attn_implementation="flash_attention_2" if fast else "sdpa")
    hf, weights = transformers.LlamaForCausalLM(config), dict(own.named_parameters(
        remove_duplicate=False))
    for path, _ in list(hf.named_parameters(remove_duplicate=False)):
        module, _, leaf = path.rpartition(".")
        hf.get_submodule(module)._parameters[leaf] = weights[path]
    return hf.to(device).train()


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def version(package):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{package} {importlib.metadata.version(package)}"
    return f"no {package}"


def make_modes(own, d, docs, weights, o, say):
    """Those that can run and agree with the first"""
    modes, probe = [], [own.model["layers"][0].self_attn[n + "_proj"].weight for n in "qkv"]
    torch._dynamo.config.recompile_limit = 64       # a version for each list of lengths
    for kind in o.modes:
        for compiled in [False, True][:1 + o.compile]:
            name = kind + " compiled" * compiled
            try:
                mode = Mode(kind, compiled, own, d, docs, o)
                mode.check(weights, probe)
                modes.append(mode)
            except Exception as error:      # a peer's failure is a result, not the end
                lines = str(error).strip().splitlines() or [""]
                say(f"{name}: cannot run: {type(error).__name__}: {lines[0][:120]}")
                if not isinstance(error, torch.OutOfMemoryError):
                    break       # compiled neither; but that may need less memory
    if not modes:
        sys.exit("error: no mode can run\nhint: see above")
    for m in modes:
        losses = abs(m.first_loss / modes[0].first_loss - 1)
        gradients = ((m.gradient - modes[0].gradient).norm() / modes[0].gradient.norm()).item()
        if not (losses <= LIMITS[o.dtype][0] and gradients <= LIMITS[o.dtype][1]):     # NaN too
            sys.exit(f"error: {m.name} is not what {modes[0].name} computes: losses differ by "
                     f"{losses:.1e}, gradients by {gradients:.1e}\nhint: no times are shown")
    return modes


def steps(o, say, lengths):
    d = MODELS[o.model]
    torch.manual_seed(0)
    own = Llama(d).to(o.device, torch.bfloat16 if o.params == "bf16" else torch.float32)
    docs = [torch.tensor(doc) for doc in make_documents(lengths, d["vocab_size"])]
    weights, real = list(own.parameters()), sum(lengths)
    groups = [{"params": [w for w in weights if (w.ndim >= 2) == decayed],
               "weight_decay": 0.1 * decayed} for decayed in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=1e-6, betas=(0.9, 0.95), fused=True)
    with tempfile.TemporaryDirectory() as folder:
        folder, ours = pathlib.Path(folder), None
        try:
            if not o.no_ours:
                write_model(own, d, folder)
                bf16 = ["--bf16-matmul"] * (o.device == "cpu" and o.dtype == "bf16")
                ours = Program("ours", o.trainer, "--model", folder, "--train",
                               write_shard(folder / "shard", lengths, d["vocab_size"]),
                               "--boundary-token", 0, *packed_options(lengths), *bf16,
                               threads=o.threads if o.device == "cpu" else 0)
                if say.backend == "cuda":
                    ours.run_alone(1 + o.warmup + o.steps)
                first_loss = ours.step()[2]
            modes = make_modes(own, d, docs, weights, o, say)
            if ours and not abs(first_loss / modes[0].first_loss - 1) <= 10 * LIMITS[o.dtype][0]:
                sys.exit(f"error: our loss is {first_loss}, theirs {modes[0].first_loss}\n"
                         "hint: no times are shown")
            table = {m.name: m.seconds for m in modes}
            table.update({"ours": []} if ours else {})
            for _ in range(o.warmup + o.steps):
                for m in modes:
                    m.step(weights, optimizer)
                if ours:
                    table["ours"].append(ours.step()[0])
        finally:
            if ours:
                ours.close()
    say(f"{'mode':20} {'ms a step: median [min-max]':>30} {'tokens/s':>9}")
    table = {name: seconds[o.warmup:] for name, seconds in table.items()}
    for name, s in table.items():
        say(f"{name:20} {spread([1e3 * x for x in s]):>30} {real / statistics.median(s):9,.0f}")
    if ours:
        best = min((m.name for m in modes), key=lambda name: statistics.median(table[name]))
        ratios = [b / a for a, b in zip(table["ours"], table[best])]
        say(f"ours is {statistics.median(ratios):.2f} times as fast as the best peer, {best}; of "
            f"single steps {min(ratios):.2f} to {max(ratios):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="demo", help="dimensions, random weights")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast")
    add("--params", choices=["fp32", "bf16"], default="fp32")
    add("--dist", choices=["seed", *LAWS, "giant"], default="seed")
    add("--lengths", help="e.g. 220,217 or 64x512")
    add("--tokens", type=int, default=65536)
    add("--cap", type=int, default=8192, help="longest document")
    add("--modes", nargs="+", choices=MODES, default=MODES)
    add("--pass-tokens", type=int, default=65536, help="of one forward and backward, with padding")
    add("--compile", action="store_true", help="each mode with torch.compile of its layers too")
    add("--steps", type=int, default=5)
    add("--warmup", type=int, default=2)
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--trainer", default=TRAINER, help="our program (default: ./train_llama)")
    add("--no-ours", action="store_true")
    add("--record", metavar="NAME", help="write dev/results/NAME-BACKEND-DATE.txt")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    lengths = make_lengths(o.dist, o.tokens, o.cap, o.lengths)
    say = Record(o.record or "peers", o.trainer)
    say(f"peers    torch {torch.__version__}, {version('transformers')}, {version('flash_attn')}, "
        f"{o.threads} threads, " + (torch.cuda.get_device_name() if o.device == "cuda" else "CPU"),
        f"{o.lengths or o.dist}: {len(lengths)} documents of {min(lengths)} to {max(lengths)} "
        f"tokens, {sum(lengths)} tokens; {o.model}, {o.dtype}")
    steps(o, say, lengths)
    if o.record:
        say.write()


if __name__ == "__main__":
    main()
