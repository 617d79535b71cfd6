"""The module calls that an exception left, read from its traceback.

A call that raises has no frame, as the recorder sees a call when it returns. Its module, its arguments and, where a
hook raised after the forward, its output are still in the frames of the traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

from torch import nn

from .call_values import call_values
from .frame import FrameRows
from .observe import observe
from .options import Options
from .record import Row
from .walk import call_leaves
from .wrapped_names import is_recorded, named_modules

# The method of PyTorch's that runs a module's hooks and its forward.
_CALL = nn.Module._call_impl.__code__


class LeftCall(NamedTuple):
    """A call that an exception left. `output` is () where the forward had not returned."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


class LeftFrames(NamedTuple):
    """The frames of the calls of a model that an exception left, the innermost first, and what led to them.

    `callers` are the modules that made the calls, `given` is what the outermost of all calls was called with.
    """

    frames: list[FrameRows]
    callers: list[str | None]
    given: list[Row]


def left_calls(error: BaseException) -> list[LeftCall]:
    """Return the module calls that the exception left, the innermost first."""
    found = []
    place = error.__traceback__
    outer: FrameType | None = None
    while place is not None:
        if place.tb_frame.f_code is _CALL:
            if outer is not None and not _is_inside(place.tb_frame, outer):
                break  # of an exception that is raised once more: these calls are of the time before
            outer = place.tb_frame
            values = place.tb_frame.f_locals
            output = values.get("result")
            found.append(
                LeftCall(values["self"], values["args"], values["kwargs"], () if output is None else output)
            )
            # Python keeps this copy of the locals with the frame, past `traceback.clear_frames()`. Since 3.13 there is
            # none.
            if type(values) is dict:
                values.clear()
        place = place.tb_next
    return found[::-1]


def _is_inside(frame: FrameType, outer: FrameType) -> bool:
    above: FrameType | None = frame
    while above is not None and above is not outer:
        above = above.f_back
    return above is not None


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
