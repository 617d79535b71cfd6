"""Merge of the reports of several ranks: one table of what each rank saw first, and how little room it had left.

Only ranks of one attempt of an elastic job are compared with each other.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from ..records.fields import plain
from ..records.record import by_module
from ..report import text
from ..report.events import SpikeReport
from ..report.finding import Finding
from ..report.page import TEXT, Table, page
from ..report.report import Report, read_saved
from ..util.job import Attempt, spell_runs
from ..util.messages import Tell, module_name, plural, silent, visible

_FILE = "report.json"
_SCHEMA, _VERSION = "nanwatch.merged", 2
_MOST_SHOWN = 64  # ranks, attempts and files; the document has all


@dataclass(frozen=True, slots=True)
class Digest:
    """One rank's part in a merge.

    `finding` has the rank of the report and always a sequence: if the report has none, it is the number of frames of
    the batch in the report before the non-finite one. `headroom_bits` is the least one, of `module`, -inf where
    something is not finite.
    """

    rank: int
    finding: Finding | None
    headroom_bits: float
    module: str
    attempt: Attempt | None


def _digest(report: Report) -> Digest:
    finding = report.finding
    if finding is not None:
        frames = [frame for frame in report.frames if frame.batch == finding.batch]
        place = next((i for i, frame in enumerate(frames) if frame.fault is not None), len(frames))
        sequence = place if finding.sequence is None else finding.sequence
        finding = replace(finding, rank=report.rank, sequence=sequence)
    bits, module, *_ = next(iter(by_module(report.frames).values()), (inf, ""))
    return Digest(report.rank, finding, bits, module, report.attempt)


def _order(digest: Digest) -> tuple[float, int, bool, int]:
    """Return a key that sorts digests: by batch, by place in it, arguments before outputs, by rank."""
    finding = digest.finding
    if finding is None:
        return inf, 0, False, digest.rank
    return finding.batch, finding.sequence or 0, finding.origin == "produced", digest.rank


@dataclass(frozen=True, slots=True)
class Merged:
    """Digests of the ranks of one attempt, sorted by rank; the files that were left out; the other attempts."""

    digests: tuple[Digest, ...]
    left_out: tuple[str, ...] = ()
    others: tuple[Merged, ...] = ()

    @property
    def attempt(self) -> Attempt | None:
        """The attempt as the launcher with the most restarts counts it, None where the reports name none."""
        attempts = [digest.attempt for digest in self.digests if digest.attempt is not None]
        return max(attempts, key=lambda attempt: attempt.number, default=None)

    @property
    def failed(self) -> list[Digest]:
        """The digests with a finding, the earliest first: by batch, by place in it, by rank."""
        return [digest for digest in sorted(self.digests, key=_order) if digest.finding is not None]

    @property
    def origins(self) -> list[Digest]:
        """The digests with the earliest finding. Several ranks may have theirs at one place."""
        failed = self.failed
        return [digest for digest in failed if _order(digest)[:3] == _order(failed[0])[:3]]

    @property
    def headline(self) -> str:
        """Where the first non-finite value was, in one line."""
        first, more = next(iter(self.origins), None), len(self.origins) - 1
        if first is None or first.finding is None:
            return f"All finite on {plural(len(self.digests), 'rank')}"
        summary = f"First: {text.summary(replace(first.finding, rank=0))}, rank {first.rank}"
        return f"{summary} and {plural(more, 'rank')} more at the same place" if more else summary

    def _amount(self) -> str:
        return f"{plural(len(self.digests), 'rank')}: {spell_runs([digest.rank for digest in self.digests])}"

    def _facts(self) -> list[tuple[str, str]]:
        facts = [("Of", str(self.attempt))] if self.attempt is not None else []
        for merged in self.others[-_MOST_SHOWN:]:
            who = f"{merged.attempt or 'reports that name no attempt'}, {plural(len(merged.digests), 'rank')}"
            facts.append(("Not merged", f"{who}: {merged.headline}"))
        return facts + [("Left out", reason) for reason in self.left_out[:_MOST_SHOWN]]

    def _table(self) -> Table:
        """Return the table of ranks: the earliest findings first, then by rank."""
        columns = ("rank", "first non-finite", "batch", "least headroom in bits", "of")
        rows = []
        for digest in sorted(self.digests, key=_order)[:_MOST_SHOWN]:
            bits, seen, batch = digest.headroom_bits, "", ""
            room = {inf: "all zero", -inf: "not finite"}.get(bits, f"{bits:.1f}")
            if (finding := digest.finding) is not None:
                seen = f"{finding.value} in {finding.label} of {module_name(finding.module)}"
                batch = str(finding.batch)
            rows.append([str(digest.rank), seen, batch, room, module_name(digest.module)])
        num_left = len(self.digests) - len(rows)
        more = f"and {plural(num_left, 'rank')} more" if num_left else ""
        return Table("ranks", "Ranks, the earliest first", dict.fromkeys(columns, TEXT), rows, after=more)

    def to_text(self) -> str:
        """Return the merge as text, without a newline at its end."""
        table = self._table()
        grid = [[*table.columns], *table.rows]
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        lines = [self._amount(), self.headline]
        lines += [f"{head}: {body}" for head, body in self._facts()]
        lines += ["", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in grid)]
        return "\n".join(map(visible, [*lines, table.after] if table.after else lines))

    def to_html(self) -> str:
        """Return the merge as one HTML document."""
        head = "nanwatch show --html", self.headline, self._amount()
        return page(*head, self._facts(), [self._table()], is_bad=bool(self.failed))

    def document(self) -> dict[str, object]:
        """Return the merge for programs, with nan and the infinities as strings, as in a report."""
        return {
            "schema": _SCHEMA,
            "version": _VERSION,
            "attempt": plain(self.attempt),  # of all digests
            "ranks": [{k: v for k, v in plain(digest).items() if k != "attempt"} for digest in self.digests],
            "origin_ranks": [digest.rank for digest in self.origins],
            "other_attempts": [merged.document() for merged in self.others],
            "left_out": list(self.left_out),
        }

    def to_json(self) -> str:
        """Return the document as JSON."""
        return json.dumps(self.document(), indent=2, allow_nan=False)


def merge(*paths: Path, tell: Tell = silent) -> Merged:
    """Merge every `report.json` below the folders, and the files.

    If an elastic job has several attempts, the latest with a finding is merged, or else the latest. If a rank has
    several reports, its earliest failure counts. Raises ValueError when no report can be read. A report that cannot be
    read is left out and named.
    """
    left_out: list[str] = []
    groups: dict[object, dict[int, Digest]] = {}  # the digests of each attempt, by rank
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
            digest = _digest(report)
            ranks = groups.setdefault(digest.attempt and digest.attempt.key, {})
            ranks[digest.rank] = min(ranks.get(digest.rank, digest), digest, key=_order)
    if not groups:
        places = " and ".join(map(str, paths))
        why = f": {left_out[0]}" if left_out else "; pass the folder that watch(output_dir=...) was given"
        raise ValueError(f"no {_FILE} of nanwatch below {places}{why}")
    attempts = [Merged(tuple(ranks[rank] for rank in sorted(ranks))) for ranks in groups.values()]
    attempts.sort(key=lambda x: min((y.attempt.begun for y in x.digests if y.attempt), default=-inf))
    chosen = ([merged for merged in attempts if merged.failed] or attempts)[-1]
    others = tuple(merged for merged in attempts if merged is not chosen)
    return replace(chosen, left_out=tuple(left_out), others=others)
