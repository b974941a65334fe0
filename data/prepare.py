#!/usr/bin/env python3
"""Converts formats that need libraries to JSON Lines for --train.

    prepare.py INPUT... --out FILE.jsonl
    train_llama --train FILE.jsonl

INPUT is Parquet (needs pyarrow), CSV, JSON or JSON Lines, all but the first also as .gz or .zst
(needs the program zstd), or hf:NAME[:CONFIG[:SPLIT]], a data set of the hub, streamed (needs
datasets). A row keeps the fields that train_llama knows (data/README.md); --text-key uses another
field as the text.

With --chat, the chat template of --model renders chats (needs jinja2) into
{"parts": [[text, trained], ...]}, for templates that train_llama does not know. data/README.md says
what is trained on, and which chats are left out. With --bench, rows of a benchmark become
{"context", "choices", "answer"} for train_llama --bench, with lm-evaluation-harness's prompts:
zero-shot, or after the questions that --shots has about the subject. A row without an answer, as
in test splits, is an error.
"""
import argparse
import collections
import contextlib
import csv
import datetime
import functools
import gzip
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../scripts"))
from command import (  # noqa: E402
    BAD_INPUT, USAGE, Parser, fail, load, printable, run_main, warn, write)

MAX_NAMED = 10  # left-out records named in warnings
RECORDS = (("messages", "messages"), ("conversations", "conversations"),
           ("instruction", "instruction output"), ("completions", "prompt completions"),
           ("prompt", "prompt completion"), ("prompt", "prompt response"), ("parts", "parts"),
           ("preference", "chosen rejected"), ("text", "text"))  # kinds, with their keys
# as in texts/records.c: s string, n number, t true, f false, l list, x left out unless rendered
KEYS = {
    "text": "text:s",
    "parts": "parts:l",
    "messages": "messages:l",
    "conversations": "conversations:l",
    "prompt": "prompt:sl completion:sl response:sl",
    "completions": "prompt:sl completions:l",
    "preference": "prompt:sl chosen:sl rejected:sl",
    "instruction": "instruction:sn input:sn output:sn",
    "record": "weight:n images:x",
    "chat": "system:sn label:t kto_tag:t tools:x functions:x history:x image:x videos:x audios:x",
    "message": "role:s from:s content:sl value:sl weight:n train:tf loss:tf reasoning_content:s "
               "reasoning:x thinking:x tool_calls:x function_call:x name:x images:x audio:x "
               "refusal:x train_detail:x",
    "content": "type:s text:s",
    "completion": "completion:sl response:sl weight:n"}
TYPES = {level: dict(pair.split(":") for pair in keys.split()) for level, keys in KEYS.items()}
for kind, _ in RECORDS:
    TYPES[kind].update(TYPES["record"], **TYPES["chat"] if kind not in ("text", "parts") else {})
COLUMNS = {key for kind, _ in RECORDS for key in TYPES[kind]}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
                  "bard": "assistant", "model": "assistant", "observation": "tool"}
CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
          "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
          "{{ '<|im_start|>assistant\n' }}{% endif %}")
START, END = "\ufdd0", "\ufdd1"  # noncharacters around what {% generation %} marks
MARK = "@unpad%d@"  # after a text that must be rendered
BARE = ("role", "tool_call_id", "id", "type", "index")  # keys of a text that need not be


class LeftOut(Exception):
    """Why a record yields no document."""


# --------------------------------------------------------------------------------------------------
# Records of files: (number, a dictionary, or LeftOut)


