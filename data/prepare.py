#!/usr/bin/env python3
"""Converts formats that need libraries to JSON Lines for --train.

    prepare.py INPUT... --out FILE.jsonl
    train_llama --train FILE.jsonl

INPUT is Parquet (needs pyarrow), CSV, JSON or JSON Lines, all but the first also as .gz or .zst (needs the
program zstd), or hf:NAME[:CONFIG[:SPLIT]], a data set of the hub, streamed (needs datasets). A row keeps
the fields that train_llama knows (data/README.md); --text-key uses another field as the text.

With --chat, the chat template of --model renders chats (needs jinja2) into
{"parts": [[text, trained], ...]}, for templates that train_llama does not know. The assistant's turns are
trained on, with the token that ends them, but not a "prompt", nor messages with "weight": 0. They are what
{% generation %} in a template marks. Without it a turn is whatever rendering the chat up to it adds to the
chat before it with a generation prompt, without white space after a closing special token; a chat whose
earlier text changes as it grows is left out.
With --bench, rows of a benchmark become {"context", "choices", "answer"} for train_llama --bench, with
lm-evaluation-harness's zero-shot prompts. A row without an answer, as in test splits, is an error.
Exit codes: 0 done, 2 usage, 3 bad input, 4 disk.
"""
import argparse
import contextlib
import csv
import datetime
import gzip
import importlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time

USAGE, BAD_INPUT, DISK = 2, 3, 4
MAX_NAMED = 10  # left-out records named in warnings
RECORDS = (("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion"),
           ("prompt", "response"))  # chats that train_llama knows
KEYS = {key for keys in RECORDS for key in keys} | {"input", "system", "tools", "history", "text"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
                  "bard": "assistant", "model": "assistant", "observation": "tool"}
CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
          "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
          "{{ '<|im_start|>assistant\n' }}{% endif %}")
START, END = "\ufdd0", "\ufdd1"  # noncharacters around what {% generation %} marks


class PrepareError(Exception):
    """Exit code, what, hint."""


class LeftOut(Exception):
    """Why a record yields no document."""


def printable(text):
    """Escapes text, so that no file name can forge a second line of output."""
    return "".join(c if c.isprintable() else "\\x%02x" % ord(c) for c in text)


def require(package, name):
    try:
        return importlib.import_module(package)
    except ImportError:
        package = package.split(".")[0]
        raise PrepareError(USAGE, "%s: needs the Python package %s" % (name, package),
                           "pip install %s" % package) from None


# --------------------------------------------------------------------------------------------------
# Files


@contextlib.contextmanager
def open_input(path):
    if not path.endswith(".zst"):
        with (gzip.open if path.endswith(".gz") else open)(path, "rb") as f:
            yield f
        return
    if not shutil.which("zstd"):
        raise PrepareError(USAGE, "%s: needs the program zstd" % path, "apt-get install zstd")
    with subprocess.Popen(["zstd", "-dcq", "--long=31", "--", path], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        yield process.stdout
        why = process.stderr.read().decode("utf-8", "replace").strip()
        if process.wait() != 0:
            raise OSError(why.split("\n")[-1].strip() or "zstd failed")


def ending(path):
    plain, packing = os.path.splitext(path)
    return os.path.splitext(plain if packing in (".gz", ".zst") else path)[1].lower()


# --------------------------------------------------------------------------------------------------
# Records: (number, a dictionary, or LeftOut)


def json_records(path, _):
    """From lines, or from an array in a .json file."""
    with open_input(path) as f:
        if ending(path) == ".json":
            return (yield from enumerate(json.load(f), 1))
        for number, line in enumerate(f, 1):
            line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as e:
                yield number, LeftOut("expected JSON: %s" % e)


def csv_records(path, _):
    csv.field_size_limit(1 << 30)
    with open_input(path) as f:
        lines = io.TextIOWrapper(f, "utf-8-sig", "replace", newline="")  # only CR and LF end lines
        rows = csv.DictReader(lines, restkey="(no name)", delimiter="\t" if ending(path) == ".tsv" else ",")
        yield from enumerate(rows, 1)


def parquet_records(path, keys):
    with require("pyarrow.parquet", path).ParquetFile(path) as file:
        found = file.schema_arrow.names
        batches = file.iter_batches(1024, columns=[name for name in found if name in keys] or found)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)


def hub_records(name, _):
    data_set, config, split = (name[len("hf:"):].split(":") + ["", ""])[:3]
    yield from enumerate(require("datasets", name).load_dataset(
        data_set, config or None, split=split or "train", streaming=True), 1)


