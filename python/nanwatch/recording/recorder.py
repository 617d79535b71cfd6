"""Recorder in Python, for an installation without the compiled part; and `make_recorder`, which chooses.

CallRecorder of the compiled part gives the same answers, and does not read again what has not changed. It also sees
calls inside torch.compile. PythonRecorder reads every tensor of every call. Tests compare the two.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..numerics import _extension
from ..records.note import PLAIN_MASK, Note
from ..records.record import Frame, Record
from .events import Arrival, BackwardCall, Event, PeakName, Recorder, RecorderEvents, Settings, Start
from .gradients import Call, PythonGradients
from .masks import Excuses
from .observe import call_values, completed_record, observe
from .walk import is_container, leaves, spell_key

if TYPE_CHECKING:
    from .._C import CallRecorder

# More than one batch is under way where several threads call the model.
_COUNTED_BATCHES = 16
# A model that names its outputs anew in every batch must not fill the memory: no peak is added beyond this many.
MAX_PEAKS = 1 << 16
# The record of a call near the end of its thread's stack.
_FULL = Note("not_checked", "the stack is nearly full (sys.getrecursionlimit)")
_NO_STACK = Record("output", "output", None, "", None, None, None, None, _FULL)


class _Node(NamedTuple):
    """A watched module: its name, its class, and whether its calls are recorded."""

    name: str
    class_name: str
    observed: bool
    allow_inf: bool | Excuses


class _KeptStart:
    """Start of a batch, kept by the graph of the batch. Refers weakly to the module: a model may keep its output."""

    def __init__(self, start: Start) -> None:
        self.began = time.monotonic()
        self.module: Callable[[], nn.Module | None] = weakref.ref(cast(nn.Module, start.module))
        self.start = start._replace(module=None)

    def present(self) -> Start:
        return self.start._replace(module=self.module(), elapsed=time.monotonic() - self.began)

    def forget_call(self) -> None:
        """Keep nothing of the call but its place among others."""
        self.module = lambda: None
        self.start = self.start._replace(args=(), kwargs=None, versions=[], extra=None)


class _Thread(threading.local):
    """The calls under way in one thread, outermost first, and their batch."""

    batch = 0
    recomputed = False
    recording = False  # a callback may call other modules: they are not recorded
    given: tuple[tuple[Any, ...], Any] = ((), None)
    start: _KeptStart | None = None

    def __init__(self) -> None:
        self.calls: list[Call] = []


class PeakMagnitudes:
    """The largest magnitude of each tensor of a batch, or of each gradient of several backwards."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._batch = -1
        self._values: dict[PeakName, float] = {}  # a name keeps its position
        self._num_taken = 0  # names that were returned before

    def add(self, frame: Frame, with_inputs: bool = True) -> None:
        """Take the finite records of a frame: reports have the others. The forward of another batch begins anew."""
        with self._lock:
            if frame.phase == "forward" and frame.batch != self._batch:
                self._values = dict.fromkeys(self._values, 0.0)
            self._batch = max(self._batch, frame.batch) if frame.phase == "backward" else frame.batch
            for record in frame.records:
                name = (frame.name, record.label, record.dtype)
                is_known = name in self._values or (len(self._values) < MAX_PEAKS and record.ends is not None)
                is_meant = record.is_excused or (record.role == "input" and not with_inputs)
                if record.isfinite and is_known and not is_meant:
                    self._values[name] = max(self._values.get(name, 0.0), record.abs_max or 0.0)

    def take(self) -> tuple[int, list[PeakName], bytes]:
        """Return `(batch, new, values)`, and forget the peaks: `new` are the names that were not returned before.

        `values` are float64 by name, in the order in which the names came, 0 for a name that the batch did not have.
        The batch of gradients is the latest of theirs.
        """
        with self._lock:
            batch, names, values = self._batch, list(self._values), array("d", self._values.values())
            new, self._num_taken = names[self._num_taken :], len(names)
            self._batch, self._values = -1, dict.fromkeys(names, 0.0)
            return batch, new, values.tobytes()


