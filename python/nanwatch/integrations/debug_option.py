"""`--debug underflow_overflow` of transformers' Trainer, served by nanwatch.

Trainer looks up the name DebugUnderflowOverflow in its own module each time it begins to train. The swap is of that
name alone: `transformers.debug_utils` keeps its class, for those who import it from there.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Container
from typing import Any, ClassVar

from torch import nn

from ..util.imports import WhenImported, when_imported
from ..util.user_warning import warn_user
from .debug import DebugUnderflowOverflow

SWITCH = "NANWATCH_TRANSFORMERS"
_TRAINER = "transformers.trainer"
_NAME = "DebugUnderflowOverflow"

_original: Any = None  # Trainer's own class while ours stands in its place
_waiting: WhenImported | None = None


class TrainerDebug(DebugUnderflowOverflow):
    """DebugUnderflowOverflow, at most one on a model.

    Trainer makes one whenever `train()` is called and keeps none: the hooks of the last would stay on the model.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[nn.Module, weakref.ref[TrainerDebug]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int | None = 21,
        trace_batch_nums: Container[int] | None = None,
        abort_after_batch_num: int | None = None,
    ) -> None:
        super().__init__(model, max_frames_to_save, trace_batch_nums, abort_after_batch_num)
        before = self._of.get(model)
        if before is not None and (last := before()) is not None:
            last.stop()
        self._of[model] = weakref.ref(self)


def patch_transformers() -> None:
    """Let nanwatch serve `TrainingArguments(debug="underflow_overflow")`, until `unpatch_transformers()`.

    Same text on stdout as transformers' class. Takes effect when `transformers.trainer` is imported, if it is not yet;
    imports nothing itself. A second time does nothing.
    """
    global _waiting
    if _original is None and _waiting is None:
        _waiting = when_imported(_TRAINER, _swap)


def unpatch_transformers() -> None:
    """Give Trainer its own class back. What already stands on a model stays there. A second time does nothing."""
    global _original, _waiting
    if _waiting is not None:
        _waiting.cancel()
        _waiting = None
    trainer = sys.modules.get(_TRAINER)
    # Who has put a third class there in the meantime keeps it.
    if trainer is not None and getattr(trainer, _NAME, None) is TrainerDebug:
        setattr(trainer, _NAME, _original)
    _original = None


def follow_environment() -> None:
    """Patch if NANWATCH_TRANSFORMERS=1."""
    word = os.environ.get(SWITCH, "")
    if word == "1":
        patch_transformers()
    elif word not in ("", "0"):
        # An import is no place to fail.
        warn_user(f"{SWITCH}={word!r} is not understood and does nothing; set it to 1 or 0")


def _swap() -> None:
    global _original, _waiting
    _waiting = None
    trainer = sys.modules[_TRAINER]
    theirs = getattr(trainer, _NAME, None)
    if theirs is None:
        warn_user(
            f"nanwatch found no {_NAME} in {_TRAINER}, so --debug underflow_overflow stays as it is;"
            " use nanwatch.integrations.transformers.NanWatchCallback"
        )
        return
    _original = theirs
    setattr(trainer, _NAME, TrainerDebug)
