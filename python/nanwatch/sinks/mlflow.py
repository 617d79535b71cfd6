"""MLflow: numbers as metrics of the run that the process has begun, words as its tags."""

from __future__ import annotations

import re
from typing import Any

from ..util.imports import needed
from .logs import LogEntry, LogSink


class MlflowSink(LogSink):
    """Log in the run of `mlflow.start_run()`; the step is the number of the batch.

    A tracking server that does not answer keeps MLflow busy for minutes, so this has a thread of its own.
    """

    in_thread = True

    def __init__(self, target: Any = None) -> None:
        super().__init__()
        if isinstance(target, str):
            raise ValueError(f"the sink mlflow takes no {target!r}; say that to mlflow.start_run()")
        self._mlflow = needed("mlflow", "the sink mlflow", "mlflow")
        self._run = self._mlflow.active_run()  # that of this thread; a trainer may begin it later

    def write(self, entry: LogEntry) -> None:
        """Log its numbers and words; histograms are left out."""
        if self._run is None:
            fluent = self._mlflow.tracking.fluent
            self._run = getattr(fluent, "_get_latest_active_run", self._mlflow.active_run)()
            if self._run is None:
                raise ValueError("has no run: call mlflow.start_run() before the first batch")
        run_id = self._run.info.run_id
        numbers = {_key(tag): value for tag, value in entry.scalars.items()}
        self._mlflow.log_metrics(numbers, step=entry.batch, run_id=run_id)
        client = self._mlflow.MlflowClient()
        for tag, words in entry.texts.items():
            client.set_tag(run_id, _key(tag), words)


def _key(tag: str) -> str:
    """Return the tag with the characters that MLflow takes in a name."""
    return re.sub(r"[^\w./ -]", "_", tag)
