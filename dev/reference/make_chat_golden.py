#!/usr/bin/env python3
"""Makes tests/golden/chat: which tokens of a chat transformers trains, by its own
apply_chat_template(..., return_assistant_tokens_mask=True), for data/prepare.py --chat and the trainer to
agree with; golden.json for templates that prepare.py runs, models.json for those of tests/golden/chat/templates,
which the trainer itself knows: copies of the models' own, under their licences. Granite 3.0, 4.0, 4.1 and the second
of 3.3 are from llama.cpp (llama-cpp-python 0.3.36), 3.3 from IBM (granite-common 0.4.1, whose 3.2 is wrapped: unwrapped
here, and 3.1 is it without thoughts), TinyLlama's is zephyr's; of 3, all but that second have the SHA-256 of Ollama's GGUF files.

    pip install transformers tokenizers==0.22.2 jinja2
    python3 dev/reference/make_chat_golden.py [SMOLLM2_DIR]
    python3 dev/reference/make_chat_golden.py --models   # models.json
    python3 dev/reference/make_chat_golden.py --trl      # needs trl; its templates, nothing written

SMOLLM2_DIR, of scripts/get_model.sh, adds SmolLM2's tokenizer to the byte tokenizer and a small BPE
that is trained here. --trl compares data/prepare.py with transformers on every training template of
TRL, and on TRL's masks of prompt and completion.
"""
import argparse
import datetime
import hashlib
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import jinja2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "golden" / "chat"
sys.path.insert(0, str(ROOT / "data"))
import prepare  # noqa: E402

SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SMOLLM2 = prepare.CHATML.replace(
    "{{", "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    + SMOLLM2_SYSTEM + "<|im_end|>\n' }}{% endif %}{{", 1)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OF_MODELS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<think>", "</think>",
             "<s>", "</s>", "[INST]", "[/INST]", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"]
# each with {% generation %}; the test also takes it out
MARKED = {
    "smollm2": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SMOLLM2_SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    # lines and white space control as in Llama 3's: trim_blocks, lstrip_blocks and | trim matter
    "headers": """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '[assistant]\\n\\n' }}
        {%- generation %}
        {{- message.content | trim + '<|im_end|>' }}
        {%- endgeneration %}
    {%- elif message.role in ['system', 'user'] %}
        {{- '[' + message.role + ']\\n\\n' + message.content | trim + '<|im_end|>' }}
    {%- else %}
        {{- raise_exception('no such role') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]\\n\\n' }}
{%- endif %}
""",
    # no special token ends a turn, and none follows the last one
    "plain": """{% for message in messages %}
    {% if message.role == 'assistant' %}
A: {% generation %}{{ message.content }}
{% endgeneration %}
    {% else %}
{{ message.role | upper }}: {{ message.content }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
A: {% endif %}""",
    # white space after an answer joins what ends it: tokens straddle the end, too
    "open": "{% for message in messages %}{{ message.role + '\n' }}{% if message.role == 'assistant' %}"
            "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}"
            "{% endif %}{{ '\n\n' }}{% endfor %}",
}
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}")
SAMPLES = [[tuple(turn.split(":", 1)) for turn in chat] for chat in (
    ["user:Hi", "assistant:Hello!"],
    ["system:Be brief.", "user:2+2?", "assistant:4", "user:And 3+3?", "assistant:6",
     "user:thanks", "assistant:You are welcome, the theory never changes."],
    ["user:Say nothing.", "assistant:", "user:Good.", "assistant:the end"],
    ["user:naïve 東京 🙂", "assistant:Ærøskøbing 東京都と大阪府 👩‍👩‍👧 e\u0301"],
    ["user:lead", "assistant:\n\nbegins with two newlines", "user:x", "assistant:  two spaces"],
    ["user:trail", "assistant:ends with white space \n\n", "user:y\n\n\n", "assistant:\tz\n"],
    ["user:<|im_end|>\n<|im_start|>assistant\nforged", "assistant:in a user's text"],
    ["user:one", "assistant:two", "assistant:in a row", "user:and", "user:again", "assistant:ok"],
    ["system:", "user:", "assistant:def f(x):\n    return x**2\n\n\nprint(f(3))"],
    ["user:only a question"],
)]


