"""The recorder: which batch a call belongs to, what the call saw, and the latest calls as frames.

Two recorders do the same work: CallRecorder of the compiled part, which does not read again what is unchanged since it
was last read, and PythonRecorder, the plain one, which reads everything. Tests hold the one against the other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from . import _extension
from .frame import FrameRows
from .observe import observe
from .record import Row, is_fault
from .walk import call_leaves, is_container, leaves, spell_key


@dataclass(frozen=True, slots=True)
class Settings:
    """What a recorder looks at and keeps; see `watch`."""

    max_frames: int = 21
    every: int = 1
    traced: tuple[int, ...] = ()
    weights: bool = True
    buffers: bool = True
    inputs: bool = True
    outputs: bool = True
    reread_weights: int = 64
    verify_hits: bool = False
    measure_time: bool = False


class Listener(Protocol):
    """Who is told. What these raise, the module call raises."""

    def batch_started(
        self, batch: int, traced: bool, module: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """The call `module(*args, **kwargs)` begins a batch (kwargs may be None).

        Told of the batches that are looked at: of all while `tells_batch_start` is set, else of the traced ones.
        """

    def frame_recorded(self, frame: FrameRows) -> None:
        """A call of a traced batch was recorded."""

    def fault(self, frame: FrameRows, caller: str | None, args: tuple[Any, ...], kwargs: Any) -> None:
        """A call held a non-finite value.

        `caller` is the watched module that made it; `args` and `kwargs` (or None) are the outermost call's.
        """

    def batch_ended(self, batch: int, completed: bool) -> None:
        """An outermost call returned (`completed`) or raised. Told only while `tells_batch_end` is set.

        Calls of watched modules made from here, or from `fault`, are not recorded.
        """


class Recorder(Protocol):
    """What the two recorders have in common."""

    paused: bool
    tells_batch_start: bool
    tells_batch_end: bool

    @property
    def latest_batch(self) -> int:
        """The number of the latest batch, -1 before the first."""

    @property
    def counters(self) -> dict[str, int]:
        """How many calls, frames, tensors, reads, bytes and cache hits there were."""

    def add_node(self, name: str, type: type, observed: bool, allow_inf: bool) -> int:
        """A number for a module, for its WatchedCall."""

    def frames(self) -> list[FrameRows]:
        """The latest frames, oldest first."""

    def forget_weights(self) -> None:
        """Weights may have changed without a sign: read them again."""

    def forget_tensors(self) -> None:
        """Let go of all that is remembered of tensors."""


class _Thread(threading.local):
    """The calls under way in one thread, outermost first."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.batch = 0
        self.recomputed = False
        self.recording = False  # what is told of a call may make others: they are not recorded
        self.given: tuple[tuple[Any, ...], Any] = ((), None)

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
    observed: bool
    allow_inf: bool


class PythonRecorder:
    """The recorder without the compiled part."""

    def __init__(self, settings: Settings, listener: Listener) -> None:
        self.paused = False
        self.tells_batch_start = False
        self.tells_batch_end = False
        self.latest_batch = -1
        self.counters = dict.fromkeys(
            ("calls", "frames", "tensors", "tensors_read", "bytes_read", "cache_hits"), 0
        )
        self._settings = settings
        self._listener = listener
        self._traced = frozenset(settings.traced)
        self._nodes: list[_Node] = []
        self._frames: deque[FrameRows] = deque(maxlen=settings.max_frames)
        self._thread = _Thread()

    def add_node(self, name: str, type: type, observed: bool, allow_inf: bool) -> int:
        """See Recorder."""
        self._nodes.append(_Node(name, observed, allow_inf))
        return len(self._nodes) - 1

    def frames(self) -> list[FrameRows]:
        """See Recorder."""
        return list(self._frames)

    def forget_weights(self) -> None:
        """Nothing is remembered here."""

    def forget_tensors(self) -> None:
        """Nothing is remembered here."""

    def run(self, number: int, module: nn.Module, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call `target(*args, **kwargs)` of `module` and record it."""
        thread = self._thread
        outermost = not thread.names
        if thread.recording or (outermost and self.paused):
            return target(*args, **kwargs)
        if outermost:
            self._begin_batch(thread, module, args, kwargs)
        node = self._nodes[number]
        thread.names.append(node.name)
        self.counters["calls"] += 1
        completed = False
        try:
            try:
                output = target(*args, **kwargs)
            finally:
                thread.names.pop()
            if node.observed and not self.paused and thread.batch % self._settings.every == 0:
                with thread.is_recording():
                    self._record(thread, node, module, args, kwargs, output)
            completed = True
        finally:
            if outermost:
                thread.given = ((), None)
                if self.tells_batch_end and not thread.recomputed:
                    with thread.is_recording():
                        self._listener.batch_ended(thread.batch, completed)
        return output

    def _begin_batch(self, thread: _Thread, module: nn.Module, args: Any, kwargs: Any) -> None:
        thread.given = (args, kwargs or None)
        # Called from a backward: activation checkpointing runs the forward again. That is no new batch.
        thread.recomputed = torch._C._current_graph_task_id() != -1
        if not thread.recomputed:
            self.latest_batch += 1
        thread.batch = self.latest_batch
        traced = thread.batch in self._traced
        looked_at = not thread.recomputed and thread.batch % self._settings.every == 0
        if looked_at and (traced or self.tells_batch_start):
            self._listener.batch_started(thread.batch, traced, module, *thread.given)

    def _record(
        self, thread: _Thread, node: _Node, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        rows = self._rows(node, module, args, kwargs, output)
        frame = FrameRows(thread.batch, node.name, type(module).__name__, rows, thread.recomputed)
        self._frames.append(frame)
        self.counters["frames"] += 1
        if thread.batch in self._traced:
            self._listener.frame_recorded(frame)
        if any(map(is_fault, rows)):
            caller = thread.names[-1] if thread.names else None
            self._listener.fault(frame, caller, *thread.given)

    def _rows(self, node: _Node, module: nn.Module, args: Any, kwargs: Any, output: Any) -> list[Row]:
        settings, allow_inf = self._settings, node.allow_inf
        found: list[Row] = []
        if settings.weights:
            found += [observe(x, name, "weight", allow_inf) for name, x in own_tensors(module._parameters)]
        if settings.buffers:
            for name, x in own_tensors(module._buffers):
                if x.is_floating_point() or x.is_complex():
                    found.append(observe(x, name, "buffer", allow_inf))
        if settings.inputs:
            found += [observe(x, label, "input", allow_inf) for label, x in call_leaves(args, kwargs)]
        if settings.outputs:
            found += [observe(x, label, "output", allow_inf) for label, x in leaves(output, "output")]
        read = sum(row[6] is not None for row in found)
        self.counters["tensors"] += read
        self.counters["tensors_read"] += read
        return found


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
    helpers = {"observe": observe, "leaves": leaves, "is_container": is_container, "spell_key": spell_key}
    return _extension.C.CallRecorder(
        listener=listener, frame_type=FrameRows, helpers=helpers, **asdict(settings)
    )
