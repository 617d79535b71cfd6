"""Monitoring over many batches: forecasts from the largest magnitudes, and the user's log from frames."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from ..recording.events import Event, Recorder
from ..report.finding import Finding
from ..report.frame import FrameRows
from ..util.modules import each_module
from ..util.user_warning import warn_user
from .backends import backend_for
from .forecast import Forecast, Forecaster
from .log import Log


class Monitor:
    """Subscriber that takes frames and magnitudes of some batches for the log and the forecaster.

    `every`, `log_to` and `log_every` are as `watch` takes them. Raises as `backend_for` does.
    """

    def __init__(
        self,
        recorder: Recorder,
        model: nn.Module,
        *,
        every: int,
        forecasts: bool,
        log_to: Any,
        log_every: int,
    ) -> None:
        self._recorder = recorder
        self._every = every
        self._forecaster = Forecaster(_num_tensors(model)) if forecasts else None
        self._looking = threading.Lock()
        self._log: Log | None = None
        if log_to is not None:
            self._log = Log(backend_for(log_to), log_every)
        self._frames = recorder.subscribe(Event.FRAME)
        self._frames.active = self._log is not None
        recorder.gathers_peaks = forecasts

    @property
    def awaits_batches(self) -> bool:
        """Return whether the monitor needs the ends of batches."""
        return self._forecaster is not None or self._log is not None

    def add(self, frame: FrameRows) -> None:
        """Take a frame from the recorder."""
        if self._log is not None and self._frames.active and self._log.is_due(frame.batch):
            self._log.add(frame)

    def end(self, batch: int) -> None:
        """Handle the end of a finite batch."""
        forecasts = [] if self._forecaster is None else self._forecasts(self._forecaster, batch)
        if self._log is not None:
            self._log.end(batch, forecasts)
            self._frames.active = self._log.is_due(batch + self._every)
        for forecast in forecasts:
            warn_user(str(forecast))

    def on_nonfinite(self, finding: Finding | None) -> None:
        """Log a non-finite batch, or a step that was about to take non-finite gradients."""
        if self._log is not None and finding is not None:
            self._log.on_nonfinite(finding)

    def close(self) -> None:
        """Stop logging."""
        if self._log is not None:
            self._log.close()

    def _forecasts(self, forecaster: Forecaster, batch: int) -> list[Forecast]:
        # Another thread's batch that ends meanwhile is one that is not looked at. Waiting could lock up: a signal's
        # handler or the garbage collector may end a batch in here.
        if not self._looking.acquire(blocking=False):
            return []
        try:
            found = []
            if self._recorder.gathers_peaks:
                gathered, names, values = self._recorder.take_peaks()
                forecaster.meet(names)
                if gathered == batch:
                    found = forecaster.end(batch, values)
            self._recorder.gathers_peaks = forecaster.is_due(batch + self._every)
            return found
        finally:
            self._looking.release()


def _num_tensors(model: nn.Module) -> int:
    """Return the number of weights, buffers and modules, each module counted for an output."""
    return sum(1 + len(module._parameters) + len(module._buffers) for _, module in each_module(model))
