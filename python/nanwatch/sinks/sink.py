"""Sinks: receivers of what a Watch finds, and the stream of events that calls them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import isfinite
from typing import Any

from ..history.forecast import Forecast
from ..recording.events import Event, Recorder
from ..records.record import Frame, by_module
from ..report.events import ReplicaDifference, SkippedStep, SpikeReport, UpdateFinding
from ..report.finding import Finding
from ..report.report import Report
from ..util.messages import close_names, spell, suppressed, warn_user

# So many modules have a curve: in a larger model those that were among the worst while there was room.
_MOST_CURVES = 256


class BatchSummary:
    """The headroom of one finite batch. Read it when all frames are taken.

    Inputs are left out: each is another module's output. `shown` are the modules that have a curve.
    """

    def __init__(self, batch: int, shown: dict[str, None] | None = None) -> None:
        self.batch = batch
        self.frames: list[Frame] = []
        self._shown = {} if shown is None else shown

    @cached_property
    def headroom(self) -> dict[str, tuple[float, str, str]]:
        """The least headroom of each module in bits, with label and dtype, the worst first."""
        worst = [least for least in by_module(self.frames).values() if isfinite(least.bits)]
        return {least.module: (least.bits, least.label, least.dtype) for least in worst}

    @cached_property
    def curves(self) -> dict[str, float]:
        """The least headroom in bits of the modules that have a curve. New ones take the room that is left."""
        new = [name for name in self.headroom if name not in self._shown]
        self._shown.update(dict.fromkeys(new[: _MOST_CURVES - len(self._shown)]))
        return {name: self.headroom[name][0] for name in self._shown if name in self.headroom}


class Sink:
    """Receiver of what a Watch finds, beside what `on_nonfinite` does about it: see docs/trackers.md.

    Subclass it and override the events that you want. The others cost nothing. Each is called in the thread of the run,
    so a sink that may block starts a thread of its own. A sink that raises is dropped, with one warning.

    Examples:
        >>> import nanwatch, torch
        >>> class Counter(nanwatch.Sink):
        ...     every, batches = 2, 0
        ...     def on_batch(self, summary):
        ...         self.batches += 1
        >>> counter, model = Counter(), torch.nn.Identity()
        >>> with nanwatch.watch(model, sinks=counter):
        ...     for _ in range(4):
        ...         output = model(torch.ones(2))
        >>> counter.batches
        2
    """

    every: int = 50  # sum up one in so many batches; with several sinks the smallest number counts

    def on_batch(self, summary: BatchSummary) -> None:
        """Take a finite batch: one in `every`, with the headroom of its modules."""

    def on_frame(self, frame: Frame) -> None:
        """Take a recorded call. Every frame is then made into a Python object, which takes 3 µs."""

    def on_nonfinite(self, finding: Finding) -> None:
        """Take the first non-finite value of a batch as soon as it is found, before the batch is examined.

        Of several batches one in `every` is reported.
        """

    def on_failure(self, report: Report) -> None:
        """Take the report of a failure that is complete: before it is raised, or the run goes on."""

    def on_forecast(self, batch: int, forecast: Forecast) -> None:
        """Take a forecast that `batch` has led to."""

    def on_spike(self, report: SpikeReport) -> None:
        """Take the report of a spike."""

    def on_update(self, finding: UpdateFinding) -> None:
        """Take a finding about an optimizer's step."""

    def on_skipped_step(self, step: SkippedStep) -> None:
        """Take a step of the optimizer that was skipped."""

    def on_replica_difference(self, difference: ReplicaDifference) -> None:
        """Take a difference between replicas, on each rank that should hold the same."""

    def on_close(self) -> None:
        """Take the end of the watch."""

    def __init_subclass__(cls) -> None:
        """Refuse a method that is named like an event, and is none."""
        super().__init_subclass__()
        for name in vars(cls):
            if name.startswith("on_") and not hasattr(Sink, name):
                hint = close_names(name, EVENTS, ", ".join(EVENTS))
                raise TypeError(f"{cls.__name__}.{name} is no event of a sink; {hint}")


EVENTS = tuple(name for name in vars(Sink) if name.startswith("on_"))


