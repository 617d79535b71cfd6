"""Report of one black box: how its process ended, in which call it was, and its latest calls."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ..records.note import NOTE_KINDS, Note
from ..records.record import PHASES, ROLES, Frame, Record
from ..util.job import started_at
from .box_file import BoxFile, Items

SCHEMA, VERSION = "nanwatch.blackbox", 1
End: TypeAlias = Literal["runs", "exit", "exception", "signal", "unknown"]
_MOST_CALLS, _MOST_FRAMES = 64, 21
_LIFE = 2.0  # seconds: a sign of life that much after a signal says that the process went on
_MOST_DIMS = 6  # of a shape that the file has
_PARTS = ("output", "input", "weight")


@dataclass(frozen=True, slots=True)
class BoxCall:
    """Call of a module in a batch. `seconds` is how long it took, or has run; None where that is not known.

    `ago` is how long before the latest sign of life it ended; 0 for one that is under way.
    """

    module: str
    class_name: str
    batch: int
    seconds: float | None
    ago: float = 0.0
    raised: bool = False


@dataclass(frozen=True, slots=True)
class BoxThread:
    """Thread with calls under way, the outermost first."""

    id: int
    calls: tuple[BoxCall, ...]


@dataclass(frozen=True, slots=True)
class BlackBoxReport:
    """State of a process when its black box was last written.

    `end` is "runs" for a process that is alive, "signal" with the number in `signal` (and the address of a fault),
    "exit" and "exception" where Python ended, with the `exit_status` that the process gave, else "unknown": os._exit, a
    lost machine, and SIGKILL without a parent that says so leave no mark. A `signal` of an unknown end came before, and
    the program went on. `raised` is the call that an exception ended.
    `phase` is "forward", "backward", "step", or "" between them. `seconds_after` is the time from the end of the latest
    call to the end. `python` is where the main thread was, `python_ago` seconds before the end. `pending` are modules
    whose work a device had not confirmed. Times are in seconds, moments in seconds since 1970. `facts` are of the
    process, `notes` what it wrote about a hang or an error.
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
    raised: BoxCall | None
    gradient: tuple[str, str] | None
    python: tuple[str, ...]
    python_ago: float | None
    memory: int
    calls: tuple[BoxCall, ...]
    frames: tuple[Frame, ...]
    pending: tuple[str, ...]
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


def read(path: str | os.PathLike[str]) -> BlackBoxReport:
    """Read the black box of a process, which may be running.

    Raises ValueError, which names the file, for one that is no black box, and OSError.
    """
    file = _Reading(path)
    try:
        return file.report()
    except (ValueError, LookupError, OverflowError) as error:  # a field or a section that is not there
        raise file.damaged(error) from error


