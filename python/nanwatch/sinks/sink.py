"""Sinks: receivers of what a Watch finds, and the stream of events that calls them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, ClassVar

from ..history.forecast import Forecast
from ..recording.events import Event, Recorder
from ..records.record import Frame
from ..report.finding import Finding
from ..report.replica import ReplicaDifference
from ..report.report import Report
from ..report.skipped_step import SkippedStep
from ..report.spike import SpikeReport
from ..report.update_finding import UpdateFinding
from ..util.visible import close_names, spell, suppressed, warn_user
from .batch_summary import BatchSummary
from .own_time import OwnTimeSample
from .thread import SinkThread

# A tracker takes 30 to 60 µs a number. A sink that takes more than a fiftieth of the run's time is called less often.
_SHARE = 50
_OF_BATCHES = ("on_frame", "on_batch")


class Sink:
    """Receiver of what a Watch finds, beside what `on_nonfinite` does about it: see docs/trackers.md.

    Subclass it and override the events that you want. The others cost nothing. Each is called in the thread of the run.
    A sink that raises is called no more, which one warning says. One that takes long is called less often, so that
    it takes at most 2 % of the time. One that may block says `in_thread = True` and is called in a thread of its own:
    it delays no step, and what it has no time for is dropped.

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

    in_thread: ClassVar[bool] = False
    every: int = 50  # sum up one in so many batches; with several sinks the smallest number counts

    def on_batch(self, summary: BatchSummary) -> None:
        """Take a finite batch: one in `every`, with the headroom and the ranges of its modules."""

    def on_frame(self, frame: Frame) -> None:
        """Take a recorded call. Every frame is then made into a Python object, which takes 3 µs."""

    def on_nonfinite(self, finding: Finding) -> None:
        """Take the first non-finite value of a batch as soon as it is found, before the batch is examined.

        Of several batches one in `every` is told.
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
                raise TypeError(
                    f"{cls.__name__}.{name} is no event of a sink; {close_names(name, EVENTS, ', '.join(EVENTS))}"
                )


EVENTS = tuple(name for name in vars(Sink) if name.startswith("on_"))


class _Taker:
    """A sink with its name for the user, the events that it takes, and the time that they have taken."""

    def __init__(self, name: str, sink: Sink) -> None:
        self.events = {event for event in EVENTS if getattr(type(sink), event) is not getattr(Sink, event)}
        self._took: dict[str, float] = {}
        self._not_before: dict[str, float] = {}
        self.has_time = True
        self._deliver: Callable[[str, tuple[Any, ...]], bool] = partial(_deliver, name, sink)
        self._thread: SinkThread | None = None
        if sink.in_thread:
            self._thread = SinkThread(name, self._deliver)
            self._deliver = self._thread.put
            weakref.finalize(self, self._thread.close).atexit = False

    def call(self, event: str, args: tuple[Any, ...]) -> None:
        """Call the sink if it takes the event and has time for it."""
        is_of_batch = event in _OF_BATCHES
        begun = monotonic()
        if event not in self.events or (
            not self.has_time if is_of_batch else begun < self._not_before.get(event, 0.0)
        ):
            return
        if not self._deliver(event, args):
            self.events = set()
        self._took[event] = self._took.get(event, 0.0) + monotonic() - begun
        if not is_of_batch:
            self._pause(event)

    def close(self) -> None:
        """Call the sink for the last time."""
        self.call("on_close", ())
        if self._thread is not None:
            self._thread.close()

    def settle(self) -> None:
        """Decide about the frames and the summary of the next batch: a sink gets all of them or none."""
        for event in _OF_BATCHES:
            self._pause(event)
        self.has_time = monotonic() >= max(self._not_before.get(event, 0.0) for event in _OF_BATCHES)

    def _pause(self, event: str) -> None:
        """Call the event later, the longer it took. The first call opens a file or a connection, and does not count."""
        if (took := self._took.pop(event, None)) is not None:
            self._not_before[event] = monotonic() + _SHARE * took if event in self._not_before else 0.0


def _deliver(name: str, sink: Sink, event: str, args: tuple[Any, ...]) -> bool:
    """Call the sink. Return False, after a warning, where it raised."""
    try:
        getattr(sink, event)(*args)
        return True
    except Exception as error:
        suppressed(f"a sink raised in {event}")
        # It may not raise in place of the failure that the sink was told.
        warn_user(
            f"nanwatch logs no more to {name}, which raised {spell(error)}; the run goes on and is watched",
            may_raise=False,
        )
        return False


_NO_SUMMARY = BatchSummary(-1)


class SinkStream(Sink):
    """The events of one Watch, each handed to the sinks that take it.

    `sinks` are the user's, each with its name. `own` are nanwatch's, which may raise and take their time. Every
    `log_every`-th batch of those that are read is summed up.
    """

    def __init__(
        self,
        recorder: Recorder,
        sinks: Sequence[tuple[str, Sink]],
        own: Sequence[Sink] = (),
        *,
        every: int = 1,
        log_every: int = 50,
    ) -> None:
        self._takers = [_Taker(name, sink) for name, sink in sinks]
        self._own = own
        self._every = every
        self._log_every = log_every
        self._next = 0  # the batch to sum up
        self._summary = _NO_SUMMARY
        self._told_of: int | None = None  # the latest batch that was told to be non-finite
        # A forked child has the sinks but not their threads: what is put in a queue would stay there, and block.
        self._process = os.getpid()
        self._frames = recorder.subscribe(Event.FRAME)
        self._own_time = OwnTimeSample(recorder)
        self._subscribe(0)

    @property
    def takes_batches(self) -> bool:
        """Return whether a sink needs the ends of batches."""
        return any(taker.events & {*_OF_BATCHES} for taker in self._takers)

    def _takes(self, event: str) -> bool:
        return any(event in taker.events and taker.has_time for taker in self._takers)

    def _is_due(self, batch: int) -> bool:
        return batch >= self._next and self._takes("on_batch")

    def _subscribe(self, batch: int) -> None:
        """Ask for the frames of this batch, if a sink wants them."""
        self._frames.active = self._takes("on_frame") or self._is_due(batch)

    def _tell(self, event: str, *args: Any) -> None:
        if self._process == os.getpid():
            for taker in self._takers:
                taker.call(event, args)

    def on_frame(self, frame: Frame) -> None:
        """Take a frame of the recorder, which reports those of traced batches to everybody."""
        if not self._frames.active:
            return
        self._tell("on_frame", frame)
        if self._is_due(frame.batch):
            # Each thread adds to its own batch. A batch that failed is dropped with the first frame of the next.
            summary = self._summary
            if summary.batch != frame.batch:
                summary = self._summary = BatchSummary(frame.batch, self._own_time.latest)
            summary.add(frame)

    def batch_ended(self, batch: int) -> None:
        """Take the end of a finite batch."""
        summary = self._summary
        # A sink that had no time at the first frame gets no half of a summary.
        if summary.batch == batch:
            self._summary = _NO_SUMMARY
            self._next = batch + self._log_every
            self._tell("on_batch", summary)

    def settle(self, batch: int) -> None:
        """Choose the sinks that have time for the next batch, as this one has ended, finite or not."""
        if self._takers and batch % self._every == 0:
            # Not in the logged batch itself, where the recorder makes frames for the sinks.
            self._own_time.batch_ended(batch + self._log_every == self._next, self._every)
            for taker in self._takers:
                taker.settle()
            self._subscribe(batch + self._every)

    def on_nonfinite(self, finding: Finding) -> None:
        """Tell of one in `log_every` of the batches that are non-finite."""
        last = self._told_of
        if last is None or not last <= finding.batch < last + self._log_every:
            self._told_of = finding.batch
            self._tell("on_nonfinite", finding)

    def on_close(self) -> None:
        """Tell of the end. A second time does nothing."""
        takers, self._takers = self._takers, []
        self._frames.remove()
        self._own_time.remove()
        if self._process == os.getpid():
            for taker in takers:
                taker.close()


def _passed_on(event: str) -> Callable[..., None]:
    """Return a method of the stream that tells the sinks of the event, and last of all its own, which may raise."""

    def tell(self: SinkStream, *args: Any) -> None:
        self._tell(event, *args)
        for sink in self._own:
            getattr(sink, event)(*args)

    return tell


for _event in EVENTS:
    if _event not in vars(SinkStream):
        setattr(SinkStream, _event, _passed_on(_event))
