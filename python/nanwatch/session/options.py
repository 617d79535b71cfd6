"""Options of `watch`, each declared once: its default, its check, its help and its flag.

The checks, the flags of `nanwatch run` and the table in docs/options.md are made from the fields of `Options`. `watch`
has an explicit signature for type checkers, which a test compares with the fields.
"""

from __future__ import annotations

import argparse
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from errno import EDQUOT, ENOSPC
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.wrapped_names import for_names
from ..monitoring.log_sinks import ACCEPTED, factory_of, log_for, named_sink
from ..monitoring.sinks import Sink
from ..recording.events import Check, Settings
from ..recording.notes import MaskedScores, masked_scores
from ..report.report import Report
from ..util.reading import shorten
from ..util.visible import close_names

OnNonfinite: TypeAlias = "Literal['raise', 'warn', 'record'] | Callable[[Report], object]"
SWITCH = "NANWATCH"
# A frame of a small call takes 2 kB and is made into text when a report is written: more than this is no report.
MAX_FRAMES = 1_000_000
# Batches are counted in 64 bits. Sums and differences of two such numbers stay in them.
MAX_BATCH = 2**62 - 1
_MAX_SECONDS = 86_400
# An exact reading takes up to 5 % of its batch. Growth is a matter of thousands of batches.
_ATTENTION_EVERY = 100


class _Kind(NamedTuple):
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
    is_folder = option == "output_dir"
    kind = "folder" if is_folder else "file such as 'run.parquet', or of a folder,"
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else ""
    if not text or not isinstance(text, str):
        raise TypeError(f"{option} should be the path of a {kind} or None, got {value!r}")
    path = Path(value)
    if is_folder and os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"{option} should be a folder, and {str(path)!r} is none")
    if not is_folder and not path.name:
        raise ValueError(f"{option} should be the path of a file or a folder with a name, got {value!r}")
    path = path.absolute()  # the run may change its folder
    folder = path if is_folder else path.parent
    try:
        folder = next(one for one in (folder, *folder.parents) if one.exists())
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


def _check_enabled(option: str, value: Any) -> bool:
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


def _check_patterns(option: str, value: Any) -> tuple[str, ...]:
    several = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
    if several is None or not all(isinstance(pattern, str) for pattern in several):
        raise TypeError(f"{option} should be a pattern or several, such as 'encoder.block.*', got {value!r}")
    return several


