"""What a merge keeps of one rank's report: its finding, the headroom of its modules, the ranges of its weights.

That is a tenth of the report or less, so the reports of many ranks are read one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from sys import intern
from typing import NamedTuple

from ..report import headroom
from ..report.attempt import Attempt
from ..report.finding import Finding
from ..report.record import Record
from ..report.report import Report
from ..report.sighting import Sighting


class Place(NamedTuple):
    """Which weight, and in which batch: what ranks that hold the same one have in common."""

    batch: int
    module: str
    label: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Digest:
    """One rank's part in a merge.

    `finding` has the rank of the report, and a sequence always: where the report has none it is the number of frames
    that the report holds of the batch before the faulty one. `headroom` is in bits, by module; `weights` has abs_min
    and abs_max. `attempt` is that of the report, and after a merge the same on all ranks of it.
    """

    rank: int
    finding: Finding | None
    headroom: dict[str, float]
    weights: dict[Place, tuple[float, float]]
    attempt: Attempt | None = None

    @classmethod
    def of(cls, report: Report) -> Digest:
        """The digest of a report."""
        # Each document that is read has its own copy of all that ranks have in common.
        bits = {intern(name): bits for name, bits in headroom.by_module(report.frames).items()}
        weights = {
            place(frame.batch, frame.name, record.label, record.shape): pair
            for frame in report.frames
            for record in frame.records
            if (pair := _comparable(record)) is not None
        }
        return cls(report.rank, _finding(report), bits, weights, report.attempt)

    @property
    def sighting(self) -> Sighting | None:
        """The finding as ranks compare theirs."""
        finding = self.finding
        return None if finding is None else Sighting.of(finding, self.rank, finding.sequence or 0, None, "")


@lru_cache(maxsize=65536)
def place(batch: int, module: str, label: str, shape: tuple[int, ...] | None) -> Place:
    """The Place, the same object each time as far as that goes."""
    return Place(batch, module, label, shape)


@lru_cache(maxsize=65536)
def pair_of(abs_min: float, abs_max: float) -> tuple[float, float]:
    """The same of a range."""
    return abs_min, abs_max


def _finding(report: Report) -> Finding | None:
    finding = report.finding
    if finding is None:
        return None
    sequence = finding.sequence
    if sequence is None:
        frames = [frame for frame in report.frames if frame.batch == finding.batch]
        sequence = next((i for i, frame in enumerate(frames) if frame.fault is not None), len(frames))
    return replace(finding, rank=report.rank, sequence=sequence)


def _comparable(record: Record) -> tuple[float, float] | None:
    if record.role != "weight" or record.note or record.abs_min is None or record.abs_max is None:
        return None
    return pair_of(record.abs_min, record.abs_max)
