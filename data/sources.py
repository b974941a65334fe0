"""What prepare.py reads besides plain and gzipped files, each with a program or package of its own:
Zstandard (the program zstd), Parquet (the package pyarrow), data sets of the Hugging Face hub (the
package datasets)."""
import importlib
import io
import itertools
import shutil
import subprocess

import prepare
from prepare import BAD_INPUT, USAGE, PrepareError

ROWS = 1024  # what a worker gets at a time
HUB = "hf:"  # hf:NAME[:CONFIG[:SPLIT]]


def require(package, name):
    try:
        return importlib.import_module(package)
    except ImportError:
        package = package.split(".")[0]
        raise PrepareError(USAGE, "%s: needs the Python package %s" % (name, package),
                           "pip install %s, or write JSON Lines with any tool" % package) from None


# --------------------------------------------------------------------------------------------------
# Zstandard


def require_zstd(path):
    if not shutil.which("zstd"):
        raise PrepareError(USAGE, "%s: needs the program zstd" % path, "apt-get install zstd")


class ZstdFile(io.RawIOBase):
    """What zstd writes; OSError at the end where it fails, say of a file that is cut."""

    def __init__(self, path):
        open(path, "rb").close()
        self.process = subprocess.Popen(["zstd", "-dcq", "--long=31", "--", path],
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def readable(self):
        return True

    def readinto(self, buffer):
        n = self.process.stdout.readinto(buffer)
        if n == 0:
            why = self.process.stderr.read().decode("utf-8", "replace").strip()
            if self.process.wait() != 0:
                raise OSError(why.split("\n")[-1].strip() or "zstd failed")
        return n

    def close(self):
        if not self.closed:
            self.process.stdout.close()
            self.process.stderr.close()
            self.process.wait()
        super().close()


def open_zstd(path):
    return io.BufferedReader(ZstdFile(path), 1 << 20)


# --------------------------------------------------------------------------------------------------
# Rows: ("rows", name, number of the first one, [record]), of the columns in keys


def choose_columns(name, found, keys):
    columns = [column for column in found if column in keys]
    if set(columns) - {"tools"}:
        return columns
    hint = prepare.CHAT_HINT if set(found) & set(prepare.CHAT_KEYS) else "name it with --text-key"
    raise PrepareError(BAD_INPUT, "%s: expected a column %s, found %s" % (
        name, ", ".join(key for key in keys if key != "tools"), ", ".join(found[:8]) or "none"),
        hint if len(keys) == 1 else "rename the columns")


def parquet_rows(path, keys):
    parquet = require("pyarrow.parquet", path)
    with parquet.ParquetFile(path) as file:
        columns = choose_columns(path, file.schema_arrow.names, keys)
        for batch in file.iter_batches(ROWS, columns=columns):
            yield batch.to_pylist()


def hub_rows(name, keys):
    datasets = require("datasets", name)
    data_set, config, split = (name[len(HUB):].split(":") + ["", ""])[:3]
    rows = iter(datasets.load_dataset(data_set, config or None, split=split or "train",
                                      streaming=True))
    columns = None
    while batch := list(itertools.islice(rows, ROWS)):
        columns = columns or choose_columns(name, list(batch[0]), keys)
        yield [{column: row.get(column) for column in columns} for row in batch]


def units(name, keys):
    number = 1
    try:
        for records in (hub_rows if name.startswith(HUB) else parquet_rows)(name, keys):
            yield "rows", name, number, records
            number += len(records)
    except PrepareError:
        raise
    except Exception as e:  # of the package, OSError, and ValueError of a file that is none
        raise prepare.cannot_read(name, str(e).split("\n")[0] or type(e).__name__) from None
