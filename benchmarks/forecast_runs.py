"""Count how often forecasts are right: natural trainings, recorded once and replayed for each change of the forecasts.

    python benchmarks/forecast_runs.py record [--folder DIR] [--seed 0] [--only WORD]   # 15 minutes on one core
    python benchmarks/forecast_runs.py replay [--folder DIR] [--lines] [--json FILE]    # half a minute

A recording holds the largest magnitude of each weight, buffer and output in each batch, and the batch and the module of
the overflow. Trainings that are recorded already are left alone. The checksum of a training's name says whether it is
tuned on or held out: the constants of `nanwatch/monitoring/forecast.py` were chosen on the first half. `--seed`
is added to the seeds of all trainings: fresh ones that nobody has seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from _forecast_trainings import Training, run, trainings
from _timing import table

import nanwatch
from nanwatch.monitoring.forecast import Forecast, Forecaster
from nanwatch.recording.frame_ring import PeakName


@dataclass(frozen=True)
class Recording:
    """The magnitudes by batch and name, and where the training overflowed, if it did."""

    name: str
    names: list[PeakName]
    values: np.ndarray
    end: int | None
    module: str

    @property
    def is_tuned(self) -> bool:
        return zlib.crc32(self.name.encode()) % 2 == 0


def record(training: Training, path: Path) -> str:
    """Run one training, write its recording, and return what happened."""
    names: list[PeakName] = []
    rows: list[np.ndarray] = []
    end, module = -1, ""
    batches = run(training)
    watch = nanwatch.watch(next(batches), forecast=False, rerun=False)
    watch._recorder.gathers_peaks = True
    try:
        with watch:
            for _ in batches:
                _, new, values = watch._recorder.take_peaks()
                names += new
                rows.append(np.frombuffer(values).astype(np.float32))
    except nanwatch.NonFiniteError as failure:
        end, module = failure.report.batch, failure.report.finding.module
    magnitudes = np.zeros((len(rows), len(names)), np.float32)
    for row, found in zip(magnitudes, rows, strict=True):
        row[: len(found)] = found
    np.savez_compressed(path, names=np.array(names), values=magnitudes, end=end, module=module)
    return f"{len(rows)} batches" + (f", overflow in {module or 'the root'}" if end >= 0 else "")


def load(folder: Path) -> Iterator[Recording]:
    """Yield the recordings of a folder."""
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as kept:
            end = int(kept["end"])
            yield Recording(
                path.name.removesuffix(".npz"),
                [(str(module), str(label), str(dtype)) for module, label, dtype in kept["names"]],
                kept["values"].astype(np.float64),
                None if end < 0 else end,
                str(kept["module"]),
            )


def replay(recording: Recording) -> list[tuple[int, Forecast]]:
    """Return what is told in which batch."""
    forecaster, told = Forecaster(), []
    forecaster.meet(recording.names)
    for batch, row in enumerate(recording.values):
        if forecaster.is_due(batch):
            told += [(batch, one) for one in forecaster.end(batch, row.tobytes())]
    return told


@dataclass
class Score:
    """The sums over some trainings."""

    overflows: int = 0
    told: int = 0
    lines: int = 0
    hits: int = 0
    named: int = 0  # lines that name the module that fails first
    finite: int = 0
    false_alarms: int = 0
    most_lines: int = 0
    ahead: list[float] = field(default_factory=list)  # of the first line, as a share of the run

    def add(self, recording: Recording, told: list[tuple[int, Forecast]]) -> list[bool]:
        """Count one training; return which lines are right."""
        end = recording.end
        self.most_lines = max(self.most_lines, len(told))
        if end is None:
            self.finite += 1
            self.false_alarms += bool(told)
            return [False] * len(told)
        right = [abs(one.batch - end) <= one.plus_minus for _, one in told]
        self.overflows += 1
        self.told += bool(told)
        self.lines += len(told)
        self.hits += sum(right)
        self.named += sum(one.module == recording.module for _, one in told)
        self.ahead += [1 - told[0][0] / end] if told else []
        return right

    def cells(self) -> list[str]:
        share = f"{self.hits} ({self.hits / self.lines:.0%})" if self.lines else "0"
        ahead = f"{statistics.median(self.ahead):.0%}" if self.ahead else "-"
        return [
            *map(str, (self.overflows, self.told, self.lines)),
            share,
            *map(str, (self.named, self.finite, self.false_alarms, self.most_lines)),
            ahead,
        ]


HEAD = [
    "",
    "overflow",
    "told",
    "lines",
    "hold",
    "named",
    "finite",
    "false alarms",
    "most lines",
    "told ahead",
]


def _record(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    todo = [dataclasses.replace(one, seed=one.seed + args.seed) for one in trainings()]
    todo = [one for one in todo if args.only in one.name and not (args.folder / f"{one.name}.npz").exists()]
    random.Random(0).shuffle(todo)
    for done, training in enumerate(todo, 1):
        told = record(training, args.folder / f"{training.name}.npz")
        print(f"{done}/{len(todo)} {training.name}: {told}", flush=True)


def _replay(args: argparse.Namespace) -> None:
    halves: dict[str, Callable[[Recording], bool]] = {
        "tuned on": lambda one: one.is_tuned,
        "held out": lambda one: not one.is_tuned,
        "all": lambda one: True,
    }
    scores = {name: Score() for name in halves}
    for recording in load(args.folder):
        told = replay(recording)
        for name, belongs in halves.items():
            if belongs(recording):
                right = scores[name].add(recording, told)
        if args.lines and (told or recording.end is not None):
            print(f"{recording.name}: overflow {recording.end}, {recording.module or 'the root'}")
            for (batch, one), holds in zip(told, right, strict=True):
                print(f"  {'right' if holds else 'wrong'} in batch {batch}: {one}")
    print(table(HEAD, [[name, *score.cells()] for name, score in scores.items()]))
    if args.json:
        args.json.write_text(json.dumps({name: dataclasses.asdict(one) for name, one in scores.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["record", "replay"])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/forecast_runs"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument("--lines", action="store_true", help="print each forecast")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    {"record": _record, "replay": _replay}[args.command](args)


if __name__ == "__main__":
    main()
