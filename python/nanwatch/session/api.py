"""The names to import: `watch`, Watch, and DeferredWatch for trainers, whose model comes later than its options."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from ..trace.trace import arrow
from ..util.modules import each_module
from .options import MAX_FRAMES, check_place
from .watch import Watch, watch

__all__ = ["DeferredWatch", "Watch", "watch"]

# Frames that a batch may have for every module: two calls, and both once more when they are recomputed.
_CALLS = 4
# Options that `start` checks, because they need the model or open a file.
_CONFIRMED_LATER = ("include", "exclude", "allow_inf", "trace")


class DeferredWatch:
    """Watch whose options are checked now and whose model comes with `start`.

    `roomy`: the recorder holds a whole batch, though `frames` and reports show no more than `max_frames`. Raises as
    `watch` does, except for patterns that match no module, which only `start` can know.
    """

    def __init__(self, options: dict[str, Any], *, roomy: bool = False) -> None:
        self.options = dict(options)
        self._roomy = roomy
        self.watch: Watch | None = None
        # The run may change its folder before the model comes.
        for option in ("trace", "output_dir", "log_to"):
            if isinstance(value := self.options.get(option), str | os.PathLike):
                self.options[option] = check_place(option, value)
        if self.options.get("trace") is not None:
            arrow("pyarrow.parquet", "trace=")
        general = {name: value for name, value in self.options.items() if name not in _CONFIRMED_LATER}
        watch(nn.Identity(), **general).stop()

    def start(self, model: nn.Module, scaler: Any = None) -> Watch:
        """Stop the Watch of the model before, and watch `model`. Raises as `watch` does.

        `scaler` is the trainer's, or None. The scaler of the options goes first.
        """
        self.stop()
        options = dict(self.options)
        is_wanted = options.get("gradients") and options.get("scaler") is None
        if is_wanted and callable(getattr(scaler, "get_scale", None)):
            options["scaler"] = scaler
        room = min(_CALLS * sum(1 for _ in each_module(model)), MAX_FRAMES) if self._roomy else 0
        self.watch = watch(model, **options, _room=room)
        return self.watch

    def stop(self) -> None:
        """Leave the model as it was found. The Watch and its frames stay."""
        if self.watch is not None:
            self.watch.stop()
