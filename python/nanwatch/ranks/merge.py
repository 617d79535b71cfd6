"""Merge of the reports of several ranks: the origin, headroom by module and rank, and replicas that differ.

Only ranks of one attempt of an elastic job are compared with each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from ..records.headroom import by_module
from ..records.record import Record
from ..report import text
from ..report.finding import Finding, RankObservation, earliest
from ..report.page import TEXT, Table, page
from ..report.report import Report
from ..report.spike import SpikeReport, read_saved
from ..util import reading
from ..util.job import Attempt, spell_runs
from ..util.progress import Tell, silent
from ..util.reading import plain
from ..util.visible import module_name, visible

_FILE = "report.json"
_SCHEMA, _VERSION = "nanwatch.merged", 1
_WORST = 20  # modules, weights, attempts and files shown; the document has all


class WeightKey(NamedTuple):
    """Name of a weight in a batch, equal on all ranks that hold it."""

    batch: int
    module: str
    label: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Digest:
    """One rank's part in a merge.

    `finding` has the rank of the report and always a sequence: if the report has none, it is the number of frames of
    the batch in the report before the non-finite one. `headroom` is in bits, by module. `weights` has abs_min and
    abs_max.
    """

    rank: int
    finding: Finding | None
    headroom: dict[str, float]
    weights: dict[WeightKey, tuple[float, float]]
    attempt: Attempt | None = None

    @classmethod
    def of(cls, report: Report) -> Digest:
        """Return the digest of a report."""
        weights = {
            WeightKey(frame.batch, frame.name, record.label, record.shape): pair
            for frame in report.frames
            for record in frame.records
            if (pair := _comparable(record)) is not None
        }
        return cls(report.rank, _finding(report), by_module(report.frames), weights, report.attempt)

    @property
    def observation(self) -> RankObservation | None:
        """The finding in the form in which ranks compare theirs."""
        if self.finding is None:
            return None
        return RankObservation.of(self.finding, self.rank, self.finding.sequence or 0, None, "")

    @property
    def summary(self) -> str:
        """The finding in one line that ends with the rank; "" without a finding."""
        if self.finding is None:
            return ""
        return f"{text.summary(replace(self.finding, rank=0))}, rank {self.rank}"


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
    return record.abs_min, record.abs_max


@dataclass(frozen=True, slots=True)
class Merged:
    """Digests of the ranks of one attempt, sorted by rank; the files that were left out; the other attempts."""

    digests: tuple[Digest, ...]
    left_out: tuple[str, ...] = ()
    others: tuple[Merged, ...] = ()

    @property
    def attempt(self) -> Attempt | None:
        """The attempt of all digests, None where the reports name none."""
        return self.digests[0].attempt

    @property
    def ranks(self) -> list[int]:
        """The ranks, ascending."""
        return [digest.rank for digest in self.digests]

    @property
    def failed(self) -> list[Digest]:
        """The digests with a finding, the earliest first: by batch, by place in it, by rank."""
        return [digest for _, digest in self._observed()]

    @property
    def origins(self) -> list[Digest]:
        """The digests with the earliest finding: by batch, then by the place of the non-finite frame in it.

        Several ranks may have theirs at one place.
        """
        observed = self._observed()
        inside = next((each for each, _ in observed if not each.came_with_the_data), None)
        data = next((each for each, _ in observed if each.came_with_the_data), None)
        first = earliest(inside, data)
        return [digest for each, digest in observed if first is not None and each.place == first.place]

    def _observed(self) -> list[tuple[RankObservation, Digest]]:
        observed = [(digest.observation, digest) for digest in self.digests]
        return sorted(
            ((observation, digest) for observation, digest in observed if observation is not None),
            key=lambda pair: pair[0].order,
        )

    def headroom(self) -> dict[str, dict[int, float]]:
        """Return the bits of headroom by module and rank, the module with the least first."""
        by_name: dict[str, dict[int, float]] = {}
        for digest in self.digests:
            for name, bits in digest.headroom.items():
                by_name.setdefault(name, {})[digest.rank] = bits
        return dict(sorted(by_name.items(), key=lambda item: (min(item[1].values()), item[0])))

    def headroom_rows(self) -> list[dict[str, Any]]:
        """Return the least, the median and the most of each module, and on which ranks they are."""
        rows = []
        for name, bits in self.headroom().items():
            by_bits = sorted((value, rank) for rank, value in bits.items())
            most, most_rank = max(by_bits, key=lambda pair: (pair[0], -pair[1]))
            rows.append(
                {
                    "module": name,
                    "least": by_bits[0][0],
                    "on rank": by_bits[0][1],
                    "median": median_low(bits.values()),
                    "most": most,
                    "by rank": most_rank,
                    "not finite": sum(value == -inf for value in bits.values()),
                }
            )
        return rows

    def differences(self) -> list[dict[str, Any]]:
        """Return the ranges of weights that differ between ranks that saw them in the same batch, and their ranks.

        Replicas hold equal weights, so their ranges are equal to the bit. Shards of one weight are not compared.
        """
        seen: dict[WeightKey, dict[tuple[str, str], list[int]]] = {}
        for digest in self.digests:
            for weight, (low, high) in digest.weights.items():
                # As text, since a nan is not equal to itself.
                seen.setdefault(weight, {}).setdefault((repr(low), repr(high)), []).append(digest.rank)
        rows = []
        for weight in sorted(seen, key=lambda weight: (*weight[:3], weight.shape or ())):
            ranges = sorted(seen[weight].items(), key=lambda item: (-len(item[1]), item[1]))
            for (lowest, highest), ranks in ranges if len(ranges) > 1 else ():
                place = {"batch": weight.batch, "module": weight.module, "weight": weight.label}
                rows.append({**place, "abs min": float(lowest), "abs max": float(highest), "ranks": ranks})
        return rows

    @property
    def headline(self) -> str:
        """Where the first non-finite value was, in one line."""
        first = self.origins
        if not first:
            return f"All finite on {_count(len(self.digests))}"
        more = f" and {_count(len(first) - 1)} more at the same place" if len(first) > 1 else ""
        return f"First: {first[0].summary}{more}"

    def _facts(self) -> list[tuple[str, str]]:
        later = [digest for digest in self.failed if digest not in self.origins]
        facts = [("Of", str(self.attempt))] if self.attempt is not None else []
        facts += [("Later", digest.summary) for digest in later[:_WORST]]
        if len(later) > _WORST:
            facts.append(("Later", f"{_count(len(later) - _WORST)} more"))
        for merged in self.others[-_WORST:]:
            who = f"{merged.attempt or 'reports that name no attempt'}, {_count(len(merged.digests))}"
            facts.append(("Not merged", f"{who}: {merged.headline}"))
        return facts + [("Left out", reason) for reason in self.left_out[:_WORST]]

    def _tables(self) -> list[Table]:
        apart = "Weights that are not alike: the replicas have come apart, or the ranks hold different parts"
        tables = []
        for kind, title, rows in (
            ("headroom", "Bits of headroom, the worst module first", self.headroom_rows()),
            ("differences", apart, self.differences()),
        ):
            if rows:
                cells = [[_cell(name, x) for name, x in row.items()] for row in rows[:_WORST]]
                more = f"and {len(rows) - _WORST} more" if len(rows) > _WORST else ""
                tables.append(Table(kind, title, dict.fromkeys(rows[0], TEXT), cells, after=more))
        return tables

    def to_text(self) -> str:
        """Return the merge as text, without a newline at its end."""
        lines = [f"{_count(len(self.digests))}: {spell_runs(self.ranks)}", self.headline]
        lines += [f"{head}: {body}" for head, body in self._facts()]
        for table in self._tables():
            grid = [[*table.columns], *table.rows]
            widths = [max(len(row[column]) for row in grid) for column in range(len(table.columns))]
            lines += ["", table.title]
            lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in grid]
            lines += [table.after] if table.after else []
        return "\n".join(map(visible, lines))

    def to_html(self) -> str:
        """Return the merge as one HTML document."""
        amount = f"{_count(len(self.digests))}: {spell_runs(self.ranks)}"
        is_bad = bool(self.failed)
        return page(
            "nanwatch show --html", self.headline, amount, self._facts(), self._tables(), is_bad=is_bad
        )

    def document(self) -> dict[str, object]:
        """Return the merge for programs, with nan and the infinities as strings, as in a report."""
        return {
            "schema": _SCHEMA,
            "version": _VERSION,
            "attempt": plain(self.attempt),
            "ranks": self.ranks,
            "origin_ranks": [digest.rank for digest in self.origins],
            "findings": [plain(digest.finding) for digest in self.failed],
            "headroom": plain(self.headroom_rows()),
            "headroom_bits": {
                name: [plain(bits.get(rank)) for rank in self.ranks] for name, bits in self.headroom().items()
            },
            "differences": plain(self.differences()),
            "other_attempts": [merged.document() for merged in self.others],
            "left_out": list(self.left_out),
        }

    def to_json(self) -> str:
        """Return the document as JSON."""
        return json.dumps(self.document(), indent=2, allow_nan=False)


def _count(number: int) -> str:
    return f"{number} rank" if number == 1 else f"{number} ranks"


def _cell(column: str, value: Any) -> str:
    if column == "module":
        return module_name(value)
    if isinstance(value, list):
        return spell_runs(value)
    if not isinstance(value, float):
        return str(value)
    if column.startswith("abs"):
        return f"{value:.6e}"
    return "not finite" if value == -inf else "all zero" if value == inf else f"{value:.1f}"


def merge(*paths: Path, tell: Tell = silent) -> Merged:
    """Merge every `report.json` below the folders, and the files.

    Of several attempts of an elastic job the latest with a finding is merged, or the latest. Of several reports of one
    rank the earliest failure counts. Raises ValueError when no report can be read. A report that cannot be read is left
    out and named.
    """
    left_out: list[str] = []
    digests: list[Digest] = []
    tell(f"looking for {_FILE}")
    files = [file for path in paths for file in (sorted(path.rglob(_FILE)) if path.is_dir() else [path])]
    for number, path in enumerate(files):
        tell("reading reports", number, len(files), "files")
        try:
            # One report at a time, because a parsed one takes ten times the size of its file.
            report = read_saved(reading.file_text(path))
        except (OSError, ValueError) as error:
            left_out.append(f"{path}: {error}")
            continue
        if not isinstance(report, SpikeReport):
            digests.append(Digest.of(report))
    if not digests:
        places = " and ".join(map(str, paths))
        why = f": {left_out[0]}" if left_out else "; pass the folder that watch(output_dir=...) was given"
        raise ValueError(f"no {_FILE} of nanwatch below {places}{why}")
    attempts = by_attempt(digests)
    chosen = ([merged for merged in attempts if merged.failed] or attempts)[-1]
    others = tuple(merged for merged in attempts if merged is not chosen)
    return replace(chosen, left_out=tuple(left_out), others=others)


def by_attempt(digests: Iterable[Digest]) -> list[Merged]:
    """Return a merge for each attempt, the earliest first; digests without an attempt come before."""

    def when(digest: Digest) -> tuple[float, int]:
        finding = digest.finding
        return (inf, 0) if finding is None else (finding.batch, finding.sequence or 0)

    groups: dict[object, dict[int, Digest]] = {}
    for digest in digests:
        ranks = groups.setdefault(digest.attempt and digest.attempt.key, {})
        ranks[digest.rank] = min(ranks.get(digest.rank, digest), digest, key=when)
    merges = []
    for ranks in groups.values():
        members = [ranks[rank] for rank in sorted(ranks)]
        attempts = [digest.attempt for digest in members if digest.attempt is not None]
        if attempts:
            # Each launcher counts by itself, and each process begins at its own moment.
            number, begun = max(each.number for each in attempts), min(each.begun for each in attempts)
            attempt = replace(attempts[0], number=number, begun=begun)
            members = [replace(digest, attempt=attempt) for digest in members]
        merges.append(Merged(tuple(members)))
    return sorted(
        merges,
        key=lambda merged: (merged.attempt.begun, merged.attempt.run_id) if merged.attempt else (-inf, ""),
    )
