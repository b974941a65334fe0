#!/usr/bin/env python3
"""Text to token shards: prepare.py INPUT... --out DIR [--tokenizer byte|tokenizer.json]

INPUT is a text file (one document), a JSON Lines file (.jsonl, .ndjson, or .json with an object a
line: one document a line), a Parquet file (a document a row), a directory (every such file in it,
in order of path), or hf:NAME[:CONFIG[:SPLIT]], a data set of the Hugging Face hub; text and lines
may be packed with gzip (.gz) or Zstandard (.zst). CSV and other JSON is refused, or with --as-text
taken as text. With --chat it is chats: chat.py.

DIR receives train_00000.bin and .idx, val_00000.bin and .idx, the tokenizer's files and
dataset.json; formats: data/README.md.

Standard library only, but for sources.py and a tokenizer.json other than the built-in byte
tokenizer, which needs `tokenizers`.
The output depends on the input and the options only, never on --jobs or the time. Everything is
written under temporary names and renamed at the end.

Exit codes: 0 done, 2 usage, 3 bad input, 4 disk.
"""
import argparse
import ast
import collections
import concurrent.futures
import fnmatch
import gzip
import hashlib
import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
import zlib
from array import array
from concurrent.futures.process import BrokenProcessPool

USAGE, BAD_INPUT, DISK = 2, 3, 4
MAGIC_U16, MAGIC_U32, OWN_MAGIC = 20240520, 20240801, 0x44415055
BOS_FIRST, EOS_LAST, HAS_MASK = 1, 2, 4
HEADER_BYTES = 1024
MAX_SHARD_TOKENS = 2**31 - 1         # the header's count is an int32
BLOCK_TOKENS = 4096                  # that share a checksum
MAX_FILE_BYTES = 1 << 30             # of a file that is one document, held in memory
MAX_NAMED = 10                       # samples that are left out, in warnings
UNIT_BYTES, UNIT_FILES = 4 << 20, 256  # what a worker gets at a time
UNPACK = "unpack it first: "
AS_LINES = ("write an object {\"text\": ...} a line into a .jsonl file; --as-text takes this file "
            "as text")
# what is refused by its ending: format, hint, and whether a directory with it is refused too: a
# data set of which only the README would be found
REFUSED = {
    ".arrow": ("Arrow", "datasets writes JSON Lines: datasets.Dataset.from_file(\"FILE\")"
               ".to_json(\"FILE.jsonl\")", True),
    ".xz": ("xz", UNPACK + "xz -dk FILE", False),
    ".bz2": ("bzip2", UNPACK + "bzip2 -dk FILE", False),
    ".zip": ("zip", UNPACK + "unzip FILE", False),
}
CHAT_KEYS = ("messages", "conversations", "conversation", "chat", "completion")
CHAT_HINT = "chat messages are not plain text: pass --chat and the --tokenizer of their model"
SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
USUAL_BOS = ("<|bos|>", "<|begin_of_text|>", "<s>", "<|endoftext|>")
USUAL_EOS = ("<|eos|>", "<|end_of_text|>", "</s>", "<|endoftext|>")


class PrepareError(Exception):
    """One failure: exit code, what, hint. All three are args, so that it crosses processes."""

    def __init__(self, code, what, hint=""):
        super().__init__(code, what, hint)
        self.code, self.what, self.hint = code, what, hint


def printable(text):
    """No file name can forge a second line of output."""
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "".join(c if c.isprintable() else "\\x%02x" % ord(c) for c in text)


# --------------------------------------------------------------------------------------------------
# Tokenizers: text to the bytes of little-endian ids, BOS and EOS included


def gpt2_alphabet():
    """GPT-2's printable character of every byte."""
    kept = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = [b for b in range(256) if b not in kept]
    points = dict([(b, b) for b in kept] + [(b, 256 + i) for i, b in enumerate(others)])
    return [chr(points[b]) for b in range(256)]


