"""The black boxes of a job in words: one process whole, or which rank stopped first and where the others wait."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from signal import SIGKILL, Signals

import numpy as np

from ..records.fields import plain
from ..util.messages import first_few, module_name, spell, visible
from .story import SCHEMA, SUFFIX, VERSION, BlackBoxReport, BoxCall, read

_CALLS = 10
_PULSE = 1.5  # seconds from one sign of life to the next, and some more
_VERSIONS = ("nanwatch", "torch", "cuda", "python", "device")


@dataclass(frozen=True, slots=True)
class Job:
    """Black boxes of one job, by rank: the newest in a folder, or a single file.

    `num_older` counts the files of other runs. `unread` says which files could not be read, and why.
    """

    reports: tuple[BlackBoxReport, ...]
    num_older: int = 0
    unread: tuple[str, ...] = ()

    @property
    def first(self) -> BlackBoxReport | None:
        """Return the rank that stopped first; None where that cannot be said.

        That is the first that ended otherwise than by itself. If all run, it is the one that has ended the fewest
        calls, unless all have ended as many.
        """

        def ended(report: BlackBoxReport) -> float:
            # Without a mark the end is up to a second after the latest sign of life.
            return report.latest + _PULSE * (report.end == "unknown" or report.signal == SIGKILL)

        if self.is_bad:
            return min((report for report in self.reports if report.is_bad), key=ended)
        by_calls = sorted(self.reports, key=lambda report: report.num_calls)
        return by_calls[0] if by_calls[0].num_calls < by_calls[-1].num_calls else None

    @property
    def is_bad(self) -> bool:
        """Return whether a process ended otherwise than by itself."""
        return any(report.is_bad for report in self.reports)

    def to_text(self) -> str:
        """Return all about one process, or a line for each rank and which stopped first."""
        lines = [*(_process_lines(self.reports[0]) if len(self.reports) == 1 else self._rank_lines())]
        if self.num_older:
            folder = Path(self.reports[0].path).parent
            lines += ["", f"Not shown: {self.num_older:,} black boxes of other runs in {folder}."]
        lines += [f"Not read: {first_few(self.unread)}."] if self.unread else []
        return "\n".join(map(visible, lines))

    def to_json(self) -> str:
        """Return the reports as one JSON document."""
        ranks = [{"schema": SCHEMA, "version": VERSION, **plain(report)} for report in self.reports]
        first = self.first and self.first.rank
        job = {"schema": f"{SCHEMA}.job", "version": VERSION, "first": first, "ranks": ranks}
        return json.dumps(job if len(ranks) > 1 else ranks[0], indent=2, allow_nan=False)

    def _rank_lines(self) -> Iterator[str]:
        yield "rank        calls      since  what"
        for report in self.reports:
            end = "" if report.end == "runs" else f"{_end_words(report)}; "
            what = f"{end}{_where_words(report)} (process {report.pid} on {report.host})"
            yield f"{report.rank:4} {report.num_calls:12,} {_seconds_words(report.seconds_after):>10}  {what}"
        if (first := self.first) is not None:
            verb = "ended first" if first.is_bad else "is behind the others"
            yield from ("", f"Rank {first.rank} {verb}: {_end_words(first)}; {_where_words(first)}.")
            # Ranks that wait at one place differ in the times.
            others = [report for report in self.reports if report is not first]
            places = Counter(_where_words(report, with_time=False) for report in others)
            yield from (f"{count} of the others: {place}." for place, count in places.most_common(4))


def read_job(path: Path) -> Job:
    """Read a black box, or those of the newest job in a folder or in its folder `blackbox`.

    Raises ValueError or OSError where there is none.
    """
    if path.is_file():
        return Job((read(path),))
    reports, unread = [], []
    for file in sorted([*path.glob(f"*{SUFFIX}"), *path.glob(f"blackbox/*{SUFFIX}")]):
        try:
            reports.append(read(file))
        except (ValueError, OSError) as error:
            unread.append(spell(error))
    if not reports:
        why = f": {unread[0]}" if unread else f" (*{SUFFIX}); watch(output_dir=...) keeps one in DIR/blackbox"
        raise ValueError(f"{str(path)!r} has no black box that can be read{why}")
    reports.sort(key=lambda report: report.begun)
    newest = reports[-1]
    # A rank that had ended before the newest began was of another run.
    by_rank = {
        report.rank: report
        for report in reports
        if report.world_size == newest.world_size
        and (report.end == "runs" or report.latest + _PULSE > newest.begun)
    }
    ranks = tuple(by_rank[rank] for rank in sorted(by_rank))
    return Job(ranks, len(reports) - len(ranks), tuple(unread))


# Words.


def _process_lines(report: BlackBoxReport) -> Iterator[str]:
    """Yield who the process was, how it ended, what it was doing, and its latest calls."""
    argv, latest = report.facts.get("argv"), report.calls[-_CALLS:]
    command = shlex.join(map(str, argv)) if isinstance(argv, list) else "?"
    rank = f", rank {report.rank} of {report.world_size}" if report.world_size > 1 else ""
    is_over = report.seconds_after is not None and report.end != "runs"
    after = f", {_seconds_words(report.seconds_after)} after its latest call ended" if is_over else ""
    open_calls = report.threads[0].calls if report.threads else ()
    ago = f"{_seconds_words(report.python_ago)} before: " if report.python_ago else ""
    facts = [
        ("Process", f"{report.pid} on {report.host}{rank}: {command}"),
        ("End", f"{_end_words(report)}{after}."),
        ("Where", f"{_where_words(report)}."),
        ("Within", " > ".join(module_name(call.module) for call in open_calls) if open_calls[1:] else ""),
        *(("Thread", f"{thread.id}: {_under_way(thread.calls[-1])}") for thread in report.threads[1:]),
        ("Python", ago + " < ".join(report.python) if report.python else ""),
        ("Memory", f"{report.memory / 2**30:.2f} GiB" if report.memory else ""),
        ("With", ", ".join(f"{name} {report.facts[name]}" for name in _VERSIONS if report.facts.get(name))),
    ]
    yield from (f"{head + ':':<8} {body}" for head, body in facts if body)
    if latest:
        yield from ("", f"the latest {len(latest)} of {report.num_calls:,} calls that ended:")
    for call in latest:
        took = f" took {_seconds_words(call.seconds)}" if call.seconds is not None else ""
        yield f"  batch {call.batch:,}: {call.name}{took}{', raised' if call.raised else ''}"
    for note in report.notes:
        yield from ("", f"{note.get('kind', 'note')}:")
        content = {name: value for name, value in note.items() if name not in ("kind", "time")}
        yield from json.dumps(content, indent=2).splitlines()[1:-1]


def _end_words(report: BlackBoxReport) -> str:
    """Return how the process ended, as a sentence without its full stop."""
    # Takes any number, as of a damaged file.
    at = f"{np.datetime64(int(report.latest), 's')} UTC".replace("T", " ", 1)
    name = next((known.name for known in Signals if known == report.signal), f"signal {report.signal}")
    if report.end == "runs":
        return "it runs"
    if report.end == "signal":
        address = f" at address {report.signal_address:#x}" if report.signal_address is not None else ""
        return f"signal {report.signal} ({name}){address} at {at}"
    if report.end == "exit":
        status = f" with exit status {report.exit_status}" if report.exit_status is not None else ""
        return f"Python ended by itself{status} at {at}"
    if report.end == "exception":
        errors = [str(note.get("error", "")) for note in report.notes if note.get("kind") == "exception"]
        return f"an exception ended Python at {at}: {''.join(errors[-1:]).partition(chr(10))[0]}"
    before = f"; it had got {name}" if report.signal else ""
    marks = "no mark of an end (SIGKILL, os._exit or a lost machine leave none)"
    return f"{marks}{before}; the latest sign of life is of {at}"


def _where_words(report: BlackBoxReport, *, with_time: bool = True) -> str:
    """Return what the process was doing."""
    if (call := report.under_way) is not None:
        return _under_way(call, with_time=with_time)
    raised = [*takewhile(lambda call: call.raised, reversed(report.calls))]
    if raised and report.end != "runs":  # the innermost ended first
        return f"batch {raised[-1].batch:,}, forward: {raised[-1].name} raised"
    if report.batch is None:
        return "before the first call of a watched module"
    if report.phase == "backward":
        module, part = report.gradient or ("?", "?")
        where = "inside" if part == "output" else f"the latest gradient was of the {part} of"
        return f"batch {report.batch:,}, backward: {where} {module_name(module)}"
    if report.phase == "step":
        return f"after batch {report.batch:,}, in the optimizer's step or after it"
    return f"after the forward of batch {report.batch:,}, outside of watched modules"


def _under_way(call: BoxCall, *, with_time: bool = True) -> str:
    # Without a later sign of life it is not known for how long.
    time = f", which had run for {_seconds_words(call.seconds)}" if call.seconds and with_time else ""
    return f"batch {call.batch:,}, forward: inside {call.name}{time}"


def _seconds_words(seconds: float | None) -> str:
    """Return a time such as `3.1 s`, `12 ms` or `45 µs`, "" for None."""
    for least, factor, unit in ((1, 1, "s"), (1e-3, 1e3, "ms"), (0, 1e6, "µs")):
        if seconds is not None and abs(seconds) >= least:
            return f"{seconds * factor:,.3g} {unit}" if abs(seconds) < 1000 else f"{seconds:,.0f} s"
    return ""
