"""Reading of the recorder's largest magnitudes at the ends of batches, and the warnings of what they show."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from torch import nn

from ..history.forecast import Forecast, Forecaster
from ..history.peaks import PeakHistory
from ..history.suspicion import Suspicion
from ..recording.events import PeakName, Recorder
from ..report.replica import ReplicaDifference
from ..report.spike import SpikeReport
from ..report.update_finding import UpdateFinding
from ..util.visible import warn_user
from .sink import Sink, SinkStream

Take = Callable[[int, list[PeakName], bytes], object]


class Warnings(Sink):
    """Sink that warns of forecasts, spikes and the first finding about steps. A user's filter may raise the warning."""

    def __init__(self) -> None:
        self._has_update = False

    def on_update(self, finding: UpdateFinding) -> None:
        """Warn of the first one."""
        is_first, self._has_update = not self._has_update, True
        if is_first:
            warn_user(f"the optimizer's {finding} Watch.updates has all findings")

    def on_forecast(self, batch: int, forecast: Forecast) -> None:
        """Warn of it."""
        warn_user(str(forecast))

    def on_spike(self, report: SpikeReport) -> None:
        """Warn of it, and say where its report is."""
        where = f"{report.files[0]} and Watch.spikes have" if report.files else "Watch.spikes has"
        warn_user(f"{report.summary}; {where} the report")

    def on_replica_difference(self, difference: ReplicaDifference) -> None:
        """Warn of it."""
        warn_user(str(difference))


class Monitor:
    """Reader of a Watch's magnitudes. Tells the sinks of forecasts and of finite batches.

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
        self._recorder = recorder
        self._every = every
        self._forecaster = Forecaster() if forecasts else None
        self._take: Take | None = None
        self._names: list[PeakName] = []  # that the forecaster has not met
        self._next = 0  # the batch to look at
        history = PeakHistory() if self._forecaster is None else self._forecaster.history
        self.suspicion = Suspicion(model, history, recorder)
        self.sinks = SinkStream(recorder, sinks, [*notes, Warnings()], every=every, log_every=log_every)
        self._looking = threading.Lock()
        if forecasts:
            recorder.gathers_from = 0

    @property
    def awaits_batches(self) -> bool:
        """Return whether the monitor needs the end of each batch. The recorder reports those with peaks."""
        return self.sinks.takes_batches

    def follow(self, take: Take) -> None:
        """Hand the peaks of each batch to `take`."""
        self._take = take
        self._recorder.gathers_from = 0

    def end(self, batch: int) -> None:
        """Handle the end of a finite batch."""
        forecast = self._look(batch) if batch >= self._recorder.gathers_from else None
        self.sinks.batch_ended(batch)
        if forecast is not None:
            self.sinks.on_forecast(batch, forecast)

    def _look(self, batch: int) -> Forecast | None:
        # A batch of another thread that ends meanwhile is left out. Waiting could lock up: a signal's handler or the
        # garbage collector may end a batch in here.
        if not self._looking.acquire(blocking=False):
            return None
        try:
            gathered, names, values = self._recorder.take_peaks()
            forecaster, take = self._forecaster, self._take
            if take is not None:
                take(gathered, names, values)
            if forecaster is None:
                return None
            self._names += names
            forecast = None
            if batch >= forecaster.next:
                names, self._names = self._names, []
                forecaster.meet(names)
                forecast = forecaster.end(batch, values) if gathered == batch else None
            if take is None:
                self._recorder.gathers_from = max(batch + self._every, forecaster.next)
            return forecast
        finally:
            self._looking.release()
