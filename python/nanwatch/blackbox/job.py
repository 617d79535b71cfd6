"""The black boxes of all ranks of a job: which rank stopped first, and where the others wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL

from ..report.page import NUMBER, TEXT, Table, page
from ..util.visible import spell, visible
from .box_file import SUFFIX
from .story import BlackBoxReport, read_black_box
from .text import ended_words, is_bad, moment_words, seconds_words, where_words

_MOST_OTHERS = 5
_PULSE = 1.5  # seconds from one sign of life to the next, and some more


@dataclass(frozen=True, slots=True)
class Job:
    """Black boxes of one job, by rank: the newest in a folder. `others` are those of other jobs, the newest first.

    `unread` are the files that could not be read, with the reason.
    """

    reports: tuple[BlackBoxReport, ...]
    others: tuple[BlackBoxReport, ...]
    unread: tuple[str, ...]

    @property
    def first(self) -> BlackBoxReport | None:
        """Return the rank that stopped first; None where that cannot be said.

        That is the first that ended otherwise than by itself. If all run, it is the one that has ended the fewest
        calls, unless all have ended as many.
        """
        bad = [one for one in self.reports if is_bad(one)]
        if bad:
            # Without a mark the end is up to a second after the latest sign of life.
            return min(
                bad, key=lambda one: one.latest + _PULSE * (one.end == "unknown" or one.signal == SIGKILL)
            )
        if len(self.reports) < 2:
            return None
        least = min(self.reports, key=lambda one: one.num_calls)
        return None if all(one.num_calls == least.num_calls for one in self.reports) else least


def read_job(folder: Path) -> Job:
    """Read the black boxes in a folder, or in its folder `blackbox`. Raises ValueError where there is none."""
    paths = sorted([*folder.glob(f"*{SUFFIX}"), *folder.glob(f"blackbox/*{SUFFIX}")])
    reports, unread = [], []
    for path in paths:
        try:
            reports.append(read_black_box(path))
        except (ValueError, OSError) as error:
            unread.append(f"{path.name}: {spell(error)}")
    if not reports:
        why = f": {unread[0]}" if unread else f"; its name ends with {SUFFIX}"
        raise ValueError(f"{str(folder)!r} has no black box that can be read{why}")
    newest = max(reports, key=lambda one: one.begun)
    # A port of the master may come again: a rank that had ended before the newest began was of another run.
    own = [
        one
        for one in reports
        if (_key(one), one.world_size) == (_key(newest), newest.world_size)
        and (one.end == "runs" or one.latest + _PULSE > newest.begun)
    ]
    by_rank = {one.rank: one for one in sorted(own, key=lambda one: one.begun)}
    of_job = [by_rank[rank] for rank in sorted(by_rank)]
    others = sorted((one for one in reports if one not in of_job), key=lambda one: one.begun, reverse=True)
    return Job(tuple(of_job), tuple(others), tuple(unread))


def _key(report: BlackBoxReport) -> object:
    """Return what the processes of a job share: a process without one is a job of its own."""
    return str(report.facts.get("job") or (report.host, report.pid, report.begun))


def job_text(job: Job) -> str:
    """Return a line for each rank, and which stopped first."""
    rows = [("rank", "process", "calls", "since", "what"), *map(_row, job.reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        " ".join([*(word.rjust(width) for word, width in zip(row, widths, strict=False)), " " + row[4]])
        for row in rows
    ]
    lines += ["", *job_words(job)]
    return "\n".join(map(visible, lines)).rstrip()


def job_words(job: Job) -> list[str]:
    """Return which rank stopped first and how, what the others do, and what was left out."""
    lines = []
    first = job.first
    if first is not None:
        verb = "ended first" if is_bad(first) else "is behind the others"
        lines.append(f"Rank {first.rank} {verb}: {ended_words(first)}; {where_words(first)}.")
        places = Counter(_place(one) for one in job.reports if one is not first)
        lines += [f"{count} of the others: {place}." for place, count in places.most_common(4)]
    return [*lines, *left_words(job)]


def left_words(job: Job) -> list[str]:
    """Return a line for each file that is not of this job, and for each that could not be read."""
    lines = [f"Of another run: {one.path}, {moment_words(one.latest)}." for one in job.others[:_MOST_OTHERS]]
    if len(job.others) > _MOST_OTHERS:
        lines.append(f"{len(job.others) - _MOST_OTHERS} more of other runs.")
    return [*lines, *(f"Not read: {one}." for one in job.unread)]


def _place(report: BlackBoxReport) -> str:
    call = report.under_way
    if call is None:
        return where_words(report)
    return f"batch {call.batch:,}, inside {call.module or 'the root module'} ({call.class_name})"


def _row(report: BlackBoxReport) -> tuple[str, str, str, str, str]:
    since = seconds_words(report.seconds_after)
    what = where_words(report) if report.end == "runs" else f"{ended_words(report)}; {where_words(report)}"
    return str(report.rank), f"{report.pid}@{report.host}", f"{report.num_calls:,}", since, what


def job_html(job: Job) -> str:
    """Return the job as a page."""
    columns = {"rank": NUMBER, "process": TEXT, "calls": NUMBER, "since the latest": TEXT, "what": TEXT}
    first = job.first
    headline = "No rank stopped before the others" if first is None else job_words(job)[0]
    amount = f"{len(job.reports)} ranks"
    return page(
        "nanwatch blackbox --html",
        headline,
        amount,
        [("Note", line) for line in job_words(job)[first is not None :]],
        [Table("ranks", "Ranks", columns, list(map(_row, job.reports)))],
        is_bad=first is not None,
    )
