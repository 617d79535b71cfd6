"""Warnings about the user's run, each at a line of the user's code."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from types import FrameType

from .visible import visible

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep


def warn_user(message: str, *, may_raise: bool = True) -> None:
    """Warn of something in the user's run, at the user's own line.

    A filter of the user's may turn the warning into an exception. Pass `may_raise=False` where that would reach nobody,
    as in a thread of nanwatch's, or would take the place of another exception: the message then goes to stderr.
    """
    message = visible(message)
    frame = _users_frame()
    try:
        warnings.warn_explicit(
            message,
            RuntimeWarning,
            frame.f_code.co_filename,
            frame.f_lineno,
            frame.f_globals.get("__name__", "<unknown>"),
            frame.f_globals.setdefault("__warningregistry__", {}),
        )
    except RuntimeWarning:
        if may_raise:
            raise
        sys.stderr.write(f"{message}\n")


def _users_frame() -> FrameType:
    """Return the innermost frame outside nanwatch and torch; in a thread without one, the main thread's."""
    here = sys._getframe(1)
    found = _outside(here)
    main = threading.main_thread().ident
    if found is None and main is not None and main != threading.get_ident():
        found = _outside(sys._current_frames().get(main))
    return found or here


def _outside(frame: FrameType | None) -> FrameType | None:
    torch = sys.modules.get("torch")  # a trace is also written, and a verdict reached, without it
    torchs = os.path.dirname(str(torch.__file__)) + os.sep if torch is not None else _OWN
    skipped = (_OWN, torchs, threading.__file__, "<frozen ")  # the last are importlib and runpy
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    return frame
