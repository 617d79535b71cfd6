"""Recorder in Python, for an installation without the compiled part; and `make_recorder`, which chooses.

CallRecorder of the compiled part gives the same answers, and does not read again what has not changed. It also sees
calls inside torch.compile. PythonRecorder reads every tensor of every call. Tests compare the two.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..numerics import _extension
from ..records.record import PLAIN_MASK, Frame, Note, Record
from .calls import Backward, Batch, Call, GradientHook, GradientUser, Node, Peaks, leaf_hook, place_of
from .events import Event, PeakName, Recorder, RecorderEvents, Settings, Start
from .masks import Excuses
from .observe import call_values, completed_record, observe
from .walk import is_container, leaves, spell_key

# More than one batch is under way where several threads call the model.
_COUNTED_BATCHES = 16
# The record of a call near the end of its thread's stack.
_FULL_STACK = Note("not_checked", "the stack is nearly full (sys.getrecursionlimit)")


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []  # under way, outermost first
        self.recording = False  # a callback may call other modules: they are not recorded


@dataclass
class _Subscription:
    events: int
    active: bool = True

    def remove(self) -> None:
        self.active = False


class PythonRecorder:
    """Recorder without the compiled part, and the reference for the methods of both recorders.

    Attributes that others set: `keeps_starts` for `start` and `ended_starts`, `gathers_from`, the batch from which on
    peaks are gathered for `take_peaks`, `gathers_inputs` among these, `gathers_gradient_peaks` for
    `take_gradient_peaks`, and `gathers_weights` for weights that are gathered from shards anew in each batch.
    `latest_batch` is -1 before the first. `counters` are numbers of calls, frames, tensors, reads, bytes and hits.
    `paused`, set by pause(), resume() and stop() of a Watch: nothing is recorded.
    """

    def __init__(self, settings: Settings, events: RecorderEvents) -> None:
        self.keeps_starts = self.gathers_inputs = self.gathers_gradient_peaks = self.gathers_weights = False
        self.gathers_from = sys.maxsize
        self.latest_batch = -1
        self.counters = dict.fromkeys(
            ("calls", "frames", "tensors", "tensors_read", "bytes_read", "cache_hits"), 0
        )
        # Nobody calls back or reads a tensor while holding the lock. Reentrant, as a signal's handler may ask for a
        # report at any moment.
        self._lock = threading.RLock()
        self._settings, self._events = settings, events
        self._is_paused, self._num_suspended = False, 0
        self._subscriptions: list[_Subscription] = []
        self._nodes: list[Node] = []
        self._frames: deque[Frame] = deque(maxlen=settings.max_frames)
        self._num_frames: dict[int, int] = {}  # by batch, of the latest ones
        self._peaks, self._gradient_peaks = Peaks(), Peaks()
        self._thread = _Thread()
        self._batches: dict[int, Batch] = {}  # under way, by thread
        self._ended: weakref.WeakSet[Batch] = weakref.WeakSet()
        self._follows = settings.gradients
        self._hooks: weakref.WeakSet[GradientHook] = weakref.WeakSet()
        self._call_numbers = itertools.count()
        self._backwards: dict[int, Backward] = {}

    # Settings, which a Watch makes

    def add_node(self, name: str, module: object, observed: bool, allow_inf: bool | Excuses) -> int:
        """Return a number for a module, for its WatchedCall; or for an optimizer."""
        with self._lock:
            self._nodes.append(Node(name, type(module).__name__, observed, allow_inf))
            return len(self._nodes) - 1

    def set_allow_inf(self, node: int, allow_inf: bool | Excuses, /) -> None:
        """Give the number to another module of the same name and class."""
        self._nodes[node].allow_inf = allow_inf

    @property
    def paused(self) -> bool:  # noqa: D102
        return self._is_paused or self._num_suspended > 0

    @paused.setter
    def paused(self, on: bool) -> None:
        self._is_paused = on

    def suspend(self, on: bool, /) -> None:
        """Record nothing until it is called with False as often as with True: for re-runs."""
        with self._lock:
            self._num_suspended += 1 if on else -1

    def subscribe(self, events: int) -> _Subscription:
        """Report these events from now on. Several subscriptions to one event are counted."""
        self._subscriptions.append(_Subscription(events))
        return self._subscriptions[-1]

    def watch_buffers(self, *_: object) -> None:
        """Do nothing: this recorder has no cache, and calls `on_batch_start` for each batch."""

    watch_generators = watch_name = forget_weights = forget_tensors = watch_buffers

    # State and frames, which a Watch reads

    @property
    def num_other_threads(self) -> int:
        """Return how many other threads are inside a batch."""
        batches = list(self._batches.items())
        return sum(thread != threading.get_ident() and not batch.recomputed for thread, batch in batches)

    @property
    def frames_kept(self) -> int:
        """Return how many frames have ever been among `frames()`."""
        return self.counters["frames"]

    def frames(self) -> list[Frame]:
        """Return the latest frames, oldest first."""
        return self.frames_since(0)[1]

    def frames_since(self, kept: int, /) -> tuple[int, list[Frame]]:
        """Return `frames_kept`, and the latest frames after the first `kept`, both at one moment."""
        with self._lock:
            new = self.frames_kept - kept
            return self.frames_kept, list(self._frames)[-new:] if new > 0 else []

    def frames_of_batch(self, batch: int, /) -> int | None:
        """Return how many frames of a batch have been among `frames()`; None once 16 later batches have had some."""
        with self._lock:
            is_known = len(self._num_frames) < _COUNTED_BATCHES or batch > min(self._num_frames)
            return self._num_frames.get(batch, 0 if is_known else None)

    def called(self) -> set[str]:
        """Return the names of the modules that were called and have weights."""
        return {node.name for node in self._nodes if node.has_frames}

    def start(self) -> Start | None:
        """Return the start of the batch under way in this thread."""
        batch = self._batches.get(threading.get_ident())
        return None if batch is None else batch.start()

    def ended_starts(self) -> list[Start]:
        """Return the starts of ended batches of which a gradient may still come: of the latest with its call."""
        with self._lock:
            starts = [start for batch in self._ended if (start := batch.start()) is not None]
        return sorted(starts, key=lambda start: start.batch)

    def forget_starts(self) -> None:
        """Forget the starts of ended batches."""
        self._forget_calls()
        self._ended.clear()

    def _forget_calls(self) -> None:
        with self._lock:
            for batch in self._ended:
                batch.forget_call()

    def call_under_way(self) -> tuple[int, str, str] | None:
        """Return the batch, and name and class of the module, of this thread's innermost call if it is recorded."""
        call = None if self._thread.recording or not self._thread.calls else self._thread.calls[-1]
        return call.frame[:3] if call is not None and self._records(call) else None

    def outermost(self) -> str | None:
        """Return the name of the module of this thread's outermost call."""
        return self._thread.calls[0].node.name if self._thread.calls else None

    def take_peaks(self) -> tuple[int, list[PeakName], bytes]:
        """Return `(batch, new, values)`, and forget the peaks: `new` are the names that were not returned before.

        `values` are float64 by name, in the order in which the names came, 0 for a name that the batch did not have.
        """
        with self._lock:
            return self._peaks.take()

    def take_gradient_peaks(self) -> tuple[int, list[PeakName], bytes]:
        """Return the peaks of gradients likewise, and the latest of their batches."""
        with self._lock:
            return self._gradient_peaks.take()

    # Calls. The wrapper of a module makes the call itself: through here it would take a level of recursion more.

    def enter(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> Call | None:
        """Begin a call of a module. Return None where it is not recorded."""
        thread = self._thread
        caller = thread.calls[-1] if thread.calls else None
        if thread.recording or (caller is None and self.paused):
            return None
        batch = self._begin_batch(module, args, kwargs) if caller is None else caller.batch
        node = self._nodes[number]
        frame = Frame(batch.number, node.name, type(module).__name__, (), "forward", batch.recomputed)
        thread.calls.append(Call(node, batch, caller, frame))
        with self._lock:
            self.counters["calls"] += 1
        return thread.calls[-1]

    def leave(self, call: Call, module: nn.Module, args: Any, kwargs: Any, outputs: tuple[Any, ...]) -> None:
        """Record a call that has returned `outputs[0]`, or raised the exception being handled."""
        thread = self._thread
        thread.calls.pop()
        completed, thread.recording = False, True
        # No context managers, which need more of the stack than is perhaps left.
        try:
            if outputs and call.node.observed and self._records(call):
                self._record(call, module, args, kwargs, *outputs)
            completed = bool(outputs)
        finally:
            try:
                if call.caller is None:
                    self._end_batch(call.batch, completed)
            finally:
                thread.recording = False

    def add_output(self, label: str, tensor: Tensor) -> None:
        """Give the innermost observed call under way in this thread one more output."""
        call = next((call for call in reversed(self._thread.calls) if call.node.observed), None)
        if call is not None and self._settings.outputs:
            call.added.append(("output", label, tensor))

    def add_frame(self, batch: int, node: int, records: list[Record]) -> None:
        """Keep a frame of an optimizer's step."""
        name, class_name = self._nodes[node].name, self._nodes[node].class_name
        self._keep(Frame(batch, name, class_name, tuple(records), "step"))

    def _records(self, call: Call) -> bool:
        return not self.paused and call.batch.number % self._settings.every == 0

    def _reports(self, event: Event, batch: int = -1) -> bool:
        """Return whether an event is reported, as somebody has subscribed to it or the batch is traced."""
        is_wanted = any(known.active and known.events & event for known in self._subscriptions)
        return is_wanted or batch in self._settings.traced

    def _record(self, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        number, settings = call.batch.number, self._settings
        try:
            values = call_values(settings, module, args, kwargs, output) + call.added
            call.added.clear()
            read = partial(observe, allow_inf=call.node.allow_inf, batch=number, wanted=settings)
            records = [read(x, label, role) for role, label, x in values]
            if self._follows:
                self._follow(call, values)
        except RecursionError:
            # The call itself was made: it needed less of the stack than its observation.
            records = [Record("output", "output", None, "", None, None, None, None, _FULL_STACK)]
        frame = call.frame._replace(records=tuple(records))
        with self._lock:
            self._keep(frame, sum(record.isfinite is not None for record in records))
            call.node.has_frames = True
            if number >= self.gathers_from and not frame.recomputed:
                self._peaks.add(frame, self.gathers_inputs)  # an input counts at the module that made it
        if self._reports(Event.FRAME, number):
            self._events.on_frame(frame)
        if any(record.is_fault for record in records):
            caller = None if call.caller is None else call.caller.node.name
            self._events.on_nonfinite(frame, caller, *call.batch.given, False)

    def _keep(self, frame: Frame, num_read: int = 0) -> None:
        with self._lock:
            self._frames.append(frame)
            self.counters["frames"] += 1
            self.counters["tensors"] += num_read
            self.counters["tensors_read"] += num_read
            self._num_frames[frame.batch] = self._num_frames.get(frame.batch, 0) + 1
            if len(self._num_frames) > _COUNTED_BATCHES:
                del self._num_frames[min(self._num_frames)]

    def _begin_batch(self, module: nn.Module, args: Any, kwargs: Any) -> Batch:
        self.settle()
        # Called from a backward: activation checkpointing runs the forward again. That is no new batch.
        recomputed = torch._C._current_graph_task_id() != -1
        with self._lock:
            self.latest_batch += not recomputed
            batch = Batch(self.latest_batch, recomputed, args, kwargs)
        if not recomputed:
            # Also of a batch that is not recorded: its thread is inside the model.
            is_traced = batch.number in self._settings.traced
            extra = self._events.on_batch_start(batch.number, is_traced, module, *batch.given)
            if self.keeps_starts:
                batch.keep_start(module, extra)
                if not hasattr(type(module), "is_watched_function"):
                    self._forget_calls()
        self._batches[threading.get_ident()] = batch
        return batch

    def _end_batch(self, batch: Batch, completed: bool) -> None:
        is_reported = self._reports(Event.BATCH_END) or batch.number >= self.gathers_from
        error = None if completed else sys.exc_info()[1]
        try:
            if not batch.recomputed and (is_reported or not completed):
                self._events.on_batch_end(batch.number, completed)
        except BaseException as raised:
            # KeyboardInterrupt and SystemExit end the program, whatever came first.
            if error is None or raised.__cause__ is error or not isinstance(raised, Exception):
                raise
        finally:
            del self._batches[threading.get_ident()]
            batch.given = (), None
            if (start := batch.start()) is not None and start.grad:
                with self._lock:
                    self._ended.add(batch)

    # Gradients. A recorded call leaves a hook at each of its tensors; csrc/gradients/gradient_recorder.h says how.

    def _follow(self, call: Call, values: Iterable[tuple[Any, str, Any]]) -> None:
        with torch._C.DisableTorchFunction():
            places = [(part, label, x, place_of(x)) for part, label, x in values if part != "buffer"]
            outputs = {place for part, _, x, place in places if part == "output" and place and not x.is_leaf}
            if not outputs or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
                return
            call.number = next(self._call_numbers)
            for part, label, x, place in places:
                # An output that is a leaf is handed through. An input that the module writes into is its output.
                if place is None or (part == "output" if x.is_leaf else part == "input" and place in outputs):
                    continue
                with self._lock:
                    hook = (leaf_hook(x, self) if x.is_leaf else None) or GradientHook(self, place, x)
                    self._hooks.add(hook)
                    alive = [user for user in hook.users if user[0]() is not None]
                    call_of = weakref.ref(call) if x.is_leaf else lambda: call
                    hook.users = [*alive, (call_of, part, f"{label}.grad")]

    def forget_gradients(self, leaves: Sequence[Tensor]) -> None:
        """Remove all hooks, and look at no gradient any more."""
        self._follows = False
        with self._lock:
            for hook in [*self._hooks]:
                hook.handle.remove()

    def take_gradient(self, gradient: Tensor, place: object, users: list[GradientUser]) -> None:
        """Take a gradient that came at a place of the graph, of a tensor that these calls have used."""
        task = torch._C._current_graph_task_id()
        # An argument or a weight may get its gradient from elsewhere, too: a call whose outputs had none has no part in
        # this backward. A weight that is used past its module alone is the latest call's.
        weights = [user for user in users if user[1] == "weight"]
        users = [user for user in users if user[1] == "output" or user[0].backward == task] or weights[-1:]
        if not self._follows or task == -1 or not users:
            return
        # The gradient of a weight is the sum over all calls of its module. It belongs to the first, which the backward
        # reaches last.
        first = dict[object, GradientUser]()
        for call, part, label in users:
            first.setdefault((id(call.node), label) if part == "weight" else len(first), (call, part, label))
        backward = self._backwards.get(task) or self._open(task)
        record = observe(gradient, "", "gradient", batch=users[0][0].batch.number, wanted=self._settings)
        with self._lock, torch._C.DisableTorchFunction():
            version = None if gradient.is_inference() else gradient._version
            backward.add((place, id(gradient), version), [*first.values()], record)
            for call, part, _ in users:
                call.backward = task if part == "output" else call.backward

    def _open(self, task: int) -> Backward:
        end = partial(self._finish, task)
        with self._lock:
            if task in self._backwards:  # another device's thread was faster
                return self._backwards[task]
            # The engine drops the callback when an exception ends the run.
            backward = self._backwards[task] = Backward(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        if self._reports(Event.BACKWARD_START):
            self._events.on_backward_start()
        return backward

    def settle(self) -> None:
        """Make frames of the backwards that an exception ended without a sign."""
        for task, backward in list(self._backwards.items()):
            if backward.end() is None:
                self._finish(task)

    def finish_nonfinite_backward(self) -> None:
        """Make frames of this thread's backward, as far as it has come, if a gradient in it is not finite."""
        backward = self._backwards.get(task := torch._C._current_graph_task_id())
        if backward is not None and backward.has_fault:
            self._finish(task)

    def _finish(self, task: int) -> None:
        backward = self._backwards.pop(task, None)
        if backward is None or self.paused or not self._follows:
            return
        ended, arrivals = backward.frames()
        frames = [call.frame for call in ended]
        with self._lock:
            for frame in frames if self.gathers_gradient_peaks else ():
                self._gradient_peaks.add(frame)
        try:
            for frame in frames:
                if frame.batch in self._settings.traced:
                    self._events.on_frame(frame)
            if backward.has_fault:
                self._events.on_backward_end(ended, arrivals)
        finally:
            for frame in frames:
                self._keep(frame, len(frame.records))

    def excuse_gradients(self, batches: Sequence[int], note: Note) -> None:
        """Note on every non-finite gradient of these batches why it is meant."""
        with self._lock:
            for position, frame in enumerate(self._frames):
                if frame.phase == "backward" and frame.batch in batches:
                    records = [x._replace(note=note) if x.isfinite is False else x for x in frame.records]
                    self._frames[position] = frame._replace(records=tuple(records))


if _extension.C is not None:
    _extension.C.bind_record(Record, Note)


def make_recorder(settings: Settings, events: RecorderEvents) -> Recorder:
    """Make the compiled recorder, or the Python one where there is none."""
    if _extension.C is None:
        return cast(Recorder, PythonRecorder(settings, events))
    functions: Iterable[Any] = (leaves, is_container, spell_key, completed_record)
    helpers = {function.__name__: function for function in functions}
    helpers |= {"observe": partial(observe, wanted=settings), "plain_mask": PLAIN_MASK}
    native: Callable[..., Recorder] = _extension.C.CallRecorder
    return native(settings, events=events, frame_type=Frame, start_type=Start, helpers=helpers)
