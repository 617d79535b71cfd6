"""Frames of the module calls that an exception left."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from ..diagnosis.left_calls import LeftCall
from ..instrumentation.wrapped_names import is_recorded, named_modules
from ..recording.observe import call_values, observe
from ..recording.walk import call_leaves
from ..report.frame import FrameRows
from ..report.record import Row
from .options import Options


class LeftFrames(NamedTuple):
    """The frames of the calls of a model that an exception left, the innermost first, and what led to them.

    `callers` are the modules that made the calls, `given` is what the outermost of all calls was called with.
    """

    frames: list[FrameRows]
    callers: list[str | None]
    given: list[Row]


def left_frames(calls: list[LeftCall], batch: int, model: nn.Module, options: Options) -> LeftFrames:
    """Return the frames of those of `calls` that `model`'s modules made, as far as they are observed."""
    names = {
        id(one.module): one.name
        for one in named_modules(model)
        if is_recorded(one.module) and options.observes(one.name)
    }
    own = [(names[id(call.module)], call) for call in calls if id(call.module) in names]
    frames = []
    for name, call in own:
        rows = [
            observe(
                x,
                label,
                role,
                options.allows_inf(name, call.module),
                counts=options.counts,
            )
            for role, label, x in call_values(options, *call)
        ]
        frames.append(FrameRows(batch, name, type(call.module).__name__, rows))
    callers = [*(name for name, _ in own[1:]), None]
    given = call_leaves(calls[-1].args, calls[-1].kwargs)
    return LeftFrames(frames, callers, [observe(x, label, "input") for label, x in given])