@contextlib.contextmanager
def open_input(path):
    if not path.endswith(".zst"):
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
            yield f
        return
    if not shutil.which("zstd"):
        fail(USAGE, "%s: needs the program zstd" % path, "apt-get install zstd")
    with subprocess.Popen(["zstd", "-dcq", "--long=31", "--", path], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        yield process.stdout
        why = process.stderr.read().decode("utf-8", "replace").strip()
        if process.wait() != 0:
            raise OSError(why.split("\n")[-1].strip() or "zstd failed")


def ending(path):
    plain, packing = os.path.splitext(path)
    return os.path.splitext(plain if packing in (".gz", ".zst") else path)[1].lower()


def json_records(path, _):
    """From lines, or from an array in a .json file."""
    with open_input(path) as f:
        if ending(path) == ".json":
            found = json.load(f)
            return (yield from enumerate(found if isinstance(found, list) else [found], 1))
        for number, line in enumerate(f, 1):
            line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as e:
                yield number, LeftOut("expected JSON: %s (%s)" % (e, repair_of(e, path)))


def repair_of(error, path):
    """The hint for a file that cannot be read."""
    data = getattr(error, "object", None) or getattr(error, "doc", "").encode()
    if data[:1] >= b"\xfe" or b"\0" in data[:2]:
        return "iconv -f UTF-16 -t UTF-8 %s > NEW" % path
    return {UnicodeDecodeError: "iconv -f WINDOWS-1252 -t UTF-8 %s > NEW",
            json.JSONDecodeError: "jq -c . %s > NEW.jsonl"}.get(
                type(error), "check %s, or copy it again") % path


def csv_records(path, _):
    csv.field_size_limit(1 << 30)
    with open_input(path) as f:
        lines = io.TextIOWrapper(f, "utf-8-sig", newline="")  # only CR and LF end lines
        rows = csv.DictReader(lines, restkey="(no name)",
                              delimiter="\t" if ending(path) == ".tsv" else ",")
        for number, row in enumerate(rows, 1):
            yield number, {**row, "weight": float(row.get("weight") or "nan")}


def parquet_records(path, keys):
    (parquet,) = load("pyarrow.parquet")
    with parquet.ParquetFile(path) as file:
        found = file.schema_arrow.names
        read = [name for name in found if name in keys] or found
        others = {name: "" for name in found if name not in read}
        batches = file.iter_batches(1024, columns=read)
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from enumerate(({**others, **row} for row in rows), 1)


def hub_records(name, _):
    data_set, config, split = (name[len("hf:"):].split(":") + ["", ""])[:3]
    (datasets,) = load("datasets")
    yield from enumerate(datasets.load_dataset(data_set, config or None, split=split or "train",
                                               streaming=True), 1)


READERS = {".jsonl": json_records, ".ndjson": json_records, ".json": json_records,
           ".csv": csv_records, ".tsv": csv_records, ".parquet": parquet_records}


def records(args):
    """(where, a dictionary or LeftOut) of all records in order."""
    keys = () if args.bench else COLUMNS if args.chat or not args.text_key else (
        args.text_key, "weight", "images")
    for path in args.input:
        reader = hub_records if path.startswith("hf:") else READERS.get(ending(path))
        if not reader:
            fail(BAD_INPUT, "%s: expected JSONL, CSV or Parquet" % path,
                 "train_llama reads text files itself")
        try:
            for number, record in reader(path, keys):
                yield "%s:%d" % (path, number), record
        except Exception as e:  # from a package, OSError, or ValueError for a damaged file
            why = getattr(e, "strerror", "") or str(e).split("\n")[0] or type(e).__name__
            fail(BAD_INPUT, "%s: cannot read: %s" % (path, why), repair_of(e, path))


# --------------------------------------------------------------------------------------------------
# Chats


def kind_name(value):
    return {list: "an array", dict: "an object", str: "a string", type(None): "null",
            bool: str(value).lower()}.get(type(value), "a number")


def clean(value):
    """Without null and NaN, which Parquet and joined data sets fill in."""
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items() if v is not None and v == v}
    return [clean(v) for v in value] if isinstance(value, list) else value


def kind_of(record):
    return next((kind for kind, keys in RECORDS if set(keys.split()) <= set(record)), None)


def checked(values, level, where=""):
    """Values of the types of the table; a number becomes its text where a text is also right."""
    found = dict(values)
    for key, value in values.items():
        types, kind = TYPES[level].get(key, "x"), kind_name(value)
        names = [{"s": "a string", "n": "a number", "t": "true", "f": "false",
                  "l": "an array"}.get(t) for t in types]
        if types == "sn" and kind == "a number":
            text = found[key] = "%.15g" % value
            exact = "e" not in text and value - float(text) == 0
            kind = "a string" if exact else "a number of more digits"
        if types != "x" and kind not in names:
            expected = " or ".join(names).replace("an array", "a list")
            raise LeftOut("%s%s: expected %s, found %s" % (where, key, expected, kind))
    return found


