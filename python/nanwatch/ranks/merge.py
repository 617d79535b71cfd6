"""Merge of the reports of several ranks: one table of what each rank saw first, and how little room it had left.

Only ranks of one attempt of an elastic job are compared with each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from ..records.headroom import by_module
from ..report import text
from ..report.finding import Finding, RankObservation, earliest
from ..report.page import TEXT, Table, page
from ..report.report import Report
from ..report.spike import SpikeReport, read_saved
from ..util.job import Attempt, spell_runs
from ..util.progress import Tell, silent
from ..util.reading import plain
from ..util.visible import module_name, visible

_FILE = "report.json"
_SCHEMA, _VERSION = "nanwatch.merged", 2
_MOST_SHOWN = 64  # ranks, attempts and files; the document has all


@dataclass(frozen=True, slots=True)
class Digest:
    """One rank's part in a merge.

    `finding` has the rank of the report and always a sequence: if the report has none, it is the number of frames of
    the batch in the report before the non-finite one. `bits` is the least headroom, of `module`, -inf where something
    is not finite.
    """

    rank: int
    finding: Finding | None
    bits: float = inf
    module: str = ""
    attempt: Attempt | None = None

    @classmethod
    def of(cls, report: Report) -> Digest:
        """Return the digest of a report."""
        finding = report.finding
        if finding is not None:
            sequence = finding.sequence
            if sequence is None:
                frames = [frame for frame in report.frames if frame.batch == finding.batch]
                sequence = next((i for i, frame in enumerate(frames) if frame.fault is not None), len(frames))
            finding = replace(finding, rank=report.rank, sequence=sequence)
        least = min(((bits, name) for name, bits in by_module(report.frames).items()), default=(inf, ""))
        return cls(report.rank, finding, *least, report.attempt)

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

    @property
    def cells(self) -> list[str]:
        """The row of the table."""
        finding, room = self.finding, "all zero" if self.bits == inf else f"{self.bits:.1f}"
        seen = (
            "" if finding is None else f"{finding.value} in {finding.label} of {module_name(finding.module)}"
        )
        batch = "" if finding is None else str(finding.batch)
        return [
            str(self.rank), seen, batch, "not finite" if self.bits == -inf else room, module_name(self.module),
        ]  # fmt: skip


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
        first = earliest(*(each for each, _ in observed)) if observed else None
        return [digest for each, digest in observed if first is not None and each.place == first.place]

    def _observed(self) -> list[tuple[RankObservation, Digest]]:
        observed = [(digest.observation, digest) for digest in self.digests]
        return sorted(
            ((observation, digest) for observation, digest in observed if observation is not None),
            key=lambda pair: pair[0].order,
        )

    @property
    def headline(self) -> str:
        """Where the first non-finite value was, in one line."""
        first = self.origins
        if not first:
            return f"All finite on {_count(len(self.digests))}"
        more = f" and {_count(len(first) - 1)} more at the same place" if len(first) > 1 else ""
        return f"First: {first[0].summary}{more}"

    def _facts(self) -> list[tuple[str, str]]:
        facts = [("Of", str(self.attempt))] if self.attempt is not None else []
        for merged in self.others[-_MOST_SHOWN:]:
            who = f"{merged.attempt or 'reports that name no attempt'}, {_count(len(merged.digests))}"
            facts.append(("Not merged", f"{who}: {merged.headline}"))
        return facts + [("Left out", reason) for reason in self.left_out[:_MOST_SHOWN]]

    def _table(self) -> Table:
        """Return the table of ranks: the earliest findings first, then by rank."""
        failed = self.failed
        rows = [*failed, *(digest for digest in self.digests if digest.finding is None)]
        more = f"and {_count(len(rows) - _MOST_SHOWN)} more" if len(rows) > _MOST_SHOWN else ""
        columns = ("rank", "first non-finite", "batch", "least headroom in bits", "of")
        cells: list[list[Any]] = [[*digest.cells] for digest in rows[:_MOST_SHOWN]]
        return Table("ranks", "Ranks, the earliest first", dict.fromkeys(columns, TEXT), cells, after=more)

    def to_text(self) -> str:
        """Return the merge as text, without a newline at its end."""
        table = self._table()
        grid = [[*table.columns], *table.rows]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        lines = [f"{_count(len(self.digests))}: {spell_runs(self.ranks)}", self.headline]
        lines += [f"{head}: {body}" for head, body in self._facts()]
        lines += ["", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in grid)]
        return "\n".join(map(visible, [*lines, table.after] if table.after else lines))

    def to_html(self) -> str:
        """Return the merge as one HTML document."""
        amount = f"{_count(len(self.digests))}: {spell_runs(self.ranks)}"
        return page(
            "nanwatch show --html",
            self.headline,
            amount,
            self._facts(),
            [self._table()],
            is_bad=bool(self.failed),
        )

    def document(self) -> dict[str, object]:
        """Return the merge for programs, with nan and the infinities as strings, as in a report."""
        return {
            "schema": _SCHEMA,
            "version": _VERSION,
            "attempt": plain(self.attempt),
            "ranks": [
                {
                    "rank": digest.rank,
                    "finding": plain(digest.finding),
                    "headroom_bits": plain(digest.bits),
                    "module": digest.module,
                }
                for digest in self.digests
            ],
            "origin_ranks": [digest.rank for digest in self.origins],
            "other_attempts": [merged.document() for merged in self.others],
            "left_out": list(self.left_out),
        }

    def to_json(self) -> str:
        """Return the document as JSON."""
        return json.dumps(self.document(), indent=2, allow_nan=False)


def _count(number: int) -> str:
    return f"{number} rank" if number == 1 else f"{number} ranks"


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
            report = read_saved(path.read_text(encoding="utf-8"))
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
