"""The reports of several ranks as one: the origin, headroom by module and rank, and replicas that differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan
from pathlib import Path
from typing import Any

from . import headroom, text
from .frame import Frame
from .record import Record
from .report import Report
from .sighting import Sighting, earliest

_FILE = "report.json"
_WORST = 20  # modules shown; the document has all


@dataclass(frozen=True, slots=True)
class Difference:
    """A weight whose range differs between ranks in one batch: label and module, and the ranks by range.

    `ranges` has one entry a range, the one of most ranks first: abs_min, abs_max and the ranks that have it.
    """

    batch: int
    module: str
    label: str
    ranges: tuple[tuple[float, float, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """One report a rank, sorted by rank; what was left out, and why."""

    reports: tuple[Report, ...]
    left_out: tuple[str, ...]

    @property
    def origins(self) -> tuple[Report, ...]:
        """The reports whose findings were first: by batch, then by the number of frames of that batch before them.

        More than one where ranks saw theirs at one place, or where no report holds its whole batch.
        """
        failed = {report.rank: report for report in self.reports if report.finding is not None}
        sightings = [
            Sighting.of(report.finding, report.rank, _sequence(report), None, "")
            for report in failed.values()
            if report.finding is not None
        ]
        inside = min((s for s in sightings if not s.came_with_the_data), key=lambda s: s.order, default=None)
        data = min((s for s in sightings if s.came_with_the_data), key=lambda s: s.order, default=None)
        first = earliest(inside, data)
        return tuple(failed[one.rank] for one in sightings if first is not None and one.place == first.place)

    def headroom(self) -> dict[str, list[float | None]]:
        """Bits of headroom of each module, one column a rank, None where it has none; the worst module first."""
        columns = [headroom.by_module(report.frames) for report in self.reports]
        names = {name for column in columns for name in column}
        table = {name: [column.get(name) for column in columns] for name in names}

        def worst(name: str) -> tuple[float, str]:
            return min(bits for bits in table[name] if bits is not None), name

        return {name: table[name] for name in sorted(table, key=worst)}

    def differences(self) -> list[Difference]:
        """The weights that are not alike on all ranks that saw them in the same batch.

        Replicas hold equal weights, so their ranges are equal to the bit; shards of one weight are not compared.
        """
        seen: dict[tuple[int, str, str, tuple[int, ...] | None], dict[int, tuple[float, float]]] = {}
        for report in self.reports:
            for frame in report.frames:
                for record in frame.records:
                    if (pair := _comparable(frame, record)) is not None:
                        place = (frame.batch, frame.name, record.label, record.shape)
                        seen.setdefault(place, {})[report.rank] = pair
        found = [
            Difference(batch, name, label, ranges)
            for (batch, name, label, _), ranks in seen.items()
            if len(ranges := _grouped(ranks)) > 1
        ]
        return sorted(found, key=lambda one: (one.batch, one.module, one.label))


def merge(folder: Path) -> Merged:
    """Read every `report.json` below `folder`; of several of one rank the earliest failure.

    Raises ValueError when there is none that can be read; one that cannot be is left out and named.
    """
    reports: dict[int, Report] = {}
    left_out: list[str] = []
    for path in sorted(folder.rglob(_FILE)):
        try:
            report = Report.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            left_out.append(f"{path}: {error}")
            continue
        other = reports.get(report.rank)
        if other is None or _when(report) < _when(other):
            reports[report.rank] = report
    if not reports:
        why = f": {left_out[0]}" if left_out else "; pass the folder that watch(output_dir=...) was given"
        raise ValueError(f"no {_FILE} of nanwatch below {folder}{why}")
    return Merged(tuple(reports[rank] for rank in sorted(reports)), tuple(left_out))


def _when(report: Report) -> float:
    return inf if report.finding is None else report.finding.batch


def _sequence(report: Report) -> int:
    """How many frames of the batch the report has before the faulty one: comparable where ranks keep as many."""
    finding = report.finding
    if finding is None:
        return 0
    frames = [frame for frame in report.frames if frame.batch == finding.batch]
    return next((i for i, frame in enumerate(frames) if frame.fault is not None), len(frames))


def _comparable(frame: Frame, record: Record) -> tuple[float, float] | None:
    if record.role != "weight" or record.note or record.abs_min is None or record.abs_max is None:
        return None
    return record.abs_min, record.abs_max


def _grouped(ranks: dict[int, tuple[float, float]]) -> tuple[tuple[float, float, tuple[int, ...]], ...]:
    groups: dict[str, list[int]] = {}
    for rank, pair in ranks.items():
        groups.setdefault(repr(pair), []).append(rank)  # by text, as a nan is not equal to itself
    ordered = sorted(groups.values(), key=lambda of: (-len(of), of))
    return tuple((*ranks[of[0]], tuple(of)) for of in ordered)


def merged_text(merged: Merged) -> str:
    """The whole as text, without a newline at its end."""
    return "\n".join(_lines(merged))


def _lines(merged: Merged) -> Iterable[str]:
    ranks = [report.rank for report in merged.reports]
    yield f"{len(ranks)} ranks: {', '.join(map(str, ranks))}"
    failed = [report for report in merged.reports if report.finding is not None]
    first = merged.origins
    for report in (*first, *(one for one in failed if one not in first)):
        if report.finding is not None:
            finding = replace(report.finding, rank=0)  # said below for rank 0 too
            yield f"{'First' if report in first else 'Later'}: {text.summary(finding)}, rank {report.rank}"
    if not failed:
        yield "All finite"
    yield from _difference_lines(merged.differences())
    yield ""
    yield from _table_lines(merged.headroom(), ranks)
    for why in merged.left_out:
        yield f"Left out: {why}"


def _difference_lines(found: Sequence[Difference]) -> Iterable[str]:
    if not found:
        return
    yield ""
    yield f"Weights that are not alike on all ranks, first in batch {found[0].batch}: the replicas have come apart,"
    yield "or the ranks hold different parts of a model under the same names"
    for one in found[:_WORST]:
        told = "; ".join(
            f"{low:.6e} to {high:.6e} on rank {', '.join(map(str, ranks))}" for low, high, ranks in one.ranges
        )
        yield f"  batch {one.batch} {text.module_name(one.module)} {one.label}: {told}"
    if len(found) > _WORST:
        yield f"  and {len(found) - _WORST} more"


def _table_lines(table: dict[str, list[float | None]], ranks: Sequence[int]) -> Iterable[str]:
    yield "Bits of headroom by rank, the worst module first; spread is the difference between ranks"
    width = max((len(text.module_name(name)) for name in list(table)[:_WORST]), default=6)
    yield f"{'module':<{width}} {'spread':>8} " + " ".join(f"{rank:>7}" for rank in ranks)
    for name, row in list(table.items())[:_WORST]:
        spread = _spread(row)
        shown = "" if spread is None else f"{spread:.1f}"
        cells = " ".join(f"{'' if bits is None else f'{bits:.1f}':>7}" for bits in row)
        yield f"{text.module_name(name):<{width}} {shown:>8} {cells}".rstrip()
    if len(table) > _WORST:
        yield f"and {len(table) - _WORST} more modules"


def _spread(row: Sequence[float | None]) -> float | None:
    known = [bits for bits in row if bits is not None]
    difference = max(known) - min(known) if len(known) > 1 else None
    return None if difference is None or isnan(difference) else difference


def document(merged: Merged) -> dict[str, Any]:
    """The whole for programs; nan and the infinities are spelt as strings, as in a report."""
    return {
        "ranks": [report.rank for report in merged.reports],
        "origins": [_finding_of(report) for report in merged.origins],
        "findings": [_finding_of(report) for report in merged.reports if report.finding is not None],
        "headroom_bits": {name: [_plain(bits) for bits in row] for name, row in merged.headroom().items()},
        "differences": [
            {
                "batch": one.batch,
                "module": one.module,
                "label": one.label,
                "ranges": [
                    {"abs_min": _plain(low), "abs_max": _plain(high), "ranks": list(ranks)}
                    for low, high, ranks in one.ranges
                ],
            }
            for one in merged.differences()
        ],
        "left_out": list(merged.left_out),
    }


def _finding_of(report: Report) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report.to_json())["finding"]
    return {**found, "rank": report.rank}


def _plain(number: float | None) -> float | str | None:
    return number if number is None or abs(number) < inf else str(number)
