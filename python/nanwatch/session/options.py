"""The options of `watch`, each declared once: its default, its check, its help and its flag.

The checks, the flags of `nanwatch run` and the table in docs/options.md are made from the fields of `Options`. `watch`
has a signature of its own for type checkers, which tests compare with the fields.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.wrapped_names import for_names
from ..recording.events import Check, Settings
from ..recording.masked_scores import masked_scores
from ..util.visible import close_names
from . import checks

if TYPE_CHECKING:
    from ..recording.masked_scores import MaskedScores
    from ..report.report import Report

OnNonfinite: TypeAlias = "Literal['raise', 'warn', 'record'] | Callable[[Report], object]"
# A frame of a small call takes 2 kB and is made into text when a report is written: more than this is no report.
MAX_FRAMES = 1_000_000


def _option(
    default: Any, check: Callable[[str, Any], Any], text: str, *, also: str = "", needs: str = "", **flag: Any
) -> Any:
    """Declare an option. `check(name, value)` returns the value to keep, or raises TypeError or ValueError.

    `text` is the help, `also` what Python code may give beyond it. `needs` says without which options this one has no
    effect, as in "weights or buffers". `flag` is what `nanwatch run` passes to argparse: nothing for an option that is
    no flag.
    """
    return field(
        default=default,
        metadata={"check": check, "text": text, "also": also, "needs": needs, "flag": flag},
    )


def _parse_batches(value: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in value.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} should be batch numbers such as 0,3") from None


# How argparse reads a flag.
_SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}
_PATTERN: dict[str, Any] = {"action": "append", "metavar": "PATTERN"}
_SECONDS: dict[str, Any] = {"type": float, "metavar": "S"}
_NUMBERS: dict[str, Any] = {"type": _parse_batches, "metavar": "N,N"}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `watch`, checked."""

    max_frames: int = _option(
        21,
        checks.whole_from(1, MAX_FRAMES),
        "keep the latest N frames, calls of modules, for the report",
        **_NUMBER,
    )
    on_nonfinite: OnNonfinite = _option(
        "raise",
        checks.action,
        "at a nan or an inf raise NonFiniteError, warn and run on, or only record it",
        also="or call a function with the Report",
        choices=checks.ACTIONS,
    )
    check: Check = _option(
        "auto",
        checks.when_to_check,
        "act at the module that holds the value, at the end of the batch, or, async, when a GPU has delivered; auto is"
        " module on a CPU and batch on a GPU",
        choices=checks.CHECKS,
    )
    weights: bool = _option(True, checks.flag, "read weights", **_SWITCH)
    buffers: bool = _option(True, checks.flag, "read buffers of floating point", **_SWITCH)
    inputs: bool = _option(True, checks.flag, "read inputs", **_SWITCH)
    outputs: bool = _option(True, checks.flag, "read outputs", **_SWITCH)
    gradients: bool = _option(
        False,
        checks.flag,
        "read the gradients of every backward, and stop before a step takes a bad one",
        **_SWITCH,
    )
    counts: bool = _option(
        False,
        checks.flag,
        "count zeros, subnormals, nans and infinities of every tensor, for reports and traces (slow)",
        **_SWITCH,
    )
    max_skipped_steps: int = _option(
        20,
        checks.whole_from(0, checks.MAX_BATCH),
        "act when GradScaler has skipped more than N steps in a row",
        needs="gradients=True",
        **_NUMBER,
    )
    scaler: Any = _option(
        None,
        checks.grad_scaler,
        "the GradScaler whose scale is told with each skipped step; None looks for the one in use",
        needs="gradients=True",
    )
    optimizer: Optimizer | None = _option(
        None, checks.optimizer, "an optimizer whose state is read after each of its steps"
    )
    include: tuple[str, ...] = _option(
        (), checks.patterns, "watch only modules whose name matches, such as 'encoder.*'", **_PATTERN
    )
    exclude: tuple[str, ...] = _option(
        (), checks.patterns, "do not watch modules whose name matches", **_PATTERN
    )
    allow_inf: tuple[str, ...] = _option(
        (),
        checks.patterns,
        "infinities are meant in modules whose name matches; a nan still counts",
        **_PATTERN,
    )
    every: int = _option(
        1, checks.whole_from(1, checks.MAX_BATCH), "read only the batches 0, N, 2N, ...", **_NUMBER
    )
    reread_weights: int = _option(
        64,
        checks.whole_from(1, checks.MAX_BATCH),
        "read a weight again after N batches, though nothing says that it changed",
        needs="weights or buffers",
        **_NUMBER,
    )
    trace_batches: frozenset[int] = _option(
        (),
        checks.batches,
        "print the frames of these batches on stdout, or write only them to the trace",
        **_NUMBERS,
    )
    trace: Path | None = _option(
        None,
        checks.check_place,
        "write every frame into this Parquet file, for 'nanwatch show', 'diff' and 'formats'",
        metavar="PATH",
    )
    log_to: Any = _option(
        None,
        checks.log_target,
        "log headroom, ranges and forecasts for TensorBoard into this folder",
        also="or to a SummaryWriter, a run of wandb or a function",
        metavar="DIR",
    )
    log_every: int = _option(
        50, checks.whole_from(1, checks.MAX_BATCH), "log one in N batches", needs="log_to=", **_NUMBER
    )
    abort_after_batch: int | None = _option(
        None, checks.batch_or_none, "end the run after batch N", also="with BatchLimitError", **_NUMBER
    )
    forecast: bool = _option(
        True, checks.flag, "warn of tensors that lose headroom and will overflow soon", **_SWITCH
    )
    microscope: bool | None = _option(
        None,
        checks.flag_or_none,
        "run a failed batch once more to find the operation and try cures; by default with on_nonfinite raise",
        **_SWITCH,
    )
    output_dir: Path | None = _option(
        None,
        checks.check_place,
        "write each failure's report (text, JSON, HTML) and capsule into this folder",
        metavar="DIR",
    )
    peer_timeout: float = _option(
        30.0,
        checks.seconds,
        "with several ranks: wait at most S seconds for all to agree on where it began, 0 for none",
        **_SECONDS,
    )
    enabled: bool = _option(
        True, checks.switch, "False makes a Watch that watches nothing; NANWATCH=0 or NANWATCH=1 goes first"
    )

    def observes(self, name: str) -> bool:
        """Return whether the calls of the module of this name are recorded."""
        return (not self.include or _matches(name, self.include)) and not _matches(name, self.exclude)

    def allows_inf(self, name: str, module: nn.Module) -> bool | MaskedScores:
        """Return whether infinities in this module are meant, or the masked scores that are, of a softmax."""
        return _matches(name, self.allow_inf) or masked_scores(module, self.inputs)

    def recorder_settings(self, *, max_frames: int, verify_hits: bool, measure_time: bool) -> Settings:
        """Return the settings of a recorder for these options; it may hold more frames than are shown."""
        return Settings(
            max_frames=max_frames,
            every=self.every,
            traced=tuple(self.trace_batches),
            weights=self.weights,
            buffers=self.buffers,
            inputs=self.inputs,
            outputs=self.outputs,
            reread_weights=self.reread_weights,
            verify_hits=verify_hits,
            measure_time=measure_time,
            gradients=self.gradients,
            counts=self.counts,
            check=self.check,
        )


def check_options(names: Sequence[str], given: dict[str, Any]) -> Options:
    """The options for a model whose modules have these names. TypeError or ValueError for what means nothing."""
    values = {one.name: one.metadata["check"](one.name, given[one.name]) for one in fields(Options)}
    for option in ("include", "exclude", "allow_inf"):
        values[option] = tuple(for_names(pattern, names) for pattern in values[option])
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
    for option, patterns in (("include", options.include), ("allow_inf", options.allow_inf)):
        _check_matches(option, patterns, names)
    if not any(options.observes(name) for name in names):
        raise ValueError(
            f"include={options.include!r} and exclude={options.exclude!r} leave no module to watch; loosen one of them"
        )
    return options


def _check_effect(one: Field[Any], options: Options) -> None:
    """ValueError for an option that was set and does nothing by itself."""
    needed = one.metadata["needs"]
    if not needed or getattr(options, one.name) == one.default:
        return
    values = [getattr(options, word.partition("=")[0]) for word in needed.split(" or ")]
    if all(value is None or value is False for value in values):
        raise ValueError(f"{one.name} has no effect without {needed}; set that too, or leave {one.name} out")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_matches(option: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"{option} pattern {pattern!r} matches no module; {close_names(pattern, names)}")
