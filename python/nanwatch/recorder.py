"""The recorder: which batch a call belongs to, what the call saw, and the latest calls as frames.

Two recorders do the same work: CallRecorder of the compiled part, which does not read again what is unchanged since it
was last read, and PythonRecorder, the plain one, which reads everything. Tests hold the one against the other.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from . import _extension
from .frame import FrameRows
from .frame_ring import FrameRing
from .gradient_frames import RecordsBackwards
from .largest import Largest, Name
from .listener import Listener, Settings
from .observe import arrived, observe
from .record import Role, Row, is_fault
from .walk import Unwalked, call_leaves, is_container, leaves, spell_key

# A call may be watched from inside torch.compile, which follows every Python frame, so also those of the recorder. With
# None it follows nothing; what it was comes back.
_set_compiler: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame


class _Thread(threading.local):
    """The calls under way in one thread, outermost first."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.batch = 0
        self.recomputed = False
        self.recording = False  # what is told of a call may make others: they are not recorded
        self.given: tuple[tuple[Any, ...], Any] = ((), None)
        self.held: object = None  # what the listener answered to the start of the batch under way
        # Of an outermost call in compiled code, whose end an exception leaves out: what it was given.
        self.compiled: list[weakref.ref[Tensor]] | None = None
        self.adopted = False  # and a normal return too

    @contextmanager
    def is_recording(self) -> Iterator[None]:
        self.recording = True
        try:
            yield
        finally:
            self.recording = False


@dataclass(frozen=True, slots=True)
class _Node:
    name: str
    class_name: str
    observed: bool
    allow_inf: bool


