"""Recorder in Python, for an installation without the compiled part; and `make_recorder`, which chooses.

CallRecorder of the compiled part gives the same answers, and does not read again what has not changed. It also sees
backwards and calls inside torch.compile. PythonRecorder reads every tensor of every call. Tests compare the two.
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..numerics import _extension
from ..records.note import PLAIN_MASK, Note
from ..records.record import Frame, Record, Role
from ..util.visible import warn_user
from .events import Event, PeakName, Recorder, RecorderEvents, Settings, Start
from .masks import Excuses
from .observe import call_values, completed_record, observe
from .walk import call_leaves, is_container, leaves, spell_key

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


class _Call(NamedTuple):
    """A call under way, and the outputs that `add_output` gave it."""

    node: _Node
    added: list[tuple[Role, str, Any]]


class _Thread(threading.local):
    """The calls under way in one thread, outermost first, and their batch."""

    batch = 0
    recomputed = False
    recording = False  # a callback may call other modules: they are not recorded
    given: tuple[tuple[Any, ...], Any] = ((), None)
    start: Start | None = None
    began = 0.0

    def __init__(self) -> None:
        self.calls: list[_Call] = []


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
        self._thread = _Thread()
        self._peaks: dict[
            PeakName, float
        ] = {}  # the largest magnitudes of a batch: a name keeps its position
        self._peaks_batch = -1
        self._num_taken = 0  # names that take_peaks has returned

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

    def _is_reported(self, event: Event) -> bool:
        return any(known.active and known.events & event for known in self._subscriptions)

    def _ignore(self, *_: object) -> None:
        """Do nothing: this recorder has no cache, follows no backward, and calls `on_batch_start` for each batch."""

    watch_buffers = watch_name = forget_weights = forget_tensors = _ignore
    settle = finish_nonfinite_backward = excuse_gradients = forget_gradients = forget_starts = _ignore

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
        thread = self._thread
        return (
            None if thread.start is None else thread.start._replace(elapsed=time.monotonic() - thread.began)
        )

    def ended_starts(self) -> list[Start]:
        """Return the starts of ended batches of which a gradient may still come: none, as nothing follows them."""
        return []

    def take_peaks(self) -> tuple[int, list[PeakName], bytes]:
        """Return `(batch, new, values)`, and forget the peaks: `new` are the names that were not returned before.

        `values` are float64 by name, in the order in which the names came, 0 for a name that the batch did not have.
        """
        with self.lock:
            batch, names, values = self._peaks_batch, list(self._peaks), array("d", self._peaks.values())
            new, self._num_taken = names[self._num_taken :], len(names)
            self._begin_peaks(-1)
            return batch, new, values.tobytes()

    def take_gradient_peaks(self) -> tuple[int, list[PeakName], bytes]:
        """Return those of the gradients since the last call: none."""
        return -1, [], b""

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
        thread.calls.append(_Call(self._nodes[number], []))
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
        self, thread: _Thread, call: _Call, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        node = call.node
        try:
            values = call_values(self._settings, module, args, kwargs, output) + call.added
            records = [
                self.observe(x, label, role, node.allow_inf, thread.batch) for role, label, x in values
            ]
        except RecursionError:
            # The call itself was made: it needed less of the stack than its observation.
            records = [_NO_STACK]
        class_name = type(module).__name__
        frame = Frame(thread.batch, node.name, class_name, tuple(records), "forward", thread.recomputed)
        num_read = sum(record.isfinite is not None for record in records)
        with self.lock:
            self._append(frame)
            self.counters["tensors"] += num_read
            self.counters["tensors_read"] += num_read
            self._called.add(frame.name)
            if frame.batch >= self.gathers_from and not frame.recomputed:
                self._add_peaks(frame)
        if self._is_reported(Event.FRAME) or frame.batch in self._settings.traced:
            self.events.on_frame(frame)
        if any(record.is_fault for record in records):
            caller = thread.calls[-1].node.name if thread.calls else None
            self.events.on_nonfinite(frame, caller, *thread.given, False)

    def _add_peaks(self, frame: Frame) -> None:
        """Take the finite records of a frame: reports have the others. The forward of another batch begins anew."""
        if frame.batch != self._peaks_batch:
            self._begin_peaks(frame.batch)
        for record in frame.records:
            # An input counts at the module that made it.
            is_left_out = record.is_excused or (record.role == "input" and not self.gathers_inputs)
            name = (frame.name, record.label, record.dtype)
            is_known = name in self._peaks or (len(self._peaks) < MAX_PEAKS and record.ends is not None)
            if record.isfinite and is_known and not is_left_out:
                self._peaks[name] = max(self._peaks.get(name, 0.0), record.abs_max or 0.0)

    def _begin_peaks(self, batch: int) -> None:
        self._peaks_batch, self._peaks = batch, dict.fromkeys(self._peaks, 0.0)

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
            thread.start, thread.began = (
                _start_of(thread.batch, module, args, kwargs, extra),
                time.monotonic(),
            )
        self._threads_inside.add(threading.get_ident())

    def _end_batch(self, thread: _Thread, completed: bool) -> None:
        thread.given = ((), None)
        is_reported = self._is_reported(Event.BATCH_END) or thread.batch >= self.gathers_from
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
            thread.start = None

    def add_frame(self, batch: int, node: int, records: list[Record]) -> None:
        """Keep a frame of an optimizer's step."""
        with self.lock:
            self._append(Frame(batch, *self._nodes[node][:2], tuple(records), "step"))


def _start_of(
    batch: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None, extra: object
) -> Start:
    """Return the start of a batch that begins now, as csrc/recorder/batch_start.h makes it."""
    leaves_of_call = call_leaves(args, kwargs or {}, objects=False)
    # By the class alone: an object may say by its `__class__` that it is a tensor.
    tensors = [x for _, x in leaves_of_call if issubclass(type(x), Tensor)]
    with torch._C.DisableTorchFunction():  # no function mode of the user sees the reads
        versions = [(x, x._version) for x in tensors if not x.is_inference()]
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")
    )
    is_inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    nodes = (torch._C._autograd._get_sequence_nr(), -1)
    is_function = hasattr(type(module), "is_watched_function")
    state = (torch.get_rng_state(), autocast, is_inference, grad, versions)
    return Start(batch, module, args, kwargs, *state, 0.0, nodes, is_function, extra)


if _extension.C is not None:
    _extension.C.bind_record(Record, Note)


def make_recorder(settings: Settings, events: RecorderEvents) -> Recorder:
    """Make the compiled recorder, or the Python one where there is none."""
    if _extension.C is None:
        if settings.gradients:
            warn_user(
                "gradients are read only where a step is about to take them, and no backward is followed: that needs"
                f" the compiled part of nanwatch, which is missing: {_extension.reason}"
            )
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
