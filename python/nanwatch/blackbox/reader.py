"""Reader of black boxes: the file that csrc/blackbox/ writes, what it says of the process, and a job's files in words.

The first page of a file says where each section lies and which words its items have. A file may be read while it is
written: counts are read before and after, and items that were overwritten meanwhile are left out. Nothing in a file is
executed, and a file that was damaged gives a ValueError or what can be read of it.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any, Literal, TypeAlias

import numpy as np

from ..records.fields import plain
from ..util.job import started_at
from ..util.messages import first_few, module_name, spell, visible

SCHEMA, VERSION = "nanwatch.blackbox", 3
SUFFIX = ".blackbox"
End: TypeAlias = Literal["runs", "exit", "exception", "signal", "unknown"]
_MAGIC = b"nanwatch black box 3\n"
_PAGE = 4096
_MOST_CALLS = 64
_LIFE = 2.0  # seconds: a sign of life that much after a signal says that the process went on
_PARTS = {0: "output", 1: "input", 2: "weight"}
_SHOWN_CALLS = 10
_PULSE = 1.5  # seconds from one sign of life to the next, and some more
_VERSIONS = ("nanwatch", "torch", "cuda", "python", "device")


def read(path: str | os.PathLike[str]) -> BlackBoxReport:
    """Read the black box of a process, which may be running.

    Raises ValueError, which names the file, where it is no black box, and OSError.
    """
    path = Path(path)
    try:
        return _report(BoxFile(path))
    except OSError:
        raise
    except Exception as error:
        hint = "copy all of it again if it is a copy, read it with the nanwatch that wrote it, or leave out --box"
        why = f"{path} cannot be read as a black box: {spell(error)}"
        raise ValueError(f"{why}; {hint} for a report or a trace") from error


@dataclass(frozen=True, slots=True)
class BoxCall:
    """Call of a module in a batch. `seconds` is how long it took, or has run; None where that is not known.

    `ago` is how long before the latest sign of life it ended; 0 while it is under way.
    """

    module: str
    class_name: str
    batch: int
    seconds: float | None
    ago: float = 0.0
    raised: bool = False

    @property
    def name(self) -> str:
        """Return the names of the module and of its class, for people."""
        return f"{module_name(self.module)} ({self.class_name})"


@dataclass(frozen=True, slots=True)
class BoxThread:
    """Thread with calls under way, the outermost first."""

    id: int
    calls: tuple[BoxCall, ...]


@dataclass(frozen=True, slots=True)
class BlackBoxReport:
    """State of a process when its black box was last written.

    `end` is "runs" for a process that is alive, "signal" with the number in `signal` (and the address of a fault),
    "exit" and "exception" where Python ended, with the `exit_status` that the process gave, else "unknown": SIGKILL,
    os._exit and a lost machine leave no mark. A `signal` of an unknown end came before, and the program went on.
    `phase` is "forward", "backward", "step", or "" between them. `seconds_after` is the time from the end of the latest
    call to the end. `python` is where the main thread was, `python_ago` seconds before the end. Times are in seconds,
    moments in seconds since 1970. `facts` are of the process, `notes` what it wrote about a hang or an error.
    """

    path: str
    pid: int
    rank: int
    world_size: int
    begun: float
    latest: float
    end: End
    signal: int
    signal_address: int | None
    exit_status: int | None
    phase: str
    batch: int | None
    num_calls: int
    seconds_after: float | None
    threads: tuple[BoxThread, ...]
    gradient: tuple[str, str] | None
    python: tuple[str, ...]
    python_ago: float | None
    memory: int
    calls: tuple[BoxCall, ...]
    facts: dict[str, Any]
    notes: tuple[dict[str, Any], ...]

    @property
    def under_way(self) -> BoxCall | None:
        """Return the innermost call under way: of the thread that got the signal, else of the one that began last."""
        return self.threads[0].calls[-1] if self.threads else None

    @property
    def host(self) -> str:
        """Return the name of the machine."""
        return str(self.facts.get("host", "?"))

    @property
    def is_bad(self) -> bool:
        """Return whether the process ended otherwise than by itself."""
        return self.end not in ("runs", "exit") or bool(self.exit_status)


# The black boxes of a job: which rank stopped first, and where the others wait.


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
    lived = (x for x in reports if x.end == "runs" or x.latest + _PULSE > newest.begun)
    by_rank = {x.rank: x for x in lived if x.world_size == newest.world_size}
    ranks = tuple(by_rank[rank] for rank in sorted(by_rank))
    return Job(ranks, len(reports) - len(ranks), tuple(unread))


def _process_lines(report: BlackBoxReport) -> Iterator[str]:
    """Yield who the process was, how it ended, what it was doing, and its latest calls."""
    argv, latest = report.facts.get("argv"), report.calls[-_SHOWN_CALLS:]
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


# The file.


class BoxFile:
    """The file at one moment.

    `state` has the words of the process by name, `calls` the calls that ended, oldest first, `threads` and `stacks` the
    places of threads and the calls under way in them, `facts` what is known of the process, `notes` the rest of what it
    wrote. Damage raises any error: of numpy, of a section, or of a word that is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, int] = {}
        self._sections: dict[str, Any] = {}
        data = path.read_bytes()
        if not data.startswith(_MAGIC):
            came = f"begins with {data[: len(_MAGIC)]!r}, not with {_MAGIC!r}" if data else "is empty"
            raise ValueError(f"it {came}")
        # The first page says where each section lies, how many items it has, and the words of an item.
        for line in data[len(_MAGIC) : _PAGE].partition(b"\0")[0].decode("ascii").splitlines():
            name, at, count, *words = line.split(" ")
            item = np.dtype([(word, "<i8") for word in words] if words else "u1")
            self._places[name] = int(at)
            self._sections[name] = np.frombuffer(data, item, int(count), int(at))
        # Counts that have grown meanwhile say which items were overwritten during the read.
        state, ring = self._sections["state"], self._sections["calls"]
        later = np.fromfile(path, state.dtype, 1, offset=self._places["state"])
        self.state, after = _words(state[0]), _words(later[0])
        end = self.state["calls"]
        # The oldest may be half overwritten by one that was never counted.
        begin = max(min(max(0, after["calls"] - len(ring) + 1), end), end - len(ring))
        self.calls = ring[np.arange(begin, end) % len(ring)]
        self.threads = self._sections["threads"]
        self.stacks = np.array_split(self._sections["stacks"], len(self.threads))
        names = (name.partition("\n") for name in self._text("names").split("\0")[:-1])
        self._names = {number: (name, class_name) for number, (name, _, class_name) in enumerate(names)}
        self.facts, self.notes = dict[str, Any](), list[dict[str, Any]]()
        for line in self._text("notes").splitlines():
            with suppress(ValueError, TypeError, RecursionError):  # of a line that is no JSON object
                note = {**json.loads(line)}
                if note.get("kind") == "facts":
                    self.facts |= note
                else:
                    self.notes.append(note)
        sample = np.array_split(self._sections["samples"], 2)[(self.state["samples"] - 1) % 2]
        self.sample = sample.tobytes().partition(b"\0")[0].decode("utf-8", "replace")

    def _text(self, name: str) -> str:
        data: bytes = self._sections[name][: self.state[name]].tobytes()
        return data.decode("utf-8", "replace")

    def module(self, number: int) -> tuple[str, str]:
        """Return the name of a module and its class."""
        return self._names.get(number, (f"module {number}", "?"))

    def seconds(self, begin: int, end: int) -> float | None:
        """Return the time between two moments in ticks, by the first and the latest sign of life; None if unknown."""
        state = self.state
        ticks, nanoseconds = state["ticks"] - state["begun_ticks"], state["time"] - state["begun"]
        if not begin or ticks <= 0 or nanoseconds <= 0:
            return None
        passed = (end - begin) * (nanoseconds / 1e9 / ticks)
        return passed if abs(passed) < 1e10 else None

    def call(self, item: Any, now: int) -> BoxCall:
        """Return a call that has ended, or that is under way."""
        call = _words(item)
        ended = call.get("ended", now)
        seconds, ago = self.seconds(call["begun"], ended), self.seconds(ended, now) or 0.0
        return BoxCall(*self.module(call["module"]), call["batch"], seconds, ago, bool(call.get("raised")))