READERS = {".jsonl": json_records, ".ndjson": json_records, ".json": json_records, ".csv": csv_records,
           ".tsv": csv_records, ".parquet": parquet_records}


def records(args):
    """(where, a dictionary or LeftOut) of all records in order."""
    keys = (args.text_key,) if args.text_key and not args.chat else KEYS
    keys = BENCHMARKS[args.bench][1] if args.bench else keys
    for path in args.input:
        reader = hub_records if path.startswith("hf:") else READERS.get(ending(path))
        if not reader:
            raise PrepareError(BAD_INPUT, "%s: expected JSONL, CSV or Parquet" % path,
                               "train_llama reads text files itself")
        try:
            for number, record in reader(path, keys):
                yield "%s:%d" % (path, number), record
        except PrepareError:
            raise
        except Exception as e:  # from a package, OSError, or ValueError for a damaged file
            why = getattr(e, "strerror", "") or str(e).split("\n")[0] or type(e).__name__
            raise PrepareError(BAD_INPUT, "%s: cannot read: %s" % (path, why),
                               "check it, or copy it again") from None


# --------------------------------------------------------------------------------------------------
# Chats


def kind_name(value):
    return {list: "an array", dict: "an object", str: "a string", type(None): "null",
            bool: "true or false"}.get(type(value), "a number")


