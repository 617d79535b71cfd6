"""Reading of the recorder's largest magnitudes at the ends of batches, for forecasts and spikes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import nn

from ..recording.events import PeakName, Recorder
from .forecast import Forecast, Forecaster
from .peaks import PeakHistory
from .suspicion import Suspicion

Take = Callable[[int, list[PeakName], bytes], object]


class Monitor:
    """Reader of a Watch's magnitudes, one batch in `every`."""

    def __init__(self, recorder: Recorder, model: nn.Module, *, every: int, forecasts: bool) -> None:
        self._recorder = recorder
        self._every = every
        self._forecaster = Forecaster() if forecasts else None
        self._take: Take | None = None
        self._names: list[PeakName] = []  # that the forecaster has not met
        history = PeakHistory() if self._forecaster is None else self._forecaster.history
        self.suspicion = Suspicion(model, history, recorder)
        self._looking = threading.Lock()
        if forecasts:
            recorder.gathers_from = 0

    def follow(self, take: Take) -> None:
        """Hand the peaks of each batch to `take`."""
        self._take = take
        self._recorder.gathers_from = 0

    def end(self, batch: int) -> Forecast | None:
        """Take the end of a finite batch, and return the forecast that is new."""
        if batch < self._recorder.gathers_from:
            return None
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
                forecaster.add_names(names)
                forecast = forecaster.end(batch, values) if gathered == batch else None
            if take is None:
                self._recorder.gathers_from = max(batch + self._every, forecaster.next)
            return forecast
        finally:
            self._looking.release()
