"""nanwatch's DebugUnderflowOverflow in the place of transformers' own, which Trainer uses.

Trainer looks up the name of the class in its own module each time it begins to train. `patch_transformers` replaces
only that name: `transformers.debug_utils` keeps its class.
"""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

from torch import nn

from ..util.imports import WhenImported, when_imported
from ..util.visible import warn_user
from .debug import DebugUnderflowOverflow

SWITCH = "NANWATCH_TRANSFORMERS"
_TRAINER, _NAME = "transformers.trainer", "DebugUnderflowOverflow"

_original: Any = None  # Trainer's own class while ours replaces it
_waiting: WhenImported | None = None


class TrainerDebug(DebugUnderflowOverflow):
    """DebugUnderflowOverflow that removes the one before it from a model.

    Trainer makes one in each `train()` and keeps none, so the hooks of the last would stay on the model.
    """

    _of: ClassVar[WeakKeyDictionary[nn.Module, ref[TrainerDebug]]] = WeakKeyDictionary()

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        before = self._of.get(model)
        if last := before and before():
            last.stop()
        self._of[model] = ref(self)


def patch_transformers() -> None:
    """Let nanwatch serve `TrainingArguments(debug="underflow_overflow")`, until `unpatch_transformers()`.

    Prints the same text on stdout as transformers' class. Takes effect when `transformers.trainer` is imported, if it
    is not yet, and imports nothing itself. Does nothing the second time.

    Examples:
        >>> from nanwatch.integrations.trainer_debug import patch_transformers, unpatch_transformers
        >>> patch_transformers()  # TrainingArguments(debug="underflow_overflow") now means nanwatch
        >>> unpatch_transformers()
    """
    global _waiting
    if _original is None and _waiting is None:
        _waiting = when_imported(_TRAINER, _swap)


def unpatch_transformers() -> None:
    """Give Trainer its own class back. Hooks on a model stay there. Does nothing the second time.

    Examples:
        >>> from nanwatch.integrations.trainer_debug import unpatch_transformers
        >>> unpatch_transformers()  # does nothing where it is not patched
    """
    global _original, _waiting
    if _waiting is not None:
        _waiting.cancel()
    trainer = sys.modules.get(_TRAINER)
    # A third class that somebody has put there since stays.
    if getattr(trainer, _NAME, None) is TrainerDebug:
        setattr(trainer, _NAME, _original)
    _original = _waiting = None


def follow_environment() -> None:
    """Patch if NANWATCH_TRANSFORMERS=1."""
    word = os.environ.get(SWITCH, "")
    if word == "1":
        patch_transformers()
    elif word not in ("", "0"):  # an import is no place to fail
        warn_user(f"{SWITCH}={word!r} is not understood and does nothing; set it to 1 or 0")


def _swap() -> None:
    global _original, _waiting
    _waiting, trainer = None, sys.modules[_TRAINER]
    _original = getattr(trainer, _NAME, None)
    if _original is not None:
        setattr(trainer, _NAME, TrainerDebug)
    else:
        warn_user(
            f"nanwatch found no {_NAME} in {_TRAINER}, so --debug underflow_overflow stays as it is;"
            " use nanwatch.integrations.transformers.NanWatchCallback"
        )