def _words(item: Any) -> dict[str, int]:
    return {name: int(item[name]) for name in item.dtype.names}


def _report(file: BoxFile) -> BlackBoxReport:
    state, facts, end = file.state, file.facts, _end(file)
    latest = max(state["latest"], *(moment for name, moment in state.items() if name.endswith("ticks")))
    now = state["signal_ticks"] if end == "signal" else latest
    threads = _threads(file, now)
    calls = tuple(file.call(item, now) for item in file.calls[-_MOST_CALLS:])
    # Where nothing has happened yet, all are equal, and the first counts.
    ended = max(int(file.calls["ended"][-1]) if calls else 0, state["backward_ticks"])
    ticks = {"": ended, "backward": state["gradient_ticks"], "step": state["step_ticks"]}
    phase = "forward" if threads else max(ticks, key=lambda phase: ticks[phase])
    batch = threads[0].calls[-1].batch if threads else calls[-1].batch if calls else None
    gradient = file.module(state["gradient_module"])[0], _PARTS.get(state["gradient_part"], "?")
    return BlackBoxReport(
        path=str(file.path),
        pid=state["pid"],
        rank=int(facts.get("rank", 0)),
        world_size=int(facts.get("world_size", 1)),
        begun=state["begun"] / 1e9,
        latest=state["time"] / 1e9 + (file.seconds(state["ticks"], now) or 0.0),
        end=end,
        signal=state["signal"] if end in ("signal", "unknown") else 0,
        signal_address=state["signal_address"] if end == "signal" and state["signal_address"] >= 0 else None,
        exit_status=state["exit_status"] - 1 if state["exit_status"] and end != "signal" else None,
        phase=phase,
        batch=batch if phase != "backward" else state["gradient_batch"],
        num_calls=state["calls"],
        seconds_after=calls[-1].ago if calls else None,
        threads=threads,
        gradient=gradient if phase == "backward" else None,
        python=tuple(file.sample.splitlines()),
        python_ago=file.seconds(state["sample_ticks"], now),
        memory=state["memory"],
        calls=calls,
        facts=facts,
        notes=tuple(file.notes),
    )


def _end(file: BoxFile) -> End:
    state, facts = file.state, file.facts
    is_here = facts.get("host") == socket.gethostname()
    if is_here and started_at(state["pid"]) == facts.get("started"):
        return "runs"
    lived = file.seconds(state["signal_ticks"], max(state["latest"], state["ticks"]))
    is_last = state["exit_ticks"] <= state["signal_ticks"] and (lived is None or lived < _LIFE)
    if state["signal"] > 0 and is_last:  # else the program has handled it
        return "signal"
    if state["exit"] == 2:
        return "exception"
    return "exit" if state["exit"] == 1 or state["exit_status"] else "unknown"


def _threads(file: BoxFile, now: int) -> tuple[BoxThread, ...]:
    """Return the threads with calls under way: the one that got a signal first, then by when their calls began."""
    threads = zip(file.threads.tolist(), file.stacks, strict=True)
    stacks = [(number, stack[:depth]) for (number, depth), stack in threads if number and depth > 0]
    hit = file.state["signal_thread"]
    stacks.sort(key=lambda thread: (thread[0] == hit, int(thread[1]["begun"][-1])), reverse=True)
    return tuple(BoxThread(number, tuple(file.call(item, now) for item in stack)) for number, stack in stacks)
