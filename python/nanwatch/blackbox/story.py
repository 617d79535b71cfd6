"""BlackBoxReport: what the file of a process says, as facts."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ..records.note import NOTE_KINDS, Note
from ..records.record import PHASES, ROLES, Frame, Record
from ..util.job import started_at
from .box_file import BoxFile, BoxFrame

SCHEMA, VERSION = "nanwatch.blackbox", 1
End: TypeAlias = Literal["runs", "exit", "exception", "signal", "unknown"]
_MOST_CALLS = 64
_MOST_BATCHES = 16
_FRAMES = 21
_LIFE = 2.0  # seconds: a sign of life that much after a signal says that the process went on
_NO_SHAPE = 255  # dims of a row that Python has made
_PARTS = ("output", "input", "weight")
# Lines of a traceback as CPython's faulthandler has them.
_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
_PLACE = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


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
class BoxBatch:
    """Batch that has ended, with the least headroom of its tensors, in bits, and where; None where nothing was read."""

    batch: int
    seconds: float | None
    raised: bool
    headroom: float | None
    module: str
    label: str
    dtype: str


@dataclass(frozen=True, slots=True)
class BlackBoxReport:
    """State of a process when its black box was last written.

    `end` is "runs" for a process that is alive, "signal" with the number in `signal` (and the address of a fault),
    "exit" and "exception" where Python ended, with the `exit_status` that the process gave, else "unknown": os._exit, a
    lost machine, and SIGKILL without a parent that says so leave no mark. A `signal` of an unknown end came before, and
    the program went on. `raised` is the call that an exception ended.
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
    kernel: str
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
    batches: tuple[BoxBatch, ...]
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


def read_black_box(path: str | os.PathLike[str]) -> BlackBoxReport:
    """Read the black box of a process, which may be running. Raises ValueError for another file, and OSError."""
    return _Reading(BoxFile(path), Path(path)).report()


