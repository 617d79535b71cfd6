"""Sinks that log: TensorBoard, W&B or a function, and which sink a target of the option `sinks` means."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from ..history.forecast import Forecast
from ..report import text
from ..report.finding import Finding
from ..report.update_finding import UpdateFinding
from ..util.imports import needed
from ..util.job import rank_and_world_size
from ..util.visible import visible
from .batch_summary import BatchSummary, Histogram
from .sink import Sink

# The first part of a tag is the group in which TensorBoard and W&B show it: the few numbers of the whole model in one,
# a curve for each module in others.
TOTAL = "nanwatch"
HEADROOM, FORECAST, RANGES = "nanwatch_headroom_bits", "nanwatch_forecast_batch", "nanwatch_log2_abs_max"
GROUPS = (TOTAL, HEADROOM, FORECAST, RANGES)
IS_FINITE, LEAST = f"{TOTAL}/is_finite", f"{TOTAL}/headroom_bits"
PLACE, SENTENCE, FINDING = f"{TOTAL}/headroom_module", f"{TOTAL}/forecast", f"{TOTAL}/finding"
UPDATE, BATCH = f"{TOTAL}/update", f"{TOTAL}/batch"
# Curves by module. Of a larger model those modules have one that were among the worst when there still was room.
_MOST_MODULES = 256
FOLDER = "runs/nanwatch"  # below `runs`, where TensorBoard looks by default


@dataclass(frozen=True, slots=True)
class LogEntry:
    """Values to log at `batch`. All numbers are finite."""

    batch: int
    scalars: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


ACCEPTED = (
    "a nanwatch.Sink, a SummaryWriter of TensorBoard, a pathlib.Path for TensorBoard, a run of wandb, a function of a"
    " dict and the number of the batch, a name such as 'tensorboard:runs/a'"
)


class LogSink(Sink):
    """Sink that logs an entry for each event. A tracker needs no more than `write`."""

    def __init__(self) -> None:
        self._modules: dict[str, None] = {}  # that have a curve

    def write(self, entry: LogEntry) -> None:
        """Log it."""
        raise NotImplementedError

    def flush(self) -> None:
        """Let what was logged outlive the process, if it does not anyhow."""

    def on_batch(self, summary: BatchSummary) -> None:
        """Log headroom and ranges."""
        self.write(batch_entry(summary, take_curves(self._modules, summary)))

    def on_forecast(self, batch: int, forecast: Forecast) -> None:
        """Log the batch that it expects, and its sentence."""
        tag = f"{FORECAST}/{spell_module(forecast.module)}"
        self.write(LogEntry(batch, {tag: float(forecast.batch)}, texts={SENTENCE: str(forecast)}))

    def on_update(self, finding: UpdateFinding) -> None:
        """Log its sentence."""
        self.write(LogEntry(max(finding.batch, 0), texts={UPDATE: str(finding)}))

    def on_nonfinite(self, finding: Finding) -> None:
        """Log the batch at once: the next exception may end the process."""
        self.write(nonfinite_entry(finding))
        self.flush()


def take_curves(known: dict[str, None], summary: BatchSummary) -> dict[str, None]:
    """Return the modules that have a curve, after those of this batch have taken what room is left."""
    for name in summary.headroom:
        if len(known) >= _MOST_MODULES:
            break
        known[name] = None
    return known


def batch_entry(summary: BatchSummary, shown: Collection[str]) -> LogEntry:
    """Return the entry of a finite batch, with a number for each of the modules in `shown` that has one."""
    headroom = summary.headroom
    scalars, texts = {IS_FINITE: 1.0}, {}
    if headroom:
        module, (bits, label, dtype) = next(iter(headroom.items()))
        scalars[LEAST] = bits
        texts[PLACE] = visible(f"{spell_module(module)} {label}, {dtype}")
    for name in shown:
        if name in headroom:
            scalars[f"{HEADROOM}/{spell_module(name)}"] = headroom[name][0]
    histograms = {f"{RANGES}/{role}": histogram for role, histogram in summary.ranges.items()}
    return LogEntry(summary.batch, scalars, histograms, texts)


def nonfinite_entry(finding: Finding) -> LogEntry:
    """Return the entry of a non-finite batch."""
    return LogEntry(finding.batch, {IS_FINITE: 0.0}, texts={FINDING: text.summary(finding)})


def spell_module(name: str) -> str:
    """Return the name of a module within a tag."""
    return visible(name) or "(root)"


class FunctionSink(LogSink):
    """Log that calls a function with the numbers and words of each entry. Histograms are left out."""

    def __init__(self, function: Callable[[dict[str, float | str], int], object]) -> None:
        super().__init__()
        self._function = function

    def write(self, entry: LogEntry) -> None:
        """Call the function."""
        self._function({**entry.scalars, **entry.texts}, entry.batch)


class TensorBoardSink(LogSink):
    """Log that writes with the user's writer, or with one of its own in a folder, made for the first entry.

    The step is the number of the batch. With several processes each has a folder of its own, as a trace has a file.
    """

    def __init__(self, target: Any = FOLDER) -> None:
        super().__init__()
        self._writer: Any = None
        self._folder: Path | None = None
        if isinstance(target, str | os.PathLike):
            who = 'watch(sinks="tensorboard:<folder>")'
            needed("tensorboard", who, "tensorboard")  # first, or torch would be said to be what is missing
            self._module = needed("torch.utils.tensorboard", who, "tensorboard")
            rank, world_size = rank_and_world_size()
            folder = Path(target).absolute()  # the run may change its folder
            self._folder = folder.with_name(f"{folder.name}-rank{rank}") if world_size > 1 else folder
        else:
            self._writer = target

    def write(self, entry: LogEntry) -> None:
        """Add its numbers, histograms and words, unless the user has closed the writer: it would begin a file then."""
        if self._writer is None:
            self._writer = self._module.SummaryWriter(self._folder)
        if not self._is_open:
            return
        for tag, value in entry.scalars.items():
            self._writer.add_scalar(tag, value, entry.batch)
        for tag, histogram in entry.histograms.items():
            self._writer.add_histogram_raw(
                tag,
                min=histogram.least,
                max=histogram.most,
                num=sum(histogram.counts),
                sum=histogram.sum,
                sum_squares=histogram.sum_of_squares,
                bucket_limits=list(histogram.edges[1:]),
                bucket_counts=list(histogram.counts),
                global_step=entry.batch,
            )
        for tag, words in entry.texts.items():
            self._writer.add_text(tag, words, entry.batch)

    @property
    def _is_open(self) -> bool:
        return self._writer is not None and getattr(self._writer, "all_writers", True) is not None

    def flush(self) -> None:
        """Write what waits to the file."""
        if self._is_open:
            self._writer.flush()

    def on_close(self) -> None:
        """Close the writer if it is its own; write what waits to the file if it is the user's."""
        if self._folder is None:
            self.flush()
        elif self._writer is not None:
            self._writer.close()