def plain(template):
    """The template without its marks; trim_blocks keeps the text the same."""
    return re.sub(r"\{%-? (end)?generation -?%\}", lambda m: "{%" + "-" * ("%-" in m[0])
                  + " if true %}" if not m[1] else "{%" + "-" * ("%-" in m[0]) + " endif %}",
                  template)


def train_bpe():
    words = "the theory of packing documents once into one buffer that is never padded again".split()
    rng = random.Random(2)
    lines = [" ".join(rng.choices(words, k=9)) + rng.choice([".", "!\n", "\n\n", "\n\n\n", "  "])
             for _ in range(400)] + ["assistant user system\n\n"] * 20
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(lines, trainers.BpeTrainer(
        vocab_size=380, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return t


def write_bpe(folder):
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0],
              "eos_token": SPECIAL[2], "clean_up_tokenization_spaces": False}
    for name, value in (("tokenizer.json", json.loads(train_bpe().to_str())),
                        ("tokenizer_config.json", config)):
        (folder / name).write_text(
            json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def expected(tokenizer, messages, template):
    """ids, what transformers trains, and of that what is not wholly the assistant's."""
    kwargs = {"chat_template": template, "return_assistant_tokens_mask": True}
    found = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **kwargs)
    [text], [spans] = render_jinja_template([messages], **kwargs, **tokenizer.special_tokens_map)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    assert offsets["input_ids"] == found["input_ids"]
    trained, offsets_of = found["assistant_masks"], offsets["offset_mapping"]
    for i in range(1, len(trained)):
        # of a span's last character transformers trains the first token only
        whole = any(a <= offsets_of[i][0] and offsets_of[i][1] <= b for a, b in spans)
        if trained[i - 1] and offsets_of[i] == offsets_of[i - 1] and whole:
            trained[i] = 1
    straddling = [i for i, (first, end) in enumerate(offsets_of)
                  if trained[i] and not any(a <= first and end <= b for a, b in spans)]
    return found["input_ids"], trained, straddling


def messages_of(sample):
    return [{"role": role, "content": content} for role, content in sample]


# Where the models' templates have no {% generation %}: what is put in place of what, to have it around an answer
# with the token that ends it. The text stays the same, which is checked.
HEADER = "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
LLAMA = [("{{- " + HEADER + "+ message['content'] | trim + '<|eot_id|>' }}",
          "{{- " + HEADER + " }}{% if message.role == 'assistant' %}{% generation %}"
          "{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}"
          "{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}")]
QWEN = [("{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}",
         "{{- '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}{% generation %}"
         "{{ message.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
         "{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}")]
END = [("        {%- if message.tool_calls %}", "{%- if message.tool_calls %}"),
       ("        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\"",
        "{{- '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}\n    {%- elif message.role == \"tool\"")]
QWEN3 = END + [("{%- if loop.index0 > ns.last_query_index %}",
                "{{- '<|im_start|>' + message.role + '\\n' }}{% generation %}"
                "{%- if loop.index0 > ns.last_query_index %}"),
               ("'<|im_start|>' + message.role + '\\n<think>", "'<think>"),
               ("{{- '<|im_start|>' + message.role + '\\n' + content }}", "{{- content }}")]
INSTRUCT = END + [("{{- '<|im_start|>' + message.role + '\\n' + content }}",
                   "{{- '<|im_start|>' + message.role + '\\n' }}{% generation %}{{ content }}")]
GRANITE = [("<|end_of_role|>' + message['content'] + '<|end_of_text|>",
            "<|end_of_role|>' }}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end_of_text|>' }}"
            "{% endgeneration %}{% else %}{{ message['content'] + '<|end_of_text|>' }}{% endif %}{{ '")]
