"""Monitoring over many batches: forecasts from the largest magnitudes, and who is told of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count

from torch import nn

from ..history.forecast import Forecast, Forecaster
from ..history.peaks import PeakHistory
from ..history.suspicion import Suspicion
from ..recording.events import PeakName, Recorder
from ..report.replica import ReplicaDifference
from ..report.spike import SpikeReport
from ..report.update_finding import UpdateFinding
from ..util.modules import each_module
from ..util.visible import warn_user
from .sink import Sink, SinkStream


class Warnings(Sink):
    """Sink that warns of forecasts, spikes and the first finding about steps.

    A filter of the user's may raise the warning.
    """

    def __init__(self, suspicion: Suspicion) -> None:
        self._suspicion = suspicion
        self._has_update = False

    def on_update(self, finding: UpdateFinding) -> None:
        """Warn of the first one."""
        first, self._has_update = not self._has_update, True
        if first:
            warn_user(f"the optimizer's {finding} Watch.updates has all findings")

    def on_forecast(self, batch: int, forecast: Forecast) -> None:
        """Warn of it, with what has grown most."""
        grew = next((one.growth for one in self._suspicion.suspects() if one.growth), "")
        warn_user(f"{forecast}; grew since the watch began: {grew}" if grew else str(forecast))

    def on_spike(self, report: SpikeReport) -> None:
        """Warn of it, and say where its report is."""
        where = f"{report.files[0]} and Watch.spikes have" if report.files else "Watch.spikes has"
        warn_user(f"{report.summary}; {where} the report")

    def on_replica_difference(self, difference: ReplicaDifference) -> None:
        """Warn of it."""
        warn_user(str(difference))


class Monitor:
    """Forecasts of a Watch, from the magnitudes of some batches. It tells the sinks of them and of finite batches.

    `sinks` are the user's, with their names, and `notes` nanwatch's own: see SinkStream.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        sinks: Sequence[tuple[str, Sink]],
        notes: Sequence[Sink],
        *,
        every: int,
        log_every: int,
        forecasts: bool,
    ) -> None:
        # Gets the peaks of each batch.
        self.spikes: Callable[[int, list[PeakName], bytes], None] | None = None
        self._names: list[PeakName] = []  # that the forecaster has not met
        self._recorder = recorder
        self._every = every
        # Weights, buffers and modules, each module counted for an output.
        modules = (module for _, module in each_module(model))
        num_tensors = sum(1 + len(one._parameters) + len(one._buffers) for one in modules)
        self._forecaster = Forecaster(num_tensors) if forecasts else None
        history = PeakHistory() if self._forecaster is None else self._forecaster.history
        self.suspicion = Suspicion(model, history)
        self.sinks = SinkStream(
            recorder, sinks, [*notes, Warnings(self.suspicion)], every=every, log_every=log_every
        )
        self._looking = threading.Lock()
        if forecasts:
            recorder.gathers_from = 0

    @property
    def awaits_batches(self) -> bool:
        """Return whether the monitor needs the end of each batch. The recorder reports those with peaks."""
        return self.sinks.takes_batches

    def end(self, batch: int) -> None:
        """Handle the end of a finite batch."""
        follows = self._forecaster is not None or self.spikes is not None
        forecasts = self._forecasts(batch) if follows else []
        self.sinks.batch_ended(batch)
        for forecast in forecasts:
            self.sinks.on_forecast(batch, forecast)

    def follow(self, spikes: Callable[[int, list[PeakName], bytes], None]) -> None:
        """Hand the peaks of each batch to `spikes`."""
        self.spikes = spikes
        self._recorder.gathers_from = 0

    def _forecasts(self, batch: int) -> list[Forecast]:
        # A batch of another thread that ends meanwhile is left out. Waiting could lock up: a signal's handler or the
        # garbage collector may end a batch in here.
        if not self._looking.acquire(blocking=False):
            return []
        try:
            found = []
            forecaster = self._forecaster
            if batch >= self._recorder.gathers_from:
                gathered, names, values = self._recorder.take_peaks()
                self._names += names
                if self.spikes is not None:
                    self.spikes(gathered, names, values)
                if forecaster is not None and (self.spikes is None or forecaster.is_due(batch)):
                    names, self._names = self._names, []
                    forecaster.meet(names)
                    if gathered == batch:
                        found = forecaster.end(batch, values)
                if forecaster is not None and self.spikes is None:
                    self._recorder.gathers_from = next(filter(forecaster.is_due, count(batch + self._every)))
            return found
        finally:
            self._looking.release()
