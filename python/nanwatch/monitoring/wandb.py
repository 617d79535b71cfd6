"""A log in a run of Weights & Biases."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..util.imports import needed
from .log_entry import GROUPS, TOTAL, LogEntry

BATCH = f"{TOTAL}/batch"


class WandbSink:
    """Adds entries to the user's run; the x axis of their charts is the number of the batch.

    A run has one step for all that is logged, and drops what comes with a lower step than it has reached. So nothing
    here makes a step: what is logged goes with the next `run.log` of the user's own. Of several entries between two of
    those the latest stays, number by number.
    """

    def __init__(self, target: Any) -> None:
        self._wandb = needed("wandb", "watch(log_to=<run of wandb>)", "wandb")
        self._target = target
        self._run: Any = None

    def write(self, entry: LogEntry) -> None:
        """Log its numbers, histograms and words."""
        if self._run is None:
            self._run = self._begin()
        histograms = {
            tag: self._wandb.Histogram(np_histogram=(list(one.counts), list(one.edges)))
            for tag, one in entry.histograms.items()
        }
        self._run.log({BATCH: entry.batch, **entry.scalars, **histograms, **entry.texts}, commit=False)

    def _begin(self) -> Any:
        run = self._target
        if isinstance(run, ModuleType):  # a trainer may begin the run after its callbacks were made
            run = run.run
            if run is None:
                raise ValueError(
                    "has no run: call wandb.init() before the first batch, or pass what it returns"
                )
        run.define_metric(BATCH, hidden=True)
        for group in GROUPS:
            run.define_metric(f"{group}/*", step_metric=BATCH)
        return run

    def flush(self) -> None:
        """The run has a process of its own that outlives this one."""

    def close(self) -> None:
        """The run is the user's."""
