"""Kinds of options: how each is checked, and how it is read from text."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable
from errno import EDQUOT, ENOSPC
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from ..sinks.sink import Sink
from ..sinks.trackers import ACCEPTED, FOLDER, factory_of, log_for
from ..util.reading import shorten

# Batches are counted in 64 bits. Sums and differences of two such numbers stay in them.
MAX_BATCH = 2**62 - 1
_MAX_SECONDS = 86_400


class Kind(NamedTuple):
    """Kind of option: `check(name, value)` returns the value to keep, or raises TypeError or ValueError.

    `read(text)` returns a value for `check`. It is None for a kind that only code can give.
    """

    check: Callable[[str, Any], Any]
    read: Callable[[str], Any] | None = None
    metavar: str = ""


def whole(option: str, value: Any, least: int, most: int = MAX_BATCH) -> int:
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


def every_n(option: str, value: Any, default: int) -> int:
    """Return N of an option that means every N-th: `default` for True, 0 for False and 0, which switch it off."""
    return value * default if isinstance(value, bool) else whole(option, value, 0)


def check_flag(option: str, value: Any) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{option} should be True or False, got {value!r}")
    return value


def check_words(option: str, value: Any, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of a text such as "weights outputs", each of which is known, in the order of `known`."""
    words = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(words, Iterable) or not all(isinstance(word, str) for word in words):
        raise TypeError(f"{option} should be words of {' '.join(known)!r}, got {value!r}")
    words = tuple(words)
    if not words or not {*words} <= {*known}:
        raise ValueError(f"{option} should be one or more words of {' '.join(known)!r}, got {value!r}")
    return tuple(word for word in known if word in words)


def check_patterns(option: str, value: Any) -> tuple[str, ...]:
    """Return one or several glob patterns as a tuple."""
    patterns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{option} should be a pattern or several, such as 'encoder.block.*', got {value!r}")
    return patterns


def check_batches(option: str, value: Any) -> frozenset[int]:
    """Return a collection of batch numbers as a set."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{option} should be a collection of batch numbers such as (0, 3), got {value!r}")
    return frozenset(whole(f"each of {option}", batch, 0) for batch in value)


def check_seconds(option: str, value: Any) -> float:
    """Return `value` as a float, if it is from 0 to a day."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{option} should be a number of seconds, 0 for none, got {value!r}") from None
    if not 0 <= seconds <= _MAX_SECONDS:
        raise ValueError(f"{option} should be from 0 to {_MAX_SECONDS:,} seconds, got {value}")
    return seconds


def check_place(option: str, value: Any, *, is_folder: bool = True) -> Path | None:
    """Return `value` as an absolute path at which something can be made, or None for None.

    Makes a nameless file in the first folder above it that exists, and leaves nothing behind. Raises ValueError where
    nothing can be written, TypeError for a value that is no path.
    """
    if value is None:
        return None
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
        # A link to nothing exists too, and no folder can be made in its place.
        folder = next(above for above in (folder, *folder.parents) if above.is_symlink() or above.exists())
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno in (ENOSPC, EDQUOT):  # there may be room by then
            return path
        why = f"nothing can be written in {str(folder)!r} ({error.strerror}); give another path"
        raise ValueError(f"{option} is {str(value)!r}, and {why}") from error
    return path


def check_sinks(option: str, value: Any) -> tuple[Any, ...]:
    """Return the targets of sinks, each of them accepted; a folder of TensorBoard as an absolute path."""
    targets = (value,) if _is_sink(value) else tuple(value) if isinstance(value, Iterable) else None
    if targets is None or not all(map(_is_sink, targets)):
        raise TypeError(f"{option} should be {ACCEPTED}, or several of these, got {shorten(value)}")
    return tuple(_check_sink(option, target) for target in targets)


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


def read_flag(text: str) -> Any:
    """Return True or False for a word that means one. Other text is left to the check."""
    return {"true": True, "1": True, "false": False, "0": False, "none": None}.get(text.lower(), text)


def read_number(text: str) -> Any:
    """Return a whole number, True or False. Other text is left to the check."""
    word = {"true": True, "false": False}.get(text.lower())
    return word if word is not None else int(text) if text.lstrip("-").isdigit() else text


def read_parts(text: str) -> tuple[str, ...]:
    """Return the parts between commas."""
    return tuple(filter(None, text.split(",")))


def read_arguments(text: str) -> tuple[str, dict[str, str]]:
    """Return the first part of "value,name,name=value", and the arguments behind it."""
    first, *rest = text.split(",")
    return first, {
        name: value if equals else "true" for name, equals, value in (part.partition("=") for part in rest)
    }
