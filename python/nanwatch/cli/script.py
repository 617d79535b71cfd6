"""Running a script in this process as `python SCRIPT` and `python -m MODULE` do."""

from __future__ import annotations

import argparse
import builtins
import os
import pkgutil
import runpy
import sys
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
    options = {name for action in parser._actions for name in action.option_strings} - {"--help"}
    given = [
        name
        for argument in arguments
        if (name := argument.partition("=")[0]).startswith("--") and name in options
    ]
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
    """Run a script, a module, a folder or zip file with a __main__.py, or a compiled file. Raise what it raises.

    `__main__`, sys.argv and sys.path stay the script's until the process ends, as with `python SCRIPT`: its threads,
    its atexit functions and late child processes need them.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.argv = [target, *arguments]
    is_file = not is_module and pkgutil.get_importer(target) is None
    if is_module or is_file:
        if not getattr(sys.flags, "safe_path", False):
            sys.path[:1] = [os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))]
    else:
        sys.path[:1] = [target]
    if is_file:
        main.__file__ = path = os.path.abspath(target)
        with open_code(path) as file:
            code = pkgutil.read_code(file)  # of a compiled file
        if code is None:
            code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        exec(code, vars(main))
    else:
        # As the interpreter does: runpy.run_module would put another __main__ back.
        runpy._run_module_as_main(target if is_module else "__main__", alter_argv=is_module)  # type: ignore[attr-defined]