class Warnings(Sink):
    """Sink that warns of forecasts, spikes and the first finding about steps. A user's filter may raise the warning.

    `note` takes the frame of a forecast or a spike, for the trace.
    """

    _has_update = False

    def __init__(self, note: Callable[[Frame], object]) -> None:
        self._note = note

    def on_update(self, finding: UpdateFinding) -> None:
        """Warn of the first one."""
        is_first, self._has_update = not self._has_update, True
        if is_first:
            warn_user(f"the optimizer's {finding} Watch.updates has all findings")

    def on_spike(self, report: SpikeReport) -> None:
        """Note it, warn of it, and say where its report is."""
        self._note(report.rows())
        where = f"{report.files[0]} and Watch.spikes have" if report.files else "Watch.spikes has"
        warn_user(f"{report.summary}; {where} the report")

    def on_forecast(self, batch: int, forecast: Forecast) -> None:
        """Note it in the batch that it was made in, and warn of it."""
        self._note(forecast.rows(batch))
        warn_user(str(forecast))

    def on_replica_difference(self, difference: ReplicaDifference) -> None:
        """Warn of it."""
        warn_user(str(difference))


class SinkStream:
    """The events of one Watch, each handed to the sinks that take it.

    `sinks` are the user's. `internal` is nanwatch's, which comes last and may raise. The smallest `every` of the user's
    sinks counts for all.
    """

    def __init__(self, recorder: Recorder, sinks: Sequence[Sink], internal: Sink, every: int) -> None:
        # Each sink with the events that it takes: none once it has raised.
        self._receivers = [
            (sink, {event for event in EVENTS if getattr(type(sink), event) is not getattr(Sink, event)})
            for sink in sinks
        ]
        self._internal, self._every = internal, every
        self._log_every = min((sink.every for sink in sinks), default=Sink.every)
        self._next = self._next_nonfinite = 0  # the batches to sum up, and to report as non-finite
        self._summary: BatchSummary | None = None
        self._shown: dict[str, None] = {}  # modules that have a curve
        self._process = os.getpid()  # a forked child has the sinks, but neither their files nor their threads
        self._frames = recorder.subscribe(Event.FRAME)
        self._subscribe(0)

    @property
    def takes_batches(self) -> bool:
        """Return whether a sink needs the ends of batches."""
        return self._takes("on_batch") or self._takes("on_frame")

    def _takes(self, event: str) -> bool:
        return any(event in events for _, events in self._receivers)

    def _subscribe(self, batch: int) -> None:
        self._frames.active = self._takes("on_frame") or (batch >= self._next and self._takes("on_batch"))

    def _tell(self, event: str, *args: Any) -> None:
        for sink, events in self._receivers if self._process == os.getpid() else ():
            if event not in events:
                continue
            try:
                getattr(sink, event)(*args)
            except Exception as error:
                events.clear()
                suppressed(f"a sink raised in {event}")
                # The warning may not replace the failure that the sink was called with.
                why = f"{type(sink).__name__}, which raised {spell(error)}; the run goes on and is watched"
                warn_user(f"nanwatch logs no more to the sink {why}", may_raise=False)
        getattr(self._internal, event)(*args)

    def on_frame(self, frame: Frame) -> None:
        """Take a frame of the recorder, which reports those of traced batches to everybody."""
        if not self._frames.active:
            return
        self._tell("on_frame", frame)
        if frame.batch >= self._next and self._takes("on_batch"):
            # Each thread adds to its own batch. A batch that failed is dropped with the first frame of the next.
            summary = self._summary
            if summary is None or summary.batch != frame.batch:
                summary = self._summary = BatchSummary(frame.batch, self._shown)
            summary.frames.append(frame)

    def batch_ended(self, batch: int) -> None:
        """Take the end of a finite batch."""
        if (summary := self._summary) is not None and summary.batch == batch:
            self._summary = None
            self._next = batch + self._log_every
            self._tell("on_batch", summary)

    def settle(self, batch: int) -> None:
        """Choose the frames of the next batch, as this one has ended, finite or not."""
        if self._receivers and batch % self._every == 0:
            self._subscribe(batch + self._every)

    def on_nonfinite(self, finding: Finding) -> None:
        """Report one in `every` of the batches that are non-finite."""
        if finding.batch >= self._next_nonfinite:
            self._next_nonfinite = finding.batch + self._log_every
            self._tell("on_nonfinite", finding)

    def on_close(self) -> None:
        """Report the end. A second time does nothing."""
        self._frames.remove()
        self._tell("on_close")
        self._receivers = []

    def __getattr__(self, event: str) -> Callable[..., None]:
        if event not in EVENTS:
            raise AttributeError(event)
        return partial(self._tell, event)
