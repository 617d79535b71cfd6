"""Recorder in Python, for an installation without the compiled part; and `make_recorder`, which chooses.

CallRecorder of the compiled part gives the same answers, and does not read again what has not changed. It also sees
calls inside torch.compile. PythonRecorder reads every tensor, and reports every event. Tests compare the two.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..numerics import _extension
from ..records.record import PLAIN_MASK, Frame, Note, Record, Role
from .backward import Gradient, backward_frames, loss_of, place_of
from .events import Part, PeakName, Recorder, RecorderEvents, Settings, Start
from .masks import Excuses
from .observe import call_values, completed_record, observe, with_absorbed
from .walk import is_container, leaves, spell_key

_COUNTED_BATCHES = 16  # each thread that calls the model has a batch under way
_FULL_STACK = Note("not_checked", "the stack is nearly full (sys.getrecursionlimit)")


@dataclass(eq=False)
class _Call:
    """Call under way, and then one that gradients may come for: the hooks of its outputs keep it."""

    node: int
    observed: bool
    caller: _Call | None
    frame: Frame  # without records
    around: _Call | None = None  # the innermost observed call around: DDP's is none
    added: list[tuple[Role, str, Any]] = field(default_factory=list)  # by `add_output`
    number: int = 0
    backward: int = -1  # the latest run of the engine in which one of its outputs had a gradient
    start: Callable[[], Start | None] = lambda: None  # of the batch, with `keeps_starts`


class _Thread(threading.local):
    call: _Call | None = None  # the innermost under way
    read: tuple[Any, ...] = (lambda: None,)  # the latest gradient, its version and record
    recording = False  # what is read or called back may call other modules: they are not recorded


class PythonRecorder:
    """Recorder without the compiled part, and the reference for the methods of both recorders.

    Attributes that others set: `paused`: nothing is recorded, `keeps_starts` for `start` and `ended_starts`,
    `gathers_from`, the batch from which on peaks are gathered for `take_peaks`, `gathers_inputs` among these,
    `gathers_gradient_peaks` for `take_gradient_peaks`, and `gathers_weights` for weights that are gathered from shards
    anew in each batch. `latest_batch` is -1 before the first, `frames_kept` how many frames have ever been among
    `frames()`, `step_generator` the CPU's random state at the last step. `counters` count calls, frames and reads.
    """

    keeps_starts = gathers_inputs = gathers_gradient_peaks = gathers_weights = _is_paused = False
    gathers_from, latest_batch, frames_kept, _num_suspended = sys.maxsize, -1, 0, 0
    step_generator: Tensor | None = None

    def __init__(self, settings: Settings, events: RecorderEvents) -> None:
        names = ("calls", "frames", "tensors", "tensors_read", "bytes_read", "cache_hits")
        self.counters = dict.fromkeys(names, 0)
        # Nobody calls back or reads a tensor while holding the lock. Reentrant, as a signal's handler may ask for a
        # report at any moment.
        self._lock = threading.RLock()
        self._settings, self._events = settings, events
        self._latest_task, self._losses = -1, deque[float](maxlen=8)
        self._nodes: list[SimpleNamespace] = []
        self._thread = _Thread()
        self._outermost: dict[int, tuple[_Call, Any, Any]] = {}  # by thread, with its arguments
        self._ended = weakref.WeakValueDictionary[int, _Call]()  # outermost calls, by batch
        self._called, self._frames = set[str](), deque[Frame](maxlen=settings.max_frames)
        self._num_frames: dict[int, int] = {}  # by batch, of the latest ones
        self._peaks = {"forward": Peaks(), "backward": Peaks()}
        self._kept: _Call | None = None
        self._follows = settings.gradients or settings.output_gradients
        self._hooks = weakref.WeakSet[Any]()  # their handles
        # By the engine's run: the callback at its end, which is gone if an exception has ended it, and the gradients by
        # place in the graph; past a leaf, by tensor and version, too.
        self._backwards: dict[int, tuple[weakref.ref[Any], dict[object, list[Gradient]]]] = {}

    # Settings, which a Watch makes

    def add_node(self, name: str, module: object, observed: bool, allow_inf: bool | Excuses) -> int:
        """Return a number for a module, for its WatchedCall; or for an optimizer."""
        frame = Frame(-1, name, type(module).__name__, ())
        with self._lock:
            self._nodes.append(SimpleNamespace(frame=frame, observed=observed, allow_inf=allow_inf))
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

    def subscribe(self, events: int) -> Any:
        """Report these events until `remove()`, while `active`. Several subscriptions to one event are counted."""
        subscription = SimpleNamespace(active=True)
        subscription.remove = partial(setattr, subscription, "active", False)
        return subscription

    def watch_buffers(self, *_: object) -> Any:
        """Do nothing: this recorder has no cache, and calls `on_batch_start` for each batch."""

    def losses(self) -> list[float]:
        """Return the magnitudes of the latest finite losses, the oldest first. With `gradients` there are none."""
        return [*self._losses]

    watch_generators = watch_name = stepped = step_begins = forget_tensors = watch_buffers

    # Calls. The wrapper of a module makes the call itself: through here it would take a level of recursion more.

    def enter(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> _Call | None:
        """Begin a call of a module. Return None where it is not recorded."""
        thread, caller, node = self._thread, self._thread.call, self._nodes[number]
        if thread.recording or (caller is None and self.paused):
            return None
        call = _Call(number, node.observed, caller, node.frame._replace(class_name=type(module).__name__))
        if caller is None:
            self._begin_batch(call, module, args, kwargs or None)
        else:
            call.around = caller if caller.observed else caller.around
            call.frame = call.frame._replace(batch=caller.frame.batch, recomputed=caller.frame.recomputed)
        thread.call = call
        with self._lock:
            self.counters["calls"] += 1
        return call

    def leave(self, call: _Call, module: nn.Module, args: Any, kwargs: Any, outputs: tuple[Any, ...]) -> None:
        """Record a call that has returned `outputs[0]`, or raised the exception being handled."""
        completed, self._thread.recording = False, True
        # No context managers, which need more of the stack than is perhaps left.
        try:
            if outputs and call.observed and self._is_due(call):
                self._record(call, module, args, kwargs, *outputs)
            completed = bool(outputs)
        finally:
            try:
                if call.caller is None:
                    self._end_batch(call, completed)
            finally:
                self._thread.call, self._thread.recording = call.caller, False

    def add_output(self, label: str, tensor: Tensor) -> None:
        """Give the innermost observed call under way in this thread one more output."""
        call = self._thread.call
        if call is not None and not call.observed:
            call = call.around
        if call is not None and self._settings.outputs:
            call.added.append(("output", label, tensor))

    def call_under_way(self) -> tuple[int, str, str] | None:
        """Return the batch, and name and class of the module, of this thread's innermost call if it is recorded."""
        call = None if self._thread.recording else self._thread.call
        return call.frame[:3] if call is not None and self._is_due(call) else None

    def outermost(self) -> str | None:
        """Return the name of the module of this thread's outermost call."""
        call, *_ = self._outermost.get(threading.get_ident(), (None,))
        return None if call is None else call.frame.name

    def _is_due(self, call: _Call) -> bool:
        return not self.paused and call.frame.batch % self._settings.every == 0

    def _record(self, call: _Call, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        batch, settings = call.frame.batch, self._settings
        try:
            values = call_values(settings, module, args, kwargs, output) + call.added
            call.added.clear()
            read = partial(observe, allow_inf=self._nodes[call.node].allow_inf, batch=batch, wanted=settings)
            records = with_absorbed([read(x, label, role) for role, label, x in values], values)
            if self._follows and (settings.gradients or call.around is None):
                self._follow(call, values)
        except RecursionError:
            # The call itself was made: it needed less of the stack than its observation.
            records = [Record("output", "output", None, "", None, None, None, None, _FULL_STACK)]
        frame = call.frame._replace(records=tuple(records))
        self._keep(frame, sum(record.isfinite is not None for record in records))
        self._events.on_frame(frame)
        if any(record.is_fault for record in records):
            caller = None if call.caller is None else call.caller.frame.name
            _, args, kwargs = self._outermost[threading.get_ident()]
            self._events.on_nonfinite(frame, caller, args, kwargs, False)

    # Batches, and their starts

    def _begin_batch(self, call: _Call, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.settle()
        # Called from a backward: activation checkpointing runs the forward again. That is no new batch.
        recomputed = torch._C._current_graph_task_id() != -1
        with self._lock:
            self.latest_batch = batch = self.latest_batch + (not recomputed)
        call.frame = call.frame._replace(batch=batch, recomputed=recomputed)
        if not recomputed:
            # Also of a batch that is not recorded: its thread is inside the model.
            extra = self._events.on_batch_start(batch, batch in self._settings.traced, module, args, kwargs)
            if self.keeps_starts:
                if not hasattr(type(module), "is_watched_function"):
                    self.forget_starts(keeps_numbers=True)
                start = Start.of(batch, module, args, kwargs, extra)._replace(module=None)
                module_of, began = weakref.ref(module), time.monotonic()  # a model may keep its own output
                call.start = lambda: start._replace(module=module_of(), elapsed=time.monotonic() - began)
        self._outermost[threading.get_ident()] = call, args, kwargs

    def _end_batch(self, call: _Call, completed: bool) -> None:
        error, batch = None if completed else sys.exc_info()[1], call.frame.batch
        try:
            if not call.frame.recomputed:
                self._events.on_batch_end(batch, completed)
        except BaseException as raised:
            # KeyboardInterrupt and SystemExit end the program, whatever came first.
            if error is None or raised.__cause__ is error or not isinstance(raised, Exception):
                raise
        finally:
            self._outermost.pop(threading.get_ident(), None)
            self._ended.setdefault(batch, call)  # a recomputation is no batch

    @property
    def num_other_threads(self) -> int:
        """Return how many other threads are inside a batch."""
        return len(self._outermost.keys() - {threading.get_ident()})

    def start(self) -> Start | None:
        """Return the start of the batch under way in this thread."""
        call, *_ = self._outermost.get(threading.get_ident(), (None,))
        return None if call is None else call.start()

    def ended_starts(self) -> list[Start]:
        """Return the starts of ended batches of which a gradient may still come: of the latest with its call."""
        starts = [call.start() for reference in self._ended.valuerefs() if (call := reference()) is not None]
        return [start for start in starts if start is not None and start.grad]

    def forget_starts(self, *, keeps_numbers: bool = False) -> None:
        """Forget the starts of ended batches, or no more than their calls."""
        for reference in self._ended.valuerefs():
            if (call := reference()) is not None and (start := call.start()) is not None:
                rest = start._replace(module=None, args=(), kwargs=None, versions=[], extra=None)
                call.start = partial(Start, *rest) if keeps_numbers else lambda: None
        if not keeps_numbers:
            self._kept, self.step_generator = None, torch.get_rng_state() if self.keeps_starts else None

    # Frames, of calls, steps and backwards

    def add_frame(self, batch: int, node: int, records: list[Record]) -> None:
        """Keep a frame of an optimizer's step."""
        self._keep(self._nodes[node].frame._replace(batch=batch, records=tuple(records), phase="step"))

    def _keep(self, frame: Frame, num_read: int = 0) -> None:
        with self._lock:
            self._frames.append(frame)
            if frame.phase == "forward":
                self._called |= {frame.name for record in frame.records if record.role == "weight"}
                if frame.batch >= self.gathers_from and not frame.recomputed:
                    self._peaks["forward"].add(frame, self.gathers_inputs)  # else at the module that made it
            elif frame.phase == "backward" and self.gathers_gradient_peaks:
                self._peaks["backward"].add(frame)
            # Each tensor is read. The methods of a Counter would need more of the stack.
            self.counters["frames"] = self.frames_kept = self.frames_kept + 1
            self.counters["tensors"] = self.counters["tensors_read"] = self.counters["tensors"] + num_read
            self._num_frames[frame.batch] = self._num_frames.get(frame.batch, 0) + 1
            if len(self._num_frames) > _COUNTED_BATCHES:
                del self._num_frames[min(self._num_frames)]

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
        return self._called.copy()

    def take_peaks(self, phase: str = "forward") -> tuple[int, list[PeakName], bytes]:
        """Return `(batch, new, values)`, and forget the peaks: `new` are the names that were not returned before.

        `values` are float64 by name, in the order in which the names came, 0 for a name that the batch did not have.
        """
        with self._lock:
            peaks = self._peaks[phase]
            batch, new, values = peaks.batch, list(peaks)[peaks.num_taken :], array("d", peaks.values())
            peaks.batch, peaks.num_taken = -1, len(peaks)
            peaks.update(dict.fromkeys(peaks, 0.0))
            return batch, new, values.tobytes()

    # Returns the peaks of all backwards since the last call, and the latest batch of these.
    take_gradient_peaks = partialmethod(take_peaks, "backward")

    # Gradients. A recorded call leaves a hook at each of its tensors; csrc/gradients/gradient_recorder.h says how.

    def _follow(self, call: _Call, values: Iterable[tuple[Any, str, Any]]) -> None:
        with torch._C.DisableTorchFunction():
            parts = ("weight", "input", "output") if self._settings.gradients else ("output",)
            places = [(*x, place) for x in values if x[0] in parts and (place := place_of(x[2])) is not None]
            outputs = {place for part, _, x, place in places if part == "output" and not x.is_leaf}
            if not outputs or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
                return
            call.number = self.frames_kept
            for part, label, x, place in places:
                # An output that is a leaf is handed through. An input that the module writes into is its output.
                if part == "output" if x.is_leaf else part == "input" and place in outputs:
                    continue
                # An output alone keeps the call: an input would keep itself, by the start, and a leaf outlives graphs.
                call_of = (lambda: call) if part == "output" else weakref.ref(call)
                hook = partial(self._take, weakref.ref(self), call_of, part, f"{label}.grad", place)
                hook.__torch_unserializable__ = True  # type: ignore[attr-defined]  # torch.save() warns of others
                with self._lock:
                    self._hooks.add(handle := x.register_hook(hook))
                weakref.finalize(call, handle.remove).atexit = False

    def forget_gradients(self, leaves: Sequence[Tensor]) -> None:
        """Remove the hooks, also from leaves, and look at no gradient any more."""
        self._follows = False
        with self._lock:
            for handle in [*self._hooks]:
                handle.remove()

    @staticmethod
    def _take(recorder_of: Any, call_of: Any, part: Part, label: str, place: Any, gradient: Any) -> None:
        # Autograd gives None for a result that nobody used, as a part of unbind, and for a Function whose backward
        # returns none. Compiled autograd would follow this hook into code that it cannot compile.
        if gradient is None or torch.compiler.is_compiling():
            return
        recorder, call, task = recorder_of(), call_of(), torch._C._current_graph_task_id()
        if recorder is None or call is None or not recorder._follows or task == -1:
            return
        if part == "output":
            call.backward = task
        # An argument or a weight may get its gradient from elsewhere, too: a call whose outputs had none has no part in
        # this backward. Of weights, `backward_frames` decides.
        is_reached = call.backward == task
        if part == "input" and not is_reached:
            return
        with torch._C.DisableTorchFunction():
            version = None if gradient.is_inference() else gradient._version
        key = place if place[0] == "leaf" else (place, id(gradient), version)
        latest, *read = recorder._thread.read  # each graph that is kept has a hook at each weight
        if latest() is gradient and read[0] == version:
            record = read[1]._replace(label=label)
        else:
            record = observe(gradient, label, "gradient", wanted=recorder._settings)
            recorder._thread.read = weakref.ref(gradient), version, record
        if not recorder._settings.gradients and not record.is_fault:
            loss = loss_of(sys._getframe(1))
            if loss is None or loss.isfinite is not False:
                recorder._kept = call  # and so its start: the graph may be gone before the step
                if loss is not None and recorder._latest_task != task:
                    recorder._losses.append(loss.abs_max or 0.0)
                recorder._latest_task = task
                return
        end = partial(recorder._finish, task)
        known_end, gradients = recorder._backwards.setdefault(task, (weakref.ref(end), {}))
        if known_end() is end:  # the first gradient
            torch.autograd.Variable._execution_engine.queue_callback(end)
            recorder._events.on_backward_start()
        gradients.setdefault(key, []).append((call, part, is_reached, record))

    def settle(self) -> None:
        """Make frames of the backwards that an exception ended without a sign."""
        for task in [task for task, (end, _) in list(self._backwards.items()) if end() is None]:
            self._finish(task)

    def finish_nonfinite_backward(self) -> None:
        """Make frames of this thread's backward, as far as it has come, if a gradient in it is not finite."""
        _, gradients = self._backwards.get(task := torch._C._current_graph_task_id(), (None, {}))
        if any(record.is_fault for group in list(gradients.values()) for *_, record in group):
            self._finish(task)

    def _finish(self, task: int) -> None:
        _, gradients = self._backwards.pop(task, (None, None))
        if gradients is None or self.paused or not self._follows:
            return
        calls, arrivals = backward_frames(gradients.values())
        try:
            for call in (call for call in calls if call.frame.batch in self._settings.traced):
                self._events.on_frame(call.frame)
            if any(call.frame.fault for call in calls):
                self._events.on_backward_end(calls, arrivals)
        finally:
            for call in calls:
                self._keep(call.frame, len(call.frame.records))

    def excuse_gradients(self, batches: Sequence[int], note: Note) -> None:
        """Note on every non-finite gradient of these batches why it is meant."""
        with self._lock:
            for position, frame in enumerate(self._frames):
                if frame.phase == "backward" and frame.batch in batches:
                    records = [x._replace(note=note) if x.isfinite is False else x for x in frame.records]
                    self._frames[position] = frame._replace(records=tuple(records))


class Peaks(dict[PeakName, float]):
    """The largest magnitude of each tensor of a batch, or of each gradient of several backwards."""

    batch, num_taken = -1, 0  # names are taken in the order in which they came

    def add(self, frame: Frame, with_inputs: bool = True) -> None:
        """Take the finite records of a frame: reports have the others. The forward of another batch begins anew."""
        if frame.phase == "forward" and frame.batch != self.batch:
            self.update(dict.fromkeys(self, 0.0))
        self.batch = max(self.batch, frame.batch) if frame.phase == "backward" else frame.batch
        for record in frame.records:
            name = (frame.name, record.label, record.dtype)
            is_taken = record.isfinite and not record.is_excused and (with_inputs or record.role != "input")
            if is_taken and (name in self or record.ends is not None):
                self[name] = max(self.get(name, 0.0), record.abs_max or 0.0)


def make_recorder(settings: Settings, events: RecorderEvents) -> Recorder:
    """Make the compiled recorder, or the Python one where there is none."""
    if _extension.C is None:
        return cast(Recorder, PythonRecorder(settings, events))
    _extension.C.bind_record(Record, Note)
    helpers: dict[str, Any] = {x.__name__: x for x in (leaves, is_container, spell_key, completed_record)}
    helpers |= {"observe": partial(observe, wanted=settings), "plain_mask": PLAIN_MASK}
    native: Callable[..., Recorder] = _extension.C.CallRecorder
    return native(settings, events=events, frame_type=Frame, start_type=Start, helpers=helpers)
