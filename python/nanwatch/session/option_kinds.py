"""Kinds of options: the check of a value, and the flag of `nanwatch run`."""

from __future__ import annotations

import argparse
import operator
import os
from collections.abc import Callable, Iterable
from errno import EDQUOT, ENOSPC
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from ..sinks.logs import ACCEPTED, FOLDER, factory_of, log_for
from ..sinks.sink import Sink
from ..util.reading import shorten

SWITCH = "NANWATCH"
# Batches are counted in 64 bits. Sums and differences of two such numbers stay in them.
MAX_BATCH = 2**62 - 1
_MAX_SECONDS = 86_400


class Kind(NamedTuple):
    """Kind of option: `check(name, value)` returns the value to keep, or raises TypeError or ValueError.

    `flag` is what `nanwatch run` passes to argparse: nothing for an option that has no flag.
    """

    check: Callable[[str, Any], Any]
    flag: dict[str, Any] = {}  # noqa: RUF012  (nobody writes to it)


def whole(option: str, value: Any, least: int, most: int) -> int:
    """Return `value` as an int, if it is a whole number from `least` to `most`, one of numpy's for example."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{option} should be a whole number of at least {least}, got {value!r}")
    if number < least:
        raise ValueError(f"{option} should be at least {least}, got {number}")
    if number > most:
        # Python refuses to spell an int of more than 4300 digits.
        spelt = str(number) if number < 10**40 else f"a number of {number.bit_length()} bits"
        raise ValueError(f"{option} should be at most {most}, got {spelt}")
    return number


def check_place(option: str, value: Any) -> Path | None:
    """Return `value` as an absolute path at which something can be made, or None for None.

    Makes a nameless file in the first folder above it that exists, and leaves nothing behind. Raises ValueError where
    nothing can be written, TypeError for a value that is no path.
    """
    if value is None:
        return None
    is_folder = option != "trace"
    kind = "folder" if is_folder else "file such as 'run.parquet', or of a folder,"
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not text or not isinstance(text, str) or "\0" in text:
        raise TypeError(f"{option} should be the path of a {kind} or None, got {value!r}")
    path = Path(os.path.expanduser(text))
    if is_folder and os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"{option} should be a folder, and {str(path)!r} is none")
    if not is_folder and not path.name:
        raise ValueError(f"{option} should be the path of a file or a folder with a name, got {value!r}")
    path = path.absolute()  # the run may change its folder
    folder = path if is_folder else path.parent
    try:
        # A link to nothing is there too, and no folder can be made in its place.
        folder = next(one for one in (folder, *folder.parents) if one.is_symlink() or one.exists())
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):  # there may be room by then
            return path
        why = f"nothing can be written in {str(folder)!r} ({error.strerror}); give another path"
        raise ValueError(f"{option} is {str(value)!r}, and {why}") from error
    return path


def check_flag(option: str, value: Any, *, or_none: bool = False) -> Any:
    """Return `value` if it is True or False, or None where that is accepted."""
    if not isinstance(value, bool) and not (or_none and value is None):
        accepted = "True, False or None" if or_none else "True or False"
        raise TypeError(f"{option} should be {accepted}, got {value!r}")
    return value


def check_enabled(option: str, value: Any) -> bool:
    """Return what the environment says, which goes before the code."""
    enabled, word = check_flag(option, value), os.environ.get(SWITCH, "")
    if word not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}={word!r} is not understood; set it to 1 (watch) or 0 (do not watch)")
    return enabled if word == "" else word == "1"


def _check_batches(option: str, value: Any) -> frozenset[int]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{option} should be a collection of batch numbers such as (0, 3), got {value!r}")
    return frozenset(whole(f"each of {option}", batch, 0, MAX_BATCH) for batch in value)


def _parse_batches(value: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in value.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} should be batch numbers such as 0,3") from None


def _parse_every(value: str) -> int:
    try:
        return {"true": True, "false": False}[value] if value.isalpha() else int(value)
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{value!r} should be a whole number, true or false") from None


def _check_texts(option: str, value: Any) -> tuple[str, ...]:
    several = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
    if several is None or not all(isinstance(text, str) for text in several):
        raise TypeError(f"{option} should be a pattern or several, such as 'encoder.block.*', got {value!r}")
    return several


def check_seconds(option: str, value: Any) -> float:
    """Return `value` as a float, if it is from 0 to a day."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{option} should be a number of seconds, 0 for none, got {value!r}")
    if not 0 <= value <= _MAX_SECONDS:
        raise ValueError(f"{option} should be from 0 to {_MAX_SECONDS:,} seconds, got {value}")
    return float(value)


def check_sinks(option: str, value: Any) -> tuple[Any, ...]:
    """Return the targets of sinks, each of them accepted; a folder of TensorBoard as an absolute path."""
    several = (value,) if _is_sink(value) else tuple(value) if isinstance(value, Iterable) else None
    if several is None or not all(map(_is_sink, several)):
        raise TypeError(f"{option} should be {ACCEPTED}, or several of these, got {shorten(value)}")
    return tuple(_check_sink(option, target) for target in several)


def _is_sink(target: Any) -> bool:
    return isinstance(target, str | Sink) or log_for(target) is not None


def _check_sink(option: str, target: Any) -> Any:
    if isinstance(target, os.PathLike):
        return check_place(option, target)
    if not isinstance(target, str):
        return target
    name, _, words = target.partition(":")
    try:
        factory_of(name)
    except ValueError as error:
        raise ValueError(f"{option} has {target!r}, and {error}") from None
    return check_place(option, words or FOLDER) if name == "tensorboard" else target


def whole_from(least: int, most: int = MAX_BATCH) -> Kind:
    """Return the kind of a whole number."""
    return Kind(lambda option, value: whole(option, value, least, most), {"type": int, "metavar": "N"})


def every_or_flag(when_true: int = 1) -> Kind:
    """Return the kind of a distance between batches, which is 0 for False and that number for True."""

    def check(option: str, value: Any) -> int:
        return value * when_true if isinstance(value, bool) else whole(option, value, 1, MAX_BATCH)

    return Kind(check, {"type": _parse_every, "metavar": "N"})


def choice(words: tuple[str, ...], accepted: str, *, or_callable: bool = False) -> Kind:
    """Return the kind of one of these words, which errors spell as `accepted`."""

    def check(option: str, value: Any) -> Any:
        if not (or_callable and callable(value)) and value not in words:
            raise ValueError(f"{option} should be {accepted}, got {value!r}")
        return value

    return Kind(check, {"choices": words})


def given_object(accepted: str, is_accepted: Callable[[Any], bool]) -> Kind:
    """Return the kind of an object that only code can give."""

    def check(option: str, value: Any) -> Any:
        if value is not None and not is_accepted(value):
            raise TypeError(f"{option} should be {accepted} or None, got {type(value).__name__}")
        return value

    return Kind(check)


FLAG = Kind(check_flag, {"action": argparse.BooleanOptionalAction})
FLAG_OR_NONE = Kind(lambda option, value: check_flag(option, value, or_none=True), FLAG.flag)
PATTERNS = Kind(_check_texts, {"action": "append", "metavar": "PATTERN"})
BATCHES = Kind(_check_batches, {"type": _parse_batches, "metavar": "N,N"})
BATCH_OR_NONE = Kind(
    lambda option, value: None if value is None else whole(option, value, 0, MAX_BATCH),
    {"type": int, "metavar": "N"},
)
