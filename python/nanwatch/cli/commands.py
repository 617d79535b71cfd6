"""Commands of `nanwatch`: one entry each in COMMANDS, what they have in common, and `doctor`, the default."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

from .._version import __version__
from ..numerics import _extension
from ..util.messages import Tell, close_names, color_console, silent, visible

_CLEAR = "\x1b[H\x1b[2J"  # of a terminal


def main(arguments: list[str] | None = None) -> int:
    """Run the command, or without one the doctor. Return the exit status, which is in the help of each."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] not in COMMANDS:
        return until_cut(lambda: doctor_main(arguments, name=""))
    name, *rest = arguments
    module, _, function = COMMANDS[name][0].partition(":")
    command: Callable[[list[str]], int] = getattr(importlib.import_module(module, __package__), function)
    if name == "run":  # stdout is the script's own
        return command(rest)
    # Where the user's code runs, the traceback of Ctrl-C says where it hung.
    return until_cut(lambda: command(rest), shows_place=name in ("compare", "replay"))


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
            return command()
        except KeyboardInterrupt:
            if not shows_place:
                sys.excepthook = lambda *_: None
            raise
        finally:
            print(end="", flush=True)  # now, because at the interpreter's end nobody can catch the error
    except BrokenPipeError:
        # The interpreter flushes the rest of the output once more at its end: send it into nothing.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
        return 128 + 13  # as a shell says of a program ended by SIGPIPE


# Each command's `module:function`, which takes the arguments and returns the exit status, and its line in `--help`.
COMMANDS = {
    "compare": (
        ".compare:compare_main",
        "the first module in which two implementations of a model, or two traces, differ",
    ),
    "diff": (".compare:diff_main", "where two traces, or two batches of one, part"),
    "doctor": (".commands:doctor_main", "what is installed, what serves which device, and what is missing"),
    "fits": (".files:fits_main", "the narrowest format that holds what each module makes, by a trace"),
    "replay": (".compare:replay_main", "make the call in a capsule again, as it was or in another dtype"),
    "run": (".run:main", "watch the model of an unchanged training script"),
    "scan": (".files:scan_main", "is a checkpoint sound, and how does it differ from another"),
    "show": (".files:show_main", "a trace, a report, the reports of all ranks, or black boxes"),
    "top": (".files:top_main", "the modules of a running trace by headroom and trend, live"),
    "twice": (".compare:twice_main", "does a script compute the same when it is run twice, and if not, why"),
}


def print_answer(
    parser: argparse.ArgumentParser,
    arguments: list[str],
    find: Callable[[argparse.Namespace, Tell], tuple[Any, int]],
    *,
    errors: tuple[type[Exception], ...] = (),
) -> int:
    """Print the text or result that `find(options, tell)` returns, and return the exit status beside it.

    Errors of use and of files are one line on stderr, and those in `errors` too. What the user's own code prints
    meanwhile goes to stderr. On a terminal the command answers again every `options.live` seconds until Ctrl-C, if it
    has such an option. Errors after the first answer are shown in its place, as a file may be about to change.
    """
    options = parser.parse_args(arguments)
    options.json |= getattr(options, "format", None) == "json"
    expected: tuple[type[Exception], ...] = (UseError, ValueError, OSError, ImportError, *errors)
    live: float = 0 if getattr(options, "once", False) else getattr(options, "live", 0)
    is_live = live > 0 and not options.json and sys.stdout.isatty()
    has_answered, status = False, 0
    try:
        while True:
            try:
                page: Path | None = getattr(options, "html", None)
                if page is not None and not page.absolute().parent.is_dir():
                    raise UseError(f"--html {page}: there is no folder {str(page.parent)!r}; make it first")
                progress = contextlib.nullcontext(silent) if is_live else _shown_progress()
                with progress as tell, contextlib.redirect_stdout(sys.stderr):
                    result, status = find(options, tell)
                    text = result if isinstance(result, str) else _rendered(result, options, tell)
            except expected as error:
                if not (is_live and has_answered):
                    sys.stderr.write(f"{parser.prog}: {visible(str(error))}\n")
                    return 2
                text = visible(f"waiting: {error}")
            print(f"{_CLEAR}{text}" if is_live else text, flush=is_live)
            if not is_live:
                return status
            has_answered = True
            time.sleep(live)
    except KeyboardInterrupt:
        if is_live:
            return status
        raise