class WandbSink(LogSink):
    """Log that adds entries to the user's run; the x axis of their charts is the number of the batch.

    A run has one step for all that is logged, and drops what comes with a lower step than it has reached. So the
    sink makes no step: its entry goes with the next `run.log` of the user's own. Of several entries between two of
    those the latest stays, number by number. The run has a process of its own, which outlives this one.
    """

    def __init__(self, target: Any = None) -> None:
        super().__init__()
        if isinstance(target, str):
            raise ValueError(
                f"the sink wandb takes no {target!r}; say that to wandb.init(), and pass what it returns"
            )
        self._wandb = needed("wandb", "watch(sinks=<run of wandb>)", "wandb")
        self._target = self._wandb if target is None else target
        self._run: Any = None

    def write(self, entry: LogEntry) -> None:
        """Log its numbers, histograms and words."""
        if self._run is None:
            self._run = self._begin()
        histograms = {
            tag: self._wandb.Histogram(np_histogram=(list(histogram.counts), list(histogram.edges)))
            for tag, histogram in entry.histograms.items()
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


def _has(target: Any, *methods: str) -> bool:
    return all(callable(getattr(target, method, None)) for method in methods)


# By name, in the order in which a target is asked what it can do. The module `wandb` stands for the run it began.
_LOGS: dict[str, tuple[Callable[[Any], bool], Callable[..., LogSink]]] = {
    "tensorboard": (
        lambda target: isinstance(target, os.PathLike) or _has(target, "add_scalar", "add_histogram_raw"),
        TensorBoardSink,
    ),
    "wandb": (lambda target: _has(target, "log", "define_metric"), WandbSink),
    "": (lambda target: callable(target) and not isinstance(target, type), FunctionSink),
}
# The other sinks with a name: what makes each, in the module that is imported for it.
_NAMED = {
    "jsonl": ".messages:JsonLinesSink",
    "prometheus": ".prometheus:PrometheusSink",
    "slack": ".webhook:SlackSink",
    "webhook": ".webhook:WebhookSink",
}
# Packages declare sinks of theirs in this entry point group: a name, and what makes the sink.
GROUP = "nanwatch.sinks"


def log_for(target: Any) -> Callable[..., LogSink] | None:
    """Return what makes the log of an object, None where it is none of those that are ACCEPTED."""
    return next((log for accepts, log in _LOGS.values() if accepts(target)), None)


def factory_of(name: str) -> Callable[..., Sink]:
    """Return what makes the sink of this name. Raises ValueError, with the names that there are, for another."""
    if name and name in _LOGS:
        return _LOGS[name][1]
    if name in _NAMED:
        module, _, attribute = _NAMED[name].partition(":")
        factory: Callable[..., Sink] = getattr(import_module(module, __package__), attribute)
        return factory
    declared = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in declared:
        known = ", ".join(sorted(filter(None, {*_LOGS, *_NAMED, *declared})))
        raise ValueError(
            f"there is no sink {name!r}; known are {known}, and those of packages with {GROUP}; a folder for"
            " TensorBoard is tensorboard:FOLDER"
        )
    made: Callable[..., Sink] = declared[name].load()
    return made


def sink_for(target: Any) -> Sink:
    """Return the sink of a target: itself, the log of an object, or what words such as "tensorboard:runs/a" name.

    Raises ImportError with the extra where its package is not installed.
    """
    if isinstance(target, Sink):
        return target
    if isinstance(target, str):
        name, _, words = target.partition(":")
        return factory_of(name)(*filter(None, [words]))
    return (log_for(target) or FunctionSink)(target)
