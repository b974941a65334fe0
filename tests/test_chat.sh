#!/usr/bin/env bash
# data/chat.py (prepare.py --chat): which tokens of a chat are trained, held against transformers by
# tests/golden/chat; the mask files; bad chats and bad templates. scripts/get_model.sh.
set -u
cd "$(dirname "$0")/.."
root=$PWD
. "$root/tests/lib.sh"
scratch chat
command -v python3 > /dev/null || skip_all chat 'python3 is not installed'
have() { python3 -c "import $1" 2> /dev/null; }
# needs PACKAGE NAME COMMAND...: a check that a Python package is needed for
needs() {
    local package=$1 name=$2
    shift 2
    if have "$package"; then check "$name" "$@"
    else skip "$name" "the Python package $package is not installed"; fi
}
run() { python3 "$root/data/prepare.py" --quiet --chat "$@"; }

# refused CODE PATTERN ARGUMENTS...: one error line that matches, one hint, and nothing written
refused() {
    local code=$1 pattern=$2 status
    shift 2
    rm -rf refused
    python3 "$root/data/prepare.py" --chat --out refused "$@" > stdout 2> stderr
    status=$?
    cat stderr
    [ $status -eq "$code" ] && grep -qE "^error: .*$pattern" stderr && [ ! -s stdout ] &&
        [ "$(cut -d: -f1 stderr)" = "$(printf 'error\nhint')" ] && [ -z "$(ls -A refused 2> /dev/null)" ]
}

cat > shards.py << 'PY'
"""What is in a directory of shards: [(ids, mask)], with every field of NAME.mask checked."""
import glob, json, struct

def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82f63b78 if crc & 1 else 0)
    return crc ^ 0xffffffff

