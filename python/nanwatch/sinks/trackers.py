"""Sinks that log numbers and words: TensorBoard, W&B or a function, and which sink a target of `sinks` means."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from importlib import import_module
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from ..history.forecast import Forecast
from ..records.record import Frame, Least, by_module
from ..report import text
from ..report.events import UpdateFinding
from ..report.finding import Finding
from ..util.job import rank_and_world_size
from ..util.messages import needed, visible
from .sink import BatchSummary, Sink

# The first part of a tag is its group in TensorBoard and W&B: the whole model's numbers in one, modules in others.
TOTAL = "nanwatch"
HEADROOM, FORECAST = "nanwatch_headroom_bits", "nanwatch_forecast_batch"
FOLDER = "runs/nanwatch"  # below `runs`, where TensorBoard looks by default
ACCEPTED = (
    "a nanwatch.Sink, a SummaryWriter of TensorBoard, a pathlib.Path for TensorBoard, a run of wandb, a function of a"
    " dict and the number of the batch, a name such as 'tensorboard:runs/a'"
)
Values: TypeAlias = Mapping[str, float | str]


def spell_module(name: str) -> str:
    """Return the name of a module within a tag."""
    return visible(name) or "(root)"


def batch_values(summary: BatchSummary) -> dict[str, float | str]:
    """Return the numbers and words of a finite batch."""
    values: dict[str, float | str] = {f"{TOTAL}/is_finite": 1.0}
    if summary.headroom:
        module, (bits, label, dtype) = next(iter(summary.headroom.items()))
        values[f"{TOTAL}/headroom_bits"] = bits
        values[f"{TOTAL}/headroom_module"] = visible(f"{spell_module(module)} {label}, {dtype}")
    return values | {f"{HEADROOM}/{spell_module(name)}": bits for name, bits in summary.curves.items()}


class LogSink(Sink):
    """Sink that logs numbers and words for each event: it calls a function with them, and with the batch.

    A tracker overrides `write`, and needs no more.
    """

    def __init__(self, function: Callable[[dict[str, float | str], int], object]) -> None:
        self._function = function

    def write(self, batch: int, values: Values) -> None:
        """Log these at the batch. All numbers are finite."""
        self._function(dict(values), batch)

    def flush(self) -> None:
        """Let what was logged outlive the process, if it does not anyhow."""

    def on_batch(self, summary: BatchSummary) -> None:
        """Log the headroom."""
        self.write(summary.batch, batch_values(summary))

    def on_forecast(self, batch: int, forecast: Forecast) -> None:
        """Log the batch that it expects, and its sentence."""
        tag = f"{FORECAST}/{spell_module(forecast.module)}"
        self.write(batch, {tag: float(forecast.batch), f"{TOTAL}/forecast": str(forecast)})

    def on_update(self, finding: UpdateFinding) -> None:
        """Log its sentence."""
        self.write(max(finding.batch, 0), {f"{TOTAL}/update": str(finding)})

    def on_nonfinite(self, finding: Finding) -> None:
        """Log the batch at once: the next exception may end the process."""
        self.write(finding.batch, {f"{TOTAL}/is_finite": 0.0, f"{TOTAL}/finding": text.summary(finding)})
        self.flush()


class LeastHeadroom(Sink):
    """Sink that keeps the least headroom until it is taken. As in `by_module` an input counts only as a fault."""

    _least: Least | None = None

    def on_frame(self, frame: Frame) -> None:
        """Look at the records of a call."""
        for least in by_module([frame]).values():
            if least.bits < (inf if self._least is None else self._least.bits):
                self._least = least

    def take(self) -> Least | None:
        """Return the least since the last `take`, or None when there was none; then begin anew."""
        least, self._least = self._least, None
        return least


class TensorBoardSink(LogSink):
    """Log that writes with the user's writer, or with one of its own in a folder, made for the first entry.

    The step is the number of the batch. With several processes each has a folder of its own, as a trace has a file.
    """

    def __init__(self, target: Any = FOLDER) -> None:
        self._make: Callable[[], Any] | None = None
        self._writer: Any = None
        if isinstance(target, str | os.PathLike):
            who = 'watch(sinks="tensorboard:<folder>")'
            needed("tensorboard", who, "tensorboard")  # first, or torch would be said to be what is missing
            module = needed("torch.utils.tensorboard", who, "tensorboard")
            rank, world_size = rank_and_world_size()
            folder = Path(target).absolute()  # the run may change its folder
            folder = folder.with_name(f"{folder.name}-rank{rank}") if world_size > 1 else folder
            self._make = partial(module.SummaryWriter, folder)
        else:
            self._writer = target

    def write(self, batch: int, values: Values) -> None:
        """Add numbers and words, unless the user has closed the writer: it would begin a file then."""
        if self._writer is None and self._make is not None:
            self._writer = self._make()
        if getattr(self._writer, "all_writers", True) is not None:
            for tag, value in values.items():
                add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
                add(tag, value, batch)

    def flush(self) -> None:
        """Write what waits to the file."""
        if self._writer is not None and getattr(self._writer, "all_writers", True) is not None:
            self._writer.flush()

    def on_close(self) -> None:
        """Write what waits to the file, and close the writer if it is its own."""
        self.flush()
        if self._make is not None and self._writer is not None:
            self._writer.close()


class WandbSink(LogSink):
    """Log that adds entries to the user's run; the x axis of their charts is the number of the batch.

    A run has one step for all that is logged, and drops what comes with a lower step than it has reached. So the
    sink makes no step: its entry goes with the next `run.log` of the user's own. Of several entries between two of
    those the latest stays, number by number. The run has a process of its own, which outlives this one.
    """

    def __init__(self, target: Any = None) -> None:
        if isinstance(target, str):
            raise ValueError(
                f"the sink wandb takes no {target!r}; say that to wandb.init(), and pass what it returns"
            )
        self._target = needed("wandb", "watch(sinks=<run of wandb>)", "wandb") if target is None else target

    def write(self, batch: int, values: Values) -> None:
        """Log numbers and words."""
        self._run.log({f"{TOTAL}/batch": batch, **values}, commit=False)

    @cached_property
    def _run(self) -> Any:
        # A trainer may begin the run after its callbacks were made.
        run = self._target.run if isinstance(self._target, ModuleType) else self._target
        if run is None:
            raise ValueError("has no run: call wandb.init() before the first batch, or pass what it returns")
        run.define_metric(f"{TOTAL}/batch", hidden=True)
        for group in (TOTAL, HEADROOM, FORECAST):
            run.define_metric(f"{group}/*", step_metric=f"{TOTAL}/batch")
        return run


def factory_of(name: str) -> Callable[..., Sink]:
    """Return what makes the sink of this name. Raises ValueError, with the names that there are, for another."""
    alerts: Any = import_module(".alerts", __package__)  # needs the network's modules, and this one

    factories: dict[str, Callable[..., Sink]] = {
        "jsonl": alerts.JsonLinesSink, "prometheus": alerts.PrometheusSink, "slack": alerts.SlackSink,
        "tensorboard": TensorBoardSink, "wandb": WandbSink, "webhook": alerts.WebhookSink,
    }  # fmt: skip
    if name not in factories:
        known = ", ".join(factories)
        raise ValueError(
            f"there is no sink {name!r}; known are {known}; a folder for TensorBoard is tensorboard:FOLDER"
        )
    return factories[name]


def log_for(target: Any) -> Callable[..., LogSink] | None:
    """Return what makes the log of an object, None where it is none of those that are ACCEPTED."""

    def has(*methods: str) -> bool:
        return all(callable(getattr(target, method, None)) for method in methods)

    if isinstance(target, os.PathLike) or has("add_scalar", "add_text"):
        return TensorBoardSink
    if has("log", "define_metric"):  # a run; the module `wandb` stands for the run it began
        return WandbSink
    return LogSink if callable(target) and not isinstance(target, type) else None


def sink_for(target: Any) -> Sink:
    """Return the sink of a target: itself, the log of an object, or what words such as "tensorboard:runs/a" name.

    Raises ImportError with the extra where its package is not installed.
    """
    if isinstance(target, Sink):
        return target
    if isinstance(target, str):
        name, _, words = target.partition(":")
        return factory_of(name)(*filter(None, [words]))
    return (log_for(target) or LogSink)(target)
