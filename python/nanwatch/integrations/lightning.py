"""Callback for Lightning's Trainer, of the package `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from ..records.record import Least
from ..report.report import NonFiniteError
from ..session.api import DeferredWatch
from ..sinks.targets import LeastHeadroom
from ..util.messages import needed

HEADROOM = "nanwatch/headroom_bits"
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[Any, ...]:
    """Return the class Callback of each package that is in use, or else of the first that is installed."""
    names = [name for name in _PACKAGES if sys.modules.get(name) is not None]
    if not names:
        names = [name for name in _PACKAGES if find_spec(name.partition(".")[0])][:1] or [_PACKAGES[0]]
    return tuple(needed(name, "nanwatch.integrations.lightning", "lightning").Callback for name in names)


class NanWatchCallback(DeferredWatch, *_callback_classes()):  # type: ignore[misc]
    """Callback that watches the LightningModule: `Trainer(callbacks=[NanWatchCallback(on_nonfinite="warn")])`.

    The watch begins and ends with fit, validate, test or predict, also when it ends by an exception. `training_step` is
    no module call: each module that it calls, or `self(...)`, is a batch of its own. Values that it computes between
    them are read when a module gets them. NonFiniteError has a note with the step (from Python 3.11 on).

    Args:
        headroom: log "nanwatch/headroom_bits" to the Trainer's loggers every `log_every_n_steps` training batches: the
            least headroom in bits of a weight, buffer or output since the last time (-inf: not finite). `least` has the
            module's name too. Each process logs its own. It takes about 3 µs per module call.
        options: those of `nanwatch.watch`.

    Raises TypeError or ValueError as `nanwatch.watch` does: at once for options that need no model, else when
    the run begins.

    Examples:
        >>> from nanwatch.integrations.lightning import NanWatchCallback
        >>> callback = NanWatchCallback(on_nonfinite="warn", gradients=True)
        >>> callback.watch is None  # until Trainer(callbacks=[callback]) calls fit, validate, test or predict
        True
        >>> callback.stop()
    """

    def __init__(self, *, headroom: bool = True, **options: Any) -> None:
        self._headroom = LeastHeadroom()
        super().__init__(options, *[self._headroom] * headroom)
        self._batches = 0
        self.least: Least | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch: the model is on its device, and the sanity check is still to come."""
        self.start(pl_module, getattr(trainer.precision_plugin, "scaler", None))
        self._batches = 0

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch, unless this is a validation within fit."""
        if trainer.state.fn != "fit":
            self.on_fit_start(trainer, pl_module)

    on_test_start = on_predict_start = on_fit_start

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log when it is time."""
        self._batches += 1
        if trainer.log_every_n_steps and self._batches % trainer.log_every_n_steps == 0:
            self._log(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the headroom since the last time."""
        self._log(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Add the step to the error, and stop the watch, because no teardown follows."""
        add_note = getattr(exception, "add_note", None)  # from Python 3.11 on
        if isinstance(exception, NonFiniteError) and add_note is not None:
            where = f"epoch {trainer.current_epoch}, global step {trainer.global_step}"
            if trainer.training:
                where += f", batch_idx {trainer.fit_loop.batch_idx}"
            add_note(f"Lightning was at {where}.")
        self.stop()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop the watch."""
        self.stop()

    def _log(self, trainer: Any) -> None:
        if (least := self._headroom.take()) is not None:
            self.least = least
            for logger in trainer.loggers:
                logger.log_metrics({HEADROOM: least.bits}, step=trainer.global_step)
