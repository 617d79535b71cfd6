"""Options of `watch`: `Options` declares each once, with its default, what it accepts and a line of help.

The flags of `nanwatch run`, NANWATCH_OPTIONS and docs/options.md are made from it. A kind is a function that takes the
option's name and a value, and returns the value to keep, or raises TypeError or ValueError. It takes text too, as the
command line and the environment have nothing else, so that an option is spelt alike everywhere.
"""

from __future__ import annotations

import operator
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, TypeAlias, TypeVar

from torch import nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.wrapped_names import for_names
from ..recording.events import ActAt, Settings
from ..recording.masks import Excuses, excuses
from ..report.report import Report
from ..sinks.sink import Sink
from ..sinks.trackers import ACCEPTED, FOLDER, factory_of, log_for
from ..trace.columns import arrow
from ..trace.trace_file import Trace as TraceFile
from ..util.visible import close_names, first_few, shorten

OnNonfinite: TypeAlias = "Literal['raise', 'warn', 'record'] | Callable[[Report], object]"
_T = TypeVar("_T", "Trace", "Audit")
PARTS = ("weights", "buffers", "inputs", "outputs")
VARIABLE, SWITCH = "NANWATCH_OPTIONS", "NANWATCH"
# Batches are counted in 64 bits. Sums and differences of two such numbers stay in them.
MAX_BATCH = 2**62 - 1
# An exact reading of attention logits takes up to 5 % of its batch, and growth is a matter of thousands of batches.
# A check of replicas and an audit read the weights once, or twice, which is 0.5 % of a hundred steps.
_EVERY = 100
_POLICIES = "raise|warn|record"
ROOT = "(root)"  # matches the model itself, whose name is empty
_BOOLS = {"true": True, "false": False}

# Kinds of options


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


def _every_nth(option: str, value: Any, default: int = _EVERY, beside: str = "") -> int:
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


def _one_of(words: Sequence[str], option: str, value: Any) -> str:
    _check(value in words, option, " or ".join(words), value, ValueError)
    return str(value)


def _seconds(option: str, value: str) -> float:
    is_number = value.replace(".", "", 1).isdecimal()
    _check(is_number, option, "a number of seconds of at least 0", value, ValueError)
    return float(value)


def parts(value: Any) -> Any:
    """Return the parts of a text between commas, and any other value as it is."""
    return tuple(value.split(",")) if isinstance(value, str) else value


def _patterns(option: str, value: Any) -> tuple[str, ...]:
    several = tuple(parts(value)) if isinstance(value, Iterable) else (None,)
    are_text = all(isinstance(pattern, str) for pattern in several)
    _check(are_text, option, "a pattern or several, such as 'encoder.block.*'", value)
    if "" in several:
        raise ValueError(f"{option} has an empty pattern; {ROOT!r} is the model itself, '*' is every module")
    return several


def _allowed(option: str, value: Any) -> tuple[str, ...]:
    accepted = f"inf:MODULE or nan:MODULE, such as 'inf:mask*', or 'inf:{ROOT}' for the model itself"
    for entry in (entries := _patterns(option, value)):
        _check(entry[:4] in ("inf:", "nan:") and entry[4:], option, accepted, entry, ValueError)
    return entries


def _read_words(option: str, value: Any) -> tuple[str, ...]:
    """Return the words of "weights outputs", in the order in which a frame has them."""
    given = value.replace(",", " ").split() if isinstance(value, str) else value
    words = tuple(given) if isinstance(given, Iterable) else ()
    is_right = words and all(word in PARTS for word in words)
    _check(is_right, option, f"one or more words of {' '.join(PARTS)!r}", value, ValueError)
    return tuple(part for part in PARTS if part in words)


def _to_path(option: str, value: Any) -> Path | None:
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


def _to_policy(option: str, value: Any) -> Any:
    accepted = '"raise", "warn", "record" or a callable that takes the Report'
    _check(callable(value) or value in _POLICIES.split("|"), option, accepted, value, ValueError)
    return value


def _to_optimizer(option: str, value: Any) -> Optimizer | None:
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
            target = _to_path(option, words or FOLDER if name else target)
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
        object.__setattr__(self, "path", _to_path("trace", self.path))
        sketches = partial(_every_nth, default=1)
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
        _check_fields(self, "an Audit", every=whole, frozen=_patterns)


def _to_trace(option: str, value: Any) -> Trace | None:
    is_path = isinstance(value, str | os.PathLike)
    _check(is_path or value is None or isinstance(value, Trace), option, "a path or a nanwatch.Trace", value)
    return _made_of(Trace, value) if is_path else value


def _to_audit(option: str, value: Any) -> Audit | None:
    if isinstance(value, str) and "," in value:
        return _made_of(Audit, value)
    if value is None or isinstance(value, Audit):
        return value
    every = _every_nth(option, value, beside="a nanwatch.Audit, ")
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


# The declaration


