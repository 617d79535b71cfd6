"""Callback for transformers' Trainer with all options of `watch`, and the switch of the class behind `--debug`."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from ..session.api import DeferredWatch
from ..sinks.targets import LeastHeadroom
from ..util.messages import needed
from .debug import patch_transformers, unpatch_transformers

__all__ = ["NanWatchCallback", "patch_transformers", "unpatch_transformers"]

HEADROOM, PLACE = "nanwatch/headroom_bits", "nanwatch/headroom_module"

_TrainerCallback: Any = needed(
    "transformers.trainer_callback", "nanwatch.integrations.transformers", "transformers"
).TrainerCallback


class NanWatchCallback(DeferredWatch, _TrainerCallback):  # type: ignore[misc]
    """Callback that watches the trained model: `Trainer(..., callbacks=[NanWatchCallback(on_nonfinite="warn")])`.

    The watch begins in `train()`, once the model is moved, wrapped, compiled and resumed, sees the evaluations in
    between, and ends with `train()`. Each forward is a batch, so a step with gradient accumulation has several. A
    failure ends `train()` with NonFiniteError. The model then stays watched until `stop()` or the next `train()`.

    Args:
        headroom: log "nanwatch/headroom_bits" with `Trainer.log` whenever Trainer logs: the least headroom in bits of a
            weight, buffer or output since the last time (-inf: not finite), with the module's name as text in
            "nanwatch/headroom_module". Each process logs its own. It takes about 3 µs per module call.
        options: those of `nanwatch.watch`.

    Raises TypeError or ValueError as `nanwatch.watch` does: at once for options that need no model, else when
    `train()` begins.

    Examples:
        >>> from nanwatch.integrations.transformers import NanWatchCallback
        >>> callback = NanWatchCallback(on_nonfinite="warn", gradients=True)
        >>> callback.watch is None  # until Trainer(callbacks=[callback]) calls train()
        True
        >>> callback.stop()
    """

    def __init__(self, *, headroom: bool = True, **options: Any) -> None:
        self._headroom = LeastHeadroom()
        super().__init__(options, *[self._headroom] * headroom)
        self._trainer: weakref.ref[Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin to watch. Trainer calls this again when it restarts with a smaller batch."""
        trainer = _trainer_of(self, sys._getframe(1))
        self._trainer = None if trainer is None else weakref.ref(trainer)
        self.start(model, getattr(getattr(trainer, "accelerator", None), "scaler", None))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the watch."""
        self.stop()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Log the least headroom since the last log."""
        trainer = None if self._trainer is None else self._trainer()
        least = self._headroom.take()
        # The log that this makes comes back here, and finds no headroom since.
        if trainer is not None and least is not None:
            trainer.log({HEADROOM: least.bits, PLACE: least.place})


def _trainer_of(callback: NanWatchCallback, frame: FrameType | None) -> Any:
    """Return the calling Trainer: events do not get it, and only its `log` reaches all reporters and the history."""
    trainer_class = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    while frame is not None and trainer_class is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, trainer_class) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    return None
