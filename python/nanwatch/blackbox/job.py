"""The black boxes of all ranks of a job: which rank stopped first, and where the others wait."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

from ..report.page import NUMBER, TEXT, Table, page
from ..util.reading import plain
from ..util.visible import module_name, spell, visible
from .box_file import SUFFIX
from .story import SCHEMA, VERSION, BlackBoxReport, read
from .text import box_facts, box_text, ended_words, moment_words, seconds_words, where_words

_MOST_OTHERS = 5
_PULSE = 1.5  # seconds from one sign of life to the next, and some more


@dataclass(frozen=True, slots=True)
class Job:
    """Black boxes of one job, by rank: the newest in a folder, or a single file.

    `others` are those of other jobs, the newest first. `unread` are the files that could not be read, with the reason.
    """

    reports: tuple[BlackBoxReport, ...]
    others: tuple[BlackBoxReport, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def first(self) -> BlackBoxReport | None:
        """Return the rank that stopped first; None where that cannot be said.

        That is the first that ended otherwise than by itself. If all run, it is the one that has ended the fewest
        calls, unless all have ended as many.
        """
        if self.is_bad:
            # Without a mark the end is up to a second after the latest sign of life.
            return min(
                (report for report in self.reports if report.is_bad),
                key=lambda report: (
                    report.latest + _PULSE * (report.end == "unknown" or report.signal == SIGKILL)
                ),
            )
        counts = {report.num_calls for report in self.reports}
        return min(self.reports, key=lambda report: report.num_calls) if len(counts) > 1 else None

    @property
    def is_bad(self) -> bool:
        """Return whether a process ended otherwise than by itself."""
        return any(report.is_bad for report in self.reports)

    @property
    def _is_single(self) -> bool:
        return len(self.reports) == 1 and not self.others

    def to_text(self) -> str:
        """Return all about one process, or a line for each rank and which stopped first."""
        if self._is_single:
            return "\n".join([box_text(self.reports[0]), *map(visible, self._left_lines())])
        rows = [("rank", "process", "calls", "since", "what"), *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            " ".join([*(word.rjust(width) for word, width in zip(row, widths, strict=False)), " " + row[4]])
            for row in rows
        ]
        return "\n".join(map(visible, [*lines, "", *self._lines()])).rstrip()

    def to_json(self) -> str:
        """Return the reports as one JSON document."""
        if self._is_single:
            document = {"schema": SCHEMA, "version": VERSION, **plain(self.reports[0])}
        else:
            rank = None if self.first is None else self.first.rank
            ranks = [plain(report) for report in self.reports]
            document = {"schema": f"{SCHEMA}.job", "version": VERSION, "first": rank, "ranks": ranks}
        return json.dumps(document, indent=2, allow_nan=False)

    def to_html(self) -> str:
        """Return a page: the facts and calls of one process, or the ranks."""
        if self._is_single:
            (report,) = self.reports
            columns = {"module": TEXT, "class": TEXT, "batch": NUMBER, "seconds": NUMBER}
            rows = [
                (module_name(call.module), call.class_name, call.batch, seconds_words(call.seconds))
                for call in reversed(report.calls)
            ]
            table = Table("calls", "The latest calls", columns, rows)
            facts = [(fact.head, fact.body) for fact in box_facts(report)]
            headline = f"{ended_words(report)}; {where_words(report)}"
            amount = moment_words(report.latest)
        else:
            headline, *notes = self._lines() or ["No rank stopped before the others"]
            facts, amount = [("Note", line) for line in notes], f"{len(self.reports)} ranks"
            columns = {"rank": NUMBER, "process": TEXT, "calls": NUMBER, "since": TEXT, "what": TEXT}
            table = Table("ranks", "Ranks", columns, list(self._rows()))
        return page("nanwatch show --html", headline, amount, facts, [table], is_bad=self.is_bad)

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                str(report.rank),
                f"{report.pid}@{report.host}",
                f"{report.num_calls:,}",
                seconds_words(report.seconds_after),
                where_words(report)
                if report.end == "runs"
                else f"{ended_words(report)}; {where_words(report)}",
            )
            for report in self.reports
        ]

    def _lines(self) -> list[str]:
        """Return which rank stopped first and how, what the others do, and what was left out."""
        lines = []
        if (first := self.first) is not None:
            verb = "ended first" if first.is_bad else "is behind the others"
            lines.append(f"Rank {first.rank} {verb}: {ended_words(first)}; {where_words(first)}.")
            places = Counter(_place(report) for report in self.reports if report is not first)
            lines += [f"{count} of the others: {place}." for place, count in places.most_common(4)]
        return [*lines, *self._left_lines()]

    def _left_lines(self) -> list[str]:
        lines = [
            f"Of another run: {report.path}, {moment_words(report.latest)}."
            for report in self.others[:_MOST_OTHERS]
        ]
        if len(self.others) > _MOST_OTHERS:
            lines.append(f"{len(self.others) - _MOST_OTHERS} more of other runs.")
        return [*lines, *(f"Not read: {reason}." for reason in self.unread)]


def _place(report: BlackBoxReport) -> str:
    call = report.under_way
    if call is None:
        return where_words(report)
    return f"batch {call.batch:,}, inside {module_name(call.module)} ({call.class_name})"


def find(path: Path) -> list[Path]:
    """Return the black boxes at a path: itself, or those in a folder or in its folder `blackbox`."""
    if path.is_dir():
        return sorted([*path.glob(f"*{SUFFIX}"), *path.glob(f"blackbox/*{SUFFIX}")])
    return [path]


def read_job(path: Path) -> Job:
    """Read a black box, or those of the newest job in a folder. Raises ValueError or OSError where there is none."""
    if not path.is_dir():
        return Job((read(path),))
    reports, unread = [], []
    for file in find(path):
        try:
            reports.append(read(file))
        except (ValueError, OSError) as error:
            unread.append(spell(error))
    if not reports:
        why = f": {unread[0]}" if unread else f"; its name ends with {SUFFIX}"
        raise ValueError(f"{str(path)!r} has no black box that can be read{why}")
    newest = max(reports, key=lambda report: report.begun)
    # A port of the master may come again: a rank that had ended before the newest began was of another run.
    by_rank = {
        report.rank: report
        for report in sorted(reports, key=lambda report: report.begun)
        if (_key(report), report.world_size) == (_key(newest), newest.world_size)
        and (report.end == "runs" or report.latest + _PULSE > newest.begun)
    }
    of_job = [by_rank[rank] for rank in sorted(by_rank)]
    others = [report for report in reports if report not in of_job]
    others.sort(key=lambda report: report.begun, reverse=True)
    return Job(tuple(of_job), tuple(others), tuple(unread))


def _key(report: BlackBoxReport) -> object:
    """Return what the processes of a job share: a process without one is a job of its own."""
    return str(report.facts.get("job") or (report.host, report.pid, report.begun))
