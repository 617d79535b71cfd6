"""Sub-commands of `nanwatch`: one line each in COMMANDS, and what they have in common."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..util.progress import Tell, shown
from ..util.visible import close_names, visible

# Exit status that a shell gives to a program ended by SIGPIPE.
_CUT = 128 + 13


@dataclass(frozen=True, slots=True)
class Command:
    """Sub-command: its line in `--help`, and the `module:function` that runs it, `(arguments) -> int`.

    `only_prints`: the command can end when nobody reads its output. `runs_user_code`: Ctrl-C prints a traceback,
    because the user may want to know where it struck.
    """

    summary: str
    place: str
    only_prints: bool = True
    runs_user_code: bool = False

    def run(self, arguments: list[str]) -> int:
        """Import the module, run the command and return the exit status."""
        module, _, name = self.place.partition(":")
        main: Callable[[list[str]], int] = getattr(importlib.import_module(module, __package__), name)
        if not self.only_prints:
            return main(arguments)
        return until_cut(lambda: main(arguments), shows_place=self.runs_user_code)


def until_cut(command: Callable[[], int], *, shows_place: bool = False) -> int:
    """Return the command's exit status, or 141 where the reader of its output went away, as `head` does.

    Ctrl-C is raised as KeyboardInterrupt, at which the interpreter ends by SIGINT: a shell calls this 130 and ends a
    loop in a script too. With `shows_place` it prints the traceback, without it nothing. Characters that the encoding
    of stdout lacks are printed as escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            status = command()
        except SystemExit:
            _flush()
            raise
        except KeyboardInterrupt:
            if not shows_place:
                sys.excepthook = partial(_tell_all_but_ctrl_c, sys.excepthook)
            raise
        # Flush now, because at the interpreter's end nobody can catch the error.
        _flush()
        return status
    except BrokenPipeError:
        # The interpreter flushes the rest of the output once more at its end: send it into nothing.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
        return _CUT


def _tell_all_but_ctrl_c(before: Callable[..., object], kind: type[BaseException], *rest: object) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        before(kind, *rest)


def _flush() -> None:
    if sys.stdout is not None:  # it is None for a process that was started without one
        sys.stdout.flush()


COMMANDS = {
    "compare": Command(
        "the first module in which two implementations of a model, or two traces, differ",
        ".compare:compare_main",
        runs_user_code=True,
    ),
    "diff": Command("where two traces, or two batches of one, part", ".compare:diff_main"),
    "doctor": Command("what is installed, what serves which device, and what is missing", ".doctor:main"),
    "fits": Command("the narrowest format that holds what each module makes, by a trace", ".fits:main"),
    "replay": Command(
        "make the call in a capsule again, in one dtype or several", ".replay:main", runs_user_code=True
    ),
    "run": Command("watch the model of an unchanged training script", ".run:main", only_prints=False),
    "scan": Command("is a checkpoint sound, and how does it differ from another", ".files:scan_main"),
    "show": Command("a trace, a report, the reports of all ranks, or black boxes", ".files:show_main"),
    "top": Command("the modules of a running trace by headroom and trend, live", ".top:main"),
    "twice": Command(
        "does a script compute the same when it is run twice, and if not, why", ".compare:twice_main"
    ),
}


def answered(
    name: str, find: Callable[[Tell], tuple[str, int]], *, errors: tuple[type[Exception], ...] = ()
) -> int:
    """Print the text that `find(tell)` returns, and return the exit status beside it.

    Errors of use and of files are one line on stderr, and those in `errors` too. What the user's own code prints
    meanwhile goes to stderr.
    """
    expected: tuple[type[Exception], ...] = (UseError, ValueError, OSError, ImportError, *errors)
    try:
        with shown() as tell, contextlib.redirect_stdout(sys.stderr):
            text, status = find(tell)
    except expected as error:
        return failed(name, error)
    print(text)
    return status


def write_page(path: Path | None, page: Callable[[], str], tell: Tell) -> str:
    """Write the page where a path is given, and return the line that says so; else ""."""
    if path is None:
        return ""
    tell("drawing the page")
    path.write_text(page(), encoding="utf-8")
    return f"wrote {visible(str(path))}"


def below(text: str, line: str) -> str:
    """Return the text with the line, if any, after an empty one."""
    return f"{text}\n\n{line}" if line else text


def rendered(found: Any, options: argparse.Namespace, tell: Tell) -> str:
    """Write the page of a result where one is asked for. Return the result as JSON or text, as asked."""
    wrote = write_page(getattr(options, "html", None), lambda: found.to_html(), tell)
    return str(found.to_json()) if options.json else below(found.to_text(), wrote)


def failed(name: str, error: BaseException) -> int:
    """Print on stderr, in one line, why the command `name` has nothing to print. Return exit status 2."""
    sys.stderr.write(f"nanwatch {name}: {visible(str(error))}\n")
    return 2


class Parser(argparse.ArgumentParser):
    """Parser of a command. Its error for an unknown flag names close ones."""

    def __init__(self, name: str, description: str, notes: str) -> None:
        super().__init__(
            prog=f"nanwatch {name}".rstrip(),
            description=description,
            epilog=notes,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with status 2."""
        flag = message.removeprefix("unrecognized arguments: ").split()[0].partition("=")[0]
        if flag.startswith("--"):
            message += f"; {close_names(flag, list(self._option_string_actions), '--help lists the options')}"
        super().error(message)


def command_parser(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Return the parser of a command that prints for people, or with --json for programs."""
    parser = Parser(name, description, examples)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document on stdout and nothing else"
    )
    return parser


# Exit statuses by whether two executions are equal; None is not known.
EQUAL_STATUS = {True: 0, False: 1, None: 2}


class UseError(Exception):
    """Error for stderr, with exit status 2."""


def imported(spelt: str, option: str) -> Any:
    """Return the object that `pkg.mod:name` or `file.py:name` is, or what it makes when a function or a class.

    It may be in the current folder too. Raises UseError, after the traceback where the user's code raised it.
    """
    module_name, _, path = spelt.partition(":")
    if not module_name or not path:
        raise UseError(f"{option} should be PKG.MOD:NAME or FILE.py:NAME, as train:make_model, got {spelt!r}")
    if module_name.endswith(".py"):
        parts = Path(os.path.relpath(module_name)).with_suffix("").parts
        if ".." in parts or not Path(module_name).is_file():
            raise UseError(f"{option} {spelt}: there is no file {module_name} in {os.getcwd()} or below it")
        module_name = ".".join(parts)
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        target: Any = importlib.import_module(module_name)
        for part in path.split("."):
            target = getattr(target, part)
        # A module is an object that is called with inputs. Its class knows, without an import of torch.
        is_made = isinstance(target, type) or not any(
            base.__name__ == "Module" for base in type(target).__mro__
        )
        return target() if callable(target) and is_made else target
    except Exception as error:
        # The traceback ends in this function where a name is missing, or where the maker wants an argument.
        is_ours = error.__traceback__ is not None and error.__traceback__.tb_next is None
        if not is_ours and (not isinstance(error, ModuleNotFoundError) or error.name != module_name):
            traceback.print_exc()
        hint = (
            "; what makes it is called without arguments" if is_ours and isinstance(error, TypeError) else ""
        )
        raise UseError(f"{option} {spelt}: {type(error).__name__}: {error}{hint}") from None
