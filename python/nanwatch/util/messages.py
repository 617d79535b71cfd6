"""Messages for people: names from strangers spelt out, warnings at the user's own line, progress, missing packages.

Exceptions that nanwatch suppresses so that the user's run goes on are counted by reason, and logged.
`logging.getLogger("nanwatch").setLevel(logging.DEBUG)` shows each with its traceback. `counts` has the number of each
in this process.
"""

from __future__ import annotations

import difflib
import linecache
import logging
import os
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, TypeAlias


def visible(text: str) -> str:
    r"""Return `text` with an escape such as `\x1b` for each character that is not printable, as repr() spells it.

    All text that nanwatch prints, logs or writes for people goes through here, line by line: names of modules and
    classes, labels, notes and errors may hold anything. An escape sequence would colour or clear a terminal, a newline
    forge a line of a log, and a bidirectional mark turn text around. Letters of any script stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def with_utf8(text: str) -> str:
    """Return `text` with an escape for each lone surrogate: for C++ and Parquet, whose text is UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def spell(error: BaseException) -> str:
    """Return the class of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return visible(f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__)


def close_names(
    wanted: str, names: Iterable[str], otherwise: str = "see model.named_modules() for the names"
) -> str:
    """Return a hint for a misspelt name: the closest ones, else those in lower case, else where to look for names."""
    names = list(names)
    close = difflib.get_close_matches(wanted, names) or difflib.get_close_matches(wanted.lower(), names)
    return visible(f"close names: {', '.join(close)}") if close else otherwise


def near(path: Path) -> str:
    """Return a hint for a path that does not exist: names like it in its folder; "" where there are none."""
    try:
        hint = close_names(path.name, os.listdir(path.parent), "")
    except OSError:
        return f"; {path.parent} is no folder"
    return f"; {hint}" if hint else ""


# Wrappers put these before the names of the modules that they hold.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}


def without_wrappers(name: str) -> str:
    """Return the name of a module in the model itself, without the parts that DistributedDataParallel adds."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def module_name(name: str) -> str:
    """Return the name of a module for prose. The root has none of its own."""
    return visible(name) or "the root module"


def plural(count: int, singular: str, more: str = "") -> str:
    """Return a count with its noun."""
    return f"{count:,} {singular if count == 1 else more or f'{singular}s'}"


def first_few(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shorten(value: object) -> str:
    """Return `repr(value)`, cut to 60 characters; of a list or dict the length."""
    shown = f"{type(value).__name__} of {len(value)}" if isinstance(value, list | dict) else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep


def warn_user(message: str, *, may_raise: bool = True) -> None:
    """Warn of something in the user's run, at the user's own line; in a thread without one, at the main thread's.

    A filter of the user's may turn the warning into an exception. Pass `may_raise=False` where that would reach nobody,
    as in a thread of nanwatch's, or would take the place of another exception: the message then goes to stderr.
    """
    message, frame = visible(message), users_frame(sys._getframe(1))
    main = threading.main_thread().ident
    if frame is None and main is not None and main != threading.get_ident():
        frame = users_frame(sys._current_frames().get(main))
    names = vars(sys.modules["__main__"]) if frame is None else frame.f_globals
    file = names.get("__file__", "nanwatch") if frame is None else frame.f_code.co_filename
    # Without a frame the script of `nanwatch run` has ended, after its last line.
    line = max(1, len(linecache.getlines(file))) if frame is None else frame.f_lineno
    registry = names.setdefault("__warningregistry__", {})
    try:
        warnings.warn_explicit(
            message, RuntimeWarning, file, line, names.get("__name__", "<unknown>"), registry
        )
    except RuntimeWarning:
        if may_raise:
            raise
        sys.stderr.write(f"{message}\n")


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside nanwatch and torch, from this one outwards."""
    torch = sys.modules.get("torch")  # a trace is also written, and a verdict reached, without it
    torchs = os.path.dirname(str(torch.__file__)) + os.sep if torch is not None else _OWN
    skipped = (_OWN, torchs, threading.__file__, "<frozen ")  # the last are importlib and runpy
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return frame


# A run that goes on may fail for ever. After so many failures what is done about each, such as a re-run that writes a
# folder, gets rarer.
MANY = 20


def is_due(number: int) -> bool:
    """Return whether the failure of this number, from 1, is worked on: the first MANY, then at numbers that double."""
    rounds, rest = divmod(number, MANY)
    return number <= MANY or (rest == 0 and rounds.bit_count() == 1)


counts: Counter[str] = Counter()

_log = logging.getLogger("nanwatch")


def suppressed(reason: str) -> None:
    """Count the exception that is being handled under `reason`, and log it at debug level. Never raises."""
    counts[reason] += 1
    try:
        _log.debug("suppressed %s: %s", type(sys.exc_info()[1]).__name__, reason, exc_info=True)
    except Exception:  # a handler or a filter of the user's; there is nobody left to tell
        counts["the log refused a line"] += 1


@contextmanager
def suppressing(reason: str) -> Iterator[None]:
    """Suppress every Exception of the block, as `contextlib.suppress(Exception)` does, and count it."""
    try:
        yield
    except Exception:
        suppressed(reason)


# Callback for progress: what is being done, such as "reading a.parquet", and how much of it: `done` of `total` such
# units, where `total` is None if it is not known. What does long work calls it. Only a command shows the progress.
Tell: TypeAlias = Callable[..., object]


def silent(what: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
    """Ignore the progress."""


def color_console(file: TextIO) -> Any:
    """Return rich's console of a terminal that shows colours, by rich's judgement; None for others, or without rich."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=file)
    return None if not console.is_terminal or console.no_color or console.color_system is None else console


def needed(module: str, who: str, extra: str, instead: str = "") -> Any:
    """Import and return the module of that name. Raise ImportError, naming `who` needs its package, without it.

    `extra` is nanwatch's extra that has the package, with its version. `instead` is what there is without it, such as
    "leave color=False".
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        # A package that is there may lack one of its own.
        missing = error.name is None or error.name.partition(".")[0] == package
        why = "which is not installed" if missing else f"which could not be imported ({error})"
        # nanwatch itself is on no package index, so that `pip install 'nanwatch[...]'` would find nothing.
        raise ImportError(
            f"{who} needs the package `{package}`, {why}; pip install {package}, or in a clone of nanwatch"
            f" pip install --no-build-isolation '.[{extra}]'" + (f"; or {instead}" if instead else ""),
            name=package,
        ) from error
