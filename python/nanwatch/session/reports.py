"""Reports of one Watch, and its non-finite batches: their reports and warnings."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from ..diagnosis.batch_snapshot import LeftCall
from ..instrumentation.wrapped_names import is_recorded, named_modules
from ..monitoring.suspicion import Suspicion
from ..recording.events import Recorder
from ..recording.notes import parameter_mesh
from ..recording.observe import call_values, observe_with
from ..recording.walk import call_leaves
from ..records.record import Frame, Record
from ..report import text
from ..report.finding import Finding, find
from ..report.report import NonFiniteError, Report, report_of
from ..util.job import rank
from ..util.visible import module_name, warn_user
from .options import Options

# A run that goes on may fail for ever. After so many failures re-runs get rarer, so that capsules do not fill a disk.
MANY = 20


def is_due(number: int) -> bool:
    """Return whether the failure of this number, from 1, is examined: the first MANY, then at numbers that double."""
    rounds, rest = divmod(number, MANY)
    return number <= MANY or (rest == 0 and rounds & (rounds - 1) == 0)


class ModelRef:
    """Weak reference to a watched model.

    Once the model is gone it returns a module with those of its children that are left: a list of model and loss may
    live for no longer than the call of `watch`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._children = {
            name: weakref.ref(child) for name, child in model._modules.items() if child is not None
        }

    def __call__(self) -> nn.Module | None:
        """Return the model or what is left of it; None once all is gone."""
        if (model := self._model()) is not None:
            return model
        left = {
            name: child for name, reference in self._children.items() if (child := reference()) is not None
        }
        rest = nn.Module()
        rest._modules.update(left)
        return rest if left else None


class Reports:
    """Makes reports of the frames that a recorder holds, each with at most the latest `max_frames`.

    `model()` is None once the model is gone.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, options: Options, suspicion: Suspicion) -> None:
        self.model = ModelRef(model)
        self.recorder = recorder
        self.options = options
        self._suspicion = suspicion
        self._mesh: tuple[str, ...] = ()  # kept, because a report may be asked for when the model has gone

    def look_at_mesh(self) -> None:
        """Remember the place of this rank in the device meshes of the model's parameters."""
        self._mesh = parameter_mesh(self.model()) or self._mesh

    def of(self, frames: tuple[Frame, ...], finding: Finding | None, batch: int | None) -> Report:
        """Return the report of these frames, the oldest first."""
        self.look_at_mesh()
        never_called = self._suspicion.never_called(frames, self.options.observes)
        suspects = () if finding is None else self._suspicion.suspects(frames)
        return report_of(
            frames[-self.options.max_frames :], finding, batch, self._mesh, never_called, suspects
        )

    def latest(self, finding: Finding | None, batch: int | None, more: Iterable[Frame] = ()) -> Report:
        """Return a report of the recorder's frames, and of `more` that it has not kept."""
        return self.of(self._frames(more), finding, batch)

    def of_failure(
        self,
        batch: int,
        caller: str | None,
        given: Iterable[Record],
        more: Sequence[Frame] = (),
        *,
        nonfinite: Frame | None = None,
    ) -> Report:
        """Return the report of the first non-finite call of a batch whose outermost call got `given`.

        `caller` is the module that made that call. `nonfinite` is the call's frame: frames of other threads may have
        pushed it out of the recorder since.
        """
        frames = self._frames(more)
        current = [one for one in frames if one.batch == batch]
        if nonfinite is not None and all(one.fault is None for one in current):
            current = [nonfinite]
            frames = (*frames, *current)
        kept = self.recorder.frames_of_batch(batch)
        num_frames = None if kept is None else kept + len(more)
        finding = find(
            current,
            batch_inputs=list(given),
            caller=caller,
            rank=rank(),
            num_frames=num_frames,
        )
        return self.of(frames, finding, batch)

    def of_left_calls(self, calls: list[LeftCall], batch: int) -> Report | None:
        """Return the report of the first non-finite one of the calls that an exception left, the innermost first.

        They are the calls of observed modules. None where all that they hold is finite.
        """
        if (model := self.model()) is None:
            return None
        names = {
            id(one.module): one.name
            for one in named_modules(model)
            if is_recorded(one.module) and self.options.observes(one.name)
        }
        own = [(names[id(call.module)], call) for call in calls if id(call.module) in names]
        callers = [*(name for name, _ in own[1:]), None]
        frames, observe = [], observe_with(self.options)
        for (name, call), caller in zip(own, callers, strict=False):
            allowed = self.options.allows_inf(name, call.module)
            values = call_values(self.options, *call)
            rows = [observe(x, label, role, allowed) for role, label, x in values]
            frames.append(Frame(batch, name, type(call.module).__name__, tuple(rows)))
            if any(row.is_fault for row in rows):
                leaves = call_leaves(calls[-1].args, calls[-1].kwargs)
                given = [observe(x, label, "input") for label, x in leaves]
                return self.of_failure(batch, caller, given, frames)
        return None

    def _frames(self, more: Iterable[Frame]) -> tuple[Frame, ...]:
        return tuple(frame for frame in (*self.recorder.frames(), *more))


# Non-finite batches that are remembered after their end, for their backwards and recomputations.
_MAX_ENDED = 64
# Modules named in one line.
_MAX_NAMED = 3


@dataclass(slots=True)
class NonFiniteBatch:
    """Batch under way from its first non-finite value on. It belongs to the thread that makes the batch.

    `report` describes that value. `is_reported`: it was raised or handed to the user's function. `is_left`: the thread
    had ended the batch before its rows came from the device. `raised` is the error that was raised inside the forward,
    until the forward is left.
    """

    report: Report
    is_left: bool = False
    is_reported: bool = False
    raised: NonFiniteError | None = None


