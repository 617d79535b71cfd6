"""Kinds of options: what an option of `watch` accepts, and Trace and Audit, which have arguments of their own.

A kind is a function that takes the option's name and a value, and returns the value to keep, or raises TypeError or
ValueError. It takes text too, as the command line and the environment have nothing else, so that an option is spelt
alike everywhere.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, TypeAlias, TypeVar

from torch.optim.optimizer import Optimizer

from ..report.report import Report
from ..sinks.sink import Sink
from ..sinks.targets import ACCEPTED, FOLDER, factory_of, log_for
from ..trace.trace_file import Trace as TraceFile
from ..util.messages import shorten

OnNonfinite: TypeAlias = "Literal['raise', 'warn', 'record'] | Callable[[Report], object]"
_T = TypeVar("_T", "Trace", "Audit")
PARTS = ("weights", "buffers", "inputs", "outputs")
# Batches are counted in 64 bits. Sums and differences of two such numbers stay in them.
MAX_BATCH = 2**62 - 1
# Reading attention logits takes up to 5 % of a batch, and logits grow over thousands of batches. A check of replicas
# or an audit reads the weights once or twice, which is 0.5 % of a hundred steps.
_EVERY = 100
POLICIES = "raise|warn|record"
ROOT = "(root)"  # matches the model itself, whose name is empty
_BOOLS = {"true": True, "false": False}


def _check(is_right: Any, option: str, accepted: str, value: Any, error: type[Exception] = TypeError) -> None:
    if not is_right:
        raise error(f"{option} should be {accepted}, got {value!r}")


def whole(option: str, value: Any, least: int = 1, most: int = MAX_BATCH, *, beside: str = "") -> int:
    """Return `value` as an int, if it is a whole number from `least` to `most`, one of numpy's for example.

    `beside` names what else the option accepts, for the error.
    """
    try:
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{option} should be {beside}a whole number of at least {least}, got {value!r}")
    if not least <= number <= most:
        limit = f"at least {least}" if number < least else f"at most {most}"
        raise ValueError(f"{option} should be {limit}, got {shorten(number)}")
    return number


def every_nth(option: str, value: Any, default: int = _EVERY, beside: str = "") -> int:
    """Return N of an option that means every N-th: `default` for True, 0 for False and 0, which switch it off."""
    value = _BOOLS.get(value.lower(), value) if isinstance(value, str) else value
    beside = f"{beside}True, False or "
    return value * default if isinstance(value, bool) else whole(option, value, 0, beside=beside)


def flag(option: str, value: Any) -> bool:
    """Return True or False, which as text may also be 1 or 0."""
    known = {**_BOOLS, "1": True, "0": False}.get(value.lower()) if isinstance(value, str) else value
    _check(isinstance(known, bool), option, "True or False", value)
    return bool(known)


def flag_or_none(option: str, value: Any) -> bool | None:
    """Return True, False or None."""
    return None if value in (None, "none") else flag(option, value)


def one_of(words: Sequence[str], option: str, value: Any) -> str:
    _check(value in words, option, " or ".join(words), value, ValueError)
    return str(value)


def seconds(option: str, value: str) -> float:
    is_number = value.replace(".", "", 1).isdecimal()
    _check(is_number, option, "a number of seconds of at least 0", value, ValueError)
    return float(value)


def parts(value: Any) -> Any:
    """Return the parts of a text between commas, and any other value as it is."""
    return tuple(value.split(",")) if isinstance(value, str) else value


def patterns(option: str, value: Any) -> tuple[str, ...]:
    several = tuple(parts(value)) if isinstance(value, Iterable) else (None,)
    are_text = all(isinstance(pattern, str) for pattern in several)
    _check(are_text, option, "a pattern or several, such as 'encoder.block.*'", value)
    if "" in several:
        raise ValueError(f"{option} has an empty pattern; {ROOT!r} is the model itself, '*' is every module")
    return several


def allowed(option: str, value: Any) -> tuple[str, ...]:
    accepted = f"inf:MODULE or nan:MODULE, such as 'inf:mask*', or 'inf:{ROOT}' for the model itself"
    for entry in (entries := patterns(option, value)):
        _check(entry[:4] in ("inf:", "nan:") and entry[4:], option, accepted, entry, ValueError)
    return entries


def read_words(option: str, value: Any) -> tuple[str, ...]:
    """Return the words of "weights outputs", in the order in which a frame has them."""
    given = value.replace(",", " ").split() if isinstance(value, str) else value
    words = tuple(given) if isinstance(given, Iterable) else ()
    is_right = words and all(word in PARTS for word in words)
    _check(is_right, option, f"one or more words of {' '.join(PARTS)!r}", value, ValueError)
    return tuple(part for part in PARTS if part in words)


def to_path(option: str, value: Any) -> Path | None:
    """Return `value` as an absolute path at which something can be made, or None for None.

    Makes a nameless file in the first folder above it that exists, and leaves nothing behind. Raises ValueError where
    nothing can be written, TypeError for a value that is no path.
    """
    if value is None:
        return None
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    _check(text and isinstance(text, str) and "\0" not in text, option, "a path or None", value)
    folder = path = Path(text).expanduser().absolute()  # the run may change its folder
    try:
        # A trace gets a name of its own in its folder. Other folders are made when there is something to write.
        above = (path.parent,) if option == "trace" else (path, *path.parents)
        folder = next((folder for folder in above if folder.exists()), path.parent)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = f"nothing can be written in {str(folder)!r} ({error.strerror}); give another path"
        raise ValueError(f"{option} is {str(value)!r}, and {why}") from error
    return path


def to_policy(option: str, value: Any) -> Any:
    accepted = '"raise", "warn", "record" or a callable that takes the Report'
    _check(callable(value) or value in POLICIES.split("|"), option, accepted, value, ValueError)
    return value


def to_optimizer(option: str, value: Any) -> Optimizer | None:
    if value is not None and not isinstance(value, Optimizer):
        raise TypeError(f"{option} should be a torch.optim.Optimizer or None, got {type(value).__name__}")
    return value


def to_sinks(option: str, value: Any) -> tuple[Any, ...]:
    """Return the targets of sinks, each of them accepted; a folder of TensorBoard as an absolute path."""
    if isinstance(value, Sink) or not isinstance(value, str | Iterable) or log_for(value) is not None:
        value = (value,)
    targets = []
    for target in parts(value):
        name, _, words = target.partition(":") if isinstance(target, str) else ("", "", "")
        if not isinstance(target, str | Sink) and log_for(target) is None:
            raise TypeError(f"{option} should be {ACCEPTED}, or several of these, got {shorten(value)}")
        if name:
            try:
                factory_of(name)
            except ValueError as error:
                raise ValueError(f"{option} has {target!r}, and {error}") from None
        if name == "tensorboard" or isinstance(target, os.PathLike):
            target = to_path(option, words or FOLDER if name else target)
        targets.append(target)
    return tuple(targets)


def _to_batches(option: str, value: Any) -> frozenset[int]:
    numbers = parts(value)
    _check(isinstance(numbers, Iterable), option, "a collection of batch numbers such as (0, 3)", value)
    return frozenset(whole(f"each of {option}", batch, 0) for batch in numbers)


# Options with arguments of their own


def _check_fields(made: Any, owner: str, **kinds: Callable[[str, Any], Any]) -> None:
    for name, kind in kinds.items():
        object.__setattr__(made, name, kind(f"{name} of {owner}", getattr(made, name)))


@dataclass(frozen=True)
class Trace:
    """File that `watch(trace=...)` writes, with what is kept beside the range of each tensor. `Trace.open` reads one.

    Args:
        path: a Parquet file ("run.parquet") in a folder that exists. A path that is taken gets a number, and with
            several processes the rank: see `Watch.trace_path`.
        batches: numbers of the batches to write, from 0; () is every batch.
        counts: count zeros, subnormals, nans and infinities in each tensor. Reads each tensor once more.
        fingerprints: keep the `nanwatch.fingerprint` of each tensor, so that two runs can be compared bit by bit.
        sketches: in every n-th batch keep 32 numbers for each row (token) of an output, from which
            `nanwatch compare` estimates relative errors and cosines of two runs.

    All three wait for a GPU at each tensor that they read (docs/traces.md). `sketches=True` is every batch.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.ReLU()
        >>> with nanwatch.watch(model, trace=nanwatch.Trace("bits.parquet", fingerprints=True)):
        ...     output = model(torch.tensor([-1.0, 2.0]))
        >>> nanwatch.Trace.open("bits.parquet").batches
        (0,)
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    batches: Collection[int] = ()
    counts: bool = False
    fingerprints: bool = False
    sketches: int = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", to_path("trace", self.path))
        sketches = partial(every_nth, default=1)
        _check_fields(self, "a Trace", batches=_to_batches, counts=flag, fingerprints=flag, sketches=sketches)

    @staticmethod
    def open(path: str | os.PathLike[str]) -> TraceFile:
        """Open the trace at `path` to read it; TraceError for a file that is none."""
        return TraceFile.open(path)