def content_of(content, where):
    """The text of a message, or of all parts if it is a list of parts."""
    for part in content if isinstance(content, list) else ():
        part = (checked(part, "content", where + "content: ") if isinstance(part, dict)
                else {"type": kind_name(part)})
        if part.get("type", "text") != "text" or "text" not in part:
            raise LeftOut("%scontent: expected a text, found a list with %s" % (
                where, part.get("type", "no text")))
    return content if isinstance(content, str) else "".join(p["text"] for p in content)


def message_of(value, where):
    """({role, content, ...}, weight) of an entry in OpenAI's or ShareGPT's format."""
    if not isinstance(value, dict):
        raise LeftOut("%sexpected an object, found %s" % (where, kind_name(value)))
    message = checked(value, "message", where)
    for key, other in ("role", "from"), ("content", "value"):
        if other in message:
            message.setdefault(key, message.pop(other))
    role = message.get("role")
    message["role"] = SHAREGPT_ROLES.get(role, role)
    if message["role"] not in ROLES:
        raise LeftOut("%sexpected a role such as user or assistant, found %s" % (
            where, json.dumps(role)))
    calls = message.get("tool_calls") or message.get("function_call")  # what templates add to text
    if "content" not in message and not calls:
        raise LeftOut("%scontent: expected a text, found none" % where)
    message["content"] = content_of(message.get("content", ""), where)
    trains = message.pop("train", message.pop("loss", message["role"] == "assistant"))
    weight = message.pop("weight", 1) * trains
    if trains and message["role"] != "assistant":
        raise LeftOut("%sonly answers are trained" % where)
    if weight and not calls and not message["content"].strip():
        raise LeftOut("%sexpected an answer, found an empty text" % where)
    return message, weight


def messages_of(record):
    """(messages, their weights)."""
    def turn(value, role):
        return [{"role": role, "content": value}] if isinstance(value, str) else value

    kind = kind_of(record)
    if kind == "preference":
        raise LeftOut("expected a chat, found chosen and rejected: leave --chat out, because "
                      "train_llama --preference renders both")
    if kind in (None, "parts", "completions", "text"):
        raise LeftOut("expected messages, conversations, prompt and completion, or instruction and "
                      "output, found " + (", ".join(sorted(record)[:8]) or "an empty object"))
    record = checked(record, kind)
    for key in record:
        if TYPES[kind].get(key) == "x" and key != "tools" and record[key]:
            raise LeftOut("expected none of \"%s\", which no template renders" % key)
    prompt, chat = turn(record.get("system") or [], "system"), record.get(kind)
    if kind == "instruction":
        asked = "\n\n".join(filter(None, (record["instruction"], record.get("input"))))
        record = {"prompt": asked, "completion": record["output"]}
    if kind in ("instruction", "prompt"):
        prompt = prompt + turn(record["prompt"], "user")
        chat = turn(record.get("completion", record.get("response")), "assistant")
    if not chat:
        raise LeftOut("expected a list of messages")
    found = [message_of(m, "message %d: " % i) for i, m in enumerate(prompt + chat, 1)]
    return [m for m, _ in found], [0] * len(prompt) + [weight for _, weight in found[len(prompt):]]


