"""Running a script in this process as `python SCRIPT` and `python -m MODULE` do."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from io import open_code
from pathlib import Path
from types import ModuleType

from ..session import model_finder

# Files whose frames stand between a command and the script.
FILES = (__file__, model_finder.__file__, runpy.__file__, "<frozen runpy>")


def check_script(target: str, *, is_module: bool) -> None:
    """Raise ValueError where there is no such script."""
    if not is_module and not os.path.exists(target):
        raise ValueError(f"there is no script {target!r}; a module is run with -m")


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add SCRIPT, its arguments and -m to the parser of a command that runs a script."""
    parser.allow_abbrev = False
    parser.usage = "%(prog)s [OPTION...] SCRIPT [ARG...]\n       %(prog)s [OPTION...] -m MODULE [ARG...]"
    parser.add_argument("target", metavar="SCRIPT", help="the script, or with -m the module")
    rest = parser.add_argument("arguments", metavar="ARG", nargs=argparse.REMAINDER, help="its own arguments")
    rest.required = False  # argparse would name it beside a missing SCRIPT
    parser.add_argument("-m", action="store_true", help="run a module, as `python -m` does")


def misplaced_hint(parser: argparse.ArgumentParser, target: str, arguments: list[str]) -> str:
    """Return a hint at options of the parser among the script's arguments which the script does not name, or ""."""
    own = {name for action in parser._actions for name in action.option_strings} - {"--help"}
    given = [name for one in arguments if (name := one.partition("=")[0]).startswith("--") and name in own]
    try:
        text = Path(target).read_text(encoding="utf-8", errors="replace") if given else ""
    except OSError:  # a module
        return ""
    lost = ", ".join(
        name for name in given if name[2:] not in text and name[2:].replace("-", "_") not in text
    )
    return (
        f"the script gets {lost}, which it does not name; options of {parser.prog} go before the script"
        if lost
        else ""
    )


def run_script(target: str, arguments: list[str], *, is_module: bool) -> None:
    """Run a script, a module, a folder or zip file with a __main__.py, or a compiled file. Raises what it raises."""
    with _as_main(target, arguments, is_module=is_module):
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        elif os.path.isfile(target) and target.endswith((".py", ".pyw")):
            _run_file(target)
        else:
            runpy.run_path(target, run_name="__main__")


def _run_file(target: str) -> None:
    """Do the same as runpy.run_path, but with `__file__` absolute and sys.argv[0] as given, as with `python SCRIPT`."""
    path = os.path.abspath(target)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=builtins)
    before, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        with open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    finally:
        sys.modules["__main__"] = before


@contextlib.contextmanager
def _as_main(target: str, arguments: list[str], *, is_module: bool) -> Iterator[None]:
    """Set sys.argv and sys.path as `python SCRIPT` and `python -m MODULE` do."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [target, *arguments]
    if not getattr(sys.flags, "safe_path", False):
        # A folder or a zip file with a __main__.py is put there by runpy.
        first = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
        sys.path[:1] = [first]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