def _check_seconds(option: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{option} should be a number of seconds, 0 for none, got {value!r}")
    if not 0 <= value <= _MAX_SECONDS:
        raise ValueError(f"{option} should be from 0 to {_MAX_SECONDS:,} seconds, got {value}")
    return float(value)


def _check_log_target(option: str, value: Any) -> Any:
    if isinstance(value, str | os.PathLike):
        return check_place(option, value)
    if value is not None and log_for(value) is None:
        raise TypeError(f"{option} should be {ACCEPTED}, got {shorten(value)}")
    return value


def check_sinks(option: str, value: Any) -> tuple[str | Sink, ...]:
    """Return the sinks, if each is a Sink or begins with the name of one."""
    several = (
        (value,) if isinstance(value, str | Sink) else tuple(value) if isinstance(value, Iterable) else None
    )
    if several is None or not all(isinstance(one, str | Sink) for one in several):
        raise TypeError(
            f"{option} should be a nanwatch.Sink, a name such as 'tensorboard:runs/a', or several, got {shorten(value)}"
        )
    for one in several:
        if isinstance(one, str):
            factory_of(one.partition(":")[0])
    return several


def _whole_from(least: int, most: int = MAX_BATCH) -> _Kind:
    return _Kind(lambda option, value: whole(option, value, least, most), {"type": int, "metavar": "N"})


def _every_or_flag(when_true: int) -> _Kind:
    """Return the kind of a distance between batches, which is 0 for False and that number for True."""

    def check(option: str, value: Any) -> int:
        return value * when_true if isinstance(value, bool) else whole(option, value, 1, MAX_BATCH)

    return _whole_from(1)._replace(check=check)


def _choice(words: tuple[str, ...], accepted: str, *, or_callable: bool = False) -> _Kind:
    def check(option: str, value: Any) -> Any:
        if not (or_callable and callable(value)) and value not in words:
            raise ValueError(f"{option} should be {accepted}, got {value!r}")
        return value

    return _Kind(check, {"choices": words})


def _object(accepted: str, is_accepted: Callable[[Any], bool]) -> _Kind:
    def check(option: str, value: Any) -> Any:
        if value is not None and not is_accepted(value):
            raise TypeError(f"{option} should be {accepted} or None, got {type(value).__name__}")
        return value

    return _Kind(check)


_FLAG = _Kind(check_flag, {"action": argparse.BooleanOptionalAction})
_FLAG_OR_NONE = _Kind(lambda option, value: check_flag(option, value, or_none=True), _FLAG.flag)
_PATTERNS = _Kind(_check_patterns, {"action": "append", "metavar": "PATTERN"})
_BATCHES = _Kind(_check_batches, {"type": _parse_batches, "metavar": "N,N"})
_BATCH_OR_NONE = _Kind(
    lambda option, value: None if value is None else whole(option, value, 0, MAX_BATCH),
    {"type": int, "metavar": "N"},
)


def _option(default: Any, kind: _Kind, text: str, *, also: str = "", needs: str = "") -> Any:
    """Declare an option.

    `text` is the help, `also` what Python code may give beyond it. `needs` says without which options this one has no
    effect, as in "weights or buffers".
    """
    return field(default=default, metadata={**kind._asdict(), "text": text, "also": also, "needs": needs})


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `watch`, checked."""

    max_frames: int = _option(
        21, _whole_from(1, MAX_FRAMES), "keep the latest N frames, calls of modules, for the report"
    )
    on_nonfinite: OnNonfinite = _option(
        "raise",
        _choice(
            ("raise", "warn", "record"),
            '"raise", "warn", "record" or a callable that takes the Report',
            or_callable=True,
        ),
        "at a nan or an inf raise NonFiniteError, warn and run on, or only record it",
        also="or call a function with the Report",
    )
    check: Check = _option(
        "auto",
        _choice(("auto", "module", "batch", "async"), '"auto", "module", "batch" or "async"'),
        "act at the module that holds the value, at the end of the batch, or, async, when a GPU has delivered; auto is"
        " module on a CPU and batch on a GPU",
    )
    weights: bool = _option(True, _FLAG, "read weights")
    buffers: bool = _option(True, _FLAG, "read buffers of floating point")
    inputs: bool = _option(True, _FLAG, "read inputs")
    outputs: bool = _option(True, _FLAG, "read outputs")
    gradients: bool = _option(
        False, _FLAG, "read the gradients of every backward, and stop before a step takes a bad one"
    )
    counts: bool = _option(
        False,
        _FLAG,
        "count zeros, subnormals, nans and infinities of every tensor, for reports and traces (slow)",
    )
    fingerprints: bool = _option(
        False, _FLAG, "keep a hash of the bits of every tensor, with which 'nanwatch diff' compares two runs"
    )
    statistics: int = _option(
        False,
        _every_or_flag(1),
        "keep mean, rms, kurtosis and the share beyond 6 sigma of every tensor in batches 0, N, 2N, ...",
        also="True is 1",
    )
    attention: int = _option(
        False,
        _every_or_flag(_ATTENTION_EVERY),
        "read a bound on the attention logits in every batch, and the largest ones by head in batches 0, N, 2N, ...",
        also="True is 100",
        needs="outputs=True",
    )
    spikes: bool = _option(
        False,
        _FLAG,
        "report what left its own history when the loss or the gradients jump; reads gradients too",
    )
    max_skipped_steps: int = _option(
        20,
        _whole_from(0),
        "act when GradScaler has skipped more than N steps in a row",
        needs="gradients=True",
    )
    scaler: Any = _option(
        None,
        _object("a torch.amp.GradScaler", lambda value: callable(getattr(value, "get_scale", None))),
        "the GradScaler whose scale is told with each skipped step; None looks for the one in use",
        needs="gradients=True",
    )
    optimizer: Optimizer | None = _option(
        None,
        _object("a torch.optim.Optimizer", lambda value: isinstance(value, Optimizer)),
        "an optimizer whose state is read after each of its steps",
    )
    include: tuple[str, ...] = _option(
        (), _PATTERNS, "watch only modules whose name matches, such as 'encoder.*'"
    )
    exclude: tuple[str, ...] = _option((), _PATTERNS, "do not watch modules whose name matches")
    allow_inf: tuple[str, ...] = _option(
        (), _PATTERNS, "infinities are meant in modules whose name matches; a nan still counts"
    )
    every: int = _option(1, _whole_from(1), "read only the batches 0, N, 2N, ...")
    reread_weights: int = _option(
        64,
        _whole_from(1),
        "read a weight again after N batches, though nothing says that it changed",
        needs="weights or buffers",
    )
    trace_batches: frozenset[int] = _option(
        (), _BATCHES, "print the frames of these batches on stdout, or write only them to the trace"
    )
    trace: Path | None = _option(
        None,
        _Kind(check_place, {"metavar": "PATH"}),
        "write every frame into this Parquet file, for 'nanwatch show', 'diff' and 'formats'",
    )
    sketches: int = _option(
        0,
        _whole_from(0),
        "in the batches 0, N, 2N, ... write each row (token) of an output to the trace as 32 numbers, with which"
        " 'nanwatch diff' estimates relative errors; 0 writes none",
        needs="trace=",
    )
    log_to: Any = _option(
        None,
        _Kind(_check_log_target, {"metavar": "DIR"}),
        "log headroom, ranges and forecasts for TensorBoard into this folder",
        also="or to a SummaryWriter, a run of wandb or a function",
    )
    sinks: tuple[str | Sink, ...] = _option(
        (),
        _Kind(check_sinks, {"action": "append", "metavar": "NAME"}),
        "tell this sink of batches, failures, forecasts and spikes, such as tensorboard:runs/a",
        also="or objects of nanwatch.Sink",
    )
    log_every: int = _option(
        50, _whole_from(1), "log one in N batches, and sum up one for sinks", needs="log_to= or sinks="
    )
    abort_after_batch: int | None = _option(
        None, _BATCH_OR_NONE, "end the run after batch N", also="with BatchLimitError"
    )
    forecast: bool = _option(True, _FLAG, "warn of tensors that lose headroom and will overflow soon")
    rerun: bool | None = _option(
        None,
        _FLAG_OR_NONE,
        "run a failed batch again for the operation and cures; by default with on_nonfinite raise or a function",
    )
    output_dir: Path | None = _option(
        None,
        _Kind(check_place, {"metavar": "DIR"}),
        "write each failure's report (text, JSON, HTML) and capsule into this folder",
    )
    peer_timeout: float = _option(
        30.0,
        _Kind(_check_seconds, {"type": float, "metavar": "S"}),
        "with several ranks: wait at most S seconds for all to agree on where it began, 0 for none",
    )
    enabled: bool = _option(
        True,
        _Kind(_check_enabled),
        "False makes a Watch that watches nothing; NANWATCH=0 or NANWATCH=1 goes first",
    )

    @property
    def parts(self) -> str:
        """The letters of the tensors to read: weights, buffers, inputs, outputs."""
        wanted = {"w": self.weights, "b": self.buffers, "i": self.inputs, "o": self.outputs}
        return "".join(letter for letter, is_wanted in wanted.items() if is_wanted)

    def observes(self, name: str) -> bool:
        """Return whether the calls of the module of this name are recorded."""
        return (not self.include or _matches(name, self.include)) and not _matches(name, self.exclude)

    def allows_inf(self, name: str, module: nn.Module) -> bool | MaskedScores:
        """Return whether infinities in this module are meant, or the masked scores that are, of a softmax."""
        return _matches(name, self.allow_inf) or masked_scores(module, self.inputs)

    def named_sinks(self) -> list[tuple[str, Sink]]:
        """Return the sinks that `log_to` and `sinks` mean, each with its name for the user."""
        log = None if self.log_to is None else log_for(self.log_to)
        sinks: list[tuple[str, Sink]] = [] if log is None else [("log_to=", log(self.log_to))]
        for one in self.sinks:
            sink, name = (named_sink(one), one) if isinstance(one, str) else (one, type(one).__name__)
            sinks.append((f"the sink {name}", sink))
        return sinks

    def recorder_settings(self, max_frames: int, **more: bool) -> Settings:
        """Return the settings of a recorder for these options; it may hold more frames than are shown."""
        shared = {one.name: getattr(self, one.name) for one in fields(Settings) if hasattr(self, one.name)}
        return Settings(**{**shared, **more, "max_frames": max_frames, "traced": tuple(self.trace_batches)})


def check_options(names: Sequence[str], given: dict[str, Any]) -> Options:
    """Return the options for a model whose modules have these names, or raise TypeError or ValueError."""
    values = {one.name: one.metadata["check"](one.name, given[one.name]) for one in fields(Options)}
    for option in ("include", "exclude", "allow_inf"):
        values[option] = tuple(for_names(pattern, names) for pattern in values[option])
    values["gradients"] |= values["spikes"]
    options = Options(**values)
    if not any((options.weights, options.buffers, options.inputs, options.outputs)):
        raise ValueError("weights, buffers, inputs and outputs are all False; leave one of them True")
    if options.gradients and not options.outputs:
        raise ValueError("gradients=True follows the graph from the outputs of modules; leave outputs=True")
    if left_out := sorted(batch for batch in options.trace_batches if batch % options.every):
        listed = ", ".join(map(str, left_out[:5])) + (", ..." if len(left_out) > 5 else "")
        raise ValueError(
            f"trace_batches has {listed}, and every={options.every} looks only at batches whose number is a multiple"
            f" of {options.every}; trace such batches, or set every=1"
        )
    for one in fields(Options):
        _check_effect(one, options)
    for option in ("include", "allow_inf"):
        for pattern in getattr(options, option):
            if not any(fnmatchcase(name, pattern) for name in names):
                close = close_names(pattern, names)
                raise ValueError(f"{option} pattern {pattern!r} matches no module; {close}")
    if not any(options.observes(name) for name in names):
        raise ValueError(
            f"include={options.include!r} and exclude={options.exclude!r} leave no module to watch; loosen one of them"
        )
    return options


def _check_effect(one: Field[Any], options: Options) -> None:
    """Raise ValueError for an option that was set and does nothing by itself."""
    needed = one.metadata["needs"]
    if not needed or getattr(options, one.name) == one.default:
        return
    values = [getattr(options, word.partition("=")[0]) for word in needed.split(" or ")]
    if all(value is None or value is False or value == () for value in values):
        raise ValueError(f"{one.name} has no effect without {needed}; set that too, or leave {one.name} out")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
