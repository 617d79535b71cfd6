"""The switch that lets nanwatch serve `--debug underflow_overflow` of transformers' Trainer.

Trainer looks up the name DebugUnderflowOverflow in its own module each time it begins to train. Only that name is
replaced: `transformers.debug_utils` keeps its class.
"""

from __future__ import annotations

import os
import sys
import weakref
from typing import Any, ClassVar

from torch import nn

from ..util.imports import WhenImported, when_imported
from ..util.visible import warn_user
from .debug import DebugUnderflowOverflow

SWITCH = "NANWATCH_TRANSFORMERS"
_TRAINER = "transformers.trainer"
_NAME = "DebugUnderflowOverflow"

_original: Any = None  # Trainer's own class while ours replaces it
_waiting: WhenImported | None = None


class TrainerDebug(DebugUnderflowOverflow):
    """DebugUnderflowOverflow that removes the one before it from a model.

    Trainer makes one in each `train()` and keeps none, so the hooks of the last would stay on the model.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[nn.Module, weakref.ref[TrainerDebug]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        before = self._of.get(model)
        if before is not None and (last := before()) is not None:
            last.stop()
        self._of[model] = weakref.ref(self)


def patch_transformers() -> None:
    """Let nanwatch serve `TrainingArguments(debug="underflow_overflow")`, until `unpatch_transformers()`.

    Prints the same text on stdout as transformers' class. Takes effect when `transformers.trainer` is imported, if it
    is not yet, and imports nothing itself. Does nothing the second time.

    Examples:
        >>> import nanwatch
        >>> nanwatch.patch_transformers()  # TrainingArguments(debug="underflow_overflow") now means nanwatch
        >>> nanwatch.unpatch_transformers()
    """
    global _waiting
    if _original is None and _waiting is None:
        _waiting = when_imported(_TRAINER, _swap)


def unpatch_transformers() -> None:
    """Give Trainer its own class back. Hooks on a model stay there. Does nothing the second time.

    Examples:
        >>> import nanwatch
        >>> nanwatch.patch_transformers()
        >>> nanwatch.unpatch_transformers()  # a second time does nothing
    """
    global _original, _waiting
    if _waiting is not None:
        _waiting.cancel()
        _waiting = None
    trainer = sys.modules.get(_TRAINER)
    # A third class that somebody has put there since stays.
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