def jinja_environment():
    """As in transformers, including {% generation %}: with env.marked, START and END enclose it."""
    jinja2, ext, sandbox = load("jinja2", "jinja2.ext", "jinja2.sandbox")

    class Generation(ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = self.call_method("mark")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def mark(self, caller):
            return START + caller() + END if self.environment.marked else caller()

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    env = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, ext.loopcontrols])
    env.extend(marked=False)
    env.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    env.globals["raise_exception"] = raise_exception
    now = float(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    env.globals["strftime_now"] = datetime.datetime.fromtimestamp(now).strftime
    return env


def read(path, parse=None):
    """The text in a file, or what parse makes of it: {} without a file."""
    if parse and not os.path.isfile(path):
        return {}
    try:
        with open(path, encoding="utf-8") as f:
            return parse(f.read()) if parse else f.read()
    except (OSError, ValueError, RecursionError) as e:
        fail(BAD_INPUT, "%s: expected %s in UTF-8: %s" % (path, "JSON" if parse else "text", e),
             "check --model and --chat-template")


def template_source(args):
    """(source, name) from the given file, chat_template.jinja, or tokenizer_config.json."""
    path = args.chat_template or os.path.join(args.model, "chat_template.jinja")
    if args.chat_template or os.path.isfile(path):
        return read(path), path
    path = os.path.join(args.model, "tokenizer_config.json")
    source = read(path, json.loads).get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {t.get("name"): t.get("template") for t in source}.get("default")
    if source is None and not args.model:
        return CHATML, "ChatML"
    if not isinstance(source, str):
        fail(BAD_INPUT, "%s: expected a chat template, found none" % path,
             "give a file with the template: --chat-template FILE")
    return source, path


class Template:
    """Renders chats as [[text, trained], ...]."""

    def __init__(self, args):
        source, name = template_source(args)
        self.values = {}
        self.marks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None
        tokenizer = read(os.path.join(args.model, "tokenizer.json"), json.loads)
        added = tokenizer.get("added_tokens") or []
        self.special = tuple(t["content"] for t in added if t.get("special")) or ("<|im_end|>",)
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            for key, token in read(os.path.join(args.model, file), json.loads).items():
                token = token.get("content") if isinstance(token, dict) else token
                if key.endswith("_token") and isinstance(token, str):
                    self.values[key] = token
        self.env = jinja_environment()
        try:
            self.template = self.env.from_string(source)
        except Exception as e:
            fail(BAD_INPUT, "%s: expected a chat template: %s" % (name, e),
                 "give another file: --chat-template FILE")

    def text(self, messages, tools, prompt=False, marked=False):
        self.env.marked = marked
        try:
            return self.template.render(messages=messages, tools=tools, documents=None,
                                        add_generation_prompt=prompt, **self.values)
        except Exception as e:  # whatever a template does wrong
            raise LeftOut("the template fails after message %d: %s"
                          % (len(messages), e or type(e).__name__)) from None

    def marked_spans(self, messages, weights, tools, text):
        """[(first character, end, weight)] of the text that {% generation %} marks."""
        marked = self.text(messages, tools, marked=True)
        block = re.compile("%s([^%s%s]*)%s" % (START, START, END, END))
        if block.sub(r"\1", marked) != text:
            raise LeftOut("the template changes what {% generation %} marks")
        spans = [(m.start() - 2 * k, m.end() - 2 * k - 2)  # without the 2 characters of each block
                 for k, m in enumerate(block.finditer(marked))]
        found = [w for w, message in zip(weights, messages) if message["role"] == "assistant"]
        if len(found) != len(spans) and set(found) != {1}:
            raise LeftOut("the template marks other turns than the assistant's")
        return [(*span, weight) for span, weight in zip(spans, itertools.cycle(found))]

    def turns(self, messages, weights, tools, text):
        """The same for the assistant's turns, by rendering every prefix of the chat."""
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.text(messages[:i], tools, prompt=True)
            after = self.text(messages[:i + 1], tools)
            if not text.startswith(after) or not after.startswith(before):
                raise LeftOut("message %d: the template renders %s differently" % (
                    i + 1, "its prompt" if text.startswith(after) else
                    "it and later messages together"))
            closed = after.rstrip()
            end = closed if closed.endswith(self.special) and len(closed) > len(before) else after
            spans.append((len(before), len(end), weights[i]))
        return spans

    def check_rendered(self, messages, tools, unknown):
        """Everything is there, before a mark of its own; keys in no table are only counted."""
        marks = []

        def mark(value, *where):
            if isinstance(value, list):
                return [mark(v, *where) for v in value]
            if isinstance(value, dict) and "arguments" in where:
                return {mark(k, *where, k): mark(v, *where, k) for k, v in value.items()}
            if isinstance(value, dict):
                bare = BARE + ("name",) * (value.get("role") in ("tool", "function"))
                return {k: v if k in bare else mark(v, *where, k) for k, v in value.items()}
            if not isinstance(value, str) or not value.strip():
                return value
            marks.append((where, value))
            return value + MARK % len(marks)

        def mark_name(tool):
            inner = tool.get("function")
            return dict(tool, function=mark_name(inner)) if isinstance(inner, dict) else dict(
                tool, name=mark(tool.get("name"), "tools"))

        chat = [mark(m, "message %d:" % i) for i, m in enumerate(messages, 1)]
        squeeze = lambda text: "".join(text.split())
        text = squeeze(self.text(chat, [mark_name(tool) for tool in tools] if tools else tools))
        for i, (where, value) in enumerate(marks, 1):
            forms = [value]
            if where[-1] != "arguments":  # JSON already: no text of JSON in JSON
                forms += [json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False)]
            if any(squeeze(form) + MARK % i in text for form in forms):
                continue
            if where[1:] and where[1] not in TYPES["message"]:
                unknown.add(where[1])
            else:
                raise LeftOut("%s: the template does not render \"%.40s\"" % (
                    " ".join(where), value))

    def parts(self, record, unknown):
        messages, weights = messages_of(record)
        tools = record.get("tools") or None
        if isinstance(tools, str):  # Parquet cannot hold their schemas otherwise
            tools = json.loads(tools)
        if tools and not all(isinstance(tool, dict) for tool in tools):
            raise LeftOut("tools: expected a list of objects")
        if not any(weights):
            raise LeftOut("no message of the assistant to train")
        text = self.text(messages, tools)
        spans = (self.marked_spans if self.marks else self.turns)(messages, weights, tools, text)
        self.check_rendered(messages, tools, unknown)
        parts, at = [], 0
        for start, end, weight in (span for span in spans if span[2]):
            special = "|".join(map(re.escape, self.special))
            if not re.sub(special, "", text[start:end]).strip():
                raise LeftOut("the template renders an empty answer")
            parts += [[text[at:start], False], [text[start:end], True if weight == 1 else weight]]
            at = end
        unknown.update(key for key in record if key not in TYPES[kind_of(record)])
        found = {"parts": [part for part in parts + [[text[at:], False]] if part[0]]}
        return dict(found, weight=record["weight"]) if "weight" in record else found


