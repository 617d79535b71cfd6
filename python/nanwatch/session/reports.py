"""Makes the reports of one Watch, and the frames of calls that an exception left."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from ..diagnosis.batch_snapshot import LeftCall
from ..instrumentation.wrapped_names import is_recorded, named_modules
from ..recording.events import Recorder
from ..recording.observe import call_values, observe
from ..recording.shard import parameter_mesh
from ..recording.walk import call_leaves
from ..report.finding import Finding, find
from ..report.frame import Frame, FrameRows
from ..report.record import Record, Row
from ..report.report import Report, report_of
from ..util.job import rank

if TYPE_CHECKING:
    from .options import Options


class Reports:
    """Makes reports of the frames that a recorder holds, each with at most the latest `max_frames`."""

    def __init__(self, model: nn.Module, recorder: Recorder, max_frames: int) -> None:
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._max_frames = max_frames
        self._mesh: tuple[str, ...] = ()  # kept, because a report may be asked for when the model has gone

    def look_at_mesh(self) -> None:
        """Remember the place of this rank in the device meshes of the model's parameters."""
        self._mesh = parameter_mesh(self._model()) or self._mesh

    def of(self, frames: tuple[Frame, ...], finding: Finding | None, batch: int | None) -> Report:
        """Return the report of these frames, the oldest first."""
        self.look_at_mesh()
        return report_of(frames[-self._max_frames :], finding, batch, self._mesh)

    def latest(self, finding: Finding | None, batch: int | None, more: Iterable[FrameRows] = ()) -> Report:
        """Return a report of the recorder's frames, and of `more` that it has not kept."""
        return self.of(self._frames(more), finding, batch)

    def of_failure(
        self,
        batch: int,
        caller: str | None,
        given: Sequence[Record],
        more: Sequence[FrameRows] = (),
        *,
        nonfinite: FrameRows | None = None,
    ) -> Report:
        """Return the report of the first non-finite call of a batch whose outermost call got `given`.

        `caller` is the module that made that call. `nonfinite` is the call's frame: frames of other threads may have
        pushed it out of the recorder since.
        """
        frames = self._frames(more)
        current = [one for one in frames if one.batch == batch]
        if nonfinite is not None and all(one.fault is None for one in current):
            current = [nonfinite.to_frame()]
            frames = (*frames, *current)
        kept = self._recorder.frames_of_batch(batch)
        num_frames = None if kept is None else kept + len(more)
        finding = find(current, batch_inputs=given, caller=caller, rank=rank(), num_frames=num_frames)
        return self.of(frames, finding, batch)

    def _frames(self, more: Iterable[FrameRows]) -> tuple[Frame, ...]:
        return tuple(frame.to_frame() for frame in (*self._recorder.frames(), *more))


class LeftFrames(NamedTuple):
    """Frames of the calls of a model that an exception left, the innermost first.

    `callers` are the modules that made the calls. `given` are the arguments of the outermost call.
    """

    frames: list[FrameRows]
    callers: list[str | None]
    given: list[Row]


def left_frames(calls: list[LeftCall], batch: int, model: nn.Module, options: Options) -> LeftFrames:
    """Return the frames of those `calls` that observed modules of `model` made."""
    names = {
        id(one.module): one.name
        for one in named_modules(model)
        if is_recorded(one.module) and options.observes(one.name)
    }
    own = [(names[id(call.module)], call) for call in calls if id(call.module) in names]
    frames = []
    for name, call in own:
        rows = [
            observe(x, label, role, options.allows_inf(name, call.module), counts=options.counts)
            for role, label, x in call_values(options, *call)
        ]
        frames.append(FrameRows(batch, name, type(call.module).__name__, rows))
    callers = [*(name for name, _ in own[1:]), None]
    given = call_leaves(calls[-1].args, calls[-1].kwargs)
    return LeftFrames(frames, callers, [observe(x, label, "input") for label, x in given])