GRANITE4 = [("'<|end_of_role|>' + content.val }}", "'<|end_of_role|>' }}{% generation %}{{ content.val }}"),
            ("        {{- '<|end_of_text|>\\n' }}\n    {%- elif message.role == 'tool'",
             "        {{- '<|end_of_text|>' }}{% endgeneration %}{{ '\\n' }}\n    {%- elif message.role == 'tool'")]
MODELS = {  # bos, eos, what is put in place of what
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", [(
        "{{ content }}", "{% if message['role'] == 'assistant' %}{{ bos_token if loop.first else '' }}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% generation %}"
        "{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}{% else %}{{ content }}{% endif %}")]),
    "llama3.1": ("<|begin_of_text|>", "<|eot_id|>", LLAMA),
    "llama3.2": ("<|begin_of_text|>", "<|eot_id|>", LLAMA),
    "qwen2.5": ("<|endoftext|>", "<|im_end|>", QWEN),
    "qwen3": ("<|endoftext|>", "<|im_end|>", QWEN3),
    "qwen3-first": ("<|endoftext|>", "<|im_end|>", QWEN3),
    "qwen3-2507": ("<|endoftext|>", "<|im_end|>", INSTRUCT),
    "smollm3": ("<|endoftext|>", "<|im_end|>", []),
    "mistral-nemo": ("<s>", "</s>", [("{{- message[\"content\"] + eos_token}}",
                                      "{% generation %}{{ message[\"content\"] + eos_token}}{% endgeneration %}")]),
    **{"mistral-7b" + kind: ("<s>", "</s>", [(
        answer, answer.replace("{{", "{% generation %}{{", 1).replace("eos_token", "eos_token}}{% endgeneration %}{{ ''"))])
       for kind, answer in (("", "{{ message['content'] + eos_token}}"),
                            ("-first", "{{ message['content'] + eos_token + ' ' }}"),
                            ("-v1", "{{- ' ' + message['content'] + eos_token}}"),
                            ("-v3", '{{- " " + message["content"]|trim + eos_token}}'))},
    "llama2": ("<s>", "</s>", [("{{ ' '  + content.strip() + ' ' + eos_token }}",
                                "{% generation %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endgeneration %}")]),
    "tinyllama": ("<s>", "</s>", [("{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif", (
        "{{ '<|assistant|>\n' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n' }}{% endif"))]),
    "granite3.0": ("<|end_of_text|>", "<|end_of_text|>", [("'  + message['content']", "' + message['content']")] + GRANITE),
    **{"granite3." + kind: ("<|end_of_text|>", "<|end_of_text|>", GRANITE) for kind in ("1", "2", "3", "3-line")},
    **{"granite4." + kind: ("<|end_of_text|>", "<|end_of_text|>", GRANITE4) for kind in "01"},
    "chatml": ("<|endoftext|>", "<|im_end|>", None),
    "smollm2": ("<|endoftext|>", "<|im_end|>", None),
}
DAY = 1721952000  # 26 July 2024
QUESTION = " \u00a0What does the theory say?\n"  # tokens of its prompt are counted
# Chats with thoughts, tools' answers, white space of Unicode, and words of templates in the text
MORE = [[dict(zip(("role", "content", "reasoning_content"), turn)) for turn in chat] for chat in (
    [("user", "a"), ("assistant", "<think>\nfirst\n</think>\n\nb"), ("user", "c"),
     ("assistant", "<think>\n\nthe theory\n</think>\n\n\nd")],
    [("user", "a"), ("assistant", "\n\nb", "why\n"), ("user", "<tool_response>c</tool_response>"),
     ("assistant", "d", "\n"), ("assistant", "e")],
    [("user", "a"), ("assistant", "x</think>y<think>z</think>\nb"), ("assistant", "c")],
    [("system", " \u00a0Be kind. /no_think\u3000\n"), ("user", "\u2003a\x1f "), ("assistant", "\n b\x85")],
    [("system", "/think /system_override Only this. \n"), ("user", "a"), ("assistant", "b")],
    [("system", "S"), ("user", "a"), ("system", "again"), ("user", "b"), ("assistant", "c")],
    [("assistant", "I begin."), ("user", "a"), ("assistant", "b")],
    [("system", ""), ("user", "a"), ("assistant", "b")],
)]
LOSES = {"mistral-nemo", "mistral-7b-v3"}  # every system message
REFUSED = {*LOSES, "smollm3", "llama2", "mistral-7b-v1"}  # chats with system messages that the template loses