# --------------------------------------------------------------------------------------------------
# Benchmarks: from a row to context (or one per choice), choices, and the index of the right one


def hellaswag(row):
    def text(raw):  # brackets are remains of WikiHow's pages
        return re.sub(r"\[.*?\]", "", raw.strip().replace(" [title]", ". ")).replace("  ", " ")

    begun = "%s: %s %s" % (row["activity_label"], row["ctx_a"], row["ctx_b"].capitalize())
    return text(begun), [text(ending) for ending in row["endings"]], int(row["label"])


def arc(row):
    choices = row["choices"]
    return ("Question: %s\nAnswer:" % row["question"], list(choices["text"]),
            list(choices["label"]).index(row["answerKey"]))


def piqa(row):
    return "Question: %s\nAnswer:" % row["goal"], [row["sol1"], row["sol2"]], int(row["label"])


def winogrande(row):
    """The choices are in the contexts; the rest of the sentence is scored."""
    before, rest = row["sentence"].split("_", 1)
    options = [before + row["option1"], before + row["option2"]]
    return options, [rest.strip()] * 2, int(row["answer"]) - 1


def mmlu(row):
    about = "The following are multiple choice questions (with answers) about %s.\n\n" % (
        row["subject"].replace("_", " "))
    listed = "".join("\n%s. %s" % pair for pair in zip("ABCD", row["choices"]))
    return about + row["question"].strip() + listed + "\nAnswer:", list("ABCD"), int(row["answer"])


BENCHMARKS = {f.__name__: f for f in (hellaswag, arc, piqa, winogrande, mmlu)}


def shots_of(args):
    """{what a prompt says about its subject: the questions of --shots, with their answers}"""
    shots = {}
    for where, row in records(argparse.Namespace(**dict(vars(args), input=[args.shots]))):
        try:
            found = question_of(row, args.bench)
        except LeftOut as e:
            fail(BAD_INPUT, "%s: %s" % (where, e), "a split with answers, as the hub has it")
        about, question = found["context"].split("\n\n", 1)
        shots[about] = "%s%s %s\n\n" % (
            shots.get(about, ""), question, found["choices"][found["answer"]])
    return shots


def question_of(row, name, shots=None):
    try:
        context, choices, answer = BENCHMARKS[name](row)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise LeftOut("expected a question of %s with its answer: %s: %s" % (
            name, type(e).__name__, e)) from None
    if not 0 <= answer < len(choices):
        raise LeftOut("expected an answer of %d choices, found %d: has the split answers?" % (
            len(choices), answer))
    if shots is not None:
        about, question = context.split("\n\n", 1)
        if about not in shots:
            raise LeftOut("--shots has no question with this beginning: " + about)
        context = about + "\n\n" + shots[about] + question
    return {"context": context, "choices": choices, "answer": answer}


# --------------------------------------------------------------------------------------------------
# Documents


