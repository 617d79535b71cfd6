"""Gradients of the tensors of recorded calls, for PythonRecorder.

A recorded call leaves a hook on each of its tensors. csrc/gradients/gradient_recorder.cpp does the same and says how.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..numerics.readable import unreadable
from ..records.record import Frame, Record, Role
from .events import Arrival, BackwardCall, Event, Part


@dataclass(eq=False)
class Call:
    """A call under way, and then one that gradients may come for. The hooks in the graph keep it."""

    node: Any
    caller: Call | None
    added: list[tuple[Role, str, Any]] = field(default_factory=list)  # outputs that `add_output` gave it
    frame: Frame = field(init=False)
    start: object = None  # of its batch
    number: int = 0
    backward: int = -1  # the one that last brought a gradient of its outputs
    handles: list[Any] = field(default_factory=list)  # of the hooks on leaves, which outlive the graph

    def remove_hooks(self) -> None:
        """Take the hooks off the leaves."""
        for handle in self.handles:
            handle.remove()

    __del__ = remove_hooks


@dataclass(slots=True)
class _Backward:
    """Gradients that came in one run of the autograd engine."""

    arrivals: list[tuple[Call, Part, int, Record]] = field(default_factory=list)
    latest: object = None  # place, tensor and version of the latest gradient, which may come to several calls
    time: int = 0
    weights: set[object] = field(default_factory=set)
    is_over: bool = False


class PythonGradients:
    """Follows the tensors of recorded calls into their backward, for a PythonRecorder."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = weakref.ref(recorder)  # the hooks keep this object
        self._lock = recorder.lock  # backwards of several threads, and of several devices, meet here
        self._backwards: dict[int, _Backward] = {}
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._numbers = itertools.count()

    def follow(self, call: Call, values: Iterable[tuple[Any, str, Any]]) -> None:
        """Leave hooks for the gradients of the values of a call."""
        with torch._C.DisableTorchFunction():
            tensors = [value for value in values if value[0] != "buffer" and _has_gradient(value[2])]
            outputs = {_place(x) for part, _, x in tensors if part == "output" and not x.is_leaf}
            if not outputs or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
                return
            call.number = next(self._numbers)
            with self._lock:
                self._calls.add(call)
            for part, label, x in tensors:
                # An output that is a leaf is handed through. An input that the module writes into is its output.
                if part == "output" if x.is_leaf else part == "input" and _place(x) in outputs:
                    continue
                reference: Callable[[], Call | None] = weakref.ref(call) if x.is_leaf else lambda: call
                handle = x.register_hook(partial(self._arrive, _place(x), reference, part, label))
                if x.is_leaf:
                    call.handles.append(handle)

    def release(self, leaves: Sequence[Tensor]) -> None:
        """Remove the hooks from all leaves, and look at no gradient any more."""
        self._recorder = lambda: None  # type: ignore[assignment]
        for call in list(self._calls):
            call.remove_hooks()

    def _arrive(
        self,
        place: tuple[Any, ...],
        call_of: Callable[[], Call | None],
        part: Part,
        label: str,
        gradient: Tensor | None,
    ) -> None:
        """Take a gradient that came at a place of the graph, of a tensor that the call has used."""
        # None comes for results of an operation that nobody used, as all parts of unbind but one, and from a Function
        # whose backward gives none. Compiled autograd follows hooks, and this leads nowhere that it could.
        if gradient is None or is_compiling():
            return
        call, recorder, task = call_of(), self._recorder(), torch._C._current_graph_task_id()
        # An argument or a weight may get its gradient from elsewhere, too: a call whose outputs had none has no part in
        # this backward.
        if call is None or recorder is None or task == -1 or (part != "output" and call.backward != task):
            return
        backward = self._open(task, recorder)
        # The gradient of a weight is the sum over all calls of its module. It belongs to the first, which the backward
        # reaches last.
        weight = (place, call.frame.name, label)
        if part == "weight" and weight in backward.weights:
            return
        record = recorder.observe(gradient, f"{label}.grad", "gradient", batch=call.frame.batch)
        with self._lock, torch._C.DisableTorchFunction():
            latest = (place, id(gradient), None if gradient.is_inference() else gradient._version)
            backward.time += latest != backward.latest
            backward.latest = latest
            backward.weights.add(weight)
            backward.arrivals.append((call, part, backward.time, record))
            if part == "output":
                call.backward = task

    def _open(self, task: int, recorder: Any) -> _Backward:
        with self._lock:
            if task in self._backwards:
                return self._backwards[task]
            backward = self._backwards[task] = _Backward()
        end = partial(self._finish, task)
        # The engine drops the callback when an exception ends the run. The garbage collector may do that anywhere, so
        # this takes no lock.
        weakref.finalize(end, setattr, backward, "is_over", True).atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(end)
        if recorder.has_subscription(Event.BACKWARD_START):
            recorder.events.on_backward_start()
        return backward

    def finish_broken(self) -> None:
        """Make frames of the backwards that an exception ended without a sign."""
        with self._lock:
            broken = [task for task, backward in self._backwards.items() if backward.is_over]
        for task in broken:
            self._finish(task)

    def finish_nonfinite(self) -> None:
        """Make frames of this thread's backward, as far as it has come, if a gradient in it is not finite."""
        task = torch._C._current_graph_task_id()
        backward = self._backwards.get(task)
        if backward is not None and any(record.is_fault for *_, record in backward.arrivals):
            self._finish(task)

    def _finish(self, task: int) -> None:
        """Make frames of a backward. A parent comes after its children, as in the forward."""
        with self._lock:
            backward = self._backwards.pop(task, None)
        recorder = self._recorder()
        if backward is None or recorder is None:
            return
        # A call is done when it and all calls in it had their last gradient.
        reached, done = {call for call, *_ in backward.arrivals}, dict[Call | None, int]()
        for position, (call, *_) in enumerate(backward.arrivals):
            around: Call | None = call
            while around in reached:
                done[around] = position
                around = around.caller
        calls = sorted(reached, key=lambda call: (done[call], call.number))
        positions: dict[Call | None, int] = {call: position for position, call in enumerate(calls)}
        records: dict[Call, list[Record]] = {call: [] for call in calls}
        arrivals = []
        for call, part, time, record in backward.arrivals:
            arrivals.append(Arrival(positions[call], len(records[call]), part, time))
            records[call].append(record)
        frames = [call.frame._replace(records=tuple(records[call]), phase="backward") for call in calls]
        ended = [
            BackwardCall(frame, positions.get(call.caller), call.number)
            for call, frame in zip(calls, frames, strict=True)
        ]
        recorder.keep_backward(ended, arrivals)


def _place(x: Tensor) -> tuple[Any, ...]:
    """Return the place of a tensor in the graph: a leaf's own, or an output of a node."""
    return ("leaf", id(x)) if x.grad_fn is None else (x.grad_fn._sequence_nr(), x.output_nr)


def _has_gradient(x: Any) -> bool:
    """Return whether hooks on this value would ever see a gradient of numbers."""
    if not issubclass(type(x), Tensor) or not x.requires_grad or x.is_meta:
        return False
    if unreadable(x).startswith("inside a functorch transform"):
        return False
    try:
        return x.grad_fn is not None or x.is_leaf
    except RuntimeError:
        # One of several views, as unbind gives them, after their base was written into: it has no graph any more, and
        # autograd refuses each use of it.
        return False
