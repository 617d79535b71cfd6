"""The names to import: `watch` with its options, Watch, `replay`, and for the callbacks of trainers DeferredWatch.

The flags of `nanwatch run`, NANWATCH_OPTIONS and docs/options.md are made from the declaration of `watch`.
"""

from __future__ import annotations

import os
import re
import shlex
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from inspect import getdoc, signature
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..capsule.capsule import Capsule
from ..capsule.replay import Model, Replayed, call_again
from ..instrumentation.calls import check_model
from ..instrumentation.wrapped_names import for_names, named_modules, original_module, parameter_names
from ..recording.events import ActAt, Settings
from ..report.report import Report
from ..sinks.sink import Sink
from ..trace.trace_file import arrow
from ..util.messages import close_names, first_few, visible
from . import kinds
from .kinds import Audit, OnNonfinite, Trace
from .reports import Describe
from .watch import Watch

VARIABLE, SWITCH = "NANWATCH_OPTIONS", "NANWATCH"
__all__ = ["DeferredWatch", "Watch", "replay", "watch"]


def watch(
    model: nn.Module,
    *,
    read: str | Iterable[str] = "weights buffers inputs outputs",
    gradients: bool | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    modules: str | Iterable[str] = (),
    ignore_modules: str | Iterable[str] = (),
    every: int = 1,
    max_frames: int = 21,
    on_nonfinite: OnNonfinite = "raise",
    allow: str | Iterable[str] = (),
    rerun: bool | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    trace: str | os.PathLike[str] | Trace | None = None,
    sinks: Any = (),
    black_box: bool | None = None,
    forecast: bool = True,
    spikes: bool = False,
    audit: int | Audit | None = None,
    replicas: int = False,
    attention: int = False,
    guard_checkpoints: bool = False,
    **unknown: NoReturn,
) -> Watch:
    """Start to watch `model` and return the Watch, which is also a context manager.

    NANWATCH_OPTIONS goes before these arguments (docs/options.md). NANWATCH=0 makes a Watch that watches nothing.

    Args:
        model: any nn.Module, also a compiled one. Modules that it gets later are watched too.
        read: which tensors to read in the forward. Integer buffers are skipped.
        gradients: stop a step before it takes a bad gradient. None reads the loss and the gradients of the model's
            outputs and first weights. True reads those of every module, and False none (docs/gradients.md).
        optimizer: read this optimizer's state after each step. The state is moments, and weights of its own.
        modules: watch only modules whose names match, such as "encoder.*". A glob's `*` crosses dots. The prefix that
            DistributedDataParallel or another wrapper adds may be left out.
        ignore_modules: do not watch modules whose names match.
        every: read only every n-th batch.
        max_frames: keep the latest n calls of modules for the report. Each is a frame.
        on_nonfinite: at a nan or an inf "raise", "warn", only "record", or from code call a function with the Report.
            "warn" tells when non-finite values begin, and at `stop()` how many batches had them (docs/watching.md).
        allow: infinities or nans that are meant, by module: "inf:mask*", "nan:embed". The names are patterns, "(root)"
            is the model itself. Masks are recognised without it (docs/watching.md).
        rerun: run a failed batch again to find operation and cure. None does so if the failure ends the batch or a
            function gets it, True also if the run goes on (docs/rerun.md).
        output_dir: a folder for each failure's report and capsule. The report is text, JSON and HTML.
        trace: a Parquet file for the range of every tensor. A `nanwatch.Trace` says what else to keep. Needs `pyarrow`
            (docs/traces.md).
        sinks: send headroom, failures, forecasts and spikes to a tracker: "tensorboard:runs/a", "wandb", "slack:URL".
            A target may also be a tracker's object, a function or a `nanwatch.Sink` (docs/trackers.md).
        black_box: keep the latest calls in a file that outlives the process. None keeps them with output_dir, in that
            folder. Else the file of 4 MiB is in `~/.local/state/nanwatch` (docs/blackbox.md). Needs the compiled part.
        forecast: warn of tensors that lose headroom and will overflow. At most 3 in 10,000 batches (docs/forecasts.md).
        spikes: name the first unusual tensor when loss or gradients jump; reads gradients too (docs/spikes.md).
        audit: check steps 1, 2, 3 and every n-th for weights that get no gradient, do not move, or move though frozen.
            A `nanwatch.Audit` names the frozen ones. True is every 100th (docs/updates.md).
        replicas: every n steps compare the weights that ranks share bit for bit. True is 100 (docs/how-to/replicas.md).
        attention: every n batches read each head's largest attention logit. True is every 100 (docs/attention.md).
        guard_checkpoints: save a checkpoint with a nan or an inf beside the good one, then act as on any failure
            (docs/how-to/good-checkpoint.md).

    Raises TypeError or ValueError, naming the given and the accepted values, for a `model` whose calls cannot be seen,
    an option with a wrong value, an unknown option, a pattern that matches nothing, and a place where nothing can be
    written; ImportError, naming the package, where `trace` or `sinks` needs one that is not installed.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.LayerNorm(2, eps=0.0))
        >>> watch = nanwatch.watch(model)
        >>> try:
        ...     model(torch.zeros(1, 2))
        ... except nanwatch.NonFiniteError as error:
        ...     print(str(error).splitlines()[0])
        nan first seen in `output` of 1 (LayerNorm) in batch 0
        >>> watch.stop()
    """
    given = {**locals(), **unknown}
    del given["model"], given["unknown"]
    watched = start_watch(model, make_options(given))
    earlier = _started.setdefault(model, weakref.WeakSet())
    for same in [watch for watch in earlier if watch._options == watched._options]:
        earlier.remove(same)
        same.stop()  # as in a notebook's cell that runs again
    earlier.add(watched)
    return watched