@dataclass(frozen=True)
class Audit:
    """Audit of the optimizer's steps 1, 2, 3 and every n-th, for `watch(audit=...)`.

    Args:
        every: the distance between audited steps.
        frozen: glob patterns on the names of modules or weights that are meant to stay as they are, such as
            "backbone.*". A step that moves one is a finding.

    Examples:
        >>> import nanwatch
        >>> nanwatch.Audit(every=10, frozen="backbone.*")
        Audit(every=10, frozen=('backbone.*',))
    """

    every: int = _EVERY
    _: KW_ONLY
    frozen: str | Iterable[str] = ()

    def __post_init__(self) -> None:
        _check_fields(self, "an Audit", every=whole, frozen=patterns)


def to_trace(option: str, value: Any) -> Trace | None:
    is_path = isinstance(value, str | os.PathLike)
    _check(is_path or value is None or isinstance(value, Trace), option, "a path or a nanwatch.Trace", value)
    return _made_of(Trace, value) if is_path else value


def to_audit(option: str, value: Any) -> Audit | None:
    if isinstance(value, str) and "," in value:
        return _made_of(Audit, value)
    if value is None or isinstance(value, Audit):
        return value
    every = every_nth(option, value, beside="a nanwatch.Audit, ")
    return Audit(every) if every else None


def _made_of(kind: type[_T], value: Any) -> _T:
    """Return the Trace or Audit of text such as "run.parquet,fingerprints,batches=0+3", or of a single value."""
    first, *words = list[Any](value.split(",") if isinstance(value, str) else [value])
    pairs = [word.partition("=") for word in words]
    named: dict[str, Any] = {name: text.replace("+", ",") or "true" for name, _, text in pairs}
    accepted = [argument.name for argument in fields(kind)][1:]
    try:
        if unknown := [name for name in named if name not in accepted]:
            raise TypeError(f"{kind.__name__} has no {unknown[0]!r}; accepted are {', '.join(accepted)}")
        return kind(first, **named)
    except TypeError as error:
        raise ValueError(f"{value!r} is not understood: {error}") from None
