"""What the forecasts say of natural trainings: recorded once, replayed as often as the forecasts are changed.

    python benchmarks/forecast_runs.py record [--into /tmp/forecast_runs]      # about ten minutes on one core
    python benchmarks/forecast_runs.py replay [--from /tmp/forecast_runs] [--lines] [--json FILE]

A recording holds the largest magnitude of each weight, buffer and output in each batch, and the batch and the module of
the overflow. A training is tuned on or held out by the checksum of its name; the constants of `nanwatch/forecast.py`
were chosen on the first half only.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from _forecast_trainings import Training, run, trainings

import nanwatch
from nanwatch.forecast import Forecast, Forecaster

FOLDER = Path("/tmp/forecast_runs")


@dataclass(frozen=True)
class Recording:
    """The magnitudes by batch and name, and where the training overflowed, if it did."""

    name: str
    names: list[tuple[str, str, str]]
    values: np.ndarray
    end: int | None
    module: str
    error: str

    @property
    def is_tuned(self) -> bool:
        return zlib.crc32(self.name.encode()) % 2 == 0


def record(training: Training, path: Path) -> None:
    """Run one training and write its recording."""
    names: list[tuple[str, str, str]] = []
    rows: list[np.ndarray] = []
    end, module, error = -1, "", ""
    batches = run(training)
    watch = nanwatch.watch(next(batches), forecast=False, microscope=False)
    recorder = watch._recorder
    recorder.gathers_largest = True
    try:
        with watch:
            for _ in batches:
                batch, new, values = recorder.take_largest()
                names += new
                rows.append(np.frombuffer(values).astype(np.float32))
    except nanwatch.NonFiniteError as failure:
        report = failure.report
        end = report.batch
        module = report.finding.module
        error = f"{report.finding.label} {report.finding.role if hasattr(report.finding, 'role') else ''}"
    table = np.zeros((len(rows), len(names)), np.float32)
    for row, found in zip(table, rows, strict=True):
        row[: len(found)] = found
    np.savez_compressed(path, names=np.array(names), values=table, end=end, module=module, error=error)


def load(folder: Path) -> Iterator[Recording]:
    """Yield the recordings of a folder."""
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as kept:
            end = int(kept["end"])
            names = [tuple(map(str, name)) for name in kept["names"]]
            yield Recording(
                path.name.removesuffix(".npz"),
                names,  # type: ignore[arg-type]
                kept["values"].astype(np.float64),
                None if end < 0 else end,
                str(kept["module"]),
                str(kept["error"]),
            )
