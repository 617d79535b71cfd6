"""Receiver of a recorder's events: which part of a Watch handles each event, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..history.forecast import Forecast
from ..recording.events import Arrival, BackwardCall, WatchPart
from ..records.record import Frame
from ..report.spike import SpikeReport
from ..sinks.sink import Sink, SinkStream
from ..trace.tracer import Tracer
from .failure_handler import FailureHandler
from .optimizer_steps import BackwardWatch
from .options import Options


@dataclass(eq=False, repr=False)
class EventDispatch:
    """RecorderEvents of one Watch. docs/architecture.md has the order of the parts at the end of a batch.

    The model's wrappers hold the recorder, the recorder holds this, and this holds the Watch, which so lives as long as
    the model. The recorder is made with this, and the parts with the recorder: the Watch sets them when they are made.
    """

    options: Options
    watch: object = None
    failures: FailureHandler = field(init=False)
    sinks: SinkStream = field(init=False)
    tracer: Tracer | None = None
    backward: BackwardWatch | None = None
    parts: Sequence[WatchPart] = ()

    def on_batch_start(
        self, batch: int, traced: bool, module: nn.Module | None, args: tuple[Any, ...], kwargs: Any
    ) -> object:
        """Return what a re-run needs beside the recorder's part."""
        self.failures.raise_postponed()
        for part in self.parts:
            part.batch_started(batch, module, args or tuple((kwargs or {}).values()))
        return self.failures.batch_started(batch, module)

    def on_frame(self, frame: Frame) -> None:
        """Hand the frame to the sinks, and to the trace if its batch was asked for."""
        self.sinks.on_frame(frame)
        for part in self.parts:
            part.on_frame(frame)
        if self.tracer is not None and frame.batch in self.options.trace_batches:
            self.tracer.add(frame)

    def on_nonfinite(
        self, frame: Frame, caller: str | None, args: tuple[Any, ...], kwargs: Any, is_over: bool
    ) -> None:
        """Hand the call to the failure handler, which may act on it at once."""
        self.failures.nonfinite_call(frame, caller, args, kwargs, is_over=is_over)

    def on_batch_end(self, batch: int, completed: bool) -> None:
        """Act on the batch's failure where that was put off."""
        self.failures.forward_left(batch, completed)
        if self.tracer is not None:
            self.tracer.batch_ended()
        try:
            self.failures.conclude(batch, completed)
        finally:
            self.sinks.settle(batch)

    def on_backward_start(self) -> None:
        """Find out whether the gradients of the deferred backward are gone, and look at the loss of this one."""
        if self.backward is not None:
            self.backward.guard.settle()
            if self.backward.spikes is not None:
                self.backward.spikes.backward_started()
            self.backward.started()

    def on_backward_end(self, calls: list[BackwardCall], arrivals: list[Arrival]) -> None:
        """Defer the failure until a step is about to take it, unless the forward's failure caused it."""
        if self.backward is not None:
            self.backward.ended(calls, arrivals)


class TraceNotes(Sink):
    """Sink that adds forecasts and spikes to a trace, which fetches its frames itself, as far as a batch is traced."""

    def __init__(self, tracer: Tracer, chosen: Collection[int]) -> None:
        self._tracer = tracer
        self._chosen = chosen

    def on_forecast(self, batch: int, forecast: Forecast) -> None:
        """Add it to the batch that it was made in."""
        self._add(forecast.rows(batch))

    def on_spike(self, report: SpikeReport) -> None:
        """Add it to the latest batch before the step."""
        self._add(report.rows())

    def _add(self, frame: Frame) -> None:
        if not self._chosen or frame.batch in self._chosen:
            self._tracer.note(frame)
