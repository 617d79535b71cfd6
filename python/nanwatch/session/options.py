"""Options of `watch`, each declared once: the question that it answers, its default, its check, its help and its flag.

The checks, the flags of `nanwatch run` and docs/options.md are made from the fields of `Options`. `watch` has an
explicit signature for type checkers, which a test compares with the fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
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
from ..sinks.logs import sink_for
from ..sinks.sink import Sink
from ..util.visible import close_names
from .option_kinds import (
    BATCH_OR_NONE,
    BATCHES,
    FLAG,
    FLAG_OR_NONE,
    PATTERNS,
    Kind,
    check_enabled,
    check_place,
    check_seconds,
    check_sinks,
    choice,
    every_or_flag,
    given_object,
    whole_from,
)

OnNonfinite: TypeAlias = "Literal['raise', 'warn', 'record'] | Callable[[Report], object]"
# A frame of a small call takes 2 kB and is made into text when a report is written: more than this is no report.
MAX_FRAMES = 1_000_000
PEER_TIMEOUT = 30.0
# An exact reading takes up to 5 % of its batch. Growth is a matter of thousands of batches.
_ATTENTION_EVERY = 100
# A check reads weights, buffers and states once.
_REPLICAS_EVERY = 100
# A small call takes 10 times as long when it is made again and compared.
# An audit reads the weights and gradients once more, which is a part of a step: 0.5 % of a hundred.
_UPDATES_EVERY = 100


def _option(group: str, default: Any, kind: Kind, text: str, *, also: str = "", needs: str = "") -> Any:
    """Declare an option.

    `text` is the help, `also` what Python code may give beyond it. `needs` says without which options this one has no
    effect, as in "weights or buffers".
    """
    metadata = {**kind._asdict(), "group": group, "text": text, "also": also, "needs": needs}
    return field(default=default, metadata=metadata)


# The questions of a user, in the order of the help, the docs and the signature.
_read = partial(_option, "What is read")
_keep = partial(_option, "What is kept of it")
_when = partial(_option, "When")
_act = partial(_option, "What is a failure, and what follows")
_tell = partial(_option, "Where it goes")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `watch`, checked."""

    weights: bool = _read(True, FLAG, "read weights")
    buffers: bool = _read(True, FLAG, "read buffers of floating point")
    inputs: bool = _read(True, FLAG, "read inputs")
    outputs: bool = _read(True, FLAG, "read outputs")
    gradients: bool = _read(
        False, FLAG, "read the gradients of every backward, and stop before a step takes a bad one"
    )
    optimizer: Optimizer | None = _read(
        None,
        given_object("a torch.optim.Optimizer", lambda value: isinstance(value, Optimizer)),
        "an optimizer whose state is read after each of its steps",
    )
    attention: int = _read(
        False,
        every_or_flag(_ATTENTION_EVERY),
        "read a bound on the attention logits in every batch, and the largest ones by head in batches 0, N, 2N, ...",
        also="True is 100",
        needs="outputs=True",
    )
    include: tuple[str, ...] = _read(
        (), PATTERNS, "watch only modules whose name matches, such as 'encoder.*'"
    )
    exclude: tuple[str, ...] = _read((), PATTERNS, "do not watch modules whose name matches")

    max_frames: int = _keep(
        21, whole_from(1, MAX_FRAMES), "keep the latest N frames, calls of modules, for the report"
    )
    counts: bool = _keep(
        False,
        FLAG,
        "count zeros, subnormals, nans and infinities of every tensor, for reports and traces (slow)",
    )
    fingerprints: bool = _keep(
        False, FLAG, "keep a hash of the bits of every tensor, with which 'nanwatch diff' compares two runs"
    )
    statistics: int = _keep(
        False,
        every_or_flag(),
        "keep mean, rms, kurtosis and the share beyond 6 sigma of every tensor in batches 0, N, 2N, ...",
        also="True is 1",
    )
    sketches: int = _keep(
        False,
        every_or_flag(),
        "keep 32 numbers for each row (token) of an output in batches 0, N, 2N, ..., with which 'nanwatch diff'"
        " estimates relative errors",
        also="True is 1",
        needs="trace=",
    )

    every: int = _when(1, whole_from(1), "read only the batches 0, N, 2N, ...")
    abort_after_batch: int | None = _when(
        None, BATCH_OR_NONE, "end the run after batch N", also="with BatchLimitError"
    )
    enabled: bool = _when(
        True,
        Kind(check_enabled),
        "False makes a Watch that watches nothing; NANWATCH=0 or NANWATCH=1 goes first",
    )

    on_nonfinite: OnNonfinite = _act(
        "raise",
        choice(
            ("raise", "warn", "record"),
            '"raise", "warn", "record" or a callable that takes the Report',
            or_callable=True,
        ),
        "at a nan or an inf raise NonFiniteError, warn and run on, or only record it",
        also="or call a function with the Report",
    )
    check: Check = _act(
        "auto",
        choice(("auto", "module", "batch"), '"auto", "module" or "batch"'),
        "act at the module that holds the value, or at the end of the batch; auto is"
        " module on a CPU and batch on a GPU",
    )
    allow_inf: tuple[str, ...] = _act(
        (), PATTERNS, "infinities are meant in modules whose name matches; a nan still counts"
    )
    allow_nan: tuple[str, ...] = _act(
        (), PATTERNS, "nans are meant in modules whose name matches, such as missing values"
    )
    rerun: bool | None = _act(
        None,
        FLAG_OR_NONE,
        "run a failed batch again for the operation and cures; by default with on_nonfinite raise or a function",
    )
    guard_checkpoints: bool = _act(
        False,
        FLAG,
        "write a checkpoint with a non-finite weight or optimizer state beside the good one, not in its place",
    )
    forecast: bool = _act(True, FLAG, "warn of tensors that lose headroom and will overflow soon")
    updates: int = _act(
        False,
        every_or_flag(_UPDATES_EVERY),
        "audit the optimizer's steps 1, 2, 3 and every N-th: which weights do not move, or move though frozen",
        also="True is 100",
    )
    frozen: tuple[str, ...] = _act(
        (),
        PATTERNS,
        "weights, or modules with all of theirs, that are meant to stay as they are: tell of a step that moves one",
        needs="updates=",
    )
    spikes: bool = _act(
        False,
        FLAG,
        "report what left its own history when the loss or the gradients jump; reads gradients too",
    )
    max_skipped_steps: int = _act(
        20,
        whole_from(0),
        "act when GradScaler has skipped more than N steps in a row",
        needs="gradients=True",
    )
    scaler: Any = _act(
        None,
        given_object("a torch.amp.GradScaler", lambda value: callable(getattr(value, "get_scale", None))),
        "the GradScaler whose scale is told with each skipped step; None looks for the one in use",
        needs="gradients=True",
    )
    replicas: int = _act(
        False,
        every_or_flag(_REPLICAS_EVERY),
        "with several ranks: every N steps compare, to the bit, what DDP and device meshes say that they hold alike",
        also="True is 100",
    )
    peer_timeout: float = _act(
        PEER_TIMEOUT,
        Kind(check_seconds, {"type": float, "metavar": "S"}),
        "with several ranks: wait at most S seconds for all to agree on where it began, 0 for none",
    )

    output_dir: Path | None = _tell(
        None,
        Kind(check_place, {"metavar": "DIR"}),
        "write each failure's report (text, JSON, HTML) and capsule into this folder",
    )
    black_box: bool = _tell(
        True, FLAG, "write what the process does into a file that outlives it, for 'nanwatch blackbox'"
    )
    stall_timeout: float | None = _tell(
        None,
        Kind(
            lambda option, value: None if value is None else check_seconds(option, value),
            {"type": float, "metavar": "S"},
        ),
        "write all stacks when no call has begun or ended for S seconds, 0 for never; by default after 10 times the"
        " slowest batch so far, at least 300",
        needs="black_box=True",
    )
    trace: Path | None = _tell(
        None,
        Kind(check_place, {"metavar": "PATH"}),
        "write every frame into this Parquet file, for 'nanwatch show', 'diff' and 'formats'",
    )
    trace_batches: frozenset[int] = _tell(
        (), BATCHES, "print the frames of these batches on stdout, or write only them to the trace"
    )
    sinks: tuple[Any, ...] = _tell(
        (),
        Kind(check_sinks, {"action": "append", "metavar": "NAME"}),
        "tell this sink of headroom, failures, forecasts and spikes, such as tensorboard:runs/a",
        also="or a SummaryWriter, a run of wandb, a function, a nanwatch.Sink",
    )
    log_every: int = _tell(50, whole_from(1), "sum up one in N batches for sinks", needs="sinks=")

    def observes(self, name: str) -> bool:
        """Return whether the calls of the module of this name are recorded."""
        return (not self.include or _matches(name, self.include)) and not _matches(name, self.exclude)

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
        return excuses(module, inf=self.allows_inf(name), nan=nan, reads_inputs=self.inputs)

    def named_sinks(self) -> list[tuple[str, Sink]]:
        """Return the sinks that `sinks` means, each with its name for the user."""
        return [(f"the sink {_name_of(target)}", sink_for(target)) for target in self.sinks]

    def recorder_settings(self, max_frames: int = 1, **more: bool) -> Settings:
        """Return the settings of a recorder for these options; it may hold more frames than are shown."""
        shared = {one.name: getattr(self, one.name) for one in fields(Settings) if hasattr(self, one.name)}
        return Settings(**{**shared, **more, "max_frames": max_frames, "traced": tuple(self.trace_batches)})


