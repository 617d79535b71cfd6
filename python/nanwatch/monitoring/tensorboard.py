"""A log in TensorBoard's event files, through a SummaryWriter of torch.utils.tensorboard or of tensorboardX."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..recording.job import place
from ..util.imports import needed
from .log_entry import Histogram, LogEntry

_WHO = "watch(log_to=<folder>)"


class TensorBoardSink:
    """Writes entries with the user's writer, or with one of its own in a folder, which it makes for the first entry.

    The step is the number of the batch. With several processes each has a folder of its own, as a trace has a file.
    """

    def __init__(self, target: Any) -> None:
        self._writer: Any = None
        self._make: Callable[[], Any] | None = None  # a writer of its own
        if isinstance(target, str | os.PathLike):
            needed("tensorboard", _WHO, "tensorboard")  # first, or torch would be said to be what is missing
            module = needed("torch.utils.tensorboard", _WHO, "tensorboard")
            rank, world_size = place()
            folder = Path(target).absolute()  # the run may change its folder
            if world_size > 1:
                folder = folder.with_name(f"{folder.name}-rank{rank}")
            self._make = partial(module.SummaryWriter, folder)
        else:
            self._writer = target

    def write(self, entry: LogEntry) -> None:
        """Add its numbers, histograms and words."""
        writer = self._open()
        if writer is None:
            return
        for tag, value in entry.scalars.items():
            writer.add_scalar(tag, value, entry.batch)
        for tag, histogram in entry.histograms.items():
            _add(writer, tag, histogram, entry.batch)
        for tag, words in entry.texts.items():
            writer.add_text(tag, words, entry.batch)

    def flush(self) -> None:
        """Write what waits to the file."""
        if self._writer is not None and self._open() is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the writer if it is its own; write what waits to the file if it is the user's."""
        if self._make is None:
            self.flush()
        elif self._writer is not None:
            self._writer.close()

    def _open(self) -> Any:
        """The writer; None when the user has closed it, as it would begin another file then."""
        if self._writer is None and self._make is not None:
            self._writer = self._make()
        return None if getattr(self._writer, "all_writers", True) is None else self._writer


def _add(writer: Any, tag: str, histogram: Histogram, batch: int) -> None:
    writer.add_histogram_raw(
        tag,
        min=histogram.least,
        max=histogram.most,
        num=sum(histogram.counts),
        sum=histogram.sum,
        sum_squares=histogram.sum_of_squares,
        bucket_limits=list(histogram.edges[1:]),
        bucket_counts=list(histogram.counts),
        global_step=batch,
    )