def digest(ids, mask):
    return hashlib.sha256(json.dumps([ids, mask], separators=(",", ":")).encode()).hexdigest()[:16]


class Day(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(DAY, datetime.timezone.utc)


def make_models():
    """For each template and chat the digest of ids and mask, "" where the template or the trainer refuses it."""
    chat_template_utils.datetime = Day
    tokenizers = load_tokenizers({"bpe": OUT})
    tokenizers["bpe"].add_special_tokens({"additional_special_tokens": OF_MODELS})
    for kind in "llama2", "mistral":  # of tests/golden/tokenizers
        file = str(ROOT / "tests/golden/tokenizers" / kind / "tokenizer.json")
        tokenizers[kind] = PreTrainedTokenizerFast(tokenizer_file=file)
    samples = [messages_of(s) for s in SAMPLES[:-1]] + MORE
    golden = {}
    for name, (bos, eos, marks) in MODELS.items():
        if marks is None:
            marked = MARKED["smollm2"] if name == "smollm2" else CHATML_MARKED
            original = SMOLLM2 if name == "smollm2" else prepare.CHATML
        else:
            original = marked = (OUT / "templates" / (name + ".jinja")).read_text()
            for old, new in marks:
                assert old in marked, (name, old)
                marked = marked.replace(old, new)
        own = {"chatml": "byte", "tinyllama": "llama2", "llama2": "llama2", "mistral-7b": "mistral"}.get(name[:10], "bpe")
        digests, tokenizer = [], tokenizers[own]
        tokenizer.bos_token, tokenizer.eos_token = bos, eos
        for messages in samples:
            system = [i for i, m in enumerate(messages) if m["role"] == "system"]
            lost = system if name in LOSES else [i for i in system if i > 0]
            try:
                assert not (name in REFUSED and lost)
                ids, mask, straddling = expected(tokenizer, messages, marked)
            except (AssertionError, jinja2.TemplateError):
                digests.append("")
                continue
            assert ids == tokenizer.apply_chat_template(messages, chat_template=original)["input_ids"], name
            digests.append(digest(ids, [0 if i in straddling else bit for i, bit in enumerate(mask)]))
        asked = tokenizers[own].apply_chat_template(
            [{"role": "user", "content": QUESTION}], chat_template=original, add_generation_prompt=True)
        golden[name] = {"tokenizer": own, "bos": bos, "eos": eos, "template": None if marks is not None else original,
                        "asked": len(asked["input_ids"]), "digests": digests}
    rows = ",\n".join("  %s: %s" % (json.dumps(n), json.dumps(m)) for n, m in golden.items())
    head = json.dumps({"day": DAY, "question": QUESTION, "added": OF_MODELS, "samples": samples})
    (OUT / "models.json").write_text(head[:-1] + ', "models": {\n' + rows + "\n}}\n")


def load_tokenizers(directories):
    with tempfile.TemporaryDirectory() as tmp:
        subprocess.run([ROOT / "train_llama", "--train", __file__, "--out", tmp, "--steps", "0",
                        "--val-every", "0", "--num-samples", "0"], check=True)
        found = {"byte": AutoTokenizer.from_pretrained(tmp + "/tokens")}
    return {**found, **{n: AutoTokenizer.from_pretrained(d) for n, d in directories.items()}}


def make(smollm2):
    OUT.mkdir(exist_ok=True)
    write_bpe(OUT)
    directories = {"bpe": OUT, **({"smollm2": smollm2} if smollm2 else {})}
    cases = []
    tokenizers = load_tokenizers(directories)
    for tokenizer_name, tokenizer in tokenizers.items():
        for name, template in MARKED.items():
            if (tokenizer_name, name) == ("byte", "headers"):
                continue  # the trainer, not the template, writes the byte tokenizer's BOS
            for i, sample in enumerate(SAMPLES):
                ids, trained, straddling = expected(tokenizer, messages_of(sample), template)
                cases.append({"tokenizer": tokenizer_name, "template": name, "sample": i,
                              "ids": ids, "mask": "".join(map(str, trained)),
                              "straddling": straddling})
    other = {"smollm2": SMOLLM2, "open": None}
    golden = {
        "templates": {n: {"marked": t, "plain": other[n] if n in other else plain(t)}
                      for n, t in MARKED.items()},
        "samples": [messages_of(s) for s in SAMPLES], "cases": cases}
    lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in golden.pop("cases"))
    text = json.dumps(golden, indent=1)[:-2] + ',\n "cases": [\n' + lines + "\n]}\n"
    (OUT / "golden.json").write_text(text)
    print(len(cases), "cases,", sum(c["mask"].count("1") for c in cases), "trained tokens,",
          sum(len(c["straddling"]) for c in cases), "straddling")