def byte_tokenizer_files():
    """The built-in tokenizer as Hugging Face files: byte-level BPE with no merges, id = byte."""
    def special(i, text):
        return {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True}

    def byte_level(use_regex):
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                "use_regex": use_regex}

    bos = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [special(256, "<|bos|>"), special(257, "<|eos|>")],
        "normalizer": None, "pre_tokenizer": byte_level(False),
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [256], "tokens": ["<|bos|>"]}},
        },
        "decoder": byte_level(False),
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": False,
                  "vocab": {c: i for i, c in enumerate(gpt2_alphabet())}, "merges": []},
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>",
              "eos_token": "<|eos|>", "clean_up_tokenization_spaces": False}
    named = {"tokenizer.json": tokenizer, "tokenizer_config.json": config,
             "special_tokens_map.json": {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}}
    return {name: (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode("utf-8")
            for name, value in named.items()}


class ByteTokenizer:
    """id = byte, BOS 256, EOS 257."""

    name, vocab_size, warning, dtype = "byte", 258, "", "H"

    def __init__(self, with_bos, with_eos):
        self.files = byte_tokenizer_files()
        self.bos = 256 if with_bos else -1
        self.eos = 257 if with_eos else -1
        self.head = struct.pack("<H", 256) if with_bos else b""
        self.tail = struct.pack("<H", 257) if with_eos else b""

    def encode(self, data):
        tokens = bytearray(2 * len(data))
        tokens[0::2] = data
        return self.head + bytes(tokens) + self.tail


class HuggingFaceTokenizer:
    """Any tokenizer.json, through the tokenizers package."""

    name = "huggingface"

    def __init__(self, path, with_bos, with_eos):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise PrepareError(USAGE, "%s: needs the Python package tokenizers" % path,
                               "pip install tokenizers, or use --tokenizer byte") from None
        path = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        self.files = {"tokenizer.json": read_file(path)}
        for name in SIDE_FILES:
            beside = os.path.join(os.path.dirname(path), name)
            if os.path.isfile(beside):
                self.files[name] = read_file(beside)
        try:
            self.tokenizer = Tokenizer.from_str(self.files["tokenizer.json"].decode("utf-8"))
            config = json.loads(self.files.get("tokenizer_config.json", b"{}").decode("utf-8"))
        except Exception as e:
            raise PrepareError(BAD_INPUT, "%s: expected a tokenizer: %s" % (path, e)) from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.dtype = "H" if self.vocab_size <= 65536 else "I"
        self.eos = self.find(vocab, config, "eos_token", USUAL_EOS, path) if with_eos else -1
        self.warning = self.other_eos(vocab, config, os.path.dirname(path)) if with_eos else ""
        self.bos = self.find(vocab, config, "bos_token", USUAL_BOS, path) if with_bos else -1
        if self.bos == self.eos:  # one token between documents is enough
            self.bos = -1

    @staticmethod
    def find(vocab, config, key, usual, path):
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if key == "bos_token" and key in config and token is None:  # it has none
            return -1
        for name in (token,) if isinstance(token, str) else usual:
            if name in vocab:
                return vocab[name]
        if key == "bos_token":  # many tokenizers have none
            return -1
        raise PrepareError(BAD_INPUT, "%s: no %s found" % (path, key),
                           "name it in tokenizer_config.json, or use --no-eos")

    def other_eos(self, vocab, config, directory):
        """A warning when a file beside the tokenizer names another EOS than the one found."""
        def content(values):
            token = values.get("eos_token")
            token = token.get("content") if isinstance(token, dict) else token
            return [vocab[token]] if token in vocab else []

        def ids(values):
            found = values.get("eos_token_id")
            return [i for i in (found if isinstance(found, list) else [found])
                    if isinstance(i, int) and i >= 0]

        def show(found):
            names = {i: name for name, i in vocab.items() if i in found}
            return ", ".join("%s (%d)" % (names.get(i, "an unknown token"), i) for i in found)

        sources = [("special_tokens_map.json", content), ("config.json", ids),
                   ("generation_config.json", ids)]
        said = [(name, kind(read_json(os.path.join(directory, name)))) for name, kind in sources]
        others = ["%s says %s" % (name, show(found)) for name, found in said
                  if found and self.eos not in found]
        own = "tokenizer_config.json" if content(config) else "the usual name"
        return "%s says EOS %s, %s: documents end with %s" % (
            own, show([self.eos]), ", ".join(others), show([self.eos])) if others else ""

    def encode(self, data):
        text = data.decode("utf-8", "replace")
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        ids = ([self.bos] if self.bos >= 0 else []) + ids + ([self.eos] if self.eos >= 0 else [])
        return pack_ids(ids, self)


def pack_ids(ids, tokenizer):
    tokens = array(tokenizer.dtype, ids)
    if sys.byteorder != "little":
        tokens.byteswap()
    return tokens.tobytes()


def make_tokenizer(options):
    if options["tokenizer"] == "byte":
        return ByteTokenizer(options["bos"], options["eos"])
    chat = options["chat"]  # its template writes BOS and EOS where it wants them
    return HuggingFaceTokenizer(options["tokenizer"], options["bos"] and not chat,
                                options["eos"] and not chat)


def read_file(path):
    try:
        with open(path, "rb") as f:
            return f.read()
    except OSError as e:
        raise cannot_read(path, e) from None


def read_json(path):
    """The object in a file; {} without one."""
    if not os.path.isfile(path):
        return {}
    try:
        value = json.loads(read_file(path).decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise PrepareError(BAD_INPUT, "%s: expected JSON: %s" % (path, e)) from None
    return value if isinstance(value, dict) else {}


# --------------------------------------------------------------------------------------------------
# Which files, and what a worker gets at a time

# kinds of files; a table is CSV or JSON, rows are Parquet or a data set of the hub (sources.py)
TEXT, LINES, TABLE, ROWS = "text", "lines", "table", "rows"
InputFile = collections.namedtuple("InputFile", "path size named kind")


def open_input(path):
    if path.endswith(".zst"):
        import sources
        return sources.open_zstd(path)
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def cannot_read(path, e):
    return PrepareError(BAD_INPUT, "%s: cannot read: %s" % (path, getattr(e, "strerror", "") or e),
                        "check it, or copy it again")


def kind_of_json(path, named, keys):
    """LINES when the first line is a whole object (in a tree: one with a key); what is there."""
    try:
        with open_input(path) as f:
            line = f.readline(1 << 16).lstrip()
            while not line and f.peek(1):
                line = f.readline(1 << 16).lstrip()
            if line[:1] == b"{" and not line.endswith(b"\n"):
                line += f.readline(MAX_FILE_BYTES)
    except (OSError, EOFError, zlib.error) as e:
        raise cannot_read(path, e) from None
    try:
        record = json.loads(line) if line[:1] == b"{" else None
    except (ValueError, RecursionError):
        record = None
    if record and (named or any(isinstance(record.get(key), (str, list)) for key in keys)):
        return LINES, ""
    return TABLE, {b"[": "a JSON array", b"{": "a JSON object over several lines"}.get(
        line[:1], "neither an object nor an array")


def kind_of(path, named, options):
    """None: a file that --chat leaves out."""
    plain, packing = os.path.splitext(path)
    ending = os.path.splitext(plain if packing in (".gz", ".zst") else path)[1].lower()
    if packing == ".zst" or ending == ".parquet":
        import sources
        if packing == ".zst":
            sources.require_zstd(path)
        else:
            sources.require("pyarrow.parquet", path)
            return ROWS
    name, hint, data_set = REFUSED.get(ending, ("", "", False))
    if name and (named or data_set):
        hint = hint.replace("FILE", path) + ("" if named else "; or choose files with --glob")
        raise PrepareError(BAD_INPUT, "%s: expected text or JSONL, found %s" % (path, name), hint)
    if ending in (".jsonl", ".ndjson"):
        return LINES
    if options["chat"] and ending != ".json":
        if named:
            raise PrepareError(BAD_INPUT, "%s: expected chats in JSONL or Parquet, found %s" % (
                path, ending or "a file without an ending"), "write an object a line: FILE.jsonl")
        return None
    if ending not in (".csv", ".tsv", ".json") or options["as_text"]:
        return TEXT
    if ending != ".json":
        kind, found, hint = TABLE, "text or JSONL, found CSV", AS_LINES
    else:
        kind, what = kind_of_json(path, named, CHAT_KEYS if options["chat"] else
                                  [options["text_key"]])
        found = "JSON Lines, found " + what
        hint = "jq -c '%s' %s > FILE.jsonl writes an object a line%s" % (
            ".[]" if "array" in what else ".", path,
            "" if options["chat"] else "; --as-text takes it as text")
    if kind == TABLE and named:
        raise PrepareError(BAD_INPUT, "%s: expected %s" % (path, found), hint)
    return kind


def walk(directory, pattern, out_dir):
    """Files of a tree in order of path, hidden ones left out."""
    found = []

    def refuse(e):
        raise PrepareError(BAD_INPUT, "%s: cannot list: %s" % (e.filename, e.strerror))

    for here, dirs, names in os.walk(directory, onerror=refuse):
        dirs[:] = [d for d in dirs if not d.startswith(".") and d != "__pycache__"
                   and os.path.realpath(os.path.join(here, d)) != out_dir]
        for name in names:
            path = os.path.join(here, name)
            relative = os.path.relpath(path, directory)
            wanted = not pattern or fnmatch.fnmatchcase(name, pattern) \
                or fnmatch.fnmatchcase(relative, pattern)
            if wanted and not name.startswith(".") and os.path.isfile(path):
                found.append((os.fsencode(relative), path))
    return [path for _, path in sorted(found)]


def collect(inputs, pattern, out_dir, options):
    """[InputFile] in a fixed order. named: by the user, not found in a directory."""
    files = []
    for given in inputs:
        if given.startswith("hf:"):
            import sources
            sources.require("datasets", given)
            files.append(InputFile(given, 0, True, ROWS))
            continue
        if os.path.isdir(given):
            paths = [(path, False) for path in walk(given, pattern, out_dir)]
        elif os.path.isfile(given):
            paths = [(given, True)]
        else:
            raise PrepareError(BAD_INPUT, "%s: expected a file or a directory, found none" % given)
        try:
            found = [InputFile(path, os.stat(path).st_size, named, kind_of(path, named, options))
                     for path, named in paths]
            files += [file for file in found if file.kind]
        except OSError as e:
            raise PrepareError(BAD_INPUT, "%s: %s" % (e.filename, e.strerror)) from None
    if not files:
        raise PrepareError(BAD_INPUT, "%s: expected files, found none" % " ".join(inputs),
                           "check --glob %s" % pattern if pattern else "")
    return files


def line_units(path):
    """A JSONL file in blocks of whole lines, so that its size does not matter."""
    number, lines, size = 1, [], 0
    try:
        with open_input(path) as f:
            for line in f:
                lines.append(line)
                size += len(line)
                if size >= UNIT_BYTES:
                    yield ("lines", path, number, lines)
                    number, lines, size = number + len(lines), [], 0
    except (OSError, EOFError, zlib.error) as e:
        raise cannot_read(path, e) from None
    if lines:
        yield ("lines", path, number, lines)


def units(files, options):
    """(bytes of input done after it, unit) for the workers, in order."""
    batch, batch_bytes, done = [], 0, 0
    for file in files:
        full = batch_bytes + file.size > UNIT_BYTES or len(batch) == UNIT_FILES
        if batch and (full or file.kind == LINES):
            yield done, ("files", batch)
            batch, batch_bytes = [], 0
        if file.kind == LINES:
            for unit in line_units(file.path):
                yield done, unit
        elif file.kind == ROWS:
            import sources
            for unit in sources.units(file.path, options["keys"]):
                yield done, unit
        elif file.kind == TEXT:
            batch.append(file)
            batch_bytes += file.size
        done += file.size
    if batch:
        yield done, ("files", batch)


# --------------------------------------------------------------------------------------------------
# Workers

# documents: [(is_val, tokens, mask or None)]; left_out: [(kind, why, hint)]
Result = collections.namedtuple("Result", "documents empty binary left_out")
worker_state = {}


def worker_start(options):
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    worker_state["options"] = options
    worker_state["tokenizer"] = make_tokenizer(options)
    if options["chat"]:
        import chat
        worker_state["chat"] = chat.Chat(options, worker_state["tokenizer"])


def pool_worker_start(options):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the pool
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    worker_start(options)


def text_of_file(file):
    """The bytes of one document, or None for a binary file found in a tree."""
    try:
        with open_input(file.path) as f:
            data = f.read(8192)
            binary = b"\0" in data
            if not binary:
                data += f.read(MAX_FILE_BYTES)
    except (OSError, EOFError, zlib.error) as e:
        raise cannot_read(file.path, e) from None
    if len(data) > MAX_FILE_BYTES:
        raise PrepareError(BAD_INPUT, "%s: one document of more than %d bytes"
                           % (file.path, MAX_FILE_BYTES),
                           "write it as .jsonl with one document a line")
    if binary and file.named:
        raise PrepareError(BAD_INPUT, "%s: expected text, found a binary file" % file.path,
                           "give text, .jsonl or .parquet")
    return None if binary else data


def python_functions(source):
    """Every function of a module and method of its classes, with decorators; [] if not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the source, such as "\\d" in a plain string
            body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines, found = source.splitlines(keepends=True), []
    for node in body:
        for function in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([function.lineno] + [d.lineno for d in function.decorator_list])
                found.append(b"".join(lines[first - 1:function.end_lineno]))
    return found


def wrong_line(path, number, record, key):
    """Why a line has no text, and what to do."""
    if not isinstance(record, dict):
        return PrepareError(BAD_INPUT, "%s:%d: expected one JSON object a line, found %s"
                            % (path, number, "an array" if isinstance(record, list) else "none"),
                            "jq -c '.[]' %s > FILE.jsonl writes an object a line" % path)
    kinds = {list: "an array", dict: "an object", type(None): "null"}
    found = kinds.get(type(record[key]), "a number") if key in record \
        else ", ".join(sorted(record)[:8])
    chat = any(isinstance(record.get(name), list) for name in CHAT_KEYS)
    return PrepareError(BAD_INPUT, "%s:%d: expected a string \"%s\", found %s"
                        % (path, number, key, found),
                        CHAT_HINT if chat else "name the field with --text-key")


def text_of_line(path, number, line, key):
    """The text, or a PrepareError that says why there is none."""
    line = line.strip()
    if not line:
        return b""
    if line[:1] == b"[":
        return wrong_line(path, number, [], key)
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as e:
        return PrepareError(BAD_INPUT, "%s:%d: expected JSON: %s" % (path, number, e))
    return text_of_record(path, number, record, key)


def text_of_record(path, number, record, key):
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        return wrong_line(path, number, record, key)
    return record[key].encode("utf-8", "replace")


def is_validation(text, options):
    """By content: a document is validation wherever it stands, and so are its copies."""
    share = int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2.0**64
    return share < options["val_frac"]


def worker_encode(unit):
    options, tokenizer = worker_state["options"], worker_state["tokenizer"]
    if options["chat"]:
        return worker_state["chat"].encode(unit)
    if unit[0] == "files":
        texts = [text_of_file(file) for file in unit[1]]
    else:
        kind, path, first, values = unit
        text_of = text_of_line if kind == "lines" else text_of_record
        texts = [text_of(path, first + i, value, options["text_key"])
                 for i, value in enumerate(values)]
    left_out = [("broken_lines", e.what, e.hint) for e in texts if isinstance(e, PrepareError)]
    texts = [text for text in texts if not isinstance(text, PrepareError)]
    binary = sum(t is None for t in texts)
    if options["functions"] and unit[0] == "files":
        texts = [f for text in texts if text for f in python_functions(text)]
    documents = [(is_validation(text, options), tokenizer.encode(text), None)
                 for text in texts if text]
    return Result(documents, sum(t == b"" for t in texts), binary, left_out)


def encode_all(files, options, jobs):
    """(bytes of input done, Result) in the order of the input, with few units in flight."""
    if jobs == 1:
        worker_start(options)
        for done, unit in units(files, options):
            yield done, worker_encode(unit)
        return
    waiting = collections.deque()
    with concurrent.futures.ProcessPoolExecutor(
            jobs, initializer=pool_worker_start, initargs=(options,)) as pool:
        try:
            for done, unit in units(files, options):
                waiting.append((done, pool.submit(worker_encode, unit)))
                if len(waiting) >= 3 * jobs:
                    at, future = waiting.popleft()
                    yield at, future.result()
            while waiting:
                at, future = waiting.popleft()
                yield at, future.result()
        except BrokenProcessPool:
            raise PrepareError(DISK, "a worker process was killed",
                               "perhaps out of memory: use fewer --jobs") from None
        finally:
            for _, future in waiting:
                future.cancel()


# --------------------------------------------------------------------------------------------------
# Shards


def crc32c_table():
    table = []
    for i in range(256):
        for _ in range(8):
            i = (i >> 1) ^ (0x82f63b78 if i & 1 else 0)
        table.append(i)
    return table


CRC32C_TABLE = crc32c_table()


def crc32c(data):
    crc, table = 0xffffffff, CRC32C_TABLE
    for byte in data:
        crc = (crc >> 8) ^ table[(crc ^ byte) & 255]
    return crc ^ 0xffffffff


CRC32C_PLANES = [bytes(value >> 8 * k & 255 for value in CRC32C_TABLE) for k in range(4)]


def crc32c_blocks(data, size):
    """CRC32C of every `size` bytes, a multiple of which data is; all blocks advance together, a
    byte at a time, which is ten times as fast as one after another. A state is four planes: the
    lowest bytes of all blocks, the next ones, ..."""
    n, number = len(data) // size, int.from_bytes
    first, second, third, fourth = CRC32C_PLANES
    ones = (1 << 8 * n) - 1
    a = b = c = d = ones
    for i in range(size):
        at = (a ^ number(data[i::size], "little")).to_bytes(n, "little")
        a = b ^ number(at.translate(first), "little")
        b = c ^ number(at.translate(second), "little")
        c = d ^ number(at.translate(third), "little")
        d = number(at.translate(fourth), "little")
    planes = [(plane ^ ones).to_bytes(n, "little") for plane in (a, b, c, d)]
    return [int.from_bytes(state, "little") for state in zip(*planes)]


class ShardWriter:
    """train_00000.bin, train_00001.bin, ... of one split, each with its .idx, and with `masks`
    (chat.py) its .mask."""

    def __init__(self, directory, split, tokenizer, shard_tokens, masks):
        self.directory, self.split, self.tokenizer = directory, split, tokenizer
        self.shard_tokens, self.masks = shard_tokens, masks
        self.token_bytes = 2 if tokenizer.vocab_size <= 65536 else 4
        self.file, self.ends, self.num_shards = None, None, 0
        self.names, self.lengths = [], collections.Counter()

    def add(self, tokens, mask):
        count = len(tokens) // self.token_bytes
        if count > MAX_SHARD_TOKENS:
            raise PrepareError(BAD_INPUT, "a document of %d tokens does not fit a shard" % count)
        if self.file and self.ends and self.ends[-1] + count > self.shard_tokens:
            self.close()
        if not self.file:
            self.open()
        self.write(tokens)
        if self.masks:
            self.masks.add(mask)
        self.ends.append((self.ends[-1] if self.ends else 0) + count)
        self.lengths[count] += 1

    def write(self, tokens):
        """Tokens and, of the blocks that are complete, the checksums, some hundred at a time."""
        self.file.write(tokens)
        self.rest += tokens
        size = BLOCK_TOKENS * self.token_bytes
        if len(self.rest) >= 256 * size:
            whole = len(self.rest) // size * size
            self.sums.extend(crc32c_blocks(bytes(self.rest[:whole]), size))
            del self.rest[:whole]

    def checksums(self):
        """Of all blocks; the last one may be shorter."""
        size = BLOCK_TOKENS * self.token_bytes
        whole = len(self.rest) // size * size
        self.sums.extend(crc32c_blocks(bytes(self.rest[:whole]), size))
        if len(self.rest) > whole:
            self.sums.append(crc32c(self.rest[whole:]))
        return struct.pack("<%dI" % len(self.sums), *self.sums)

    def open(self):
        self.stem = "%s_%05d" % (self.split, self.num_shards)
        self.num_shards += 1
        self.file = open(os.path.join(self.directory, self.stem + ".bin"), "wb", 1 << 20)
        self.file.write(b"\0" * HEADER_BYTES)
        self.ends, self.sums, self.rest = array("Q"), [], bytearray()

    def header(self):
        t, wide = self.tokenizer, self.token_bytes == 4
        words = [0] * 255
        words[0:3] = [MAGIC_U32 if wide else MAGIC_U16, 7 if wide else 1, self.ends[-1]]
        flags = (BOS_FIRST if t.bos >= 0 else 0) | (EOS_LAST if t.eos >= 0 else 0) \
            | (HAS_MASK if self.masks else 0)
        words[8:14] = [OWN_MAGIC, 1, t.vocab_size, flags, t.bos, t.eos]
        head = struct.pack("<255i", *words)
        digest = hashlib.sha256(t.files["tokenizer.json"]).digest()[:8]
        head = head[:56] + struct.pack("<Q", len(self.ends)) + digest + head[72:]
        return head + struct.pack("<I", crc32c(head))

    def close(self):
        if not self.file:
            return
        head = self.header()
        self.file.seek(0)
        self.file.write(head)
        sync_close(self.file)
        self.file = None
        if sys.byteorder != "little":
            self.ends.byteswap()
        num_tokens = struct.unpack_from("<i", head, 8)[0]
        body = b"UNPADIDX" + struct.pack("<I4s", 2, head[1020:]) \
            + struct.pack("<QQQ", len(self.ends), num_tokens, BLOCK_TOKENS) \
            + self.ends.tobytes() + self.checksums()
        write_file(os.path.join(self.directory, self.stem + ".idx"),
                   body + struct.pack("<I", crc32c(body)))
        if self.masks:
            self.masks.close(os.path.join(self.directory, self.stem + ".mask"), head[1020:],
                             num_tokens)
        self.names.append(self.stem)


def sync_close(f):
    f.flush()
    os.fsync(f.fileno())
    f.close()


def write_file(path, data):
    f = open(path, "wb")
    f.write(data)
    sync_close(f)


# --------------------------------------------------------------------------------------------------
# Summary


def quantile(lengths, share):
    """The smallest length that at least this share of documents does not exceed."""
    wanted, seen = share * sum(lengths.values()), 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= wanted:
            return length
    return 0


def split_summary(writer):
    lengths = writer.lengths
    documents = sum(lengths.values())
    tokens = sum(length * count for length, count in lengths.items())
    powers = collections.Counter()
    for length, count in lengths.items():
        powers[1 << (length - 1).bit_length()] += count
    trained = {"trained_tokens": writer.masks.trained} if writer.masks else {}
    return {
        "shards": writer.names, "documents": documents, "tokens": tokens, **trained,
        "length": {"median": quantile(lengths, 0.5), "mean": round(tokens / max(documents, 1), 1),
                   "p90": quantile(lengths, 0.9), "p99": quantile(lengths, 0.99),
                   "longest": max(lengths, default=0)},
        "documents_up_to": {str(p): powers[p] for p in sorted(powers)},
        "padding_percent_in_rows_of": {
            str(row): round(100 * padding_share(lengths, tokens, row), 1)
            for row in (512, 1024, 2048, 4096, 8192)},
    }


def padding_share(lengths, tokens, row):
    """Of rows with one document each, longer ones cut into several rows."""
    rows = sum(-(-length // row) * count for length, count in lengths.items())
    return 1 - tokens / (rows * row) if rows else 0


def count_of(n, what):
    """"1 empty document", of "empty_documents"."""
    text = "%d %s" % (n, what.replace("_", " ").replace("csv or json", "CSV or JSON"))
    note = " (--as-text takes them)" if what == "csv_or_json_files" else ""
    return (text[:-1] if n == 1 else text) + note


def print_summary(summary):
    print("         documents        tokens   median     mean      p90      p99    longest")
    for split in ("train", "val"):
        s = summary[split]
        n = s["length"]
        print("%-6s %11d %13d %8d %8d %8d %8d %10d" % (
            split, s["documents"], s["tokens"], n["median"], n["mean"], n["p90"], n["p99"],
            n["longest"]))
    if "trained_tokens" in summary["train"]:
        print("trained: " + ", ".join("%d tokens of %s (%.1f %%)" % (
            s["trained_tokens"], split, 100 * s["trained_tokens"] / max(s["tokens"], 1))
            for split, s in (("train", summary["train"]), ("val", summary["val"]))))
    rows = summary["train"]["padding_percent_in_rows_of"]
    print("padding that packing saves: " + ", ".join(
        "%s %% in rows of %s" % (rows[row], row) for row in rows))
    left_out = [count_of(n, what) for what, n in summary["left_out"].items() if n]
    if left_out:
        print("left out: " + ", ".join(left_out))


class Progress:
    """A bar on a terminal; in a log a line now and then."""

    def __init__(self, total, quiet):
        self.total, self.quiet = max(total, 1), quiet
        self.tty = sys.stderr.isatty()
        self.start = self.last = time.monotonic()

    def show(self, done, tokens, end=False):
        now = time.monotonic()
        every = 0.2 if self.tty else 15.0
        if self.quiet or (now - self.last < every and not (end and self.tty)):
            return
        self.last = now
        share = min(done / self.total, 1.0)
        rate = tokens / max(now - self.start, 1e-9) / 1e6
        line = "%5.1f %%  %.1f M tokens  %.1f M/s" % (100 * share, tokens / 1e6, rate)
        if self.tty:
            bar = ("#" * int(30 * share)).ljust(30, ".")
            sys.stderr.write("\r[%s] %s%s" % (bar, line, "\n" if end else ""))
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


# --------------------------------------------------------------------------------------------------
# The whole


def is_ours(name):
    stem, ending = os.path.splitext(name)
    return ending in (".bin", ".idx", ".mask") and stem.startswith(("train_", "val_")) \
        and stem.split("_", 1)[1].isdigit()


def install(temporary, out):
    """Old shards out, new files in; dataset.json goes first and comes last."""
    final = os.path.join(out, "dataset.json")
    if os.path.exists(final):
        os.unlink(final)
    for name in os.listdir(out):
        if is_ours(name) or name in SIDE_FILES:
            os.unlink(os.path.join(out, name))
    for name in sorted(os.listdir(temporary), key=lambda name: (name == "dataset.json", name)):
        os.replace(os.path.join(temporary, name), os.path.join(out, name))
    fd = os.open(out, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_dataset(args, options, files, tokenizer, temporary):
    left_out, named, hint = collections.Counter(), [], ""
    kinds = ("broken_lines",)
    if args.chat:
        import chat
        kinds = chat.KINDS
    writers = {split: ShardWriter(temporary, split, tokenizer, args.shard_tokens,
                                  chat.MaskWriter() if args.chat else None)
               for split in ("train", "val")}
    progress = Progress(sum(file.size for file in files), args.quiet)
    tables = sum(file.kind == TABLE for file in files)
    tokens = empty = binary = done = 0
    for done, result in encode_all(files, options, args.jobs):
        if result.left_out and args.strict:
            raise PrepareError(BAD_INPUT, result.left_out[0][1], "without --strict it is left out")
        left_out.update(kind for kind, _, _ in result.left_out)
        hint = hint or (result.left_out[0][2] if result.left_out else "")
        named += [why for _, why, _ in result.left_out[:MAX_NAMED - len(named)]]
        for is_val, document, mask in result.documents:
            writers["val" if is_val else "train"].add(document, mask)
            tokens += len(document) // writers["train"].token_bytes
        empty += result.empty
        binary += result.binary
        progress.show(done, tokens)
    progress.show(done, tokens, end=True)
    for writer in writers.values():
        writer.close()
    if not writers["train"].names and not writers["val"].names and named and not args.chat:
        raise PrepareError(BAD_INPUT, named[0], hint)
    if not writers["train"].names:
        raise PrepareError(BAD_INPUT, "%s: no document for training" % " ".join(args.input),
                           "lower --val-frac" if writers["val"].names else
                           "left out: " + named[0] if named else
                           count_of(tables, "csv_or_json_files") + "; better: " + AS_LINES
                           if tables else "give text files or JSON Lines")
    for name, data in tokenizer.files.items():
        write_file(os.path.join(temporary, name), data)
    summary = {
        "format": "unpad.c data set", "version": 1,
        "tokenizer": {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size,
                      "bos": tokenizer.bos, "eos": tokenizer.eos,
                      "sha256": hashlib.sha256(tokenizer.files["tokenizer.json"]).hexdigest()},
        "train": split_summary(writers["train"]), "val": split_summary(writers["val"]),
        "left_out": {"empty_documents": empty, "binary_files": binary, "csv_or_json_files": tables,
                     **{kind: left_out[kind] for kind in kinds}},
        "val_frac": args.val_frac,
    }
    write_file(os.path.join(temporary, "dataset.json"),
               (json.dumps(summary, indent=2) + "\n").encode("utf-8"))
    if left_out.total() > len(named):
        named.append("%d %s in all" % (left_out.total(), "chats" if args.chat else "lines"))
    return summary, named


def warn(what):
    print("warning: %s" % printable(what), file=sys.stderr)


def show(args, options):
    """--show: some chats on the terminal, and nothing written."""
    import chat
    files = collect(args.input, args.glob, "", options)
    if chat.show(files, options, make_tokenizer(options), args.show) == 0:
        raise PrepareError(BAD_INPUT, "%s: expected chats, found none" % " ".join(args.input))


def prepare(args):
    options = {"tokenizer": args.tokenizer, "bos": not args.no_bos, "eos": not args.no_eos,
               "text_key": args.text_key, "val_frac": args.val_frac,
               "functions": args.python_functions, "as_text": args.as_text,
               "chat": args.chat, "chat_template": args.chat_template, "train_on": args.train_on,
               "now": None, "keys": (args.text_key,)}
    if args.chat:
        import chat
        options["keys"] = chat.KEYS
        options["now"] = chat.start_time()
    if args.show:
        return show(args, options)
    out = args.out
    if os.path.exists(os.path.join(out, "dataset.json")) and not args.overwrite:
        raise PrepareError(USAGE, "%s: holds a data set already" % out,
                           "choose another --out, or pass --overwrite")
    files = collect(args.input, args.glob, os.path.realpath(out), options)
    tokenizer = make_tokenizer(options)  # before anything is written
    if tokenizer.warning:
        warn("%s: %s" % (args.tokenizer, tokenizer.warning))
    if args.chat:
        chat.make_template(options, tokenizer)  # adds its file to the tokenizer's
    temporary = None
    try:
        os.makedirs(out, exist_ok=True)
        temporary = tempfile.mkdtemp(prefix=".prepare-", dir=out)
        summary, left_out = write_dataset(args, options, files, tokenizer, temporary)
        install(temporary, out)
    except OSError as e:
        raise PrepareError(DISK, "%s: %s" % (e.filename or out, e.strerror),
                           "check the space and the permissions of --out") from None
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
    for why in left_out:
        warn("left out: " + why)
    if not args.quiet:
        if args.chat:
            chat.show(files, options, tokenizer, 1, limit=2000)
        print_summary(summary)
        print("wrote %s (%s tokenizer, vocabulary %d)" % (
            printable(out), summary["tokenizer"]["name"], summary["tokenizer"]["vocab_size"]))
    if args.val_frac > 0 and summary["val"]["documents"] == 0:
        print("note: no document was chosen for validation; raise --val-frac", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise PrepareError(USAGE, message, "prepare.py --help lists the options")


def number_between(kind, low, high):
    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise ValueError
        return value
    parse.__name__ = "number from %g to %g:" % (low, high)  # argparse puts it into its message
    return parse


def parse_args(argv):
    p = Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    p.add_argument("input", nargs="+", metavar="INPUT",
                   help="text file or .jsonl, also .gz or .zst, .parquet, a directory, or "
                   "hf:NAME[:CONFIG[:SPLIT]]")
    p.add_argument("--out", metavar="DIR", help="directory for the shards")
    p.add_argument("--tokenizer", default="byte", help="byte (default), a tokenizer.json, or the "
                   "directory of a model")
    p.add_argument("--glob", metavar="PATTERN", help="only these files of directories, e.g. '*.py'")
    p.add_argument("--python-functions", action="store_true",
                   help="every function and method of a Python file is a document")
    p.add_argument("--as-text", action="store_true",
                   help="CSV and JSON files are documents as they are")
    p.add_argument("--text-key", default="text",
                   help="field of JSONL records, column of Parquet (default text)")
    p.add_argument("--chat", action="store_true", help="chats (messages, conversations, or prompt "
                   "and completion), with a loss mask")
    p.add_argument("--train-on", choices=("assistant", "all"), default="assistant",
                   help="what of a chat is trained (default assistant: its turns)")
    p.add_argument("--chat-template", metavar="FILE",
                   help="Jinja template (default: the tokenizer's, else ChatML)")
    p.add_argument("--show", type=number_between(int, 1, 1 << 30), metavar="N",
                   help="print N chats with what is trained, write nothing")
    p.add_argument("--strict", action="store_true",
                   help="stop at a chat, or a line without a text, that would be left out")
    p.add_argument("--val-frac", type=number_between(float, 0, 1), default=0.01,
                   help="share of documents for validation, chosen by content (default 0.01)")
    p.add_argument("--shard-tokens", default=100000000, help="tokens of one shard (default 1e8)",
                   type=number_between(lambda text: int(float(text)), 1, MAX_SHARD_TOKENS))
    p.add_argument("--jobs", type=number_between(int, 1, 1024),
                   default=min(os.cpu_count() or 1, 16),
                   help="processes (default: all cores, at most 16)")
    p.add_argument("--no-bos", action="store_true", help="no BOS before documents")
    p.add_argument("--no-eos", action="store_true", help="no EOS after documents")
    p.add_argument("--overwrite", action="store_true", help="replace the data set in DIR")
    p.add_argument("--quiet", action="store_true", help="no progress and no summary")
    args = p.parse_args(argv)
    if not args.out and not args.show:
        p.error("the following arguments are required: --out")
    of_chats = args.show or args.chat_template or args.train_on != "assistant"
    if args.chat and (args.as_text or args.python_functions):
        p.error("--chat takes no --as-text and no --python-functions")
    if of_chats and not args.chat:
        p.error("--train-on, --chat-template and --show need --chat")
    return args


def main(argv):
    # a stop by a batch system cleans up like Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prepare(parse_args(argv))
    except PrepareError as e:
        print("error: %s" % printable(e.what), file=sys.stderr)
        if e.hint:
            print("hint: %s" % printable(e.hint), file=sys.stderr)
        return e.code
    except KeyboardInterrupt:
        print("error: interrupted; nothing was changed in --out", file=sys.stderr)
        return 130
    except BrokenPipeError:  # --show into head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    import prepare as module  # chat.py and the workers know it by this name
    sys.exit(module.main(sys.argv[1:]))