@contextlib.contextmanager
def _shown_progress() -> Iterator[Tell]:
    """Show on stderr the progress of the block by a line of rich, where stderr is a terminal with colours.

    rich keeps what the block writes to sys.stderr meanwhile above the line. Text for stdout, which may be the same
    terminal, has to wait for the block's end.
    """
    if sys.stderr is None or (console := color_console(sys.stderr)) is None:
        yield silent
        return
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, transient=True, redirect_stdout=False) as live:

        def tell(what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
            amount = f" {done:,} of {total:,} {unit}" if total else f" {done:,} {unit}" if done else ""
            live.update(Text(visible(what) + amount))

        yield tell


def _rendered(result: Any, options: argparse.Namespace, tell: Tell) -> str:
    """Write the page of a result where one is asked for. Return the result as JSON or text, as asked."""
    wrote = write_page(getattr(options, "html", None), lambda: result.to_html(), tell)
    if options.json:
        return str(result.to_json())
    return f"{result.to_text()}\n\n{wrote}" if wrote else str(result.to_text())


def write_page(path: Path | None, page: Callable[[], str], tell: Tell) -> str:
    """Write the page where a path is given, and return the line that says so; else ""."""
    if path is None:
        return ""
    tell("drawing the page")
    path.write_text(page(), encoding="utf-8")
    return f"wrote {visible(str(path))}"


class Parser(argparse.ArgumentParser):
    """Parser of a command. Its error for an unknown flag names close ones; argparse lists the words that there are."""

    def __init__(self, name: str, description: str, notes: str) -> None:
        program, form = f"nanwatch {name}".rstrip(), argparse.RawDescriptionHelpFormatter
        super().__init__(program, description=description, epilog=notes, formatter_class=form)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit with status 2."""
        flag = message.removeprefix("unrecognized arguments: ").partition(" ")[0].partition("=")[0]
        if flag.startswith("--"):
            message += f"; {close_names(flag, list(self._option_string_actions), '--help lists the options')}"
        super().error(message)


def command_parser(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Return the parser of a command that prints for people, or with --json for programs."""
    parser = Parser(name, description, examples)
    words = "print one JSON document on stdout and nothing else"
    parser.add_argument("--json", action="store_true", help=words)
    return parser


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
        # A module is an object that is called with inputs.
        is_made = isinstance(target, type) or not isinstance(target, torch.nn.Module)
        return target() if callable(target) and is_made else target
    except Exception as error:
        # The traceback ends in this function where a name is missing, or where the maker wants an argument.
        is_ours = error.__traceback__ is not None and error.__traceback__.tb_next is None
        if not is_ours and (not isinstance(error, ModuleNotFoundError) or error.name != module_name):
            traceback.print_exc()
        needs_more = is_ours and isinstance(error, TypeError)
        hint = "; what makes it is called without arguments" if needs_more else ""
        raise UseError(f"{option} {spelt}: {type(error).__name__}: {error}{hint}") from None


# The default

_DOCTOR = """\
examples:
  nanwatch                      versions, devices, and what is missing, as `nanwatch doctor` says
  nanwatch --json               the same for programs: one JSON document on stdout
  NANWATCH_CPU=avx2 nanwatch    with the CPU part held at AVX2
  nanwatch replay --help        what a command does, and with which options
"""


def doctor_main(arguments: list[str], name: str = "doctor") -> int:
    """Run the command and return the exit status. Without a name its help lists the others."""
    description = "What is installed, which implementation serves which device, and why a part is missing."
    parser = command_parser(name, description, _DOCTOR)
    if not name:
        parser.add_argument("--version", action="version", version=f"nanwatch {__version__}")
        commands = "\n".join([f"  {command:<10}{summary}" for command, (_, summary) in COMMANDS.items()])
        parser.epilog = f"commands, each with a --help of its own:\n{commands}\n\n{parser.epilog}"
        parser.add_argument("command", nargs="?", metavar="COMMAND", choices=[*COMMANDS])
    options = parser.parse_args(arguments)
    if not name and options.command:
        parser.error(f"the command goes first: {parser.prog} {options.command} ...")
    lines = facts()
    if options.json:
        print(json.dumps(lines, indent=2))
    else:
        print("\n".join([f"{label:<16}{words}" for label, words in lines.items()]))
    return 0


def facts() -> dict[str, str]:
    """Return the lines of the answer by their labels, which are the members of the JSON document."""
    module: Any = _extension.C
    build, info = _extension.build, dict(module.build_info()) if module is not None else {}
    gpu = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda or 'none'}"
    lines = {
        "nanwatch": f"{__version__}, {_extension.__file__.rpartition('/numerics')[0]}",
        "python": f"{platform.python_version()}, {platform.platform()}",
        "torch": f"{torch.__version__}, {gpu}, {torch.get_num_threads()} threads",
        "compiled part": "loaded" if module is not None else f"MISSING: {_extension.reason}",
    }
    if module is not None:
        # A wheel's build names all the versions that it has a module for; the module knows its own.
        lines["built with"] = f"torch {info.get('torch')}, {build.get('compiler') or info.get('compiler')}"
        if " " in build.get("torch", ""):
            lines["also for"] = f"torch {build['torch'].replace(' ', ', ')}"
        lines["CUDA kernels"] = f"CUDA {build.get('cuda')}, {build.get('cuda_archs')}"
        if not module.cuda_compiled():
            lines["CUDA kernels"] = f"no: {build.get('cuda_reason', 'it was built without nvcc')}"
        levels = ", ".join(map(str, module.cpu_capabilities()))
        lines["CPU level"] = f"{module.cpu_capability()} (this machine can run {levels})"
        if warning := str(module.cpu_capability_warning()):
            lines["WARNING"] = warning
    elif not _extension.reason.startswith("switched off"):
        lines["without it"] = "every answer is the same, each takes 10 to 100 times longer"
        lines["to get it"] = f"{_extension.REBUILD}   (in the source tree, after curing the reason)"
    devices = [torch.device("cpu")]
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        devices += [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]
    return lines | {str(device): _implementation(device) for device in devices}


def _implementation(device: torch.device) -> str:
    """Return what serves the device, and why it is not native."""
    native: Any = _extension.C
    if native is not None and device.type == "cpu":
        return f"native ({native.cpu_capability()})"
    name = f": {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    if native is not None and device.type == "cuda" and native.cuda_compiled():
        return f"native{name}"
    reason = _extension.reason
    if native is not None:
        reason = f"there are no native kernels for {device.type}"
        if device.type == "cuda":
            reason = _extension.build.get("cuda_reason", "the compiled part has no CUDA kernels")
    return f"torch operations: {reason}{name}"
