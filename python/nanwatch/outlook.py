"""What is seen over many batches, from the frames of some of them: forecasts and the user's log."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from .finding import Finding
from .forecast import Forecaster
from .frame import FrameRows
from .listener import Recorder

if TYPE_CHECKING:
    from .log import Log


class Outlook:
    """Tells the recorder of which batches frames are wanted, and those who want them what they see.

    `every`, `log_to` and `log_every` are as `watch` takes them. Raises as `sink_of` does.
    """

    def __init__(
        self, recorder: Recorder, *, every: int, forecasts: bool, log_to: Any, log_every: int
    ) -> None:
        self._recorder = recorder
        self._every = every
        self._forecaster = Forecaster() if forecasts else None
        self._log: Log | None = None
        if log_to is not None:
            from .log import Log
            from .sink import sink_of

            self._log = Log(sink_of(log_to), log_every)
        recorder.tells_frames = self.awaits_batches

    @property
    def awaits_batches(self) -> bool:
        """Whether it wants to be told of the ends of batches."""
        return self._forecaster is not None or self._log is not None

    def add(self, frame: FrameRows) -> None:
        """Take a frame, told by the recorder."""
        if not self._recorder.tells_frames:
            return
        if self._forecaster is not None and self._forecaster.is_due(frame.batch):
            self._forecaster.add(frame)
        if self._log is not None and self._log.is_due(frame.batch):
            self._log.add(frame)

    def end(self, batch: int) -> None:
        """A batch is done, and all was finite."""
        forecasts = []
        if self._forecaster is not None and self._recorder.tells_frames and self._forecaster.is_due(batch):
            forecasts = self._forecaster.end(batch)
        if self._log is not None:
            self._log.end(batch, forecasts)
        self._recorder.tells_frames = self._is_due(batch + self._every)
        for forecast in forecasts:
            warnings.warn(str(forecast), RuntimeWarning, stacklevel=2)

    def fault(self, finding: Finding | None) -> None:
        """A batch went wrong, or a step was about to take what its backward did wrong."""
        if self._log is not None and finding is not None:
            self._log.fault(finding)

    def close(self) -> None:
        """Log no more."""
        if self._log is not None:
            self._log.close()

    def _is_due(self, batch: int) -> bool:
        wanting = (self._forecaster, self._log)
        return any(one is not None and one.is_due(batch) for one in wanting)
