"""How the Python programs end on an error, and what they import only where it is installed."""
import argparse
import importlib
import os
import sys

USAGE, BAD_INPUT, DISK, DIVERGED = 2, 3, 4, 7  # exit codes


def printable(text):
    """Escapes text, so that no file name can forge a second line of output."""
    return "".join(c if c.isprintable() else "\\x%02x" % ord(c) for c in text)


def warn(what):
    print(f"warning: {printable(what)}", file=sys.stderr)


def fail(code, what, hint):
    print(f"error: {printable(what)}\nhint: {printable(hint)}", file=sys.stderr)
    sys.exit(code)


def write(path, text):
    """A whole file, or the old one"""
    try:
        with open(f"{path}.tmp-{os.getpid()}", "x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as e:
        fail(DISK, f"{path}: cannot write: {e.strerror}", "give --out FILE elsewhere")


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
