#!/usr/bin/env python3
"""Compares our readers with the reference readers on the same files.

usage: dev/fuzz/compare.py [--edits N] [FORMAT ...]     after make build/fast/fuzz

The files are those of build/fuzz (make fuzz) and valid ones with one to three edits: a value
replaced, removed, renamed or given twice, a byte changed. FORMATs: safetensors, config, tokenizer,
adapter; strings: valid tokenizers, and random texts of pieces that are hard for them. Needs
safetensors, transformers, tokenizers and peft of pip. Prints how many both read alike, and with an
example why the reference refuses what we accept, and what it reads otherwise.
"""
import argparse, collections, glob, json, logging, os, random, re, resource, signal, struct
import subprocess, tempfile, safetensors, tokenizers
from peft import LoraConfig
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

os.chdir(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
ODD = r"""null true false 0 1 -1 2 3 8 16 1.0 1.5 -0.0 1e3 1e-9 1e400 2147483648 9007199254740993
18446744073709551616 1000000000000000000000000000000 NaN Infinity 01 1. .5 +1 0x1 "" "x" "1" "a" []
[1] [0,24] ["a"] [[]] {} {"a":1} {"type":"x"} 'x' "\ud800" "\ud83d\ude00" "\u0000" "\x" "\/" [1,]
[1 {"a":1,} true,false /**/1 F64 "F64" "F32" "BF16" "I64" "BOOL" "F8_E4M3" "linear" "yarn" "llama3"
"default" "dynamic" "gelu" "qwen2" "q_proj" ["q_proj","v_proj"] "all-linear" "none" "gaussian" "NFC"
"Metaspace" "WordPiece" "BPE" "<s>" "ab" "a b" "\u0120" """.split()
ODD += ['"\udcff"', '"\t"', "[" * 200 + "]" * 200, "[" * 3000 + "]" * 3000]
SIZES = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
num_key_value_heads max_position_embeddings tie_word_embeddings rms_norm_eps
initializer_range""".split()
TEXT = "ab a  b\n\nthe The 1234 it's \u00e9e\u0301 \u6f22\u5b57 <|im_start|>user <s>x\t\r\n"
TENSORS = """{"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [2, 3],
"data_offsets": [0, 24]}, "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}}"""
ADAPTER = """{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 32,
"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0, "use_rslora": false, "bias": "none",
"rank_pattern": {},
"modules_to_save": null, "init_lora_weights": true, "base_model_name_or_path": "x"}"""


def edited(text, rng, count):
    tree, raw = json.loads(text), []
    for _ in range(count):
        at, key, old = {"": tree}, "", tree
        while old and isinstance(old, (dict, list)) and (at is not tree or rng.random() < .8):
            at, key = old, rng.choice(list(old) if isinstance(old, dict) else range(len(old)))
            old = at[key]
        odd, kind = rng.choice(ODD), rng.random()
        near = [str(old + i) for i in (-1, 1, old)] + ["%d.0" % old] if type(old) is int else [odd]
        if kind < .1 or "@" in str(old):
            at.pop(key)
        elif kind < .15 and isinstance(at, dict):
            at[str(key) + "x"] = at.pop(key)
        else:
            at[key] = "@%d" % len(raw)
            twice = rng.choice([key, "x", "type", "factor", "rope_theta", "head_dim"])
            raw.append(rng.choice(near) if kind < .7 else '%s, "%s": %s' % (
                json.dumps(old), twice, rng.choice([odd, json.dumps(old)])))
    text = json.dumps(tree, ensure_ascii=False)
    for i, new in enumerate(raw):
        text = text.replace('"@%d"' % i, new)
    data, at = bytearray(text.encode("utf-8", "surrogateescape")), rng.randrange(2, len(text) + 9)
    if rng.random() < .2:
        data[at:at + rng.randrange(2)] = rng.choice([b"", b"\0", b"\xff", b'"', b",", b"}", b"1"])
    return bytes(data)


def read_safetensors(flags, head, body, *_):
    size = struct.pack("<Q", len(head)) if flags & 1 else b""
    return sorted([name, t["dtype"], t["shape"], bytes(t["data"][:32]).hex()]
                  for name, t in safetensors.deserialize(size + head + body))


def config(c, rope):
    ids = [c[k + "_token_id"] for k in ("bos", "eos", "pad")]
    ids = [dict.fromkeys(x if isinstance(x, list) else [x]) for x in ids]
    return [c[k] for k in SIZES] + rope + [
        [i for i in x if i is not None and 0 <= i < c["vocab_size"]] for x in ids]


def read_config(flags, text, *_):
    tree = json.loads(text.decode())
    c = CONFIG_MAPPING[tree["model_type"]].from_dict(tree)
    rope = LlamaRotaryEmbedding(c)
    return config(vars(c) | {"max_position_embeddings": c.max_position_embeddings},
                  rope.inv_freq.tolist() + [rope.attention_scaling])


def read_tokenizer(flags, text, _, __, prompt):
    t = tokenizers.Tokenizer.from_str(text.decode())
    return t.encode(prompt.decode(), add_special_tokens=False).ids


PIECES = """ a the theory word norm 12 \u2581 \u2581\u2581 ~~ ~ < <left> <right> <both> <s> </s> <unk> <0x41> [INST] [/INST]
e\u0301< e\u0301 \u0301 \u0338 \u00e9 \u212b \u0344 \ufffd _ . , don't Hello packing documents buffer \u200d \u0663
<|endoftext|> <|im_start|> \u6771\u4eac \U0001f642""".split() + list("  \t\n\r\u0085\u00a0\u2003\u3000\x07\x7f\0")


def random_text(rng):
    any_character = lambda: chr(rng.choice([rng.randrange(0xd800), rng.randrange(0xe000, 0x110000)]))
    return "".join(rng.choice(PIECES) if rng.random() < .9 else any_character()
                   for _ in range(rng.randrange(1, 24))).replace("\n~~\n", "").encode()


def read_adapter(flags, text, *_):
    with tempfile.TemporaryDirectory() as path:
        open(path + "/adapter_config.json", "wb").write(text)
        c = LoraConfig.from_pretrained(path)
    return [c.r, c.lora_alpha, sorted(c.target_modules)]


def texts(pattern):
    return [open(f).read() for f in sorted(glob.glob("tests/golden/" + pattern))]


FORMATS = {  # valid texts, what stands before and after, the reference, our answer in its form
    "safetensors": ([TENSORS], b"\1", b"\n~~\n" + bytes(range(32)), read_safetensors, sorted),
    "config": (texts("configs/*.json"), b"", b"", read_config, lambda x: config(x[-1], x[:-1])),
    "tokenizer": (texts("tokenizers/*/tokenizer.json"), b"",
                  b'\n~~\n{"bos_token": null}\n~~\n\n~~\n' + TEXT.encode(), read_tokenizer, list),
    "strings": (texts("tokenizers/*/tokenizer.json"), b"", b'\n~~\n{"bos_token": null}\n~~\n\n~~\n', read_tokenizer, list),
    "adapter": ([ADAPTER], b"", b"", read_adapter, lambda x: [
        x[0]["r"], x[0]["lora_alpha"], sorted(x[0]["target_modules"])]),
}


def ours(name, files):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        names = ["%s/%d" % (path, i) for i in range(len(files))]
        for file, data in zip(names, files):
            open(file, "wb").write(data)
        env = dict(os.environ, FUZZ_TARGET=name.replace("strings", "tokenizer"), FUZZ_SEEN="1", TMPDIR=path)
        out = subprocess.run(["build/fast/fuzz"] + names, stdout=subprocess.PIPE, env=env,
                             stderr=subprocess.DEVNULL).stdout
    return [json.loads(line) for line in out.decode().split("\n")[:-1]]


def same(a, b):
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    number = isinstance(a, float) and type(b) in (int, float)
    return a == b or (number and abs(a - b) <= 2e-6 * max(abs(a), abs(b)))


def compare(name, edits):
    valid, before, after, reference, form = FORMATS[name]
    rng, count, why = random.Random(1), collections.Counter(), collections.defaultdict(list)
    files = [open(f, "rb").read() for f in glob.glob("build/fuzz/%s/*" % name) if os.path.exists(f)]
    files = [f for f in files if name != "safetensors" or f[:1] < b"\2"]  # no index
    for _ in range(edits):
        text = rng.choice(valid)
        files.append(before + text.encode() + after + random_text(rng) if name == "strings" else
                     before + edited(text, rng, rng.choice([1, 1, 2, 3])) + after)
    answers = [a for i in range(0, len(files), 500) for a in ours(name, files[i:i + 500])]
    assert len(answers) == len(files), "our reader stopped: make fuzz TARGET=" + name
    for data, answer in zip(files, answers):
        flags, error = len(before), ""
        try:
            signal.alarm(2)
            parts = data[flags:].split(b"\n~~\n", 3) + [b""] * 3
            theirs = reference(data[0] if flags and data else 0, *parts[:4])
        except BaseException as e:  # also panics of Rust
            error = "%s: %s" % (type(e).__name__, str(e)[-150:])
        signal.alarm(0)
        accepted = isinstance(answer, list)
        kind = "both refuse" if error else "only we refuse"
        if accepted:
            alike = not error and same(form(answer), theirs)
            kind = "only we accept" if error else "alike" if alike else "other values"
        count[kind] += 1
        shown = error if accepted else answer if not error else ""
        if kind == "other values":
            shown = "\n        ".join(str(x) for x in (form(answer), theirs))
        why[kind, re.sub(r"'.*'|`.*`|\"[^\"]*\"|[\d.]+", "#", shown[-100:])].append((shown, data))
    print("%-12s %s" % (name, ", ".join("%s %d" % k for k in sorted(count.items()))), flush=True)
    for (kind, _), cases in sorted(why.items(), key=lambda x: -len(x[1])):
        if kind in ("only we accept", "other values"):
            shortest = min(cases, key=lambda c: len(c[1]))
            print("    %s %d: %s\n        %s" % (kind, len(cases), *shortest))


def too_long(*_):
    raise TimeoutError("longer than 2 s")


signal.signal(signal.SIGALRM, too_long)
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
for log in map(logging.getLogger, ("transformers", "peft")):
    log.disabled = True
parser = argparse.ArgumentParser()
parser.add_argument("--edits", type=int, default=5000)
parser.add_argument("formats", nargs="*", default=list(FORMATS))
args = parser.parse_args()
for name in args.formats:
    compare(name, args.edits)
