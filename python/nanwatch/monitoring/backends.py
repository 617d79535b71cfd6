"""Backends of the log: TensorBoard, W&B or a function, chosen by what `log_to` was given."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import ceil, floor
from pathlib import Path
from types import ModuleType
from typing import Any

from ..util.imports import needed
from ..util.job import rank_and_world_size

# The first part of a tag is the group in which TensorBoard and W&B show it: the few numbers of the whole model in one,
# a curve a module in others.
TOTAL = "nanwatch"
HEADROOM, FORECAST, RANGES = "nanwatch_headroom_bits", "nanwatch_forecast_batch", "nanwatch_log2_abs_max"
GROUPS = (TOTAL, HEADROOM, FORECAST, RANGES)
IS_FINITE, LEAST = f"{TOTAL}/is_finite", f"{TOTAL}/headroom_bits"
PLACE, TOLD, FINDING = f"{TOTAL}/headroom_module", f"{TOTAL}/forecast", f"{TOTAL}/finding"

_MOST_BINS = 512  # W&B takes no more


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between edges, of which there is one more; with the sums that TensorBoard asks for."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    least: float
    most: float
    sum: float
    sum_of_squares: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Histogram:
        """Make a histogram of finite values, at least one. Bins are whole numbers wide: 1 if 512 bins suffice."""
        found = sorted(values)
        first = floor(found[0])
        width = max(1, ceil((floor(found[-1]) + 1 - first) / _MOST_BINS))
        counts = [0] * ((floor(found[-1]) - first) // width + 1)
        for value in found:
            counts[(floor(value) - first) // width] += 1
        edges = tuple(float(first + width * i) for i in range(len(counts) + 1))
        return cls(edges, tuple(counts), found[0], found[-1], sum(found), sum(x * x for x in found))


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Values to log at `batch`. All numbers are finite."""

    batch: int
    scalars: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


class Backend(ABC):
    """Backend of the log. An exception from one ends the log."""

    @abstractmethod
    def write(self, entry: LogEntry) -> None:
        """Log it."""

    def flush(self) -> None:  # noqa: B027
        """Let what was logged outlive the process, if it does not anyhow."""

    def close(self) -> None:  # noqa: B027
        """End the log. A tracker of the user's stays open."""


ACCEPTED = (
    "a SummaryWriter of TensorBoard, a run of wandb, the path of a folder for TensorBoard, or a callable that takes a"
    " dict and the number of the batch"
)


class CallableBackend(Backend):
    """Backend that calls a function with the numbers and words of each entry."""

    def __init__(self, function: Callable[[dict[str, float | str], int], object]) -> None:
        self._function = function

    def write(self, entry: LogEntry) -> None:
        """Call it; histograms are left out."""
        self._function({**entry.scalars, **entry.texts}, entry.batch)


def is_target(target: Any) -> bool:
    """Return whether `target` is one of those that are ACCEPTED, by what it can do."""
    return isinstance(target, str | os.PathLike) or _is_writer(target) or _is_run(target) or callable(target)


def backend_for(target: Any) -> Backend:
    """Return the backend for a target. Raise ImportError with the extra where its package is not installed."""
    if isinstance(target, str | os.PathLike) or _is_writer(target):
        return TensorBoardBackend(target)
    if _is_run(target):
        return WandbBackend(target)
    return CallableBackend(target)


def _is_writer(target: Any) -> bool:
    return callable(getattr(target, "add_scalar", None)) and callable(
        getattr(target, "add_histogram_raw", None)
    )


def _is_run(target: Any) -> bool:
    """Return whether `target` is a run of wandb, or the module `wandb`, which stands for the run it began."""
    return callable(getattr(target, "log", None)) and callable(getattr(target, "define_metric", None))


_WHO = "watch(log_to=<folder>)"


class TensorBoardBackend(Backend):
    """Backend that writes with the user's writer, or with one of its own in a folder, made for the first entry.

    The step is the number of the batch. With several processes each has a folder of its own, as a trace has a file.
    """

    def __init__(self, target: Any) -> None:
        self._writer: Any = None
        self._make: Callable[[], Any] | None = None  # a writer of its own
        if isinstance(target, str | os.PathLike):
            needed("tensorboard", _WHO, "tensorboard")  # first, or torch would be said to be what is missing
            module = needed("torch.utils.tensorboard", _WHO, "tensorboard")
            rank, world_size = rank_and_world_size()
            folder = Path(target).absolute()  # the run may change its folder
            if world_size > 1:
                folder = folder.with_name(f"{folder.name}-rank{rank}")
            self._make = partial(module.SummaryWriter, folder)
        else:
            self._writer = target

    def write(self, entry: LogEntry) -> None:
        """Add its numbers, histograms and words."""
        writer = self._open()
        if writer is None:
            return
        for tag, value in entry.scalars.items():
            writer.add_scalar(tag, value, entry.batch)
        for tag, histogram in entry.histograms.items():
            _add(writer, tag, histogram, entry.batch)
        for tag, words in entry.texts.items():
            writer.add_text(tag, words, entry.batch)

    def flush(self) -> None:
        """Write what waits to the file."""
        if self._writer is not None and self._open() is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the writer if it is its own; write what waits to the file if it is the user's."""
        if self._make is None:
            self.flush()
        elif self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        """Return the writer; None when the user has closed it, as it would begin another file then."""
        if self._writer is None and self._make is not None:
            self._writer = self._make()
        return None if getattr(self._writer, "all_writers", True) is None else self._writer


def _add(writer: Any, tag: str, histogram: Histogram, batch: int) -> None:
    writer.add_histogram_raw(
        tag,
        min=histogram.least,
        max=histogram.most,
        num=sum(histogram.counts),
        sum=histogram.sum,
        sum_squares=histogram.sum_of_squares,
        bucket_limits=list(histogram.edges[1:]),
        bucket_counts=list(histogram.counts),
        global_step=batch,
    )


BATCH = f"{TOTAL}/batch"


class WandbBackend(Backend):
    """Backend that adds entries to the user's run; the x axis of their charts is the number of the batch.

    A run has one step for all that is logged, and drops what comes with a lower step than it has reached. So the
    backend makes no step: its entry goes with the next `run.log` of the user's own. Of several entries between two of
    those the latest stays, number by number. The run has a process of its own, which outlives this one.
    """

    def __init__(self, target: Any) -> None:
        self._wandb = needed("wandb", "watch(log_to=<run of wandb>)", "wandb")
        self._target = target
        self._run: Any = None

    def write(self, entry: LogEntry) -> None:
        """Log its numbers, histograms and words."""
        if self._run is None:
            self._run = self._begin()
        histograms = {
            tag: self._wandb.Histogram(np_histogram=(list(one.counts), list(one.edges)))
            for tag, one in entry.histograms.items()
        }
        self._run.log({BATCH: entry.batch, **entry.scalars, **histograms, **entry.texts}, commit=False)

    def _begin(self) -> Any:
        run = self._target
        if isinstance(run, ModuleType):  # a trainer may begin the run after its callbacks were made
            run = run.run
            if run is None:
                raise ValueError(
                    "has no run: call wandb.init() before the first batch, or pass what it returns"
                )
        run.define_metric(BATCH, hidden=True)
        for group in GROUPS:
            run.define_metric(f"{group}/*", step_metric=BATCH)
        return run
