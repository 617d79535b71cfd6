"""Where a log goes: a tracker of the user's, or a function; and which of them something is that `log_to` was given."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .log_entry import LogEntry

ACCEPTED = (
    "a SummaryWriter of TensorBoard, a run of wandb, the path of a folder for TensorBoard, or a callable that takes a"
    " dict and the number of the batch"
)


class Sink(Protocol):
    """Takes entries. What these raise ends the log."""

    def write(self, entry: LogEntry) -> None:
        """Log it."""

    def flush(self) -> None:
        """Let what was logged outlive the process."""

    def close(self) -> None:
        """Nothing more comes. What is the user's is left open."""


class CallableSink:
    """Calls a function with the numbers and words of each entry."""

    def __init__(self, function: Callable[[dict[str, float | str], int], object]) -> None:
        self._function = function

    def write(self, entry: LogEntry) -> None:
        """Call it; histograms are left out."""
        self._function({**entry.scalars, **entry.texts}, entry.batch)

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""


def is_target(target: Any) -> bool:
    """Whether it is one of those that are ACCEPTED, by what it can do."""
    return isinstance(target, str | os.PathLike) or _is_writer(target) or _is_run(target) or callable(target)


def sink_of(target: Any) -> Sink:
    """The sink for a target. Raises ImportError, naming the extra, where its package is not installed."""
    # What needs a tracker's package is imported for those who have it.
    if isinstance(target, str | os.PathLike) or _is_writer(target):
        from .tensorboard import TensorBoardSink

        return TensorBoardSink(target)
    if _is_run(target):
        from .wandb import WandbSink

        return WandbSink(target)
    return CallableSink(target)


def _is_writer(target: Any) -> bool:
    return callable(getattr(target, "add_scalar", None)) and callable(
        getattr(target, "add_histogram_raw", None)
    )


def _is_run(target: Any) -> bool:
    """Of a run, or of the module `wandb`, which stands for the run that `wandb.init` began."""
    return callable(getattr(target, "log", None)) and callable(getattr(target, "define_metric", None))