def _option(default: Any, kind: Callable[[str, Any], Any], text: str, metavar: str = "") -> Any:
    """Declare an option of `watch`; `text` is its help, `metavar` stands for its value in that of `nanwatch run`."""
    return field(default=default, metadata={"kind": kind, "text": text, "metavar": metavar})


def _setting(default: Any, variable: str, kind: Callable[[str, str], Any]) -> Any:
    """Declare a setting that a variable of the environment changes, in one program of a hundred."""
    return field(default=default, metadata={"kind": kind, "variable": variable})


@dataclass(frozen=True)
class Options:
    """The options of `watch`, checked."""

    read: tuple[str, ...] = _option(PARTS, _read_words, "which tensors to read in the forward", "WORDS")
    gradients: bool = _option(False, flag, "read gradients too, and stop a step that would take a bad one")
    optimizer: Optimizer | None = _option(None, _to_optimizer, "read this optimizer's state after each step")
    modules: tuple[str, ...] = _option((), _patterns, "watch only modules named like 'encoder.*'", "PATTERN")
    ignore_modules: tuple[str, ...] = _option((), _patterns, "do not watch modules named so", "PATTERN")
    every: int = _option(1, whole, "read only every N-th batch", "N")
    # A frame of a small call takes 2 kB, and a report writes it as text: more than this is no report.
    max_frames: int = _option(
        21, partial(whole, most=1_000_000), "keep the latest N calls of modules for the report", "N"
    )
    on_nonfinite: OnNonfinite = _option(
        "raise",
        _to_policy,
        "at a nan or an inf: raise, warn, or only record; code may give a function",
        _POLICIES,
    )
    allow: tuple[str, ...] = _option(
        (), _allowed, "infinities or nans that are meant, by module: 'inf:mask*', 'nan:embed'", "VALUE:NAME"
    )
    rerun: bool | None = _option(None, flag_or_none, "run a failed batch again to find operation and cure")
    output_dir: Path | None = _option(None, _to_path, "a folder for each failure's report and capsule", "DIR")
    trace: Trace | None = _option(None, _to_trace, "a Parquet file for the range of every tensor", "PATH")
    sinks: tuple[Any, ...] = _option(
        (), to_sinks, "send what is found to a tracker: tensorboard:runs/a, wandb, slack:URL", "NAME"
    )
    black_box: bool | None = _option(
        None, flag_or_none, "keep the latest calls in a file that outlives the process; on with output_dir"
    )
    forecast: bool = _option(True, flag, "warn of tensors that lose headroom and will overflow soon")
    spikes: bool = _option(
        False, flag, "name what left its history when loss or gradients jump; reads gradients"
    )
    audit: Audit | None = _option(
        None, _to_audit, "audit steps 1, 2, 3 and every N-th: weights that rest, or are frozen and move", "N"
    )
    replicas: int = _option(False, _every_nth, "every N steps compare to the bit what ranks hold alike", "N")
    attention: int = _option(
        False, _every_nth, "every N batches read each head's largest attention logit", "N"
    )
    guard_checkpoints: bool = _option(False, flag, "write a bad checkpoint beside the good one")

    enabled: bool = _setting(True, SWITCH, lambda variable, text: _one_of(("0", "1"), variable, text) == "1")
    act_at: ActAt = _setting("auto", "NANWATCH_ACT_AT", partial(_one_of, ("auto", "module", "batch")))
    peer_timeout: float = _setting(30.0, "NANWATCH_PEER_TIMEOUT", _seconds)
    stall_timeout: float | None = _setting(None, "NANWATCH_STALL_TIMEOUT", _seconds)
    rerun_in: str = _setting("child", "NANWATCH_RERUN", partial(_one_of, ("in-process", "child")))
    scaler: Any = None  # a trainer's
    max_skipped_steps: int = 20

    @property
    def acts(self) -> bool:
        """True if the user gets the report of each failure. Otherwise the run goes on by itself."""
        return self.on_nonfinite == "raise" or callable(self.on_nonfinite)

    @property
    def reruns(self) -> bool:
        """True if a failed batch is run again. "warn" and "record" promise a run that goes on without a pause."""
        return self.acts if self.rerun is None else self.rerun

    def observes(self, name: str) -> bool:
        """Return whether the calls of the module of this name are recorded."""
        return (not self.modules or _matches(name, self.modules)) and not _matches(name, self.ignore_modules)

    def is_frozen(self, name: str) -> bool:
        """Return whether the weight, or the module that has it, is meant to stay as it is."""
        frozen, words = () if self.audit is None else self.audit.frozen, name.split(".")
        return any(_matches(".".join(words[: i + 1]), frozen) for i in range(len(words)))

    def allows(self, value: Literal["inf", "nan"], name: str) -> bool:
        """Return whether this value is meant in the module of this name."""
        return _matches(name, [entry[4:] for entry in self.allow if entry.startswith(value)])

    def excuses(self, name: str, module: nn.Module) -> bool | Excuses:
        """Return whether infinities in this module are meant, or the judge of a module that may hold masks or nans."""
        inf, nan = self.allows("inf", name), self.allows("nan", name)
        return excuses(module, inf=inf, nan=nan, reads_inputs="inputs" in self.read)

    @property
    def trace_batches(self) -> Collection[int]:
        """The batches to trace, () for every one."""
        return () if self.trace is None else self.trace.batches

    def recorder_settings(self, max_frames: int = 1) -> Settings:
        """Return the settings of a recorder for these options; it may hold more frames than are shown."""
        # Most have the name of an option or of an argument of Trace.
        values = vars(self) | ({} if self.trace is None else vars(self.trace))
        values |= {part: part in self.read for part in PARTS} | {"traced": tuple(self.trace_batches)}
        values |= {"max_frames": max_frames, "black_box": bool(self.black_box)}
        return Settings(**{name: values[name] for name in Settings.__slots__ if name in values})

    def for_model(
        self, names: Sequence[str], weights: Iterable[str] = (), *, must_match: bool = True
    ) -> Options:
        """Return the options with patterns on these names of modules and weights, without a wrapper's prefix.

        Raises ValueError for a pattern that matches nothing, of `modules` only where not `must_match`, and where no
        module is left.
        """

        def fitted(option: str, entries: Iterable[str], names: Sequence[str] = names) -> tuple[str, ...]:
            length, patterns = len("inf:") if option == "allow" else 0, list[str]()
            for entry in entries:
                pattern = for_names(entry[length:], names) or ROOT
                has_match = any(_matches(name, [pattern]) for name in names)
                if not has_match and (must_match or option == "modules"):
                    what = "no module and no weight" if option == "frozen" else "no module"
                    hint = close_names(pattern, names)
                    raise ValueError(f"{option} pattern {entry!r} matches {what}; {hint}")
                patterns.append(entry[:length] + pattern)
            return tuple(patterns)

        with_patterns = "modules", "ignore_modules", "allow"
        changed: Any = {name: fitted(name, getattr(self, name)) for name in with_patterns}
        if self.audit is not None:
            frozen = fitted("frozen", self.audit.frozen, [*names, *weights])
            changed["audit"] = replace(self.audit, frozen=frozen)
        options = replace(self, **changed)
        if not any(map(options.observes, names)):
            what = f"modules={options.modules!r} and ignore_modules={options.ignore_modules!r}"
            raise ValueError(f"{what} leave no module to watch; loosen one of them")
        return options