def known(record, text_key, unknown):
    """The part of a record that train_llama reads."""
    key, kind = text_key or "text", "text" if text_key else kind_of(record) or "text"
    if kind == "text":
        if not isinstance(record.get(key), str):
            raise LeftOut("expected a string \"%s\", found %s" % (
                key, kind_name(record[key]) if key in record else
                ", ".join(sorted(record)[:8]) or "null"))
        others = {k: v for k, v in record.items() if k not in ("text", key)}
        record = {"text": record[key], **others}
    pair = not text_key and {"chosen", "rejected"} <= set(record)  # --preference decides
    keys = {*TYPES[kind], *(TYPES["preference"] if pair else ())}
    unknown.update(set(record) - keys)
    return {k: v for k, v in record.items() if k in keys}


def documents(args, left_out, unknown):
    """(content, line) of each. Bad records are left out; with --strict, or if they are the first
    1000, they are an error."""
    template, count = Template(args) if args.chat else None, 0
    shots = shots_of(args) if args.shots else None
    for where, record in records(args):
        keys = set()
        try:
            if isinstance(record, LeftOut):
                raise record
            if not isinstance(record, dict):
                raise LeftOut("expected an object, found " + kind_name(record))
            record = clean(record)
            found = (question_of(record, args.bench, shots) if args.bench else
                     template.parts(record, keys) if template else
                     known(record, args.text_key, keys))
            line = json.dumps(found, allow_nan=False)
        except (LeftOut, TypeError, ValueError) as e:  # not JSON: a date, infinity
            left_out.append("%s: %s" % (where, e))
            if args.strict or args.bench or (count == 0 and len(left_out) == 1000):
                fail(BAD_INPUT, left_out[0], "a split with answers, as the hub has it"
                     if args.bench else "--text-key names another field")
            continue
        unknown.update(keys)
        if found.get("text") != "":
            count += 1
            yield found, line


def lines(args, left_out, unknown):
    line = None
    for _, line in documents(args, left_out, unknown):
        yield line + "\n"
    if line is None:
        fail(BAD_INPUT, "%s: expected documents, found none" % " ".join(args.input),
             "left out: %s" % ("; ".join(left_out[:3]) or "nothing; are the files empty?"))


def main():
    args, left_out, unknown = parse_args(), [], collections.Counter()
    if args.show:
        for found, _ in itertools.islice(documents(args, left_out, unknown), args.show):
            parts = found.get("parts") or [[found.get("text") or str(found), False]]
            for text, trained in parts:
                text = "\n".join(map(printable, text.split("\n")))
                print("[[%s]]" % text if trained else text, end="")
            print("\n")
    else:
        os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
        print("wrote %s: %d documents" % (
            printable(args.out), write(args.out, lines(args, left_out, unknown))))
    for why in left_out[:MAX_NAMED]:
        warn("left out: " + why)
    if len(left_out) > MAX_NAMED:
        warn("%d records left out in all" % len(left_out))
    if unknown:
        names = ("%s (%d records)" % (printable(k), n) for k, n in unknown.most_common(20))
        print("unknown keys: %s" % ", ".join(names), file=sys.stderr)


def parse_args():
    p = Parser()
    p.add_argument("input", nargs="+", metavar="INPUT")
    p.add_argument("--out", metavar="FILE.jsonl", help="output, replaced if it exists")
    kind = p.add_mutually_exclusive_group()
    kind.add_argument("--text-key", metavar="NAME", help="field or column with the text")
    kind.add_argument("--chat", action="store_true", help="records are chats")
    kind.add_argument("--bench", choices=BENCHMARKS, help="rows are questions of this benchmark")
    p.add_argument("--shots", metavar="INPUT", help="--bench mmlu: rows shown before each question")
    p.add_argument("--model", default="", metavar="DIR",
                   help="model with the template (default: ChatML)")
    p.add_argument("--chat-template", metavar="FILE",
                   help="a Jinja template instead of the model's")
    p.add_argument("--show", type=int, metavar="N", help="print N documents, write nothing")
    p.add_argument("--strict", action="store_true",
                   help="stop at the first record that would be left out")
    args = p.parse_args()
    if not args.out and not args.show or (args.show or 0) < 0:
        p.error("expected --out FILE.jsonl, or --show N")
    if args.shots and args.bench != "mmlu":  # there each question of a subject has the same ones
        p.error("expected --bench mmlu with --shots: other benchmarks draw them for each question")
    return args


if __name__ == "__main__":
    run_main(main)
