"""Makes the reports of one watch."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import nn

from ..recording.events import Recorder
from ..recording.job import rank, report_of
from ..recording.shard import parameter_mesh
from ..report.finding import Finding, find
from ..report.frame import Frame, FrameRows
from ..report.record import Record
from ..report.report import Report


class Reports:
    """Reports of what a recorder holds, each with at most `max_frames` of the latest frames."""

    def __init__(self, model: nn.Module, recorder: Recorder, max_frames: int) -> None:
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._max_frames = max_frames
        self._mesh: tuple[str, ...] = ()  # as last seen: a report may be asked for when the model has gone

    def look_at_mesh(self) -> None:
        """Remember where this rank is in the device meshes of the model's parameters."""
        self._mesh = parameter_mesh(self._model()) or self._mesh

    def of(self, frames: tuple[Frame, ...], finding: Finding | None, batch: int | None) -> Report:
        """Return the report of these frames, the oldest first."""
        self.look_at_mesh()
        return report_of(frames[-self._max_frames :], finding, batch, self._mesh)

    def latest(self, finding: Finding | None, batch: int | None, more: Iterable[FrameRows] = ()) -> Report:
        """Return a report of the recorder's frames, and of `more` that it has not kept."""
        return self.of(self._frames(more), finding, batch)

    def of_fault(
        self,
        batch: int,
        caller: str | None,
        given: Sequence[Record],
        more: Sequence[FrameRows] = (),
        *,
        faulty: FrameRows | None = None,
    ) -> Report:
        """Return the report of the first fault of a batch, which was called with `given`.

        `caller` is the module that made the faulty call. `faulty` is that call's frame, which the recorder has kept and
        which the frames of other threads may have pushed out since.
        """
        frames = self._frames(more)
        current = [one for one in frames if one.batch == batch]
        if faulty is not None and all(one.fault is None for one in current):
            current = [faulty.to_frame()]
            frames = (*frames, *current)
        kept = self._recorder.frames_of_batch(batch)
        num_frames = None if kept is None else kept + len(more)
        finding = find(current, batch_inputs=given, caller=caller, rank=rank(), num_frames=num_frames)
        return self.of(frames, finding, batch)

    def _frames(self, more: Iterable[FrameRows]) -> tuple[Frame, ...]:
        return tuple(frame.to_frame() for frame in (*self._recorder.frames(), *more))
