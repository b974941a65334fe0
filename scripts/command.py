"""How the scripts end on an error, and what they import only where it is installed."""
import argparse
import importlib
import sys


def fail(code, what, hint):
    print(f"error: {what}\nhint: {hint}", file=sys.stderr)
    sys.exit(code)


class Parser(argparse.ArgumentParser):
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
        fail(2, f"{package} is not installed", f"pip install {package}")
