"""Recorder: finds the batch of a call, reads its tensors, and keeps the latest calls as frames.

Two recorders do the same work. CallRecorder of the compiled part does not read again what is unchanged since it was
last read. PythonRecorder, the plain one, reads everything. Tests hold the one against the other.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..numerics import _extension
from ..records.note import PLAIN_MASK, Note
from ..records.record import Frame, Record, Role
from .backward import RecordsBackwards
from .batch_start import KeptStart
from .events import (
    Event,
    PeakName,
    Recorder,
    RecorderEvents,
    Settings,
    Start,
    Subscription,
    Subscriptions,
)
from .frame_ring import FrameRing, PeakMagnitudes
from .gradients import PythonGradients
from .masks import Excuses
from .observe import PLAN_SEPARATOR, call_values, completed_row, observe_with, planned_rows
from .thread_calls import Node, ThreadCalls
from .walk import is_container, leaves, spell_key

if TYPE_CHECKING:
    from .._C import CallRecorder

# A call may be watched from inside torch.compile, which follows every Python frame, also those of the recorder. With
# None it follows nothing. The function returns the compiler that was set before.
_set_compiler: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame


class _Entered(NamedTuple):
    """A call that is under way."""

    thread: ThreadCalls
    node: Node
    is_outermost: bool


class PythonRecorder(RecordsBackwards):
    """Recorder without the compiled part. Implements the interface `Recorder`."""

    def __init__(self, settings: Settings, events: RecorderEvents) -> None:
        self._is_paused = False
        self._num_suspended = 0
        self.keeps_starts = False
        self._ended_starts: list[weakref.ref[KeptStart]] = []
        self._num_inside = 0
        self.gathers_from = sys.maxsize
        self.gathers_inputs = False
        self.gathers_gradient_peaks = False
        self.gathers_weights = False  # nothing is remembered here
        self.latest_batch = -1
        self.counters = dict.fromkeys(
            ("calls", "frames", "tensors", "tensors_read", "bytes_read", "cache_hits"), 0
        )
        self._settings = settings
        self._observe = observe_with(settings)
        self._events = events
        self._subscriptions = Subscriptions()
        self._traced = frozenset(settings.traced)
        self._names: list[tuple[dict[str, Any], str]] = []
        self._nodes: list[Node] = []
        self._frames = FrameRing(settings.max_frames)
        self._called: set[str] = set()
        self._peaks = PeakMagnitudes()
        self._gradient_peaks = PeakMagnitudes()
        self._thread = ThreadCalls()
        # Guards the counters, the ring, the nodes and what is known of backwards. Nobody calls back or reads a
        # tensor while holding it. Reentrant, as a signal's handler may ask for a report at any moment.
        self.lock = threading.RLock()
        # No graph keeps a call in compiled code alive. The latest of each module is kept, for its weights' gradients.
        self._compiled_calls = {}
        this = weakref.ref(self)
        self._gradients = None
        if settings.gradients:
            self._gradients = PythonGradients(
                lambda: None if (own := this()) is None else own._report_backward_start(),
                lambda *found: None if (own := this()) is None else own._keep_backward(*found),
                self._observe,
                self.lock,
            )

    def add_node(self, name: str, module: object, observed: bool, allow_inf: bool | Excuses) -> int:
        with self.lock:
            self._nodes.append(Node(name, type(module).__name__, observed, allow_inf))
            return len(self._nodes) - 1

    def set_allow_inf(self, node: int, allow_inf: bool | Excuses, /) -> None:
        with self.lock:
            self._nodes[node] = replace(self._nodes[node], allow_inf=allow_inf)

    @property
    def paused(self) -> bool:
        return self._is_paused or self._num_suspended > 0

    @paused.setter
    def paused(self, on: bool) -> None:
        self._is_paused = on

    def suspend(self, on: bool, /) -> None:
        with self.lock:
            self._num_suspended += 1 if on else -1

    @property
    def is_under_way(self) -> bool:
        """Return whether this thread is inside a watched call."""
        return bool(self._thread.nodes)

    @property
    def frames_kept(self) -> int:
        return self.counters["frames"]

    def frames(self) -> list[Frame]:
        with self.lock:
            return list(self._frames)

    def frames_since(self, kept: int, /) -> tuple[int, list[Frame]]:
        with self.lock:
            new = self.frames_kept - kept
            return self.frames_kept, list(self._frames)[-new:] if new > 0 else []

    def frames_of_batch(self, batch: int, /) -> int | None:
        with self.lock:
            return self._frames.of_batch(batch)

    def called(self) -> set[str]:
        """Return the names of the modules that were called."""
        return set(self._called)

    def take_peaks(self) -> tuple[int, list[PeakName], bytes]:
        with self.lock:
            return self._peaks.take()

    def take_gradient_peaks(self) -> tuple[int, list[PeakName], bytes]:
        with self.lock:
            return self._gradient_peaks.take()

    def start(self) -> Start | None:
        start = self._thread.start
        return None if start is None else start.start

    def ended_starts(self) -> list[Start]:
        return [start.start for reference in self._ended_starts if (start := reference()) is not None]

    def forget_starts(self) -> None:
        self._let_go_of_starts()
        self._ended_starts = []

    def _let_go_of_starts(self) -> None:
        for reference in self._ended_starts:
            if (start := reference()) is not None:
                start.let_go()

    @property
    def num_other_threads(self) -> int:
        return self._num_inside - self._thread.is_inside

    def watch_buffers(self, buffers: list[tuple[weakref.ref[nn.Module], str]], /) -> None:
        """Do nothing: a recorder that keeps starts calls `on_batch_start` for each."""

    def watch_name(self, names: dict[str, Any], name: str, /) -> None:
        self._names.append((names, name))

    def subscribe(self, events: int) -> Subscription:
        return self._subscriptions.add(events)

    def unconfirmed_calls(self) -> list[tuple[int, str, str]]:
        """Return none: this recorder waits for each tensor."""
        return []

    def is_finite(self, x: Tensor, /) -> bool | None:
        """Return None: there is no cache."""
        return None

    def forget_weights(self, groups: list[list[Tensor]] | None = None, /) -> None:
        """Do nothing: there is no cache."""

    def forget_tensors(self) -> None:
        """Do nothing: there is no cache."""

    def enter(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> _Entered | None:
        """Begin a call of a module. Return what `leave` and `left_by` need, None for a call that is not recorded.

        The wrapper makes the call itself: a call through here would take a level of recursion more than a hook does.
        """
        thread = self._thread
        if thread.compiled is not None and not thread.recording:
            self._end_compiled(thread, completed=False)
        is_outermost = not thread.nodes
        if thread.recording or (is_outermost and self.paused):
            return None
        if is_outermost:
            compiler = _set_compiler(None)
            try:
                self._begin_batch(thread, module, args, kwargs)
            finally:
                _set_compiler(compiler)
        node = self._nodes[number]
        thread.nodes.append(node)
        self._add(calls=1)
        return _Entered(thread, node, is_outermost)

    def leave(self, entered: _Entered, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record a call that has returned `output`."""
        thread, node, is_outermost = entered
        compiler = _set_compiler(None)
        completed = False
        try:
            thread.nodes.pop()
            if node.observed and not self.paused and thread.batch % self._settings.every == 0:
                with thread.is_recording():
                    class_name, caller = type(module).__name__, thread.innermost
                    call = (thread.batch, node.name, class_name, caller, thread.recomputed)
                    try:
                        rows, tensors = self._rows(thread.batch, node, module, args, kwargs, output)
                        self._follow(call, tensors, thread.start)
                    except RecursionError:
                        # The call itself was made: it needed less of the stack than its observation.
                        rows = [_NO_STACK]
                    self._keep(thread, node.name, class_name, rows, caller)
            completed = True
        finally:
            try:
                if is_outermost:
                    self._leave_batch(thread, completed)
            finally:
                _set_compiler(compiler)

    def left_by(self, entered: _Entered) -> None:
        """End a call that raised the exception being handled."""
        thread, _, is_outermost = entered
        compiler = _set_compiler(None)
        try:
            thread.nodes.pop()
            thread.take_added()
            if is_outermost:
                self._leave_batch(thread, completed=False)
        finally:
            _set_compiler(compiler)

    def call_under_way(self) -> tuple[int, str, str] | None:
        thread = self._thread
        is_recorded = thread.batch % self._settings.every == 0 and not (thread.recording or self.paused)
        if not thread.nodes or not is_recorded or thread.compiled is not None:
            return None
        return thread.batch, thread.nodes[-1].name, thread.nodes[-1].class_name

    def outermost(self) -> str | None:
        return self._thread.nodes[0].name if self._thread.nodes else None

    def add_output(self, label: str, tensor: Tensor) -> None:
        observed = [depth for depth, node in enumerate(self._thread.nodes, 1) if node.observed]
        if observed and self._settings.outputs:
            self._thread.added.append((observed[-1], label, tensor))

    def _leave_batch(self, thread: ThreadCalls, completed: bool) -> None:
        thread.given = ((), None)
        thread.added.clear()
        self._end_batch(thread, completed)

    def begin_compiled(self, callee: int, plan: str, tensors: Sequence[Tensor]) -> None:
        thread = self._thread
        if thread.recording:
            return
        if thread.compiled is not None:
            self._end_compiled(thread, completed=False)
        if thread.nodes or self.paused or not 0 <= callee < len(self._nodes):
            return
        self._begin_batch(thread, None, (), None)
        thread.nodes.append(self._nodes[callee])
        places = [
            line[3:].removeprefix("input[")[:-1] for line in plan.split(PLAN_SEPARATOR) if line[1:2] == "t"
        ]
        thread.compiled = {place: weakref.ref(x) for place, x in zip(places, tensors, strict=False)}

    def record_compiled(self, callee: int, caller: int, plan: str, tensors: Sequence[Tensor]) -> None:
        thread = self._thread
        if thread.recording or not 0 <= callee < len(self._nodes):
            return
        if not thread.nodes:  # the graph was made for another watch, for which this call was no outermost one
            self.begin_compiled(callee if caller < 0 else caller, "", ())
        if not thread.nodes:
            return
        ends = thread.compiled is not None and caller < 0
        if ends:
            thread.nodes.pop()
        self._add(calls=1)
        node = self._nodes[callee]
        completed = False
        try:
            if node.observed and not self.paused and thread.batch % self._settings.every == 0:
                observe = partial(self._observe, batch=thread.batch)
                class_name, rows, read = planned_rows(self._settings, plan, tensors, node.allow_inf, observe)
                self._count(rows)
                if thread.compiled is not None:
                    arguments = ((place, reference()) for place, reference in thread.compiled.items())
                    thread.given = ((), {place: x for place, x in arguments if x is not None})
                outer = self._nodes[caller].name if caller >= 0 else thread.innermost
                with thread.is_recording():
                    call = (thread.batch, node.name, class_name, outer, thread.recomputed)
                    self._follow(call, read, thread.start, in_compiled_code=True)
                    self._keep(thread, node.name, class_name, rows, outer)
            completed = True
        finally:
            if thread.compiled is not None:
                thread.given = ((), None)
                if ends or not completed:
                    self._end_compiled(thread, completed)

    def _end_compiled(self, thread: ThreadCalls, completed: bool) -> None:
        thread.nodes.clear()
        thread.compiled = None
        self._end_batch(thread, completed)

    def _end_batch(self, thread: ThreadCalls, completed: bool) -> None:
        is_reported = self._subscriptions.has(Event.BATCH_END) or thread.batch >= self.gathers_from
        own = None if completed else sys.exc_info()[1]
        try:
            if not thread.recomputed and (is_reported or not completed):
                with thread.is_recording():
                    self._events.on_batch_end(thread.batch, completed)
        except BaseException as error:
            # KeyboardInterrupt and SystemExit end the program, whatever came first.
            if own is None or error.__cause__ is own or not isinstance(error, Exception):
                raise
        finally:
            self._leave_start(thread)

    def _leave_start(self, thread: ThreadCalls) -> None:
        with self.lock:
            self._num_inside -= thread.is_inside
        start, thread.start, thread.is_inside = thread.start, None, False
        if start is not None:
            start.end()
            if start.has_graph:
                self._ended_starts = [x for x in self._ended_starts if x() is not None] + [weakref.ref(start)]

    def _begin_batch(self, thread: ThreadCalls, module: nn.Module | None, args: Any, kwargs: Any) -> None:
        self.settle()
        # Called from a backward: activation checkpointing runs the forward again. That is no new batch.
        thread.recomputed = torch._C._current_graph_task_id() != -1
        with self.lock:
            if not thread.recomputed:
                self.latest_batch += 1
            thread.batch = self.latest_batch
        if not thread.recomputed:
            self._start_batch(thread, module, args, kwargs or None)
        thread.given = (args, kwargs or None)

    def _start_batch(self, thread: ThreadCalls, module: nn.Module | None, args: Any, kwargs: Any) -> None:
        traced = thread.batch in self._traced
        keeps = self.keeps_starts and module is not None
        # Also of a batch that is not recorded: its thread is inside the model.
        is_asked = self._subscriptions.has(Event.BATCH_START) or any(names.get(x) for names, x in self._names)
        extra = None
        if traced or keeps or is_asked:
            extra = self._events.on_batch_start(thread.batch, traced, module, args, kwargs)
        if module is None:
            return
        if keeps:
            is_function = hasattr(type(module), "is_watched_function")
            if not is_function:
                self._let_go_of_starts()
            thread.start = KeptStart(thread.batch, is_function, module, args, kwargs, extra)
        with self.lock:
            thread.is_inside = True
            self._num_inside += 1

    def _keep(
        self, thread: ThreadCalls, name: str, class_name: str, rows: list[Record], caller: str | None
    ) -> None:
        frame = Frame(thread.batch, name, class_name, tuple(rows), "forward", thread.recomputed)
        with self.lock:
            self._frames.append(frame)
            self._add(frames=1)
            self._called.add(name)
            if frame.batch >= self.gathers_from:
                self._peaks.add(frame, self.gathers_inputs)
        if self._subscriptions.has(Event.FRAME) or thread.batch in self._traced:
            self._events.on_frame(frame)
        if any(row.is_fault for row in rows):
            self._events.on_nonfinite(frame, caller, *thread.given, False)

    def _rows(
        self, batch: int, node: Node, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> tuple[list[Record], list[tuple[Role, str, Tensor]]]:
        """Return the rows of a call and their tensors."""
        values = call_values(self._settings, module, args, kwargs, output)
        values += self._thread.take_added()
        found = [self._observe(x, label, role, node.allow_inf, batch) for role, label, x in values]
        self._count(found)
        return found, [one for one in values if isinstance(one[2], Tensor)]

    def _count(self, rows: list[Record]) -> None:
        read = sum(row.isfinite is not None for row in rows)
        self._add(tensors=read, tensors_read=read)


# The row of a call near the end of its thread's stack.
_FULL = Note("not_checked", "the stack is nearly full (sys.getrecursionlimit)")
_NO_STACK = Record("output", "output", None, "", None, None, None, None, _FULL)

if _extension.C is not None:
    _extension.C.bind_row(Record, Note)


def make_recorder(settings: Settings, events: RecorderEvents) -> Recorder:
    """Make the compiled recorder, or the Python one where there is none."""
    if _extension.C is None:
        return PythonRecorder(settings, events)
    helpers: dict[str, Any] = {
        "observe": observe_with(settings),
        "leaves": leaves,
        "is_container": is_container,
        "spell_key": spell_key,
        "completed_row": completed_row,
        "plain_mask": PLAIN_MASK,
    }
    native: type[CallRecorder] = _extension.C.CallRecorder
    return native(settings, events=events, frame_type=Frame, start_type=Start, helpers=helpers)