class _Reading(BoxFile):
    _per_tick = math.nan

    def _between(self, begin: int, end: int) -> float | None:
        """Return the seconds from one moment in ticks to another; None where they are not known."""
        seconds = (end - begin) * self._per_tick
        return seconds if begin and math.isfinite(seconds) and abs(seconds) < 1e10 else None

    def _module(self, number: int) -> tuple[str, str]:
        """Return the name of a module and its class."""
        name, _, class_name = self.name(number).rpartition("\n")
        return (name, class_name) if class_name else (f"module {number}", "?")

    def report(self) -> BlackBoxReport:
        """Return all that the file says."""
        state, facts = self.state, dict[str, Any]()
        for line in _documents(self.text("facts")):
            facts |= line
        ticks, nanoseconds = state["ticks"] - state["begun_ticks"], state["time"] - state["begun"]
        if ticks > 0 and nanoseconds > 0:
            self._per_tick = nanoseconds / 1e9 / ticks
        end = self._end(facts)
        kinds = ("sample", "step", "gradient", "signal", "exit")
        latest = max(state["latest"], state["ticks"], *(state[f"{kind}_ticks"] for kind in kinds))
        is_marked = end == "signal" and state["killed_by"] in (0, state["signal"])
        ended = state["signal_ticks"] if is_marked else latest
        threads = self._threads(ended)
        calls = tuple(self._call(call, ended) for call in self.calls[-_MOST_CALLS:])
        phase = self._phase(threads)
        batch = threads[0].calls[-1].batch if threads else calls[-1].batch if calls else None
        frames = self.frames(_MOST_FRAMES)
        return BlackBoxReport(
            path=str(self.path),
            pid=state["pid"],
            rank=_whole(facts.get("rank"), 0),
            world_size=_whole(facts.get("world_size"), 1),
            begun=state["begun"] / 1e9,
            latest=state["time"] / 1e9 + (self._between(state["ticks"], ended) or 0.0),
            end=end,
            signal=(state["killed_by"] or state["signal"]) if end in ("signal", "unknown") else 0,
            # The field of a signal that was sent has the pid of its sender.
            signal_address=state["signal_address"] if is_marked and state["signal_code"] > 0 else None,
            exit_status=state["exit_status"] - 1 if state["exit_status"] and end != "signal" else None,
            phase=phase,
            batch=batch if phase != "backward" else state["gradient_batch"],
            num_calls=state["calls"],
            seconds_after=calls[-1].ago if calls else None,
            threads=threads,
            raised=_raised(calls) if not threads and end != "runs" else None,
            gradient=self._gradient() if phase == "backward" else None,
            python=tuple(self.sample.splitlines()),
            python_ago=self._between(state["sample_ticks"], ended),
            memory=state["memory"],
            calls=calls,
            frames=tuple(self._frame(frame) for frame in frames),
            pending=tuple(self._pending(frames)),
            facts=facts,
            notes=tuple(_documents(self.text("notes"))),
        )

    def _end(self, facts: dict[str, Any]) -> End:
        state, is_here = self.state, facts.get("host") == socket.gethostname()
        if is_here and started_at(state["pid"]) == facts.get("started"):
            return "runs"
        lived = self._between(state["signal_ticks"], max(state["latest"], state["ticks"]))
        is_last = state["exit_ticks"] <= state["signal_ticks"] and (lived is None or lived < _LIFE)
        if state["killed_by"] or (state["signal"] > 0 and is_last):  # else the program has handled it
            return "signal"
        if state["exit"] == 2:
            return "exception"
        return "exit" if state["exit"] == 1 or state["exit_status"] else "unknown"

    def _threads(self, now: int) -> tuple[BoxThread, ...]:
        """Return the threads with calls under way, the one that matters first."""
        order: list[tuple[bool, int, BoxThread]] = []
        for thread, stack in zip(self.threads, self.stacks, strict=True):
            number, depth = int(thread["id"]), min(int(thread["depth"]), len(stack))
            if number and depth:
                calls = tuple(self._call(call, now) for call in stack[:depth])
                is_hit = number == self.state["signal_thread"]
                order.append((is_hit, int(stack[depth - 1]["begun"]), BoxThread(number, calls)))
        order.sort(key=lambda item: item[:2], reverse=True)
        return tuple(thread for *_, thread in order)

    def _call(self, call: Any, now: int) -> BoxCall:
        """Return a call that has ended, or that is under way."""
        names, begun, batch = self._module(int(call["module"])), int(call["begun"]), int(call["batch"])
        if "ended" not in call.dtype.names:
            return BoxCall(*names, batch, self._between(begun, now))
        ended = int(call["ended"])
        ago = self._between(ended, now) or 0.0
        return BoxCall(*names, batch, self._between(begun, ended), ago, bool(call["raised"]))

    def _phase(self, threads: tuple[BoxThread, ...]) -> str:
        if threads:
            return "forward"
        ended = int(self.calls[-1]["ended"]) if len(self.calls) else 0
        # Of equal ones the first: nothing has happened yet.
        ends = (ended, ""), (self.state["gradient_ticks"], "backward"), (self.state["step_ticks"], "step")
        return max(ends, key=lambda end: end[0])[1]

    def _gradient(self) -> tuple[str, str]:
        part = self.state["gradient_part"]
        return self._module(self.state["gradient_module"])[0], _PARTS[part] if part < len(_PARTS) else "?"

    def _frame(self, rows: Items) -> Frame:
        first = rows[0]
        phase = PHASES[int(first["phase"])] if first["phase"] < len(PHASES) else "forward"
        names, records = self._module(int(first["module"])), tuple(map(self._record, rows))
        return Frame(int(first["batch"]), *names, records, phase, bool(first["recomputed"]))

    def _record(self, row: Any) -> Record:
        dims = int(row["dims"])
        shape = tuple(int(row[f"size{d}"]) for d in range(dims)) if dims <= _MOST_DIMS else None
        label, dtype = (self.name(int(row[field])) for field in ("label", "dtype"))
        kind, role, is_read = int(row["note"]), int(row["role"]), bool(dtype) and not row["pending"]
        note = Note(NOTE_KINDS[kind - 1]) if 0 < kind <= len(NOTE_KINDS) else None
        if row["pending"]:
            note = Note("not_checked", "the device had not delivered it")
        return Record(
            label or "?",
            ROLES[role] if role < len(ROLES) else "output",
            shape if dtype else None,
            dtype,
            float(row["abs_min"]) if is_read else None,
            float(row["abs_max"]) if is_read else None,
            bool(row["isfinite"]) if is_read else None,
            None,
            note,
        )

    def _pending(self, frames: list[Items]) -> list[str]:
        """Return the modules whose rows a device had not delivered, the oldest call first."""
        waits: dict[tuple[int, int], bool] = {}
        for rows in frames:
            waits[int(rows[0]["batch"]), int(rows[0]["module"])] = bool(rows["pending"].any())
        return [self._module(module)[0] for (_, module), is_pending in waits.items() if is_pending]


def _raised(calls: tuple[BoxCall, ...]) -> BoxCall | None:
    """Return the innermost of the latest calls that an exception ended, as far as none came after them."""
    raised = None
    for call in reversed(calls):
        if not call.raised:
            break
        raised = call
    return raised


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 31 else default


def _documents(text: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a section that are JSON objects."""
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            yield document


def signal_name(number: int) -> str:
    """Return `SIGSEGV` for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
