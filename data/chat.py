"""Chats to documents with a loss mask: prepare.py --chat.

A sample is a JSON object with "messages" (OpenAI), "conversations" (ShareGPT), or "prompt" and
"completion" (texts, or lists of messages; the loss is on the completion only), as a line of a JSONL
file or a row of a Parquet file. The model's chat template renders it as one document. The loss is
on the assistant's turns with the token that ends them, or with --train-on all on everything. An
assistant message with "weight": 0 is not trained.

Where a template has {% generation %}, that is what is trained. Otherwise a turn is what rendering
the chat up to it adds to rendering the chat before it with a generation prompt, without white space
after a closing special token. A sample whose earlier text changes as the chat grows is left out.

A token is trained if all of its text belongs to the assistant. transformers also trains a token
that straddles the boundary (say "\\n\\n" where the answer begins with a newline), which a model
that generates cannot write: its prompt already ends with the first "\\n".

Jinja templates need the Python package jinja2; SmolLM2's and plain ChatML do not.
"""
import datetime
import json
import os
import re
import struct
import sys
import time

import prepare
from prepare import BAD_INPUT, USAGE, PrepareError

MASK_MAGIC, MASK_VERSION = b"UNPADMSK", 1
MALFORMED, UNRENDERABLE, UNTRAINED = "malformed_samples", "unrenderable_samples", \
    "untrained_samples"
KINDS = (MALFORMED, UNRENDERABLE, UNTRAINED)  # why a sample is left out
KEYS = ("messages", "conversations", "prompt", "completion", "tools")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant",
                  "bard": "assistant", "model": "assistant", "observation": "tool"}
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
          "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
          "{{ '<|im_start|>assistant\n' }}{% endif %}")
