"""The module calls that an exception left, read from its traceback.

A call that raises has no frame, as the recorder sees a call when it returns. Its module, its arguments and, where a
hook raised after the forward, its output are still in the frames of the traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

from torch import nn

# The method of PyTorch's that runs a module's hooks and its forward.
_CALL = nn.Module._call_impl.__code__


class LeftCall(NamedTuple):
    """A call that an exception left. `output` is () where the forward had not returned."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


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
