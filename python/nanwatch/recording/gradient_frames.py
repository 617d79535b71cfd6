"""Frames of backwards: PythonRecorder's part of what gradients/gradient_recorder.cpp does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..report.frame import FrameRows, Phase
from ..report.record import Role, Row
from .events import Arrival, BackwardCall, Event, RecorderEvents, Subscriptions
from .frame_ring import FrameRing
from .observe import past_torch_function

if TYPE_CHECKING:
    from .gradients import PythonGradients


class RecordsBackwards(ABC):
    """The part of PythonRecorder that makes frames of backwards."""

    counters: dict[str, int]
    lock: AbstractContextManager[object]
    _frames: FrameRing
    _traced: frozenset[int]
    _events: RecorderEvents
    _subscriptions: Subscriptions
    _nodes: list[Any]
    _gradients: PythonGradients | None
    _compiled_calls: dict[str, object]

    def _add(self, **amounts: int) -> None:
        with self.lock:
            for name, amount in amounts.items():
                self.counters[name] += amount

    @property
    @abstractmethod
    def paused(self) -> bool:
        """Return whether nothing is recorded."""

    def _report_backward_start(self) -> None:
        if self._subscriptions.has(Event.BACKWARD_START):
            self._events.on_backward_start()

    def finish_broken_backwards(self) -> None:
        if self._gradients is not None:
            self._gradients.finish_broken()

    def finish_nonfinite_backward(self) -> None:
        if self._gradients is not None:
            self._gradients.finish_nonfinite()

    @property
    def gradient_sums_may_overflow(self) -> bool:
        return self._gradients is not None and self._gradients.sums_may_overflow

    def forget_gradient_sums(self) -> None:
        if self._gradients is not None:
            self._gradients.sums_may_overflow = False
            self._gradients.sums_looked_at += 1

    def add_frame(self, batch: int, node: int, rows: list[Row]) -> None:
        frame = FrameRows(batch, self._nodes[node].name, self._nodes[node].class_name, rows, False, "step")
        with self.lock:
            self._frames.append(frame)
            self._add(frames=1)

    def excuse_gradients(self, batches: Sequence[int], note: str) -> None:
        with self.lock:
            for i, frame in enumerate(list(self._frames)):
                if frame.phase == "backward" and frame.batch in batches:
                    rows = [row._replace(note=note) if row.isfinite is False else row for row in frame.rows]
                    self._frames[i] = frame._replace(rows=rows)

    def forget_gradients(self, leaves: Sequence[Tensor]) -> None:
        if self._gradients is not None:
            self._gradients.release(leaves)
            self._gradients = None

    def _keep_backward(
        self, calls: list[Any], rows: list[list[Row]], arrivals: list[Arrival], is_nonfinite: bool
    ) -> None:
        gradients = self._gradients
        if self.paused or gradients is None:
            return
        with self.lock:
            read, gradients.tensors_read = gradients.tensors_read, 0
            self._add(tensors=len(arrivals), tensors_read=read, cache_hits=len(arrivals) - read)
        phase: Phase = "backward"
        frames = [
            FrameRows(one.batch, one.name, one.class_name, own, one.recomputed, phase)
            for one, own in zip(calls, rows, strict=True)
        ]
        try:
            for frame in frames:
                if frame.batch in self._traced:
                    self._events.on_frame(frame)
            if is_nonfinite:
                told = [
                    BackwardCall(frame, one.caller, one.number)
                    for frame, one in zip(frames, calls, strict=True)
                ]
                self._events.on_backward_end(told, arrivals)
        finally:
            with self.lock:
                self._frames.extend(frames)
                self._add(frames=len(frames))

    @past_torch_function()
    def _follow(
        self,
        call: tuple[int, str, str, str | None, bool],
        tensors: Sequence[tuple[Role, str, Tensor]],
        held: object,
        *,
        in_compiled_code: bool = False,
    ) -> None:
        if self._gradients is not None:
            parts: list[Any] = [one for one in tensors if one[0] != "buffer"]
            keep = self._gradients.follow(parts, call, held, in_compiled_code=in_compiled_code)
            if in_compiled_code:
                self._compiled_calls[call[1]] = keep