def _matches(name: str, entries: Iterable[str]) -> bool:
    return any(fnmatchcase(name or ROOT, entry) for entry in entries)


OPTIONS = {option.name: option for option in fields(Options) if "text" in option.metadata}


def make_options(given: Mapping[str, Any], **settings: Any) -> Options:
    """Return the options that NANWATCH_OPTIONS says, and else `given`, or raise TypeError or ValueError.

    `settings` go before what the environment says.
    """
    chosen = {**given, **_options_of_environment()}
    values = {name: _checked(name, value) for name, value in chosen.items()}
    for setting in fields(Options):
        variable = setting.metadata.get("variable", "")
        if text := os.environ.get(variable):
            values[setting.name] = setting.metadata["kind"](variable, text)
    options = Options(**{**values, **settings})
    if options.trace is not None:
        arrow("pyarrow.parquet", "trace=")
    has_box = options.output_dir is not None if options.black_box is None else options.black_box
    options = replace(options, gradients=options.gradients or options.spikes, black_box=has_box)
    for name in ("gradients", "attention"):
        if getattr(options, name) and "outputs" not in options.read:
            raise ValueError(f'{name} needs the outputs of modules; add "outputs" to read={options.read}')
    if missed := sorted(batch for batch in options.trace_batches if batch % options.every):
        raise ValueError(
            f"batches of the Trace has {first_few([*map(str, missed)])}, and every={options.every} reads only multiples"
            f" of {options.every}; trace such batches, or set every=1"
        )
    return options if options.enabled else Options(enabled=False, on_nonfinite="record", forecast=False)


def _checked(name: str, value: Any) -> Any:
    if name not in OPTIONS:
        raise TypeError(f"watch has no option {name!r}; {close_names(name, OPTIONS, 'see docs/options.md')}")
    return OPTIONS[name].metadata["kind"](name, value)


def _options_of_environment() -> dict[str, Any]:
    """Return what NANWATCH_OPTIONS says, such as "gradients=true output_dir=out", or raise ValueError."""
    text, chosen = os.environ.get(VARIABLE, ""), {}
    try:
        for word in shlex.split(text):
            name, equals, value = word.partition("=")
            if not equals:
                raise ValueError(f"{word!r} should be option=value, such as gradients=true output_dir=out")
            chosen[name] = _checked(name, value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE}={text!r}: {error}") from None
    return chosen
