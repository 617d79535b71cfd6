"""Calls whose values mean nothing: a pipeline finds out what its stages exchange by calls with uninitialised memory."""

from __future__ import annotations

import sys
from typing import Any

_PIPELINING = "torch.distributed.pipelining.stage"
# Of torch up to 2.12 the first, since then the others.
_FUNCTIONS = frozenset(("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference"))


def is_rehearsal() -> bool:
    """Whether this runs inside such a call of torch.distributed.pipelining."""
    if _PIPELINING not in sys.modules:
        return False
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _FUNCTIONS and frame.f_globals.get("__name__") == _PIPELINING:
            return True
        frame = frame.f_back
    return False