def read(directory, split="train"):
    found, trained = [], 0
    for path in sorted(glob.glob("%s/%s_*.bin" % (directory, split))):
        data, index = open(path, "rb").read(), open(path[:-4] + ".idx", "rb").read()
        words, mask = struct.unpack("<256i", data[:1024]), open(path[:-4] + ".mask", "rb").read()
        assert words[11] & 4, "no flag for the mask"
        tokens = struct.unpack("<%dH" % words[2], data[1024:])
        size = -(-len(tokens) // 8)
        magic, version, of, count, ones = struct.unpack("<8sI4sQQ", mask[:32])
        assert (magic, version, of) == (b"UNPADMSK", 1, data[1020:1024])
        assert len(mask) == 32 + size + 4 and count == len(tokens)
        assert struct.unpack("<I", mask[-4:])[0] == crc32c(mask[:-4])
        bits = [mask[32 + i // 8] >> i % 8 & 1 for i in range(8 * size)]
        assert sum(bits) == ones and not any(bits[len(tokens):])
        ends = struct.unpack_from("<%dQ" % words[14], index, 40)
        for a, b in zip((0,) + ends, ends):
            assert not bits[a], "a first token is trained"
            found.append((list(tokens[a:b]), bits[a:b]))
        trained += ones
    summary = json.load(open(directory + "/dataset.json"))[split]
    assert (summary["documents"], summary["trained_tokens"]) == (len(found), trained)
    return found
PY

# What transformers trains, but for tokens that straddle the boundary: through prepare.py and back
cat > golden.py << 'PY'
import json, os, subprocess, sys
import shards
golden_dir, prepare, tokenizer, form, smollm2 = sys.argv[1:]
golden, compared = json.load(open(golden_dir + "/golden.json")), 0
with open("samples.jsonl", "w") as f:
    f.writelines(json.dumps({"messages": m}) + "\n" for m in golden["samples"])
where = {"byte": "byte", "bpe": golden_dir, "smollm2": smollm2}[tokenizer]
for name, forms in golden["templates"].items():
    template = forms["marked" if form == "marked" else "plain"]
    if not template or (tokenizer, name) == ("byte", "headers") or (form, name) in (
            ("built_in", "headers"), ("built_in", "plain")):
        continue
    # a comment, so that it is not the template that needs no jinja2
    open("template.jinja", "w").write(template + ("{# #}" if form == "turns" else ""))
    subprocess.run([sys.executable, prepare, "--quiet", "--chat", "samples.jsonl", "--out", "golden",
                    "--overwrite", "--val-frac", "0", "--tokenizer", where, "--no-bos", "--no-eos",
                    "--chat-template", "template.jinja", "--jobs", "1"], check=True)
    found = iter(shards.read("golden"))
    for case in golden["cases"]:
        mask = [int(c) for c in case["mask"]]
        for i in case["straddling"]:
            mask[i] = 0
        if (case["tokenizer"], case["template"]) != (tokenizer, name) or not any(mask):
            continue
        wanted, got = (case["ids"], mask), next(found)
        if got != wanted:
            sys.exit("%s, sample %d:\n%s\n%s" % (name, case["sample"], wanted, got))
        compared += 1
    assert next(found, None) is None
assert compared >= 9, compared
print(compared, "cases")
PY
golden() {
    python3 golden.py "$root/tests/golden/chat" "$root/data/prepare.py" "$1" "$2" "${SMOLLM2_DIR:-}"
}

python3 - "$root" << 'PY'
import gzip, json
chats = [[("user", "Hi"), ("assistant", "Hello \x1b[31m€!")],
         [("system", "S"), ("user", "2+2?"), ("assistant", "4"), ("user", "3+3?"), ("assistant", "6")]]
openai = lambda chat: [{"role": r, "content": c} for r, c in chat]
names = {"user": "human", "assistant": "gpt", "system": "system"}
sharegpt = lambda chat: [{"from": names[r], "value": c} for r, c in chat]
def put(name, records):
    data = "".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records).encode()
    (gzip.open if name.endswith(".gz") else open)(name, "wb").write(data)
put("openai.jsonl", [{"messages": openai(c)} for c in chats])
put("sharegpt.jsonl.gz", [{"conversations": sharegpt(c), "id": 1} for c in chats])
put("parts.jsonl", [{"messages": [{"role": r, "content": [{"type": "text", "text": c}]}
                                  for r, c in chat]} for chat in chats])
put("prompt.jsonl", [{"prompt": "Hi", "completion": chats[0][1][1]},
                     {"prompt": openai(chats[1][:4]), "completion": openai(chats[1][4:])}])
weight = openai(chats[1])
weight[2]["weight"] = 0
put("weight.jsonl", [{"messages": openai(chats[0])}, {"messages": weight}])
put("many.jsonl", [{"messages": openai([("user", "question %d" % i), ("assistant", "%d " % i * (i % 7))])}
                   for i in range(400)])
good = {"messages": openai(chats[0])}
put("bad.jsonl", [good, "\n", "{\"messages\": [\n", good, "[1]\n", {"text": "x"}, {"messages": []},
                  {"messages": "x"}, {"messages": [3]}, {"messages": [{"role": "asistant"}]},
                  {"messages": [{"role": "user", "content": 3}]}, {"messages": openai(chats[0][:1])},
                  {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "[" * 9999 + "\n",
                  {"conversations": [{"from": "dog", "value": "x"}]}, "\"\udcff\"\n".encode(
                      "utf-8", "surrogateescape").decode("latin-1"), {"prompt": "x"}, good])
put("only_bad.jsonl", [{"text": "x"}] * 3)
put("surrogate.jsonl", ['{"messages": [{"role": "user", "content": "\\ud800"}, '
                        '{"role": "assistant", "content": "a\\udfff"}]}\n'])
open("cut.jsonl.gz", "wb").write(gzip.compress(b"{}\n" * 1000)[:-9])
open("notes.txt", "w").write("not a chat\n")
open("cut.parquet", "wb").write(b"PAR1 not really")
open("latin.jinja", "wb").write(b"\xe9")
templates = {
    "syntax": "{% for %}", "raises": "{{ raise_exception('no chats today') }}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    # the last answer is rendered otherwise than the ones before it
    "rewrites": "{% for m in messages %}{{ m.role + ':' + ('-' if m.role == 'assistant' and not loop.last else m.content) + '\n' }}"
                "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    # a block in a macro: its text is not where it is rendered
    "macro": "{% macro turn(m) %}<{% generation %}{{ m.content }}{% endgeneration %}>{% endmacro %}"
             "{% for m in messages %}{{ m.role }}{{ turn(m) if m.role == 'assistant' }}{% endfor %}",
    "today": "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m | tojson }}"
             "{% if loop.index > 8 %}{% break %}{% endif %}{% endfor %}",
}
for name, text in templates.items():
    open(name + ".jinja", "w").write(text)
PY

shown() { run --show 9 "$@" | grep -v -e '^$' -e '^<|im_start|>' -e trained; }
same_pictures() {  # every form of the same chats renders and trains the same
    printf '%s\n' 'Hi<|im_end|>' '[[Hello \x1b[31m€!<|im_end|>]]' '[[<|eos|>]]' 'S<|im_end|>' \
        '2+2?<|im_end|>' '[[4<|im_end|>]]' '3+3?<|im_end|>' '[[6<|im_end|>]]' '[[<|eos|>]]' > wanted
    for form in openai.jsonl sharegpt.jsonl.gz parts.jsonl; do
        shown "$form" | diff wanted - || return 1
    done
}
last_turn_only() { sed 's/\[\[4<|im_end|>\]\]/4<|im_end|>/' wanted > last; shown "$1" | diff last -; }
everything() {
    run openai.jsonl --train-on all --val-frac 0 --out all &&
        run openai.jsonl --train-on all --val-frac 0 --no-bos --no-eos --out bare && python3 - << 'PY'
import shards
for ids, mask in shards.read("bare"):
    assert ids[0] == ord("<") and mask == [0] + [1] * (len(ids) - 1)
for ids, mask in shards.read("all"):
    assert (ids[0], ids[-1]) == (256, 257) and mask == [0] + [1] * (len(ids) - 1)
PY
}
many_shards() {
    run many.jsonl --val-frac 0.2 --shard-tokens 3000 --out many &&
        run many.jsonl --val-frac 0.2 --out one && python3 - << 'PY'
import glob, shards
for split in "train", "val":
    many = shards.read("many", split)
    assert many == shards.read("one", split) and len(many) > 50
assert len(glob.glob("many/train_*.mask")) > 5 and len(glob.glob("one/train_*.mask")) == 1
PY
}
jobs_agree() {
    for jobs in 1 3; do run many.jsonl openai.jsonl --jobs $jobs --out jobs$jobs || return 1; done
    diff -r jobs1 jobs3
}
old_masks_go() {
    run openai.jsonl --val-frac 0 --out many --overwrite && [ "$(ls many/*.mask)" = many/train_00000.mask ] &&
        python3 "$root/data/prepare.py" --quiet notes.txt --val-frac 0 --out many --overwrite &&
        ! ls many | grep -E 'mask|jinja' && python3 -c 'import struct
assert struct.unpack_from("<i", open("many/train_00000.bin", "rb").read(), 44) == (3,)'
}
bad_lines() {  # named, counted and left out
    run bad.jsonl --val-frac 0 --out bad > stdout 2> stderr || return 1
    cat stderr
    for line in '3: expected JSON' '5: expected an object, found an array' '6: expected messages.* found text' \
        '7: expected a list' '8: expected a list' '9: message 1: expected an object, found a number' \
        '10: .*a role such as.*found "asistant"' '11: .*a string as content, found a number' \
        '12: no message of the assistant' '13: .*parts with a text'; do
        grep -qE "^warning: left out: bad.jsonl:$line" stderr || { echo "not: $line"; return 1; }
    done
    [ "$(grep -c '^warning: ' stderr)" -eq 11 ] && grep -q '14 chats in all' stderr && [ ! -s stdout ] &&
        python3 - << 'PY'
import json, shards
assert len(shards.read("bad")) == 3
left_out = json.load(open("bad/dataset.json"))["left_out"]
assert left_out["malformed_samples"] == 13 and left_out["untrained_samples"] == 1, left_out
PY
}
summary_is_printed() {
    python3 "$root/data/prepare.py" --chat bad.jsonl --val-frac 0 --out summary > stdout 2> stderr
    cat stdout
    grep -qE '^trained: [0-9]+ tokens of train \([0-9.]+ %\)' stdout && grep -q '\[\[Hello' stdout &&
        grep -q '^left out: 13 malformed samples, 1 untrained sample$' stdout
}
coloured() {  # coloured YES|NO [VARIABLE=VALUE]: on a terminal
    local wanted=$1
    shift
    env -u NO_COLOR "$@" python3 - "$root/data/prepare.py" > terminal << 'PY'
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(
    pty.spawn([sys.executable, sys.argv[1], "--chat", "--show", "1", "openai.jsonl"])))
PY
    cat terminal
    if [ "$wanted" = yes ]; then grep -q $'\033\\[1;32mHello .*\033\\[0m' terminal
    else grep -q '\[\[Hello' terminal && ! grep -q $'\033' terminal; fi
}
show_writes_nothing() {
    mkdir empty && cp openai.jsonl empty && run --show 1 empty --out empty/out > /dev/null &&
        [ "$(ls -A empty)" = openai.jsonl ]
}
tree_of_chats() {
    mkdir -p tree/deep && cp openai.jsonl tree/deep && cp notes.txt tree/README.md &&
        run tree --val-frac 0 --out from_tree && run openai.jsonl --val-frac 0 --out from_file &&
        diff -r from_tree from_file
}
long_samples_are_cut() {
    python3 -c 'import json; print(json.dumps({"prompt": "x" * 1900, "completion": "y" * 9000}))' > long.jsonl
    python3 "$root/data/prepare.py" --chat long.jsonl --val-frac 0 --out long > stdout &&
        [ "$(wc -c < stdout)" -lt 4000 ] && grep -A 1 -E 'x<.im_end' stdout && grep -qxF '...' stdout &&
        [ "$(run --show 1 long.jsonl | wc -c)" -gt 11000 ]
}
closed_pipe() {
    for _ in $(seq 2000); do cat openai.jsonl; done > pipe.jsonl
    run --show 4000 pipe.jsonl 2> stderr | head -n 1 && [ ! -s stderr ]
}
surrogates() { run surrogate.jsonl --show 1 | grep -q '^\[\[a?<'; }
macro() { shown openai.jsonl --chat-template macro.jinja | grep -F 'userassistant<[[4]]>user'; }
rewriting() {
    run openai.jsonl --chat-template rewrites.jinja --val-frac 0 --out rewrites 2> stderr
    cat stderr
    grep -q 'left out: openai.jsonl:2: message 3: the template renders it and later messages' stderr &&
        python3 -c 'import shards; assert len(shards.read("rewrites")) == 1'
}
same_day() {  # what the template calls today
    SOURCE_DATE_EPOCH=86400 TZ=UTC run openai.jsonl --chat-template today.jinja --train-on all --show 1 |
        grep -q '1970-01-02{"role": "user", "content": "Hi"}'
}
stub() {  # stub PACKAGE: python3 without it
    mkdir -p stub && rm -f stub/* && echo 'raise ImportError' > "stub/$1.py"
    shift
    PYTHONPATH=$work/stub refused "$@"
}
parquet() {
    python3 - << 'PY'
import json, pyarrow, pyarrow.parquet
records = [json.loads(line) for line in open("many.jsonl")] * 6
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), "many.parquet")
open("many6.jsonl", "w").writelines(json.dumps(r) + "\n" for r in records)
pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), "text.parquet")
PY
    run many.parquet --out from_parquet && run many6.jsonl --out from_jsonl &&
        diff -r from_parquet from_jsonl
}

# built_in: by ChatML in Python; turns: by rendering prefixes; marked: by {% generation %}
check golden_byte_built_in golden byte built_in
needs jinja2 golden_byte_marked golden byte marked
needs tokenizers golden_bpe_built_in golden bpe built_in
if have tokenizers; then
    needs jinja2 golden_bpe_turns golden bpe turns
    needs jinja2 golden_bpe_marked golden bpe marked
else
    skip golden_bpe_of_templates 'the Python package tokenizers is not installed'
fi
if [ -n "${SMOLLM2_DIR:-}" ]; then
    for form in built_in turns marked; do check golden_smollm2_$form golden smollm2 $form; done
else
    skip golden_smollm2 'set SMOLLM2_DIR to the directory of get_model.sh smollm2-135m-instruct'
fi
check every_form_is_the_same_chat same_pictures
check only_the_completion_is_trained last_turn_only prompt.jsonl
check a_turn_of_weight_0_is_not_trained last_turn_only weight.jsonl
check train_on_all everything
check masks_over_many_shards many_shards
check jobs_do_not_change_a_byte jobs_agree
check overwriting_leaves_no_old_mask old_masks_go
check bad_lines_are_named_and_counted bad_lines
check summary_is_printed summary_is_printed
if has_terminals; then
    check colour_on_a_terminal coloured yes
    check no_color_is_respected coloured no NO_COLOR=1
else
    skip colour_on_a_terminal 'no pseudo-terminals here'
    skip no_color_is_respected 'no pseudo-terminals here'
fi
check show_writes_nothing show_writes_nothing
check a_tree_of_chats tree_of_chats
check lone_surrogates surrogates
check long_samples_are_cut long_samples_are_cut
check show_into_head closed_pipe
needs jinja2 generation_in_a_macro macro
needs jinja2 a_template_that_rewrites rewriting
needs jinja2 strftime_now_is_one_time same_day
needs pyarrow parquet_as_jsonl parquet
check refuses_strict refused 3 'bad.jsonl:3: expected JSON' bad.jsonl --strict --jobs 2
check refuses_only_bad refused 3 'no document for training' only_bad.jsonl
check refuses_text refused 3 'notes.txt: expected chats in JSONL or Parquet, found .txt' notes.txt
check refuses_a_cut_gzip refused 3 'cut.jsonl.gz: cannot read' cut.jsonl.gz
check refuses_no_template_file refused 3 'absent.jinja: cannot read' openai.jsonl \
    --chat-template absent.jinja
check refuses_a_binary_template refused 3 'latin.jinja: expected a chat template in UTF-8' \
    openai.jsonl --chat-template latin.jinja
SOURCE_DATE_EPOCH=soon check refuses_a_bad_time refused 2 'expected seconds' openai.jsonl
check refuses_as_text refused 2 'takes no --as-text' openai.jsonl --as-text
expect refuses_show_without_chat 2 'need --chat' python3 "$root/data/prepare.py" openai.jsonl --show 1
expect refuses_no_out 2 'required: --out' run openai.jsonl
check refuses_without_pyarrow stub pyarrow 2 'cut.parquet: needs the Python package pyarrow' \
    cut.parquet
check refuses_without_jinja2 stub jinja2 2 'needs the Python package jinja2' openai.jsonl \
    --chat-template syntax.jinja
needs jinja2 refuses_a_broken_template refused 3 'syntax.jinja: expected a chat template' \
    openai.jsonl --chat-template syntax.jinja
needs jinja2 refuses_a_raising_template refused 3 'no document for training' openai.jsonl \
    --chat-template raises.jinja
needs jinja2 templates_are_in_a_sandbox refused 3 'unsafe' openai.jsonl --chat-template escape.jinja --strict
needs pyarrow refuses_a_cut_parquet refused 3 'cut.parquet: cannot read' cut.parquet
needs pyarrow refuses_other_columns refused 3 'expected a column messages.*found text' text.parquet
needs tokenizers refuses_no_chat_tokens refused 3 'no chat template, and no tokens' openai.jsonl \
    --tokenizer "$root/tests/golden/tokenizers/llama3"

# scripts/get_model.sh
get_model() { "$root/scripts/get_model.sh" "$@"; }
from_a_hub() {  # a hub on this machine
    local files=(config.json generation_config.json model.safetensors special_tokens_map.json
        tokenizer.json tokenizer_config.json) folder port
    folder=hub/HuggingFaceTB/SmolLM2-135M-Instruct/resolve/main
    mkdir -p $folder && for f in "${files[@]}"; do echo "$f" > "$folder/$f"; done
    python3 -u -m http.server --bind 127.0.0.1 --directory hub 0 > server.log 2>&1 &
    server=$!
    for _ in $(seq 100); do grep -q 'port [0-9]' server.log && break; sleep 0.1; done
    port=$(sed -n 's/.*port \([0-9]*\).*/\1/p' server.log)
    HF_ENDPOINT=http://127.0.0.1:$port get_model smollm2-135m-instruct got/model && diff -r got/model $folder
    local status=$?
    kill $server
    return $status
}
nothing_reachable() {
    mkdir -p bin && printf '#!/bin/sh\necho no network >&2\nexit 1\n' > bin/python3 && chmod +x bin/python3
    PATH=$work/bin:$PATH HF_ENDPOINT=http://127.0.0.1:9 get_model smollm2-135m-instruct none/model
    [ $? -eq 4 ] && [ -z "$(ls -A none)" ]
}
tiny_gguf() {  # as llama.cpp writes it: rows of Q and K in its order
    rm -rf tiny.gguf converted && python3 - << 'PY' && python3 "$root/scripts/gguf_to_hf.py" tiny.gguf converted &&
import gguf, numpy
rng = numpy.random.default_rng(1)
heads, kv, hidden = 2, 1, 64
def permute(w, n):
    return w.reshape(n, 2, w.shape[0] // n // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
w = gguf.GGUFWriter("tiny.gguf", "llama")
w.add_block_count(1); w.add_context_length(128); w.add_embedding_length(hidden)
w.add_feed_forward_length(96); w.add_head_count(heads); w.add_head_count_kv(kv)
w.add_rope_freq_base(10000.0); w.add_layer_norm_rms_eps(1e-5)
w.add_tokenizer_model("gpt2"); w.add_tokenizer_pre("smollm")
w.add_token_list(["<|im_start|>", "<|im_end|>", "a", "b", "ab"]); w.add_token_types([3, 3, 1, 1, 1])
w.add_token_merges(["a b"]); w.add_bos_token_id(0); w.add_eos_token_id(1)
w.add_unk_token_id(0); w.add_pad_token_id(1); w.add_chat_template("{{ bos_token }}")
whole = lambda *shape: rng.integers(-99, 99, shape).astype(numpy.float32)
wanted = {}
def put(name, hf, value, stored, kind=None):
    wanted["model." + hf] = value
    if kind:
        stored = gguf.quants.quantize(stored, kind)
        wanted["model." + hf] = gguf.quants.dequantize(stored, kind)
    w.add_tensor(name, stored, raw_dtype=kind)
value = rng.standard_normal((5, hidden)).astype(numpy.float32)
put("token_embd.weight", "embed_tokens.weight", value, value, gguf.GGMLQuantizationType.Q8_0)
q, k = whole(hidden, hidden), whole(kv * hidden // heads, hidden)
put("blk.0.attn_q.weight", "layers.0.self_attn.q_proj.weight", q, permute(q, heads))
put("blk.0.attn_k.weight", "layers.0.self_attn.k_proj.weight", k, permute(k, kv))
for name, hf, shape in (("attn_v", "self_attn.v_proj", k.shape), ("attn_output", "self_attn.o_proj", q.shape),
                        ("ffn_gate", "mlp.gate_proj", (96, hidden)), ("ffn_up", "mlp.up_proj", (96, hidden)),
                        ("ffn_down", "mlp.down_proj", (hidden, 96))):
    value = rng.standard_normal(shape).astype(numpy.float32)
    put("blk.0.%s.weight" % name, "layers.0.%s.weight" % hf, value, value, gguf.GGMLQuantizationType.Q4_1)
for name, hf in (("blk.0.attn_norm", "layers.0.input_layernorm"), ("output_norm", "norm"),
                 ("blk.0.ffn_norm", "layers.0.post_attention_layernorm")):
    value = whole(hidden)
    put(name + ".weight", hf + ".weight", value, value)
w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
numpy.savez("wanted.npz", **wanted)
PY
        python3 - << 'PY'
import json, numpy, struct
data, wanted = open("converted/model.safetensors", "rb").read(), numpy.load("wanted.npz")
size = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8:8 + size])
assert set(header) == set(wanted) | {"__metadata__"}
for name in wanted:
    a, b = (8 + size + x for x in header[name]["data_offsets"])
    bits = numpy.frombuffer(data[a:b], "<u2").astype("<u4") << 16
    found = bits.view("<f4").reshape(header[name]["shape"])
    exact = wanted[name].view("<u4")
    # the nearer of the two bf16 around it, so that whole numbers below 256 are exact
    assert found.shape == exact.shape, name
    assert (numpy.abs(bits.reshape(exact.shape).astype("i8") - exact.astype("i8")) <= 0x8000).all(), name
config = json.load(open("converted/config.json"))
assert (config["num_key_value_heads"], config["head_dim"], config["tie_word_embeddings"]) == (1, 32, True)
assert json.load(open("converted/tokenizer_config.json"))["eos_token"] == "<|im_end|>"
PY
}
cut_gguf() {
    head -c 700 tiny.gguf > cut.gguf
    python3 "$root/scripts/gguf_to_hf.py" cut.gguf cut 2>&1
    [ $? -eq 3 ] && [ ! -e cut ]
}
if command -v curl > /dev/null; then check get_model_from_a_hub from_a_hub
else skip get_model_from_a_hub 'curl is not installed'; fi
check get_model_without_a_network nothing_reachable
expect get_model_refuses_other_models 2 'expected the name of a model' get_model gpt5
mkdir -p there
expect get_model_refuses_a_directory_that_is_there 2 'there: exists already' \
    get_model smollm2-135m-instruct there
needs gguf gguf_to_hugging_face tiny_gguf
needs gguf refuses_a_cut_gguf cut_gguf
expect refuses_gguf_without_arguments 2 'expected MODEL.gguf' python3 "$root/scripts/gguf_to_hf.py"
finish