class _Reading:
    def __init__(self, file: BoxFile, path: Path) -> None:
        self._file = file
        self._path = path
        state = self._state = file.state
        spent = state["ticks"] - state["begun_ticks"]
        seconds = (state["time"] - state["begun"]) / 1e9
        self._per_tick = seconds / spent if spent > 0 and seconds > 0 else math.nan

    def _between(self, begin: int, end: int) -> float | None:
        seconds = (end - begin) * self._per_tick
        return seconds if begin and math.isfinite(seconds) and abs(seconds) < 1e10 else None

    def _moment(self, ticks: int) -> float:
        return self._state["time"] / 1e9 + (self._between(self._state["ticks"], ticks) or 0.0)

    def _module(self, number: int) -> tuple[str, str]:
        name, _, class_name = self._file.name(number).rpartition("\n")
        return (name, class_name) if class_name else (f"module {number}", "?")

    def report(self) -> BlackBoxReport:
        state = self._state
        facts: dict[str, Any] = {}
        for line in _documents(self._file.text("facts")):
            facts |= line
        end = self._end(facts)
        moments = (
            "latest",
            "ticks",
            "sample_ticks",
            "step_ticks",
            "gradient_ticks",
            "signal_ticks",
            "exit_ticks",
        )
        latest = max(state[name] for name in moments)
        is_marked = end == "signal" and state["killed_by"] in (0, state["signal"])
        is_untold = end == "unknown" or (end == "signal" and not is_marked)
        ended = state["signal_ticks"] if is_marked else latest
        threads = self._threads(ended)
        calls = tuple(self._call(one, ended) for one in self._file.calls[-_MOST_CALLS:])
        phase = self._phase(threads)
        batch = threads[0].calls[-1].batch if threads else calls[-1].batch if calls else None
        frames = self._file.frames(_FRAMES)
        rank, world_size = (
            _whole(facts.get(name), default) for name, default in (("rank", 0), ("world_size", 1))
        )
        return BlackBoxReport(
            path=str(self._path),
            pid=state["pid"],
            rank=rank,
            world_size=world_size,
            begun=state["begun"] / 1e9,
            latest=self._moment(ended),
            end=end,
            signal=(state["killed_by"] or state["signal"]) if end in ("signal", "unknown") else 0,
            # The field of a signal that was sent has the pid of its sender.
            signal_address=state["signal_address"] if is_marked and state["signal_code"] > 0 else None,
            exit_status=state["exit_status"] - 1 if state["exit_status"] and end != "signal" else None,
            kernel=_kernel_said(state["pid"]) if is_untold and _is_here(facts) else "",
            phase=phase,
            batch=batch if phase != "backward" else state["gradient_batch"],
            num_calls=state["calls"],
            seconds_after=calls[-1].ago if calls else None,
            threads=threads,
            raised=_raised(calls) if not threads and end != "runs" else None,
            gradient=self._gradient() if phase == "backward" else None,
            python=tuple(self._file.sample.splitlines()),
            python_ago=self._between(state["sample_ticks"], ended),
            memory=state["memory"],
            calls=calls,
            batches=tuple(map(self._batch, self._file.batches[-_MOST_BATCHES:])),
            frames=tuple(map(self._frame, frames)),
            pending=tuple(self._pending(frames)),
            facts=facts,
            notes=(*_documents(self._file.text("notes")), *self._held()),
        )

    def _end(self, facts: dict[str, Any]) -> End:
        state = self._state
        if _is_here(facts) and started_at(state["pid"]) == facts.get("started"):
            return "runs"
        if state["killed_by"]:
            return "signal"
        lived = self._between(state["signal_ticks"], max(state["latest"], state["ticks"]))
        if (
            state["signal"] > 0
            and state["exit_ticks"] <= state["signal_ticks"]
            and (lived is None or lived < _LIFE)
        ):
            return "signal"  # else the program has handled it
        if state["exit"] == 2:
            return "exception"
        return "exit" if state["exit"] == 1 or state["exit_status"] else "unknown"

    def _held(self) -> Iterator[dict[str, Any]]:
        """Yield a hang of which no thread of Python could write a note, as one held the interpreter lock."""
        if not (text := self._file.text("tracebacks")):
            return
        stacks: dict[str, list[str]] = {}
        for line in text.splitlines():
            if head := _THREAD.match(line):
                places = stacks.setdefault(head[1], [])
            elif (place := _PLACE.match(line)) and stacks:
                places.append("{}:{} in {}".format(*place.groups()))
        moment = self._moment(self._state["traceback_ticks"])
        yield {"kind": "stall", "time": moment, "interpreter lock": "held by a thread", "stacks": stacks}

    def _threads(self, now: int) -> tuple[BoxThread, ...]:
        """Return the threads with calls under way, the one that matters first."""
        found: list[tuple[bool, int, BoxThread]] = []
        for thread, stack in zip(self._file.threads, self._file.stacks, strict=True):
            depth = min(int(thread["depth"]), len(stack))
            if not thread["id"] or not depth:
                continue
            calls = tuple(
                BoxCall(
                    *self._module(int(one["module"])),
                    int(one["batch"]),
                    self._between(int(one["begun"]), now),
                )
                for one in stack[:depth]
            )
            met_signal = int(thread["id"]) == self._state["signal_thread"]
            found.append((met_signal, int(stack[depth - 1]["begun"]), BoxThread(int(thread["id"]), calls)))
        found.sort(key=lambda one: one[:2], reverse=True)
        return tuple(one[2] for one in found)

    def _call(self, one: Any, now: int) -> BoxCall:
        ended = int(one["ended"])
        return BoxCall(
            *self._module(int(one["module"])),
            int(one["batch"]),
            self._between(int(one["begun"]), ended),
            self._between(ended, now) or 0.0,
            bool(one["raised"]),
        )

    def _phase(self, threads: tuple[BoxThread, ...]) -> str:
        if threads:
            return "forward"
        state, calls = self._state, self._file.calls
        ended = int(calls[-1]["ended"]) if len(calls) else 0
        # Of equal ones the first: nothing has happened yet.
        ends = (ended, ""), (state["gradient_ticks"], "backward"), (state["step_ticks"], "step")
        return max(ends, key=lambda one: one[0])[1]

    def _gradient(self) -> tuple[str, str]:
        part = self._state["gradient_part"]
        return self._module(self._state["gradient_module"])[0], _PARTS[part] if part < len(_PARTS) else "?"

    def _batch(self, one: Any) -> BoxBatch:
        used = float(one["used"])
        return BoxBatch(
            int(one["batch"]),
            self._between(int(one["begun"]), int(one["ended"])),
            bool(one["raised"]),
            None if not used > 0 else -math.inf if used > 1 else -math.log2(used),
            self._module(int(one["module"]))[0] if used > 0 else "",
            self._file.name(int(one["label"])),
            self._file.name(int(one["dtype"])),
        )

    def _frame(self, frame: BoxFrame) -> Frame:
        records, at = [], 0
        for row in frame.rows:
            dims = int(row["dims"])
            if dims == _NO_SHAPE:
                records.append(self._record(row, None))
                continue
            records.append(self._record(row, tuple(frame.sizes[at : at + dims])))
            at += dims
        phase = int(frame.head["phase"])
        return Frame(
            int(frame.head["batch"]),
            *self._module(int(frame.head["module"])),
            tuple(records),
            PHASES[phase] if phase < len(PHASES) else "forward",
            bool(frame.head["recomputed"]),
        )

    def _record(self, row: Any, shape: tuple[int, ...] | None) -> Record:
        dtype, kind, role = self._file.name(int(row["dtype"])), int(row["note"]), int(row["role"])
        note = Note(NOTE_KINDS[kind - 1]) if 0 < kind <= len(NOTE_KINDS) else None
        is_read = bool(dtype) and not row["pending"]
        if row["pending"]:
            note = Note("not_checked", "the device had not delivered it")
        return Record(
            self._file.name(int(row["label"])) or "?",
            ROLES[role] if role < len(ROLES) else "output",
            shape if dtype else None,
            dtype,
            float(row["abs_min"]) if is_read else None,
            float(row["abs_max"]) if is_read else None,
            bool(row["isfinite"]) if is_read else None,
            None,
            note,
        )

    def _pending(self, frames: list[BoxFrame]) -> list[str]:
        """Return the modules whose rows a device had not delivered, the oldest call first."""
        waits: dict[tuple[int, int], bool] = {}
        for frame in frames:
            waits[int(frame.head["batch"]), int(frame.head["module"])] = bool(frame.rows["pending"].any())
        return [self._module(module)[0] for (_, module), pending in waits.items() if pending]


def _raised(calls: tuple[BoxCall, ...]) -> BoxCall | None:
    """Return the innermost of the latest calls that an exception ended, as far as none came after them."""
    found = None
    for call in reversed(calls):
        if not call.raised:
            break
        found = call
    return found


def _is_here(facts: dict[str, Any]) -> bool:
    return facts.get("host") == socket.gethostname()


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 31 else default


def _documents(text: str) -> list[dict[str, Any]]:
    """Return the lines of a section that are JSON objects."""
    found = []
    for line in text.splitlines():
        try:
            one = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(one, dict):
            found.append(one)
    return found


def _kernel_said(pid: int) -> str:
    """Return the kernel's line about the end of this process, as that it had no memory left; "" where it has none."""
    try:
        file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    found = ""
    try:
        for _ in range(100_000):
            line = os.read(file, 8192).decode("utf-8", "replace").partition(";")[2].partition("\n")[0]
            if f"process {pid} " in line or f"[{pid}]" in line:
                found = line
    except OSError:
        pass
    finally:
        os.close(file)
    return found


def signal_name(number: int) -> str:
    """Return `SIGSEGV` for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