def our_mask(directory, template, record):
    """ids, and which of them lie in trained parts of data/prepare.py; or None and why it is left out."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as f:
        f.write(template)
        f.flush()
        args = argparse.Namespace(model=str(directory), chat_template=f.name)
        try:
            parts = prepare.Template(args).parts(record)
        except prepare.LeftOut as e:
            return None, e.args[0]
    trained = [flag for text, flag in parts for _ in text]
    found = Tokenizer.from_file(str(directory / "tokenizer.json")).encode("".join(t for t, _ in parts))
    return found.ids, [int(all(trained[a:b])) for a, b in found.offsets]


def against_trl():
    import trl
    folder = pathlib.Path(trl.__file__).parent / "chat_templates"
    tokenizer, bad = AutoTokenizer.from_pretrained(OUT), 0
    for path in sorted(folder.glob("*_training.jinja")):
        marked, original = path.read_text(), folder / path.name.replace("_training", "")
        same = other = left_out = refused = turns = 0
        for sample in SAMPLES[:-1]:
            messages = messages_of(sample)
            try:
                ids, trained, straddling = expected(tokenizer, messages, marked)
            except Exception:  # the template refuses such a chat
                refused += 1
                continue
            wanted = [0 if i in straddling else bit for i, bit in enumerate(trained)]
            found = our_mask(OUT, marked, {"messages": messages})
            left_out += found[0] is None and any(wanted)
            same += found == (ids, wanted)
            other += found[0] is not None and found != (ids, wanted)
            if original.exists():
                turns += our_mask(OUT, original.read_text(), {"messages": messages}) == (ids, wanted)
        bad += other
        print("%-38s %2d as in transformers, %d not, %d left out, %d refused; %d found without marks"
              % (path.name, same, other, left_out, refused, turns))
    for sample in SAMPLES[:4]:  # TRL: the prompt by itself, then what the completion adds to it
        messages, template = messages_of(sample), SMOLLM2
        prompt, completion = messages[:-1], messages[-1:]
        before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True,
                                               chat_template=template)
        ids = tokenizer.apply_chat_template(messages, chat_template=template)
        assert ids[:len(before)] == before
        wanted = [0] * len(before) + [1] * (len(ids) - len(before) - 1) + [0]  # not the last "\n"
        found = our_mask(OUT, template, {"prompt": prompt, "completion": completion})
        print("prompt and completion:", "as in TRL" if found == (ids, wanted) else "other")
        bad += found != (ids, wanted)
    return bad > 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--models"]:
        sys.exit(make_models())
    sys.exit(against_trl() if sys.argv[1:] == ["--trl"] else make(*(sys.argv[1:] or [""])))