class PythonRecorder(RecordsBackwards):
    """The recorder without the compiled part."""

    def __init__(self, settings: Settings, listener: Listener) -> None:
        self.paused = False
        self.tells_batch_start = False
        self.tells_batch_end = False
        self.tells_frames = False
        self.gathers_largest = False
        self.awaits_backwards = False  # nothing is late here
        self.gathers_weights = False  # nor is anything remembered here
        self.watch = -1
        self.latest_batch = -1
        self.counters = dict.fromkeys(
            ("calls", "frames", "tensors", "tensors_read", "bytes_read", "cache_hits"), 0
        )
        self._settings = settings
        self._listener = listener
        self._traced = frozenset(settings.traced)
        self._nodes: list[_Node] = []
        self._frames = FrameRing(settings.max_frames)
        self._largest = Largest()
        self._thread = _Thread()
        self.lock = threading.Lock()  # held while a frame is kept and counted
        super().__init__(settings.gradients, settings.counts)

    def add_node(self, name: str, module: object, observed: bool, allow_inf: bool) -> int:
        """See Recorder."""
        self._nodes.append(_Node(name, type(module).__name__, observed, allow_inf))
        return len(self._nodes) - 1

    @property
    def frames_kept(self) -> int:
        """See Recorder."""
        return self.counters["frames"]

    def frames(self) -> list[FrameRows]:
        """See Recorder."""
        return list(self._frames)

    def frames_since(self, kept: int, /) -> tuple[int, list[FrameRows]]:
        """See Recorder."""
        with self.lock:  # whatever other threads record
            new = self.frames_kept - kept
            return self.frames_kept, list(self._frames)[-new:] if new > 0 else []

    def frames_of_batch(self, batch: int, /) -> int | None:
        """See Recorder."""
        return self._frames.of_batch(batch)

    def take_largest(self) -> tuple[int, list[Name], bytes]:
        """See Recorder."""
        with self.lock:
            return self._largest.take()

    def pending_frames(self) -> list[FrameRows]:
        """None: each row is waited for."""
        return []

    def look(self, wait: bool) -> None:
        """Nothing is ever late here."""

    @property
    def has_devices(self) -> bool:
        """See Recorder: each row is waited for."""
        return False

    @property
    def may_be_late(self) -> bool:
        """See Recorder: never."""
        return False

    def await_before_step(self) -> None:
        """There are none to wait for."""

    def forget_weights(self) -> None:
        """Nothing is remembered here."""

    def forget_tensors(self) -> None:
        """Nothing is remembered here."""

    def run(self, number: int, module: nn.Module, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call `target(*args, **kwargs)` of `module` and record it."""
        thread = self._thread
        if thread.compiled is not None and not thread.recording:
            self._end_compiled(thread, thread.adopted)
        outermost = not thread.names
        if thread.recording or (outermost and self.paused):
            return target(*args, **kwargs)
        if outermost:
            compiler = _set_compiler(None)
            try:
                self._begin_batch(thread, module, args, kwargs)
            finally:
                _set_compiler(compiler)
        node = self._nodes[number]
        thread.names.append(node.name)
        self.counters["calls"] += 1
        completed = False
        compiler = None
        try:
            try:
                output = target(*args, **kwargs)
            finally:
                compiler = _set_compiler(None)
                thread.names.pop()
            if node.observed and not self.paused and thread.batch % self._settings.every == 0:
                with thread.is_recording():
                    caller = thread.names[-1] if thread.names else None
                    rows, tensors = self._rows(node, module, args, kwargs, output)
                    call = (thread.batch, node.name, type(module).__name__, caller, thread.recomputed)
                    self._follow(call, tensors, thread.held)
                    self._keep(thread, node.name, type(module).__name__, rows, caller)
            completed = True
        finally:
            try:
                if outermost:
                    thread.given = ((), None)
                    self._end_batch(thread, completed)
            finally:
                _set_compiler(compiler)
        return output

    def begin_compiled(self, callee: int, tensors: Sequence[Tensor]) -> None:
        """See Recorder."""
        thread = self._thread
        if thread.adopted or thread.recording:
            return
        if thread.compiled is not None:
            self._end_compiled(thread, completed=False)
        if thread.names or self.paused or not 0 <= callee < len(self._nodes):
            return
        self._begin_batch(thread, None, (), None)
        thread.names.append(self._nodes[callee].name)
        thread.compiled = [weakref.ref(x) for x in tensors]

    def adopt_compiled(self, callee: int) -> None:
        """See Recorder."""
        self.begin_compiled(callee, ())
        self._thread.adopted = self._thread.compiled is not None

    def record_compiled(self, callee: int, caller: int, plan: str, tensors: Sequence[Tensor]) -> None:
        """See Recorder."""
        thread = self._thread
        if not thread.names or thread.recording or not 0 <= callee < len(self._nodes):
            return
        ends = thread.compiled is not None and not thread.adopted and caller < 0
        if ends:
            thread.names.pop()
        self.counters["calls"] += 1
        node = self._nodes[callee]
        completed = False
        try:
            if node.observed and not self.paused and thread.batch % self._settings.every == 0:
                class_name, rows, read = planned_rows(plan, tensors, node.allow_inf, self._settings.counts)
                self._count(rows)
                if thread.compiled is not None:
                    thread.given = (tuple(x for one in thread.compiled if (x := one()) is not None), None)
                outer = (
                    self._nodes[caller].name if caller >= 0 else thread.names[-1] if thread.names else None
                )
                with thread.is_recording():
                    call = (thread.batch, node.name, class_name, outer, thread.recomputed)
                    self._follow(call, read, thread.held, in_compiled_code=True)
                    self._keep(thread, node.name, class_name, rows, outer)
            completed = True
        finally:
            if thread.compiled is not None:
                thread.given = ((), None)
                if ends or not completed:
                    self._end_compiled(thread, completed)

    def _end_compiled(self, thread: _Thread, completed: bool) -> None:
        thread.names.clear()
        thread.compiled = None
        thread.adopted = False
        self._end_batch(thread, completed)

    def _end_batch(self, thread: _Thread, completed: bool) -> None:
        if not self.tells_batch_end or thread.recomputed:
            thread.held = None
            return
        own = None if completed else sys.exc_info()[1]
        try:
            with thread.is_recording():
                self._listener.batch_ended(thread.batch, completed)
        except BaseException as error:
            if own is None or error.__cause__ is own:
                raise
        finally:
            thread.held = None

    def _begin_batch(self, thread: _Thread, module: nn.Module | None, args: Any, kwargs: Any) -> None:
        self.finish_broken_backwards()
        # Called from a backward: activation checkpointing runs the forward again. That is no new batch.
        thread.recomputed = torch._C._current_graph_task_id() != -1
        if not thread.recomputed:
            self.latest_batch += 1
        thread.batch = self.latest_batch
        traced = thread.batch in self._traced
        looked_at = not thread.recomputed and thread.batch % self._settings.every == 0
        if looked_at and (traced or self.tells_batch_start):
            thread.held = self._listener.batch_started(thread.batch, traced, module, args, kwargs or None)
        thread.given = (args, kwargs or None)

    def _keep(self, thread: _Thread, name: str, class_name: str, rows: list[Row], caller: str | None) -> None:
        frame = FrameRows(thread.batch, name, class_name, rows, thread.recomputed)
        with self.lock:
            self._frames.append(frame)
            self.counters["frames"] += 1
            if self.gathers_largest:
                self._largest.add(frame)
        if self.tells_frames or thread.batch in self._traced:
            self._listener.frame_recorded(frame)
        if any(map(is_fault, rows)):
            self._listener.fault(frame, caller, *thread.given)

    def _rows(
        self, node: _Node, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> tuple[list[Row], list[tuple[Role, str, Tensor]]]:
        """The rows of a call, and the tensors that they are of."""
        settings = self._settings
        values: list[tuple[Role, str, Any]] = []
        if settings.weights:
            values += [("weight", name, x) for name, x in own_tensors(module._parameters)]
        if settings.buffers:
            for name, x in own_tensors(module._buffers):
                if x.is_floating_point() or x.is_complex():
                    values.append(("buffer", name, x))
        if settings.inputs:
            values += [("input", label, x) for label, x in call_leaves(args, kwargs)]
        if settings.outputs:
            values += [("output", label, x) for label, x in leaves(output, "output")]
        found = [observe(x, label, role, node.allow_inf, counts=settings.counts) for role, label, x in values]
        self._count(found)
        return found, [one for one in values if isinstance(one[2], Tensor)]

    def _count(self, rows: list[Row]) -> None:
        read = sum(row[6] is not None for row in rows)
        self.counters["tensors"] += read
        self.counters["tensors_read"] += read


_ROLES: dict[str, Role] = {"w": "weight", "b": "buffer", "i": "input", "o": "output"}
_VALUES: dict[str, Any] = {"n": None, "x": 0}


def planned_rows(
    plan: str, tensors: Sequence[Tensor], allow_inf: bool, counts: bool
) -> tuple[str, list[Row], list[tuple[Role, str, Tensor]]]:
    """The class, the rows and their tensors of a call in compiled code; csrc/compiled_call.cpp says what a plan is."""
    class_name, *lines = plan.split("\n")
    left, own = iter(tensors), set()
    rows: list[Row] = []
    read: list[tuple[Role, str, Tensor]] = []
    for line in lines:
        role, kind = _ROLES[line[0]], line[1]
        label, _, reason = line[3:].partition("\t")
        value = next(left) if kind == "t" else Unwalked(reason) if kind == "u" else _VALUES[kind]
        if kind == "t" and role in ("weight", "buffer"):
            if id(value) in own:
                continue
            own.add(id(value))
        if isinstance(value, Tensor):
            read.append((role, label, value))
        rows.append(observe(value, label, role, allow_inf, counts=counts))
    return class_name, rows, read


def own_tensors(named: Mapping[str, Tensor | None]) -> list[tuple[str, Tensor]]:
    """The tensors of a module's `_parameters` or `_buffers`, each once, without the empty places."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, x in named.items():
        if x is not None:
            found.setdefault(id(x), (name, x))
    return list(found.values())


def make_recorder(settings: Settings, listener: Listener) -> Any:
    """The compiled recorder, or the Python one where there is none."""
    if _extension.C is None:
        return PythonRecorder(settings, listener)
    helpers = {
        "observe": partial(observe, counts=True) if settings.counts else observe,
        "leaves": leaves,
        "is_container": is_container,
        "spell_key": spell_key,
        "arrived": arrived,
    }
    return _extension.C.CallRecorder(
        listener=listener, frame_type=FrameRows, helpers=helpers, **asdict(settings)
    )
