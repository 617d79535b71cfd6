"""Options of `watch`, each declared once with a line of help.

The signature of `watch`, the flags of `nanwatch run`, NANWATCH_OPTIONS and docs/options.md have the options declared
in `Options`. A test compares them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.wrapped_names import for_names
from ..recording.events import Check, Settings
from ..recording.masks import Excuses, excuses
from ..report.report import Report
from ..sinks.sink import Sink
from ..sinks.trackers import sink_for
from ..trace.columns import arrow
from ..trace.trace_file import Trace as TraceFile
from ..util.visible import close_names
from .option_kinds import (
    Kind,
    check_batches,
    check_flag,
    check_patterns,
    check_place,
    check_seconds,
    check_sinks,
    check_words,
    every_n,
    read_arguments,
    read_flag,
    read_number,
    read_parts,
    whole,
)

OnNonfinite: TypeAlias = "Literal['raise', 'warn', 'record'] | Callable[[Report], object]"
PARTS = ("weights", "buffers", "inputs", "outputs")
VARIABLE, SWITCH = "NANWATCH_OPTIONS", "NANWATCH"
# A frame of a small call takes 2 kB and is made into text when a report is written: more than this is no report.
MAX_FRAMES = 1_000_000
# An exact reading of attention logits takes up to 5 % of its batch, and growth is a matter of thousands of batches.
# A check of replicas and an audit read the weights once, or twice, which is 0.5 % of a hundred steps.
_EVERY = 100
_LOG_EVERY = 50
_POLICIES = ("raise", "warn", "record")


@dataclass(frozen=True)
class Trace:
    """File that `watch(trace=...)` writes, with what is kept beside the range of each tensor. `Trace.open` reads one.

    Args:
        path: a Parquet file ("run.parquet") or a folder. A path that is taken gets a number, and with several processes
            the rank: see `Watch.trace_path`.
        batches: numbers of the batches to write, from 0; () is every batch.
        counts: count zeros, subnormals, nans, infinities and elements by power of two in each tensor. Reads each
            tensor three times more.
        fingerprints: keep the `nanwatch.fingerprint` of each tensor, so that two runs can be compared bit by bit.
        statistics: in every n-th batch keep mean, rms, kurtosis and the share beyond 6 sigma of each tensor.
        sketches: in every n-th batch keep 32 numbers for each row (token) of an output, from which
            `nanwatch compare` estimates relative errors and cosines of two runs.

    All four wait for a GPU at each tensor that they read (docs/traces.md). True for `statistics` and `sketches` is
    every batch.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.ReLU()
        >>> with nanwatch.watch(model, trace=nanwatch.Trace("bits.parquet", fingerprints=True)):
        ...     output = model(torch.tensor([-1.0, 2.0]))
        >>> nanwatch.Trace.open("bits.parquet").batches
        (0,)
    """

    path: Path
    batches: Collection[int] = ()
    counts: bool = False
    fingerprints: bool = False
    statistics: int = False
    sketches: int = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        batches: Iterable[int] = (),
        counts: bool = False,
        fingerprints: bool = False,
        statistics: int = False,
        sketches: int = False,
    ) -> None:
        vars(self).update(
            path=check_place("trace", path, is_folder=False),
            batches=check_batches("batches of a Trace", batches),
            counts=check_flag("counts of a Trace", counts),
            fingerprints=check_flag("fingerprints of a Trace", fingerprints),
            statistics=every_n("statistics of a Trace", statistics, 1),
            sketches=every_n("sketches of a Trace", sketches, 1),
        )

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
    frozen: tuple[str, ...] = ()

    def __init__(self, every: int = _EVERY, *, frozen: str | Iterable[str] = ()) -> None:
        vars(self).update(
            every=whole("every of an Audit", every, 1), frozen=check_patterns("frozen of an Audit", frozen)
        )


def _check_trace(option: str, value: Any) -> Trace | None:
    if value is None or isinstance(value, Trace):
        return value
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{option} should be a path or a nanwatch.Trace, got {value!r}")
    return Trace(value)


def _check_audit(option: str, value: Any) -> Audit | None:
    if value is None or isinstance(value, Audit):
        return value
    every = every_n(option, value, _EVERY)
    return Audit(every) if every else None


def _read_trace(text: str) -> Any:
    path, arguments = read_arguments(text)
    readers = {"batches": _read_batches, "statistics": read_number, "sketches": read_number}
    known = {name: readers.get(name, read_flag)(words) for name, words in arguments.items()}
    return _made(Trace, text, path, **known)


def _read_batches(text: str) -> Any:
    return tuple(map(int, text.split("+"))) if text.replace("+", "").isdigit() else text


def _read_audit(text: str) -> Any:
    every, arguments = read_arguments(text)
    if not arguments:
        return read_number(every)
    frozen = {name: words.split("+") for name, words in arguments.items()}
    return _made(Audit, text, _EVERY if read_number(every) is True else read_number(every), **frozen)


def _made(kind: Callable[..., Any], text: str, *values: Any, **arguments: Any) -> Any:
    try:
        return kind(*values, **arguments)
    except TypeError as error:
        raise ValueError(f"{text!r} is not understood: {error}") from None


def _check_policy(option: str, value: Any) -> Any:
    if not callable(value) and value not in _POLICIES:
        accepted = '"raise", "warn", "record" or a callable that takes the Report'
        raise ValueError(f"{option} should be {accepted}, got {value!r}")
    return value


def _check_optimizer(option: str, value: Any) -> Any:
    if value is not None and not isinstance(value, Optimizer):
        raise TypeError(f"{option} should be a torch.optim.Optimizer or None, got {type(value).__name__}")
    return value


def _check_switch(variable: str, word: str) -> bool:
    if word not in ("0", "1"):
        raise ValueError(f"{variable}={word!r} is not understood; set it to 1 (watch) or 0 (do not watch)")
    return word == "1"


def _check_act_at(variable: str, word: str) -> str:
    if word not in ("auto", "module", "batch"):
        raise ValueError(f"{variable}={word!r} is not understood; set it to module or batch")
    return word


_FLAG = Kind(check_flag, read_flag)
_FLAG_OR_NONE = Kind(lambda option, value: None if value is None else check_flag(option, value), read_flag)
_PATTERNS = Kind(check_patterns, read_parts, "PATTERN")
_EVERY_N = Kind(partial(every_n, default=_EVERY), read_number, "N")


def _option(default: Any, kind: Kind, text: str) -> Any:
    """Declare an option of `watch`; `text` is its help."""
    return field(default=default, metadata={"kind": kind, "text": text})


def _setting(default: Any, variable: str = "", check: Callable[[str, str], Any] | None = None) -> Any:
    """Declare a setting that another option has as an argument, or that an environment variable says."""
    return field(default=default, metadata={"variable": variable, "check": check})


@dataclass(frozen=True)
class Options:
    """The options of `watch`, checked."""

    read: tuple[str, ...] = _option(
        PARTS, Kind(partial(check_words, known=PARTS), str, "WORDS"), "which tensors to read in the forward"
    )
    gradients: bool = _option(
        False, _FLAG, "read the gradients of every backward, and stop before a step takes a bad one"
    )
    optimizer: Optimizer | None = _option(
        None, Kind(_check_optimizer), "read the state of this optimizer after each of its steps"
    )
    modules: tuple[str, ...] = _option(
        (), _PATTERNS, "watch only modules whose name matches, such as 'encoder.*'"
    )
    ignore_modules: tuple[str, ...] = _option((), _PATTERNS, "do not watch modules whose name matches")
    every: int = _option(
        1, Kind(lambda option, value: whole(option, value, 1), read_number, "N"), "read only every n-th batch"
    )
    max_frames: int = _option(
        21,
        Kind(lambda option, value: whole(option, value, 1, MAX_FRAMES), read_number, "N"),
        "keep the latest N calls of modules for the report",
    )
    on_nonfinite: OnNonfinite = _option(
        "raise",
        Kind(_check_policy, str, f"{{{','.join(_POLICIES)}}}"),
        "at a nan or an inf raise NonFiniteError, warn and run on, or only record it; code may give a function",
    )
    allow_inf: tuple[str, ...] = _option(
        (), _PATTERNS, "infinities are meant in modules whose name matches; a nan still counts"
    )
    allow_nan: tuple[str, ...] = _option(
        (), _PATTERNS, "nans are meant in modules whose name matches, such as missing values"
    )
    rerun: bool | None = _option(
        None, _FLAG_OR_NONE, "run a failed batch again to find the operation, the line and a cure"
    )
    output_dir: Path | None = _option(
        None,
        Kind(check_place, str, "DIR"),
        "write each failure's report (text, JSON, HTML) and capsule into this folder",
    )
    trace: Trace | None = _option(
        None,
        Kind(_check_trace, _read_trace, "PATH"),
        "write the range of every tensor into this Parquet file, for 'nanwatch show', 'diff' and 'fits'",
    )
    sinks: tuple[Any, ...] = _option(
        (),
        Kind(check_sinks, read_parts, "NAME"),
        "send headroom, failures, forecasts and spikes to this tracker, such as tensorboard:runs/a or wandb",
    )
    black_box: bool | None = _option(
        None,
        _FLAG_OR_NONE,
        "write the latest calls into a file that outlives a killed process; on with output_dir",
    )
    forecast: bool = _option(True, _FLAG, "warn of tensors that lose headroom and will overflow soon")
    spikes: bool = _option(
        False, _FLAG, "when the loss or the gradients jump, report what left its own history; reads gradients"
    )
    audit: Audit | None = _option(
        None,
        Kind(_check_audit, _read_audit, "N"),
        "audit the steps 1, 2, 3 and every N-th: which weights do not move, or move though frozen",
    )
    replicas: int = _option(
        False, _EVERY_N, "with several ranks, compare every N steps to the bit what they should hold alike"
    )
    attention: int = _option(
        False, _EVERY_N, "read a bound on attention logits, and every N batches the largest of each head"
    )
    guard_checkpoints: bool = _option(
        False, _FLAG, "write a checkpoint with a nan or an inf beside the good one, not in its place"
    )

    # From the environment
    enabled: bool = _setting(True, SWITCH, _check_switch)
    act_at: Check = _setting("auto", "NANWATCH_ACT_AT", _check_act_at)
    peer_timeout: float = _setting(30.0, "NANWATCH_PEER_TIMEOUT", check_seconds)
    stall_timeout: float | None = _setting(None, "NANWATCH_STALL_TIMEOUT", check_seconds)
    # Arguments of `trace`, `audit` and `sinks`
    trace_batches: Collection[int] = _setting(())
    counts: bool = _setting(False)
    fingerprints: bool = _setting(False)
    statistics: int = _setting(0)
    sketches: int = _setting(0)
    frozen: tuple[str, ...] = _setting(())
    log_every: int = _setting(_LOG_EVERY)
    # From a trainer
    scaler: Any = _setting(None)
    max_skipped_steps: int = _setting(20)

    def observes(self, name: str) -> bool:
        """Return whether the calls of the module of this name are recorded."""
        return (not self.modules or _matches(name, self.modules)) and not _matches(name, self.ignore_modules)

    def is_frozen(self, name: str) -> bool:
        """Return whether the weight, or the module that has it, is meant to stay as it is."""
        parts = name.split(".")
        return any(_matches(".".join(parts[: i + 1]), self.frozen) for i in range(len(parts)))

    def allows_inf(self, name: str) -> bool:
        """Return whether infinities in the module of this name are meant."""
        return _matches(name, self.allow_inf)

    def excuses(self, name: str, module: nn.Module) -> bool | Excuses:
        """Return whether infinities in this module are meant, or the judge of a module that may hold masks or nans."""
        nan = _matches(name, self.allow_nan)
        return excuses(module, inf=self.allows_inf(name), nan=nan, reads_inputs="inputs" in self.read)

    def named_sinks(self) -> list[tuple[str, Sink]]:
        """Return the sinks that `sinks` means, each with its name for the user."""
        return [(f"the sink {_name_of(target)}", sink_for(target)) for target in self.sinks]

    def recorder_settings(self, max_frames: int = 1, **more: bool) -> Settings:
        """Return the settings of a recorder for these options; it may hold more frames than are shown."""
        shared: dict[str, Any] = {
            setting.name: getattr(self, setting.name, setting.default) for setting in fields(Settings)
        }
        shared |= {part: part in self.read for part in PARTS}
        shared |= {"check": self.act_at, "traced": tuple(self.trace_batches), "max_frames": max_frames}
        shared["black_box"] = bool(self.black_box)
        return Settings(**{**shared, **more})

    def for_model(
        self, names: Sequence[str], weights: Iterable[str] = (), *, must_match: bool = True
    ) -> Options:
        """Return the options with patterns on these names of modules and weights, without a wrapper's prefix.

        Raises ValueError for a pattern that matches nothing, of `modules` only where not `must_match`, and where no
        module is left.
        """
        known = {
            **dict.fromkeys(("modules", "ignore_modules", "allow_inf", "allow_nan"), names),
            "frozen": [*names, *weights],
        }
        matched: dict[str, Any] = {}
        for option, candidates in known.items():
            matched[option] = tuple(for_names(pattern, candidates) for pattern in getattr(self, option))
            for pattern in matched[option] if must_match or option == "modules" else ():
                if not any(fnmatchcase(name, pattern) for name in candidates):
                    what = "no module and no weight" if option == "frozen" else "no module"
                    hint = close_names(pattern, candidates)
                    raise ValueError(f"{option} pattern {pattern!r} matches {what}; {hint}")
        options = replace(self, **matched)
        if not any(map(options.observes, names)):
            raise ValueError(
                f"modules={options.modules!r} and ignore_modules={options.ignore_modules!r} leave no module to watch;"
                " loosen one of them"
            )
        return options


OPTIONS: dict[str, Field[Any]] = {field.name: field for field in fields(Options) if "kind" in field.metadata}
_VARIABLES = {name: field for field in fields(Options) if (name := field.metadata.get("variable"))}


def make_options(given: Mapping[str, Any], **settings: Any) -> Options:
    """Return the options that NANWATCH_OPTIONS says, and else `given`, or raise TypeError or ValueError.

    `settings` go before what the environment and the arguments of an option say.
    """
    for name in given:
        check_name(name)
    chosen = {**given, **_of_environment()}
    values = {
        name: option.metadata["kind"].check(name, chosen.get(name, option.default))
        for name, option in OPTIONS.items()
    }
    for variable, setting in _VARIABLES.items():
        if os.environ.get(variable):
            values[setting.name] = setting.metadata["check"](variable, os.environ[variable])
    trace, audit = values["trace"], values["audit"]
    if trace is not None:
        arrow("pyarrow.parquet", "trace=")
        values |= {
            name: getattr(trace, name) for name in ("counts", "fingerprints", "statistics", "sketches")
        }
        values["trace_batches"] = trace.batches
    if audit is not None:
        values["frozen"] = audit.frozen
    values["gradients"] |= values["spikes"]
    if values["black_box"] is None:
        values["black_box"] = values["output_dir"] is not None
    values["log_every"] = min(
        (sink.every for sink in values["sinks"] if isinstance(sink, Sink)), default=_LOG_EVERY
    )
    options = Options(**{**values, **settings})
    if "outputs" not in options.read:
        for name in ("gradients", "attention"):
            if getattr(options, name):
                raise ValueError(f'{name} needs the outputs of modules; add "outputs" to read={options.read}')
    if missed := sorted(batch for batch in options.trace_batches if batch % options.every):
        listed = ", ".join(map(str, missed[:5])) + (", ..." if len(missed) > 5 else "")
        raise ValueError(
            f"batches of the Trace has {listed}, and every={options.every} reads only multiples of {options.every};"
            " trace such batches, or set every=1"
        )
    return options


def check_name(name: str) -> None:
    """Raise TypeError for a name that is no option."""
    if name not in OPTIONS:
        hint = close_names(name, OPTIONS, "docs/options.md has the options, and their earlier names")
        raise TypeError(f"watch has no option {name!r}; {hint}")


def _of_environment() -> dict[str, Any]:
    """Return what NANWATCH_OPTIONS says, such as "gradients=true output_dir=out", or raise ValueError."""
    text, chosen = os.environ.get(VARIABLE, ""), {}
    try:
        for word in shlex.split(text):
            name, equals, value = word.partition("=")
            if not equals:
                raise ValueError(f"{word!r} should be option=value, such as gradients=true output_dir=out")
            check_name(name)
            kind = OPTIONS[name].metadata["kind"]
            if kind.read is None:
                raise ValueError(f"{name} takes an object, which only code can give")
            chosen[name] = kind.read(value)
            kind.check(name, chosen[name])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE}={text!r}: {error}") from None
    return chosen


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _name_of(target: Any) -> str:
    """Return the words that name a sink: the name or folder itself, a function's name, or the class of an object.

    The path of a URL is left out, as that of a webhook is a secret.
    """
    if isinstance(target, str) and "://" in target:
        return target.partition(":")[0]
    if isinstance(target, str | Path):
        return str(target)
    return str(getattr(target, "__name__", None) or type(target).__name__)
