"""How the Python programs end on an error, and what they import only where it is installed."""
import argparse
import importlib
import os
import struct
import sys

USAGE, BAD_INPUT, DISK, DIVERGED = 2, 3, 4, 7  # exit codes

CRC32C = list(range(256))
for _ in range(8):
    CRC32C = [crc >> 1 ^ (0x82f63b78 if crc & 1 else 0) for crc in CRC32C]


def crc32c(data):
    """The checksum that seals our files, as 4 bytes"""
    crc = 0xffffffff
    for byte in data:
        crc = crc >> 8 ^ CRC32C[(crc ^ byte) & 255]
    return struct.pack("<I", crc ^ 0xffffffff)


def printable(text):
    """Escapes text, so that no file name can forge a second line of output."""
    return "".join(c if c.isprintable() else "\\x%02x" % ord(c) for c in text)


def warn(what):
    print(f"warning: {printable(what)}", file=sys.stderr)


def fail(code, what, hint):
    print(f"error: {printable(what)}\nhint: {printable(hint)}", file=sys.stderr)
    sys.exit(code)


def write(path, lines):
    """A whole file, or the old one; how many lines. A link stays one, and what is no file is kept."""
    real, count = os.path.realpath(path), 0
    partial = f"{real}.tmp-{os.getpid()}"
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError(0, "expected a regular file")
        with open(partial, "x", encoding="utf-8", errors="replace", newline="\n") as file:
            for count, line in enumerate(lines, 1):
                file.write(line)
        os.replace(partial, real)
    except OSError as e:
        fail(DISK, f"{path}: cannot write: {e.strerror}",
             "check the space and the permissions, or give another file")
    finally:
        if os.path.exists(partial):
            os.remove(partial)
    return count


def run_main(main):
    """Runs a program, whose other errors are caught where they happen."""
    try:
        main()
        print(end="", flush=True)
    except KeyboardInterrupt:
        fail(130, "interrupted", "run the same command again")
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes again
        if isinstance(e, BrokenPipeError):  # of head or less, as if by its signal
            sys.exit(141)
        fail(DISK, f"{e.filename or 'standard output'}: {e.strerror}", "check it, and the space")


class Parser(argparse.ArgumentParser):
    def __init__(self):
        """The usage and the help are the program's docstring."""
        super().__init__(description=sys.modules["__main__"].__doc__, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        fail(2, message, f"{self.prog} --help")


def load(*modules):
    """Modules of a package that may be missing; --help needs none."""
    try:
        return [importlib.import_module(name) for name in modules]
    except ImportError:
        if {"-h", "--help"} & set(sys.argv):
            print(sys.modules["__main__"].__doc__.strip())
            sys.exit()
        package = modules[0].split(".")[0]
        fail(2, f"the Python package {package} is not installed", f"pip install {package}")