def check_options(
    names: Sequence[str], given: dict[str, Any], weights: Iterable[str] = (), *, must_match: bool = True
) -> Options:
    """Return the options for a model whose modules and weights have these names, or raise TypeError or ValueError.

    `must_match`: each pattern matches something. Without it only those of `include` have to.
    """
    values = {one.name: one.metadata["check"](one.name, given[one.name]) for one in fields(Options)}
    matched = {
        **dict.fromkeys(("include", "exclude", "allow_inf", "allow_nan"), names),
        "frozen": [*names, *weights],
    }
    for option, known in matched.items():
        values[option] = tuple(for_names(pattern, known) for pattern in values[option])
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
    for option, known in matched.items():
        for pattern in getattr(options, option) if must_match or option == "include" else ():
            if not any(fnmatchcase(name, pattern) for name in known):
                what = "no module and no weight" if option == "frozen" else "no module"
                raise ValueError(
                    f"{option} pattern {pattern!r} matches {what}; {close_names(pattern, known)}"
                )
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


def _name_of(target: Any) -> str:
    """Return the words that name a sink: the name or folder itself, a function's name, or the class of an object.

    The path of a URL is left out, as that of a webhook is a secret.
    """
    if isinstance(target, str) and "://" in target:
        return target.partition(":")[0]
    if isinstance(target, str | Path):
        return str(target)
    return str(getattr(target, "__name__", None) or type(target).__name__)