class NonFiniteBatches:
    """Non-finite batches under way, at most one per thread, and the latest that have ended, by their numbers.

    `failure` is the report of the first batch of the latest run of non-finite batches. A finite batch ends the run.
    """

    def __init__(self) -> None:
        self.failure: Report | None = None
        self.run_is_open = False
        self._under_way: dict[int, NonFiniteBatch] = {}
        self._ended: deque[int] = deque(maxlen=_MAX_ENDED)

    def __contains__(self, number: int) -> bool:
        """Return whether the batch of this number is known to be non-finite."""
        return number in self._under_way or number in self._ended

    def has_ended(self, number: int) -> bool:
        """Return whether the batch of this number was non-finite and has ended."""
        return number in self._ended

    def __bool__(self) -> bool:
        """Return whether a non-finite batch is under way, or a run of them is open."""
        return bool(self._under_way) or self.run_is_open

    def get(self, number: int) -> NonFiniteBatch | None:
        """Return the batch of this number, if it is non-finite and under way."""
        return self._under_way.get(number)

    def add(self, number: int, report: Report, *, is_left: bool = False) -> NonFiniteBatch:
        """Remember that this batch is non-finite."""
        self.open_run(report)
        batch = self._under_way[number] = NonFiniteBatch(report, is_left)
        return batch

    def end(self, number: int) -> None:
        """Note that the batch has ended, non-finite or not."""
        if self._under_way.pop(number, None) is not None:
            self._ended.append(number)

    def open_run(self, report: Report) -> None:
        """Keep the report of a failure, if it is the first of its run."""
        if not self.run_is_open:
            self.failure = report
            self.run_is_open = True


@dataclass(slots=True)
class _Count:
    """Counts of non-finite batches and calls, by module."""

    first: int = -1
    last: int = -1
    batches: int = 0
    firsts: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, batch: int, module: str) -> None:
        # Batches of several threads come in any order.
        self.first = batch if self.first < 0 else min(self.first, batch)
        self.last = max(self.last, batch)
        self.batches += 1
        self.firsts[module] += 1

    def __str__(self) -> str:
        place = str(self.first) if self.batches == 1 else f"from {self.first} to {self.last}"
        plural = "" if self.batches == 1 else "es"
        return f"{self.batches:,} non-finite batch{plural} ({place}), first in {_ranked(self.firsts)}"


class NonFiniteWarnings:
    """Warnings of non-finite batches in few lines, if it `speaks`, and a sum of all at the end.

    A line comes when a run of non-finite batches begins, when another module is the first at fault, and when the run
    ends. Frequent lines get rarer: the n-th line of a run needs 2 ** (n - 2) such batches since the line before it, and
    the n-th run ends after 2 ** (n - 1) finite batches in a row. `patience` is that number for the first run: more than
    1 where failures are found after the end of a batch.
    """

    def __init__(self, *, speaks: bool, patience: int = 1) -> None:
        self._speaks = speaks
        self._patience = patience
        # Reentrant, because the garbage collector or a signal's handler may call the model.
        self._lock = threading.RLock()
        self._all = _Count()
        self._run: _Count | None = None
        self._lines = 0  # of the run
        self._since = 0  # non-finite batches since the latest line
        self._finite = 0  # batches in a row since the latest failure
        self._latest_line: tuple[str, str] = "", ""  # module and phase of the latest line

    @property
    def awaits_batches(self) -> bool:
        """True while `end` is to be called after a finite batch."""
        return self._run is not None

    def begin(self, finding: Finding | None) -> None:
        """Take the first failure of a batch."""
        if not self._speaks or finding is None:
            return
        with self._lock:
            message = self._begin(finding)
        if message:
            warn_user(message)

    def _begin(self, finding: Finding) -> str:
        place = finding.module, finding.phase
        run, self._finite = self._run, 0
        message = ""
        if run is None:
            self._run = run = _Count()
            self._lines = 0
            message = (
                f"{text.summary(finding)}; Watch.report() (or --output-dir) has the frames that led to it"
            )
        elif place != self._latest_line and self._since >= 2 ** (self._lines - 1):
            message = f"{text.summary(finding)}; before it, {run}"
        if message:
            self._latest_line, self._since = place, 0
            self._lines += 1
        self._since += 1
        for count in (run, self._all):
            count.add(finding.batch, finding.module)
        return message

    def count(self, module: str) -> None:
        """Take a non-finite call of the module."""
        if self._speaks:
            with self._lock:
                self._all.calls[module] += 1

    def end(self, batch: int) -> None:
        """Take a finite batch."""
        if self._run is None:
            return
        with self._lock:
            self._finite += 1
            run = self._run
            if run is None or self._finite < self._patience:
                return
            self._run = None
            self._patience *= 2
        warn_user(f"all finite again in batch {batch}, after {run}")

    def close(self, batches: int, *, may_raise: bool) -> None:
        """Warn once of the sum over all `batches` watched batches."""
        with self._lock:
            total, self._all = self._all, _Count()
            self._run = None
        if total.batches:
            calls = f"; non-finite calls: {_ranked(total.calls)}" if total.calls else ""
            watched = f"{batches:,} batch{'' if batches == 1 else 'es'}"
            warn_user(f"of {watched} watched, {total}{calls}", may_raise=may_raise)


def _ranked(counts: Counter[str]) -> str:
    """Return `'0' 45x, '1' 45x, '2' 45x and 57 more modules`, the most frequent first."""
    named = [
        f"{repr(name) if name else module_name(name)} {count:,}x"
        for name, count in counts.most_common(_MAX_NAMED)
    ]
    more = len(counts) - len(named)
    return ", ".join(named) + (f" and {more} more module{'' if more == 1 else 's'}" if more else "")