class _Subscription:
    def __init__(self, events: int) -> None:
        self.events, self.active = events, True

    def remove(self) -> None:
        self.events, self.active = 0, False


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
        names = ("calls", "frames", "tensors", "tensors_read", "bytes_read", "cache_hits")
        self.counters = dict.fromkeys(names, 0)
        # Nobody calls back or reads a tensor while holding the lock. Reentrant, as a signal's handler may ask for a
        # report at any moment.
        self.lock = threading.RLock()
        self.events = events
        self.observe = partial(observe, wanted=settings)
        self._settings = settings
        self._is_paused = False
        self._num_suspended = 0
        self._threads_inside: set[int] = set()  # of a batch
        self._subscriptions: list[_Subscription] = []
        self._nodes: list[_Node] = []
        self._frames: deque[Frame] = deque(maxlen=settings.max_frames)
        self._num_frames: dict[int, int] = {}  # by batch, of the latest ones
        self._called: set[str] = set()
        self._peaks, self._gradient_peaks = PeakMagnitudes(self.lock), PeakMagnitudes(self.lock)
        self._thread = _Thread()
        self._ended_starts: list[weakref.ref[_KeptStart]] = []
        self._gradients = gradients = PythonGradients(self)
        self.settle, self.forget_gradients = gradients.finish_broken, gradients.release
        self.finish_nonfinite_backward = gradients.finish_nonfinite
        self.take_peaks, self.take_gradient_peaks = self._peaks.take, self._gradient_peaks.take

    # Settings, which a Watch makes

    def add_node(self, name: str, module: object, observed: bool, allow_inf: bool | Excuses) -> int:
        """Return a number for a module, for its WatchedCall; or for an optimizer."""
        with self.lock:
            self._nodes.append(_Node(name, type(module).__name__, observed, allow_inf))
            return len(self._nodes) - 1

    def set_allow_inf(self, node: int, allow_inf: bool | Excuses, /) -> None:
        """Give the number to another module of the same name and class."""
        self._nodes[node] = self._nodes[node]._replace(allow_inf=allow_inf)

    @property
    def paused(self) -> bool:  # noqa: D102
        return self._is_paused or self._num_suspended > 0

    @paused.setter
    def paused(self, on: bool) -> None:
        self._is_paused = on

    def suspend(self, on: bool, /) -> None:
        """Record nothing until it is called with False as often as with True: for re-runs."""
        with self.lock:
            self._num_suspended += 1 if on else -1

    def subscribe(self, events: int) -> _Subscription:
        """Report these events from now on. Several subscriptions to one event are counted."""
        self._subscriptions.append(_Subscription(events))
        return self._subscriptions[-1]

    def has_subscription(self, event: Event) -> bool:
        """Return whether somebody subscribes to the event."""
        return any(known.active and known.events & event for known in self._subscriptions)

    def _ignore(self, *_: object) -> None:
        """Do nothing: this recorder has no cache, and calls `on_batch_start` for each batch."""

    watch_buffers = watch_generators = watch_name = forget_weights = forget_tensors = _ignore

    # State and frames, which a Watch reads

    @property
    def is_under_way(self) -> bool:
        """Return whether this thread is inside a watched call."""
        return bool(self._thread.calls)

    @property
    def num_other_threads(self) -> int:
        """Return how many other threads are inside a batch."""
        return len(self._threads_inside - {threading.get_ident()})

    @property
    def frames_kept(self) -> int:
        """Return how many frames have ever been among `frames()`."""
        return self.counters["frames"]

    def frames(self) -> list[Frame]:
        """Return the latest frames, oldest first."""
        with self.lock:
            return list(self._frames)

    def frames_since(self, kept: int, /) -> tuple[int, list[Frame]]:
        """Return `frames_kept`, and the latest frames after the first `kept`, both at one moment."""
        with self.lock:
            new = self.frames_kept - kept
            return self.frames_kept, list(self._frames)[-new:] if new > 0 else []

    def frames_of_batch(self, batch: int, /) -> int | None:
        """Return how many frames of a batch have been among `frames()`; None once 16 later batches have had some."""
        with self.lock:
            is_known = len(self._num_frames) < _COUNTED_BATCHES or batch > min(self._num_frames)
            return self._num_frames.get(batch, 0 if is_known else None)

    def called(self) -> set[str]:
        """Return the names of the modules that were called and have weights."""
        return self._called.copy()

    def start(self) -> Start | None:
        """Return the start of the batch under way in this thread."""
        return None if self._thread.start is None else self._thread.start.present()

    def ended_starts(self) -> list[Start]:
        """Return the starts of ended batches of which a gradient may still come.

        Of those before the latest batch only their numbers are kept.
        """
        return [kept.present() for kept in self._kept_starts()]

    def forget_starts(self) -> None:
        """Forget the starts of ended batches."""
        for kept in self._kept_starts():
            kept.forget_call()
        self._ended_starts = []

    def _kept_starts(self) -> list[_KeptStart]:
        return [kept for reference in self._ended_starts if (kept := reference()) is not None]

    def call_under_way(self) -> tuple[int, str, str] | None:
        """Return the batch, and name and class of the module, of this thread's innermost call if it is recorded."""
        thread = self._thread
        return (thread.batch, *thread.calls[-1].node[:2]) if thread.calls and self._records(thread) else None

    def outermost(self) -> str | None:
        """Return the name of the module of this thread's outermost call."""
        return self._thread.calls[0].node.name if self._thread.calls else None

    # Calls. The wrapper of a module makes the call itself: through here it would take a level of recursion more.

    def enter(self, number: int, module: nn.Module, args: Any, kwargs: Any) -> bool | None:
        """Begin a call of a module. Return whether it begins a batch, None for a call that is not recorded."""
        thread = self._thread
        is_outermost = not thread.calls
        if thread.recording or (is_outermost and self.paused):
            return None
        if is_outermost:
            self._begin_batch(thread, module, args, kwargs or None)
            thread.given = (args, kwargs or None)
        thread.calls.append(Call(self._nodes[number], thread.calls[-1] if thread.calls else None))
        with self.lock:
            self.counters["calls"] += 1
        return is_outermost

    def leave(self, is_outermost: bool, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record a call that has returned `output`."""
        thread = self._thread
        call = thread.calls.pop()
        completed = False
        try:
            if call.node.observed and self._records(thread):
                with self._recording(thread):
                    self._record(thread, call, module, args, kwargs, output)
            completed = True
        finally:
            if is_outermost:
                self._end_batch(thread, completed)

    def left_by(self, is_outermost: bool) -> None:
        """End a call that raised the exception being handled."""
        self._thread.calls.pop()
        if is_outermost:
            self._end_batch(self._thread, completed=False)

    def add_output(self, label: str, tensor: Tensor) -> None:
        """Give the innermost observed call under way in this thread one more output."""
        call = next((call for call in reversed(self._thread.calls) if call.node.observed), None)
        if call is not None and self._settings.outputs:
            call.added.append(("output", label, tensor))

    def _records(self, thread: _Thread) -> bool:
        return not (self.paused or thread.recording) and thread.batch % self._settings.every == 0

    @contextmanager
    def _recording(self, thread: _Thread) -> Iterator[None]:
        """Record no call of this thread in the block: what a callback calls is not the run's."""
        thread.recording = True
        try:
            yield
        finally:
            thread.recording = False

    def _record(
        self, thread: _Thread, call: Call, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        node, call.start = call.node, thread.start
        frame = Frame(thread.batch, node.name, type(module).__name__, (), "forward", thread.recomputed)
        call.frame = frame
        try:
            values = call_values(self._settings, module, args, kwargs, output) + call.added
            call.added.clear()
            records = [self.observe(x, label, role, node.allow_inf, frame.batch) for role, label, x in values]
            if self._settings.gradients:
                self._gradients.follow(call, values)
        except RecursionError:
            # The call itself was made: it needed less of the stack than its observation.
            records = [_NO_STACK]
        frame = frame._replace(records=tuple(records))
        num_read = sum(record.isfinite is not None for record in records)
        with self.lock:
            self._append(frame)
            self._count(num_read)
            self._called.add(frame.name)
            if frame.batch >= self.gathers_from and not frame.recomputed:
                self._peaks.add(frame, self.gathers_inputs)  # an input counts at the module that made it
        if self.has_subscription(Event.FRAME) or frame.batch in self._settings.traced:
            self.events.on_frame(frame)
        if any(record.is_fault for record in records):
            caller = None if call.caller is None else call.caller.node.name
            self.events.on_nonfinite(frame, caller, *thread.given, False)

    def _count(self, num_read: int) -> None:
        self.counters["tensors"] += num_read
        self.counters["tensors_read"] += num_read

    def _append(self, frame: Frame) -> None:
        self._frames.append(frame)
        self.counters["frames"] += 1
        self._num_frames[frame.batch] = self._num_frames.get(frame.batch, 0) + 1
        if len(self._num_frames) > _COUNTED_BATCHES:
            del self._num_frames[min(self._num_frames)]

    def _begin_batch(self, thread: _Thread, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.settle()
        # Called from a backward: activation checkpointing runs the forward again. That is no new batch.
        thread.recomputed = torch._C._current_graph_task_id() != -1
        with self.lock:
            self.latest_batch += not thread.recomputed
            thread.batch = self.latest_batch
        if thread.recomputed:
            return
        # Also of a batch that is not recorded: its thread is inside the model.
        is_traced = thread.batch in self._settings.traced
        extra = self.events.on_batch_start(thread.batch, is_traced, module, args, kwargs)
        if self.keeps_starts:
            start = start_of(thread.batch, module, args, kwargs, extra)
            for kept in () if start.is_function else self._kept_starts():
                kept.forget_call()
            thread.start = _KeptStart(start)
        self._threads_inside.add(threading.get_ident())

    def _end_batch(self, thread: _Thread, completed: bool) -> None:
        thread.given = ((), None)
        is_reported = self.has_subscription(Event.BATCH_END) or thread.batch >= self.gathers_from
        error = None if completed else sys.exc_info()[1]
        try:
            if not thread.recomputed and (is_reported or not completed):
                with self._recording(thread):
                    self.events.on_batch_end(thread.batch, completed)
        except BaseException as raised:
            # KeyboardInterrupt and SystemExit end the program, whatever came first.
            if error is None or raised.__cause__ is error or not isinstance(raised, Exception):
                raise
        finally:
            self._threads_inside.discard(threading.get_ident())
            kept, thread.start = thread.start, None
            if kept is not None:
                nodes = kept.start.nodes[0], torch._C._autograd._get_sequence_nr()
                kept.start = kept.start._replace(nodes=nodes)
                if kept.start.grad:
                    self._ended_starts = [*map(weakref.ref, self._kept_starts()), weakref.ref(kept)]

    # Backwards and steps

    def keep_backward(self, calls: list[BackwardCall], arrivals: list[Arrival]) -> None:
        """Keep the frames of a backward that is over."""
        if self.paused:
            return
        frames = [call.frame for call in calls]
        with self.lock:
            self._count(len(arrivals))
            for frame in frames if self.gathers_gradient_peaks else ():
                self._gradient_peaks.add(frame)
        try:
            for frame in frames:
                if frame.batch in self._settings.traced:
                    self.events.on_frame(frame)
            if any(record.is_fault for frame in frames for record in frame.records):
                self.events.on_backward_end(calls, arrivals)
        finally:
            with self.lock:
                for frame in frames:
                    self._append(frame)

    def add_frame(self, batch: int, node: int, records: list[Record]) -> None:
        """Keep a frame of an optimizer's step."""
        with self.lock:
            self._append(Frame(batch, *self._nodes[node][:2], tuple(records), "step"))

    def excuse_gradients(self, batches: Sequence[int], note: Note) -> None:
        """Note on every non-finite gradient of these batches why it is meant."""
        with self.lock:
            for position, frame in enumerate(self._frames):
                if frame.phase == "backward" and frame.batch in batches:
                    records = [x._replace(note=note) if x.isfinite is False else x for x in frame.records]
                    self._frames[position] = frame._replace(records=tuple(records))


def start_of(
    batch: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, extra: object
) -> Start:
    """Return the start of a batch that begins now, as csrc/recorder/batch_start.h makes it."""
    values = [*args, *(kwargs or {}).values()]
    for value in values.copy():  # one level deep
        values += value if isinstance(value, tuple | list) else ()
        values += value.values() if isinstance(value, dict) else ()
    # By the class alone: an object may say by its `__class__` that it is a tensor.
    tensors = [x for x in values if issubclass(type(x), Tensor)]
    with torch._C.DisableTorchFunction():  # no function mode of the user sees the reads
        versions = [(x, x._version) for x in tensors if not x.is_inference()]
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")
    )
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    nodes = (torch._C._autograd._get_sequence_nr(), -1)
    is_function = hasattr(type(module), "is_watched_function")
    # CUDA's generators refuse while a graph is captured.
    is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    cuda = tuple(x.get_state() for x in (() if is_captured else torch.cuda.default_generators))
    state = (torch.get_rng_state(), cuda, autocast, *modes, versions)
    return Start(batch, module, args, kwargs, *state, 0.0, nodes, is_function, extra)


if _extension.C is not None:
    _extension.C.bind_record(Record, Note)


def make_recorder(settings: Settings, events: RecorderEvents) -> Recorder:
    """Make the compiled recorder, or the Python one where there is none."""
    if _extension.C is None:
        return cast(Recorder, PythonRecorder(settings, events))
    helpers: dict[str, Any] = {
        "observe": partial(observe, wanted=settings),
        "leaves": leaves,
        "is_container": is_container,
        "spell_key": spell_key,
        "completed_record": completed_record,
        "plain_mask": PLAIN_MASK,
    }
    native: type[CallRecorder] = _extension.C.CallRecorder
    return native(settings, events=events, frame_type=Frame, start_type=Start, helpers=helpers)