SMOLLM2 = CHATML.replace(
    "{{", "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    + SMOLLM2_SYSTEM + "<|im_end|>\n' }}{% endif %}{{", 1)
BUILT_IN = {CHATML: "", SMOLLM2: SMOLLM2_SYSTEM}
START, END = "\ufdd0", "\ufdd1"  # noncharacters around what {% generation %} marks


class LeftOut(Exception):
    """A sample that becomes no document: kind, why."""


# --------------------------------------------------------------------------------------------------
# Records to messages


def kind_name(value):
    return {list: "an array", dict: "an object", str: "a string", type(None): "null",
            bool: "true or false"}.get(type(value), "a number")


def content_of(message, at):
    """The text of a message; of a list of parts, that of all parts."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            raise LeftOut(MALFORMED, "message %d: expected parts with a text" % at)
        return "".join(p["text"] for p in content)
    if not isinstance(content, str):
        raise LeftOut(MALFORMED, "message %d: expected a string as content, found %s"
                      % (at, kind_name(content)))
    return content


def message_of(value, at):
    """{role, content, ...} of an entry in OpenAI's or in ShareGPT's form."""
    if not isinstance(value, dict):
        raise LeftOut(MALFORMED, "message %d: expected an object, found %s"
                      % (at, kind_name(value)))
    message = {k: v for k, v in value.items() if v is not None}  # Parquet fills in what is missing
    if "from" in message and "role" not in message:
        message = {"role": message["from"], "content": message.get("value")}
    role = message.get("role")
    role = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise LeftOut(MALFORMED, "message %d: expected a role such as user or assistant, found %s"
                      % (at, json.dumps(role) if isinstance(role, str) else kind_name(role)))
    message["role"] = role
    if "content" in message or "tool_calls" not in message:
        message["content"] = content_of(message, at)
    return message


def messages_of(record):
    """(messages, index of the first one that may be trained)."""
    def turn(key, role):
        value = record.get(key)
        return [{"role": role, "content": value}] if isinstance(value, str) else value

    prompt, chat = [], record.get("messages")
    if chat is None:
        chat = record.get("conversations")
    if chat is None and record.get("prompt") is not None and record.get("completion") is not None:
        prompt, chat = turn("prompt", "user"), turn("completion", "assistant")
    if chat is None:
        raise LeftOut(MALFORMED, "expected messages, conversations, or prompt and completion, "
                      "found " + (", ".join(sorted(record)[:8]) or "an empty object"))
    if not isinstance(prompt, list) or not isinstance(chat, list) or not prompt + chat:
        raise LeftOut(MALFORMED, "expected a list of messages")
    return [message_of(m, i + 1) for i, m in enumerate(prompt + chat)], len(prompt)


def record_of(line):
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise LeftOut(MALFORMED, "expected JSON: %s" % e) from None
    if not isinstance(record, dict):
        raise LeftOut(MALFORMED, "expected an object, found " + kind_name(record))
    return record


# --------------------------------------------------------------------------------------------------
# Templates: (text, [(first character, end, message index or -1)] of the assistant's turns)


class ChatMLTemplate:
    """What CHATML and SMOLLM2 render, without jinja2."""

    def __init__(self, system):
        self.system = system

    def render(self, messages, tools, with_spans):
        text, spans = "", []
        if self.system and messages[0]["role"] != "system":
            text = "<|im_start|>system\n%s<|im_end|>\n" % self.system
        for i, message in enumerate(messages):
            if "content" not in message:
                raise LeftOut(UNRENDERABLE, "message %d: ChatML has no tool calls" % (i + 1))
            text += "<|im_start|>%s\n" % message["role"]
            first = len(text)
            text += message["content"] + "<|im_end|>"
            if message["role"] == "assistant":
                spans.append((first, len(text), i))
            text += "\n"
        return text, spans


def start_time():
    """What templates take for now: the same in every worker."""
    now = os.environ.get("SOURCE_DATE_EPOCH") or time.time()
    try:
        return datetime.datetime.fromtimestamp(float(now))
    except (ValueError, OverflowError, OSError):
        raise PrepareError(USAGE, "SOURCE_DATE_EPOCH: expected seconds since 1970, found %s" % now,
                           "unset it") from None


def jinja_environment(now):
    """As in transformers, {% generation %} included: with env.marked, START and END around it."""
    try:
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise PrepareError(USAGE, "the chat template needs the Python package jinja2",
                           "pip install jinja2") from None

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

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                          sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=[Generation, jinja2.ext.loopcontrols])
    env.extend(marked=False)
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = now.strftime
    return env


class JinjaTemplate:
    def __init__(self, source, name, special, values, now):
        self.env = jinja_environment(now)
        self.special, self.values = special, values
        self.marks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None
        try:
            self.template = self.env.from_string(source)
        except Exception as e:
            raise PrepareError(BAD_INPUT, "%s: expected a chat template: %s" % (name, e),
                               "name another file by --chat-template") from None

    def text(self, messages, tools, prompt=False, marked=False):
        self.env.marked = marked
        try:
            return self.template.render(messages=messages, tools=tools, documents=None,
                                        add_generation_prompt=prompt, **self.values)
        except Exception as e:  # whatever a template does wrong
            raise LeftOut(UNRENDERABLE, "the template fails after message %d: %s"
                          % (len(messages), e or type(e).__name__)) from None

    def render(self, messages, tools, with_spans):
        text = self.text(messages, tools)
        if not with_spans:
            return text, []
        return text, (self.marked_spans if self.marks else self.turns)(messages, tools, text)

    def marked_spans(self, messages, tools, text):
        marked = self.text(messages, tools, marked=True)
        if marked.replace(START, "").replace(END, "") != text:
            raise LeftOut(UNRENDERABLE, "the template changes what {% generation %} marks")
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
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.text(messages[:i], tools, prompt=True)
            after = self.text(messages[:i + 1], tools)
            if not text.startswith(after) or not after.startswith(before):
                raise LeftOut(UNRENDERABLE, "message %d: the template renders %s differently" % (
                    i + 1, "its prompt" if text.startswith(after) else
                    "it and later messages together"))
            closed = after.rstrip()
            end = closed if closed.endswith(self.special) and len(closed) > len(before) else after
            spans.append((len(before), len(end), i))
        return spans


def template_source(tokenizer, given):
    """(source, name) of the template: the given file, chat_template.jinja, or what
    tokenizer_config.json has, if anything."""
    name = given or "chat_template.jinja"
    if not given and name not in tokenizer.files:
        name = "tokenizer_config.json"
        source = json_object(tokenizer, name).get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
        return (source, name) if isinstance(source, str) else (None, name)
    data = prepare.read_file(given) if given else tokenizer.files[name]
    try:
        return data.decode("utf-8"), name
    except UnicodeDecodeError:
        raise PrepareError(BAD_INPUT, "%s: expected a chat template in UTF-8" % name,
                           "name another file by --chat-template") from None


def json_object(tokenizer, name):
    try:
        value = json.loads(tokenizer.files.get(name, b"{}").decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise PrepareError(BAD_INPUT, "%s: expected JSON: %s" % (name, e),
                           "copy the tokenizer again") from None
    return value if isinstance(value, dict) else {}


def special_tokens(tokenizer):
    """(contents of all, {"bos_token": content, ...}); of the byte tokenizer none: prepare.py writes
    its BOS and EOS."""
    if tokenizer.name == "byte":
        return (), {}
    added = json_object(tokenizer, "tokenizer.json").get("added_tokens") or []
    contents = tuple(t["content"] for t in added if t.get("special"))
    values = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, token in json_object(tokenizer, name).items():
            token = token.get("content") if isinstance(token, dict) else token
            if key.endswith("_token") and isinstance(token, str):
                values[key] = token
    return contents, values


def make_template(options, tokenizer):
    source, name = template_source(tokenizer, options["chat_template"])
    special, values = special_tokens(tokenizer)
    if source is None:
        if tokenizer.name != "byte" and not {"<|im_start|>", "<|im_end|>"} <= set(special):
            raise PrepareError(
                BAD_INPUT, "%s: no chat template, and no tokens <|im_start|> and <|im_end|> for "
                "ChatML" % options["tokenizer"], "name a file with the template by --chat-template")
        source, name = CHATML, "ChatML"
    if options["chat_template"] or name == "ChatML":  # for those who use the model later
        tokenizer.files["chat_template.jinja"] = source.encode("utf-8")
    if source in BUILT_IN:
        return ChatMLTemplate(BUILT_IN[source])
    return JinjaTemplate(source, name, special, values, options["now"])


# --------------------------------------------------------------------------------------------------
# Samples to documents


def tokens_of(tokenizer, text):
    """Ids and, of each, its characters: [(first, end)]."""
    if tokenizer.name == "byte":
        sizes = [len(c.encode("utf-8")) for c in text]
        return list(text.encode("utf-8")), [(i, i + 1) for i, n in enumerate(sizes)
                                            for _ in range(n)]
    encoding = tokenizer.tokenizer.encode(text, add_special_tokens=False)
    return encoding.ids, encoding.offsets


def mask_of(offsets, spans):
    """1 for each token that lies within a span; spans and tokens are in order."""
    mask, k = bytearray(len(offsets)), 0
    for i, (first, end) in enumerate(offsets):
        while k < len(spans) and spans[k][1] < end:
            k += 1
        mask[i] = k < len(spans) and spans[k][0] <= first
    return mask


class Document:
    """ids, mask (a byte of 0 or 1 a token), text, and offsets: each token's characters."""

    def __init__(self, tokenizer, text, spans):
        ids, self.offsets = tokens_of(tokenizer, text)
        self.text, mask = text, mask_of(self.offsets, spans)
        if tokenizer.bos >= 0:
            ids, mask = [tokenizer.bos] + ids, b"\0" + mask
            self.offsets = [(0, 0)] + self.offsets
        if tokenizer.eos >= 0:  # trained after a turn that is: a byte tokenizer's answer ends there
            last = bool(spans) and spans[-1][1] >= len(text.rstrip())
            ids, mask = ids + [tokenizer.eos], mask + bytes([last])
            self.offsets = self.offsets + [(len(text), len(text))]
        self.ids, self.mask = ids, bytearray(mask)
        self.mask[:1] = bytes(len(self.mask[:1]))  # nothing comes before the first token


class Chat:
    """A worker's template and tokenizer."""

    def __init__(self, options, tokenizer):
        self.options, self.tokenizer = options, tokenizer
        self.template = make_template(options, tokenizer)

    def document(self, record):
        messages, first = messages_of(record)
        everything = self.options["train_on"] == "all"
        trained = [i >= first and message["role"] == "assistant" and message.get("weight", 1) != 0
                   for i, message in enumerate(messages)]
        if not everything and not any(trained):
            raise LeftOut(UNTRAINED, "no message of the assistant to train")
        text, spans = self.template.render(messages, record.get("tools"), not everything)
        # a lone surrogate, which JSON can write, is no character: "?"
        text = text.encode("utf-8", "replace").decode("utf-8")
        if everything:
            spans = [(0, len(text), 0)]
        elif any(i < 0 for _, _, i in spans):
            if first or any(message.get("weight", 1) == 0 for message in messages):
                raise LeftOut(UNRENDERABLE, "the template marks other turns than the assistant's")
        else:
            spans = [span for span in spans if trained[span[2]]]
        document = Document(self.tokenizer, text, spans)
        if not any(document.mask):
            raise LeftOut(UNTRAINED, "no token to train")
        return document

    def documents(self, unit):
        """(where, Document or LeftOut) of each sample of a unit; blank lines are none."""
        _, path, first, values = unit
        for number, value in enumerate(values, first):
            if isinstance(value, bytes) and not value.strip():
                continue
            try:
                record = record_of(value) if isinstance(value, bytes) else value
                yield "%s:%d" % (path, number), self.document(record)
            except LeftOut as e:
                yield "%s:%d" % (path, number), e

    def encode(self, unit):
        documents, left_out = [], []
        for where, found in self.documents(unit):
            if isinstance(found, LeftOut):
                left_out.append((found.args[0], "%s: %s" % (where, found.args[1]), ""))
                continue
            is_val = prepare.is_validation(found.text.encode("utf-8"), self.options)
            tokens = prepare.pack_ids(found.ids, self.tokenizer)
            documents.append((is_val, tokens, bytes(found.mask)))
        return prepare.Result(documents, 0, 0, left_out)


# --------------------------------------------------------------------------------------------------
# NAME.mask


class MaskWriter:
    """The masks of one shard after another."""

    def __init__(self):
        self.trained, self.bits, self.rest, self.ones = 0, bytearray(), bytearray(), 0

    def add(self, mask):
        self.ones += mask.count(1)
        self.rest += mask
        if len(self.rest) >= 1 << 16:
            self.pack(len(self.rest) // 8 * 8)

    def pack(self, count):
        """The first `count` of rest, a multiple of 8, as bits; all bytes at once, a plane each."""
        planes = (int.from_bytes(self.rest[k:count:8], "little") << k for k in range(8))
        self.bits += sum(planes).to_bytes(count // 8, "little")
        del self.rest[:count]

    def close(self, path, header_checksum, num_tokens):
        self.rest += bytes(-len(self.rest) % 8)
        self.pack(len(self.rest))
        body = MASK_MAGIC + struct.pack("<I4sQQ", MASK_VERSION, header_checksum, num_tokens,
                                        self.ones) + bytes(self.bits)
        prepare.write_file(path, body + struct.pack("<I", prepare.crc32c(body)))
        self.trained, self.bits, self.ones = self.trained + self.ones, bytearray(), 0


# --------------------------------------------------------------------------------------------------
# A picture of a sample


def picture(document, tokenizer, colour, limit):
    """The text, with what is trained in colour or in [[ ]]; of a long one `limit` characters."""
    before, after = ("\033[1;32m", "\033[0m") if colour else ("[[", "]]")
    out, at, inside = [], 0, False
    text = document.text
    for (first, end), trained in zip(document.offsets, document.mask):
        if first >= limit:
            text = text[:first]
            break
        if bool(trained) != inside:
            out.append(text[at:first])
            out.append(before if trained else after)
            at, inside = first, bool(trained)
        if first == end == len(text) and tokenizer.eos >= 0:
            out.append(text[at:] + "<|eos|>")
            at = end
    out += [text[at:], after if inside else "", "" if text == document.text else "\n..."]
    return "".join(piece if piece in (before, after) else
                   "\n".join(prepare.printable(line) for line in piece.split("\n"))
                   for piece in out)


def show(files, options, tokenizer, count, limit=sys.maxsize):
    """Prints the first `count` samples, whatever becomes of them; returns how many there were."""
    chat, shown = Chat(options, tokenizer), 0
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    sys.stdout.reconfigure(errors="backslashreplace")
    for _, unit in prepare.units(files, options):
        for where, found in chat.documents(unit):
            if shown == count:
                return shown
            shown += 1
            if isinstance(found, LeftOut):
                print("%s: left out: %s\n" % (prepare.printable(where),
                                              prepare.printable(found.args[1])))
                continue
            print("%s: %d tokens, %d trained, %s" % (
                prepare.printable(where), len(found.ids), sum(found.mask),
                "in colour" if colour else "in [[ ]]"))
            print(picture(found, tokenizer, colour, limit).rstrip("\n") + "\n")
    return shown