# The watches that `watch` has started, by model.
_started: MutableMapping[nn.Module, weakref.WeakSet[Watch]] = WeakIdKeyDictionary()


def start_watch(model: nn.Module, options: Options, *, must_match: bool = True) -> Watch:
    """Start to watch `model`. A host that watches several models with the same patterns passes `must_match=False`."""
    check_model(model)
    model = original_module(model)
    names = [named.name for named in named_modules(model)]
    return Watch(model, options.for_model(names, parameter_names(model).values(), must_match=must_match))


# The declaration: the signature and the docstring of `watch`, and for each parameter a field of Options.


def _option(kind: Callable[[str, Any], Any], metavar: str = "") -> Any:
    """Declare what a parameter of `watch` accepts; `metavar` stands for its value in the help of `nanwatch run`."""
    return field(metadata={"kind": kind, "metavar": metavar})


def _setting(default: Any, variable: str, kind: Callable[[str, str], Any]) -> Any:
    """Declare a setting that a variable of the environment changes, in one program of a hundred."""
    return field(default=default, metadata={"kind": kind, "variable": variable})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `watch`, checked."""

    read: tuple[str, ...] = _option(kinds.read_words, "WORDS")
    gradients: bool | None = _option(kinds.flag_or_none)
    optimizer: torch.optim.Optimizer | None = _option(kinds.to_optimizer)
    modules: tuple[str, ...] = _option(kinds.patterns, "PATTERN")
    ignore_modules: tuple[str, ...] = _option(kinds.patterns, "PATTERN")
    every: int = _option(kinds.whole, "N")
    # A frame of a small call takes 2 kB, and a report writes it as text: more than this is no report.
    max_frames: int = _option(partial(kinds.whole, most=1_000_000), "N")
    on_nonfinite: OnNonfinite = _option(kinds.to_policy, kinds.POLICIES)
    allow: tuple[str, ...] = _option(kinds.allowed, "VALUE:NAME")
    rerun: bool | None = _option(kinds.flag_or_none)
    output_dir: Path | None = _option(kinds.to_path, "DIR")
    trace: Trace | None = _option(kinds.to_trace, "PATH")
    sinks: tuple[Any, ...] = _option(kinds.to_sinks, "NAME")
    black_box: bool | None = _option(kinds.flag_or_none)
    forecast: bool = _option(kinds.flag)
    spikes: bool = _option(kinds.flag)
    audit: Audit | None = _option(kinds.to_audit, "N")
    replicas: int = _option(kinds.every_nth, "N")
    attention: int = _option(kinds.every_nth, "N")
    guard_checkpoints: bool = _option(kinds.flag)

    enabled: bool = _setting(
        True, SWITCH, lambda variable, text: kinds.one_of(("0", "1"), variable, text) == "1"
    )
    act_at: ActAt = _setting("auto", "NANWATCH_ACT_AT", partial(kinds.one_of, ("auto", "module", "batch")))
    peer_timeout: float = _setting(30.0, "NANWATCH_PEER_TIMEOUT", kinds.seconds)
    stall_timeout: float | None = _setting(None, "NANWATCH_STALL_TIMEOUT", kinds.seconds)
    rerun_in: str = _setting("child", "NANWATCH_RERUN", partial(kinds.one_of, ("in-process", "child")))
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

    def allows(self, value: str, name: str, masks: Sequence[str] = ()) -> bool:
        """Return whether this value, "inf" or "nan", is meant in the module of this name."""
        return _matches(name, [entry[4:] for entry in (*self.allow, *masks) if entry.startswith(value)])

    @property
    def trace_batches(self) -> Collection[int]:
        """The batches to trace, () for every one."""
        return () if self.trace is None else self.trace.batches

    def recorder_settings(self, max_frames: int = 1) -> Settings:
        """Return the settings of a recorder for these options; it may hold more frames than are shown."""
        # Most have the name of an option or of an argument of Trace.
        values = vars(self) | ({} if self.trace is None else vars(self.trace))
        values |= {part: part in self.read for part in kinds.PARTS} | {"traced": tuple(self.trace_batches)}
        values |= {"max_frames": max_frames, "black_box": bool(self.black_box)}
        values |= {"gradients": bool(self.gradients), "output_gradients": self.gradients is None}
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
                pattern = for_names(entry[length:], names) or kinds.ROOT
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
    return any(fnmatchcase(name or kinds.ROOT, entry) for entry in entries)


OPTIONS = {option.name: option for option in fields(Options) if "metavar" in option.metadata}
GIVEN = {
    name: parameter.default for name, parameter in signature(watch).parameters.items() if name in OPTIONS
}
DEFAULTS = Options(**{name: OPTIONS[name].metadata["kind"](name, default) for name, default in GIVEN.items()})
# The first sentence of each entry of the docstring, without a reference to the docs.
_SENTENCE = re.compile(r"^    (\w+): (.+?)(?: \(docs/\S+\))?\.\s", re.DOTALL | re.MULTILINE)
TEXTS = {name: " ".join(text.split()) for name, text in _SENTENCE.findall(getdoc(watch) or "")}


def make_options(given: Mapping[str, Any], **settings: Any) -> Options:
    """Return the checked options: those of NANWATCH_OPTIONS, else `given`. Raises TypeError or ValueError.

    `settings` replace what other variables of the environment say.
    """
    values = {name: _checked(name, value) for name, value in given.items()} | _options_of_environment()
    for setting in fields(Options):
        variable = setting.metadata.get("variable", "")
        if text := os.environ.get(variable):
            values[setting.name] = setting.metadata["kind"](variable, text)
    options = replace(DEFAULTS, **{**values, **settings})
    if options.trace is not None:
        arrow("pyarrow.parquet", "trace=")
    has_box = options.output_dir is not None if options.black_box is None else options.black_box
    options = replace(options, gradients=True if options.spikes else options.gradients, black_box=has_box)
    for name in ("gradients", "attention"):
        if getattr(options, name) and "outputs" not in options.read:
            raise ValueError(f'{name} needs the outputs of modules; add "outputs" to read={options.read}')
    if missed := sorted(batch for batch in options.trace_batches if batch % options.every):
        raise ValueError(
            f"batches of the Trace has {first_few([*map(str, missed)])}, and every={options.every} reads only multiples"
            f" of {options.every}; trace such batches, or set every=1"
        )
    switched_off = replace(DEFAULTS, enabled=False, on_nonfinite="record", forecast=False)
    return options if options.enabled else switched_off


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


class DeferredWatch:
    """Watch of a trainer's callback: its options are checked now, and its model comes with `start`.

    `watch` is the latest one, None before the first. `more_sinks` are the callback's own. Raises as `watch` does, but
    for patterns that match no module, which only `start` can know.
    """

    def __init__(self, options: dict[str, Any], *more_sinks: Sink) -> None:
        self.options = make_options(options)
        self.options = replace(self.options, sinks=(*self.options.sinks, *more_sinks))
        self.watch: Watch | None = None

    def start(self, model: nn.Module, scaler: Any = None, describe: Describe | None = None) -> Watch:
        """Stop the Watch of the model before, and watch `model`. Raises as `watch` does.

        `scaler` is the trainer's, or None. The remarks of `describe` go to each finding, such as its request.
        """
        self.stop()
        self.watch = start_watch(model, replace(self.options, scaler=scaler))
        self.watch._reports.describe = describe
        return self.watch

    def stop(self) -> None:
        """Leave the model as it was found. The Watch and its frames stay."""
        if self.watch is not None:
            self.watch.stop()


def replay(
    capsule: Capsule | str | os.PathLike[str],
    model: Model,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Report:
    """Make a capsule's call again, watched, without gradients, and return its report.

    After a failure the call runs a few times more, as a batch does under `watch`, for the operation and for cures.

    The call has the capsule's weights, inputs, random states, autocast and training flags. `model`, the caller's random
    states and the capsule stay as they are. `report.finding` is None when all was finite this time.

    Args:
        capsule: a Capsule, or its folder.
        model: the whole model, the module of the capsule, or a callable that makes one of the two.
        dtype: cast weights and inputs of floating point to it, and leave autocast off.
        device: where to run; None for the device of the recorded call, or the CPU where that is missing.

    `report.finding.remarks` lists differences from the recorded call. When all was finite, each is a RuntimeWarning.

    Raises CapsuleError for a folder that is no capsule, ValueError where model and capsule do not fit or an input was
    left out, and the errors of the call itself.

    Examples:
        >>> import nanwatch, torch
        >>> layer = torch.nn.LayerNorm(2, eps=0.0)
        >>> folder = nanwatch.write_capsule("call", layer, "norm", [torch.zeros(1, 2)])
        >>> report = nanwatch.replay(folder, layer)
        >>> report.finding.value, report.finding.label
        ('nan', 'output')
    """
    done = rerun(capsule if isinstance(capsule, Capsule) else Capsule.open(capsule), model, dtype, device)
    if done.report.finding is None:
        for remark in done.remarks:
            warnings.warn(visible(f"replay: {remark}"), RuntimeWarning, stacklevel=2)
    return done.report


def rerun(
    capsule: Capsule, model: Model, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Replayed:
    """Do the same as `replay`, and return the remarks beside the report."""
    if os.environ.get(SWITCH) == "0":
        raise ValueError(f"{SWITCH}=0 switches every watch off, and a replay needs one; unset it")
    # The re-run comes when the call is over.
    options = replace(DEFAULTS, on_nonfinite=lambda _: None, act_at="batch", rerun=True)
    return call_again(capsule, model, lambda module: Watch(module, options), dtype, device)