def content_of(content, at):
    """The text of a message, or of all parts if it is a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
            isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(p["text"] for p in content)
    raise LeftOut("message %d: expected a string or parts with a text as content, found %s"
                  % (at, kind_name(content)))


def message_of(value, at):
    """{role, content, ...} from an entry in OpenAI's or ShareGPT's format."""
    if not isinstance(value, dict):
        raise LeftOut("message %d: expected an object, found %s" % (at, kind_name(value)))
    message = {k: v for k, v in value.items() if v is not None}  # Parquet fills in what is missing
    if "from" in message and "role" not in message:
        message = {"role": message["from"], "content": message.get("value")}
    role = message.get("role")
    message["role"] = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if message["role"] not in ROLES:
        raise LeftOut("message %d: expected a role such as user or assistant, found %s"
                      % (at, json.dumps(role)))
    without = "" if "tool_calls" in message else None       # what templates add to text
    message["content"] = content_of(message.get("content", without), at)
    return message


def messages_of(record):
    """(messages, index of the first one that may be trained on)."""
    def turn(key, role):
        value = record.get(key)
        return [{"role": role, "content": value}] if isinstance(value, str) else value

    prompt = []
    chat = next((record[k] for k in ("messages", "conversations") if record.get(k) is not None), None)
    if chat is None and record.get("instruction") is not None:
        record = {"prompt": "\n\n".join(filter(None, (record["instruction"], record.get("input")))),
                  "completion": record.get("output")}
    answer = "response" if record.get("completion") is None else "completion"
    if chat is None and record.get("prompt") is not None and record.get(answer) is not None:
        prompt, chat = turn("prompt", "user"), turn(answer, "assistant")
    if chat is None:
        raise LeftOut("expected messages, conversations, prompt and completion, or instruction and "
                      "output, found " + (", ".join(sorted(record)[:8]) or "an empty object"))
    if not isinstance(prompt, list) or not isinstance(chat, list) or not prompt + chat:
        raise LeftOut("expected a list of messages")
    return [message_of(m, i + 1) for i, m in enumerate(prompt + chat)], len(prompt)


def jinja_environment():
    """As in transformers, including {% generation %}: with env.marked, START and END enclose it."""
    jinja2 = require("jinja2", "the chat template")
    importlib.import_module("jinja2.ext")
    sandbox = importlib.import_module("jinja2.sandbox")

    class Generation(jinja2.ext.Extension):
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

    def tojson(value, ensure_ascii=False, **layout):
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    env = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, jinja2.ext.loopcontrols])
    env.extend(marked=False)
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    now = float(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    env.globals["strftime_now"] = datetime.datetime.fromtimestamp(now).strftime
    return env


def read_text(path):
    try:
        with open(path, encoding="utf-8") as f:
            return f.read()
    except (OSError, ValueError) as e:
        raise PrepareError(BAD_INPUT, "%s: expected text in UTF-8: %s" % (path, e),
                           "check --model and --chat-template") from None


def read_json(path):
    """The object in a file; {} if there is no file."""
    try:
        return json.loads(read_text(path)) if os.path.isfile(path) else {}
    except (ValueError, RecursionError) as e:
        raise PrepareError(BAD_INPUT, "%s: expected JSON: %s" % (path, e), "copy it again") from None


def template_source(args):
    """(source, name) from the given file, chat_template.jinja, or tokenizer_config.json."""
    path = args.chat_template or os.path.join(args.model, "chat_template.jinja")
    if args.chat_template or os.path.isfile(path):
        return read_text(path), path
    path = os.path.join(args.model, "tokenizer_config.json")
    source = read_json(path).get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {t.get("name"): t.get("template") for t in source}.get("default")
    if source is None and not args.model:
        return CHATML, "ChatML"
    if not isinstance(source, str):
        raise PrepareError(BAD_INPUT, "%s: expected a chat template, found none" % path,
                           "give a file with the template: --chat-template FILE")
    return source, path


class Template:
    """Renders chats as [[text, trained], ...]."""

    def __init__(self, args):
        source, name = template_source(args)
        self.values = {}
        self.marks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None
        added = read_json(os.path.join(args.model, "tokenizer.json")).get("added_tokens") or []
        self.special = tuple(t["content"] for t in added if t.get("special")) or ("<|im_end|>",)
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            for key, token in read_json(os.path.join(args.model, file)).items():
                token = token.get("content") if isinstance(token, dict) else token
                if key.endswith("_token") and isinstance(token, str):
                    self.values[key] = token
        self.env = jinja_environment()
        try:
            self.template = self.env.from_string(source)
        except Exception as e:
            raise PrepareError(BAD_INPUT, "%s: expected a chat template: %s" % (name, e),
                               "give another file: --chat-template FILE") from None

    def text(self, messages, tools, prompt=False, marked=False):
        self.env.marked = marked
        try:
            return self.template.render(messages=messages, tools=tools, documents=None,
                                        add_generation_prompt=prompt, **self.values)
        except Exception as e:  # whatever a template does wrong
            raise LeftOut("the template fails after message %d: %s"
                          % (len(messages), e or type(e).__name__)) from None

    def marked_spans(self, messages, tools, text):
        """[(first character, end, message index or -1)] of the text that {% generation %} marks."""
        marked = self.text(messages, tools, marked=True)
        if marked.replace(START, "").replace(END, "") != text:
            raise LeftOut("the template changes what {% generation %} marks")
        open_at, spans, at = [], [], 0
        for piece in re.split("([%s%s])" % (START, END), marked):
            if piece == START:
                open_at.append(at)
            elif piece == END:
                spans.append((open_at.pop(), at))
            else:
                at += len(piece)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        known = turns if len(turns) == len(spans) else [-1] * len(spans)
        return [(first, end, i) for (first, end), i in zip(spans, known)]

    def turns(self, messages, tools, text):
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
            spans.append((len(before), len(end), i))
        return spans

    def parts(self, record):
        messages, first = messages_of(record)
        tools = record.get("tools")
        trained = [i >= first and message["role"] == "assistant" and message.get("weight", 1) != 0
                   for i, message in enumerate(messages)]
        if not any(trained):
            raise LeftOut("no message of the assistant to train")
        text = self.text(messages, tools)
        spans = (self.marked_spans if self.marks else self.turns)(messages, tools, text)
        if any(i < 0 for _, _, i in spans) and not all(
                trained[i] for i, m in enumerate(messages) if m["role"] == "assistant"):
            raise LeftOut("the template marks other turns than the assistant's")
        parts, at = [], 0
        for start, end, i in spans:
            if i < 0 or trained[i]:
                parts += [[text[at:start], False], [text[start:end], True]]
                at = end
        return [part for part in parts + [[text[at:], False]] if part[0]]


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


BENCHMARKS = {  # with their columns
    "hellaswag": (hellaswag, ("activity_label", "ctx_a", "ctx_b", "endings", "label")),
    "arc": (arc, ("question", "choices", "answerKey")),
    "piqa": (piqa, ("goal", "sol1", "sol2", "label")),
    "winogrande": (winogrande, ("sentence", "option1", "option2", "answer")),
    "mmlu": (mmlu, ("question", "subject", "choices", "answer"))}


def question_of(row, name):
    try:
        context, choices, answer = BENCHMARKS[name][0](row)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise LeftOut("expected a question of %s with its answer: %s: %s" % (
            name, type(e).__name__, e)) from None
    if not 0 <= answer < len(choices):
        raise LeftOut("expected an answer of %d choices, found %d: has the split answers?" % (
            len(choices), answer))
    return {"context": context, "choices": choices, "answer": answer}


# --------------------------------------------------------------------------------------------------
# Documents


def known(record, text_key):
    """The part of a record that train_llama reads."""
    kept, key = {k: v for k, v in record.items() if k in KEYS and v is not None}, text_key or "text"
    if not text_key and any(all(k in kept for k in keys) for keys in RECORDS):
        return kept
    if not isinstance(record.get(key), str):
        raise LeftOut("expected a string \"%s\", found %s" % (
            key, kind_name(record[key]) if key in record else ", ".join(sorted(record)[:8])))
    return {"text": record[key]}


def documents(args, left_out):
    """The lines' contents. Bad records are left out; with --strict, or if they are the first 1000, they
    are an error."""
    template, count = Template(args) if args.chat else None, 0
    for where, record in records(args):
        try:
            if isinstance(record, LeftOut):
                raise record
            if not isinstance(record, dict):
                raise LeftOut("expected an object, found " + kind_name(record))
            found = (question_of(record, args.bench) if args.bench else {"parts": template.parts(record)}
                     if template else known(record, args.text_key))
        except LeftOut as e:
            left_out.append("%s: %s" % (where, e))
            if args.strict or args.bench or (count == 0 and len(left_out) == 1000):
                raise PrepareError(BAD_INPUT, left_out[0], "a split with answers, as the hub has it" if args.bench
                                   else "--text-key names another field") from None
            continue
        if found.get("text") != "":
            count += 1
            yield found


def write(args, left_out):
    """Writes under a temporary name first. Returns the number of documents."""
    count, temporary = 0, args.out + ".tmp"
    try:
        os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
        with open(temporary, "w", encoding="ascii", newline="\n") as f:
            for count, found in enumerate(documents(args, left_out), 1):
                f.write(json.dumps(found) + "\n")
        if count == 0:
            raise PrepareError(BAD_INPUT, "%s: expected documents, found none" %
                               " ".join(args.input), "left out: %s" % "; ".join(left_out[:3]))
        os.replace(temporary, args.out)
    except OSError as e:
        raise PrepareError(DISK, "%s: %s" % (e.filename or args.out, e.strerror),
                           "check the space and the permissions of --out") from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return count


def prepare(args):
    left_out = []
    if args.show:
        for found in itertools.islice(documents(args, left_out), args.show):
            parts = [("\n".join(map(printable, text.split("\n"))), trained)
                     for text, trained in found.get("parts") or [[found.get("text") or str(found), False]]]
            print("".join("[[%s]]" % text if trained else text for text, trained in parts), end="\n\n")
    else:
        count = write(args, left_out)
    for why in left_out[:MAX_NAMED]:
        print("warning: left out: %s" % printable(why), file=sys.stderr)
    if len(left_out) > MAX_NAMED:
        print("warning: %d records left out in all" % len(left_out), file=sys.stderr)
    if not args.show:
        print("wrote %s: %d documents" % (printable(args.out), count))


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise PrepareError(USAGE, message, "prepare.py --help lists the options")


def parse_args(argv):
    p = Parser(description=__doc__, allow_abbrev=False,
               formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("input", nargs="+", metavar="INPUT")
    p.add_argument("--out", metavar="FILE.jsonl", help="output, replaced if it exists")
    p.add_argument("--text-key", metavar="NAME", help="field or column with the text")
    p.add_argument("--chat", action="store_true", help="records are chats")
    p.add_argument("--model", default="", metavar="DIR", help="model with the template (default: ChatML)")
    p.add_argument("--chat-template", metavar="FILE", help="a Jinja template instead of the model's")
    p.add_argument("--bench", choices=BENCHMARKS, help="rows are questions of this benchmark")
    p.add_argument("--show", type=int, metavar="N", help="print N documents, write nothing")
    p.add_argument("--strict", action="store_true", help="stop at the first record that would be left out")
    args = p.parse_args(argv)
    if args.bench and (args.chat or args.text_key):
        p.error("expected at most one of --bench, --chat and --text-key")
    if not args.out and not args.show:
        p.error("expected --out FILE.jsonl, or --show N")
    return args


def main(argv):
    try:
        prepare(parse_args(argv))
    except PrepareError as e:
        code, what, hint = e.args
        print("error: %s\nhint: %s" % (printable(what), printable(hint)), file=sys.stderr)
        return code
    except KeyboardInterrupt:
        print("error: interrupted; nothing was changed in --out", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
