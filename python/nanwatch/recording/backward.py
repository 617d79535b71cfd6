"""Backwards: the first non-finite gradient and the module that made it, and PythonRecorder's frames of gradients.

The frames are what csrc/gradients/gradient_recorder.cpp makes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..records.note import Note
from ..records.record import Frame, Phase, Record, Role
from ..report.finding import Finding, OriginKind, finding_of
from .events import Arrival, BackwardCall, Event, RecorderEvents, Subscriptions
from .frame_ring import FrameRing, PeakMagnitudes
from .observe import past_torch_function

if TYPE_CHECKING:
    from .gradients import PythonGradients


@dataclass(frozen=True, slots=True)
class NonFiniteBackward:
    """The finding of a backward and the frames that it had up to there."""

    finding: Finding
    frames: tuple[Frame, ...]


def find_in_backward(
    calls: Sequence[BackwardCall], arrivals: Sequence[Arrival], *, rank: int = 0
) -> NonFiniteBackward | None:
    """Return the finding of the first non-finite gradient, or None.

    `calls` are in the order of their frames, `arrivals` in the order in which they came. The finding's sequence is the
    place among the calls of its batch.
    """
    bad = [one for one in arrivals if _row(calls, one).is_fault]
    if not bad:
        return None
    now = [one for one in bad if one.time == bad[0].time]
    # One gradient is that of a module's input and of another's output: whose backward made it is the one to name, and
    # of these the innermost, whose call ended first.
    makers = [one for one in now if one.part != "output" and _was_reached(arrivals, one.call, one.time)]
    origin: OriginKind = "produced" if makers else "received"
    first = min(makers or now, key=lambda one: (calls[one.call].number, one.part != "output"))
    around = None if makers else _around(calls, arrivals, first)
    source = None if around is None else calls[around].frame.name
    frame = calls[first.call].frame
    record = _row(calls, first)
    sequence = sum(call.frame.batch == frame.batch for call in calls[: first.call])
    finding = finding_of(frame, record, origin, source, rank, sequence)
    remarks = _remarks(calls, arrivals, now, first)
    frames = [call.frame for call in calls[: first.call + 1]]
    if around is not None:
        # The frame of the module around keeps the gradients that came before this one: only they led here.
        early = [one.row for one in arrivals if one.call == around and one.time < first.time]
        frame_around = calls[around].frame
        frames.insert(-1, frame_around._replace(records=tuple(frame_around.records[row] for row in early)))
    return NonFiniteBackward(replace(finding, remarks=remarks), tuple(frames))


def _row(calls: Sequence[BackwardCall], arrival: Arrival) -> Record:
    return calls[arrival.call].frame.records[arrival.row]


def _was_reached(arrivals: Sequence[Arrival], call: int, time: int) -> bool:
    """Return whether a gradient of the call's outputs came before `time`, that of the first non-finite one."""
    return any(one.call == call and one.part == "output" and one.time < time for one in arrivals)


def _above(calls: Sequence[BackwardCall], position: int) -> Iterator[int]:
    """Yield the calls around that one, the nearest first."""
    while (caller := calls[position].caller) is not None:
        number = calls[position].number
        found = [i for i, one in enumerate(calls) if one.frame.name == caller and one.number > number]
        if not found:
            return
        position = min(found, key=lambda i: calls[i].number)
        yield position


def _around(calls: Sequence[BackwardCall], arrivals: Sequence[Arrival], here: Arrival) -> int | None:
    """Return the nearest call around that one whose own outputs had finite gradients; None without one.

    Code between the calls that it made then made the value in its backward.
    """
    above = _above(calls, here.call)
    return next((one for one in above if _was_reached(arrivals, one, here.time)), None)


def _remarks(
    calls: Sequence[BackwardCall], arrivals: Sequence[Arrival], now: Sequence[Arrival], first: Arrival
) -> tuple[str, ...]:
    """Name the others that may have made the value: a gradient is the sum over all uses of the tensor."""
    if first.part == "output" or not _was_reached(arrivals, first.call, first.time):
        return ()
    above = {first.call, *_above(calls, first.call)}
    others = [one for one in now if one.call not in above and _was_reached(arrivals, one.call, first.time)]
    given = _names(calls, [one for one in others if one.part != "output"])
    # A module that returns what it has used itself, and whose other outputs had gradients.
    returned = _names(calls, [one for one in others if one.part == "output"])
    remarks = []
    if given:
        what = "weight is shared with" if first.part == "weight" else "same tensor was given to"
        remarks.append(
            f"the {what} {given}: the gradient is the sum over all of them, and each may have made the value"
        )
    if returned:
        remarks.append(
            f"the same tensor is an output of {returned}, whose other outputs had gradients: the gradient is the sum"
            " over all that was made of it, and what was made of it there may have made the value"
        )
    return tuple(remarks)


def _names(calls: Sequence[BackwardCall], arrivals: Sequence[Arrival]) -> str:
    return ", ".join(sorted({calls[one.call].frame.name or "the root module" for one in arrivals}))


class RecordsBackwards(ABC):
    """The part of PythonRecorder that makes frames of backwards."""

    counters: dict[str, int]
    gathers_gradient_peaks: bool
    lock: AbstractContextManager[object]
    _frames: FrameRing
    _gradient_peaks: PeakMagnitudes
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

    def settle(self) -> None:
        if self._gradients is not None:
            self._gradients.finish_broken()

    def finish_nonfinite_backward(self) -> None:
        if self._gradients is not None:
            self._gradients.finish_nonfinite()

    def add_frame(self, batch: int, node: int, rows: list[Record]) -> None:
        frame = Frame(batch, self._nodes[node].name, self._nodes[node].class_name, tuple(rows), "step")
        with self.lock:
            self._frames.append(frame)
            self._add(frames=1)

    def excuse_gradients(self, batches: Sequence[int], note: Note) -> None:
        with self.lock:
            for i, frame in enumerate(list(self._frames)):
                if frame.phase == "backward" and frame.batch in batches:
                    rows = [
                        row._replace(note=note) if row.isfinite is False else row for row in frame.records
                    ]
                    self._frames[i] = frame._replace(records=tuple(rows))

    def forget_gradients(self, leaves: Sequence[Tensor]) -> None:
        if self._gradients is not None:
            self._gradients.release(leaves)
            self._gradients = None

    def _keep_backward(
        self, calls: list[Any], rows: list[list[Record]], arrivals: list[Arrival], is_nonfinite: bool
    ) -> None:
        gradients = self._gradients
        if self.paused or gradients is None:
            return
        with self.lock:
            read, gradients.tensors_read = gradients.tensors_read, 0
            self._add(tensors=len(arrivals), tensors_read=read, cache_hits=len(arrivals) - read)
            for one in arrivals if self.gathers_gradient_peaks else ():
                call = calls[one.call]
                self._gradient_peaks.add_gradient(call.batch, call.name, rows[one.call][one.row])
        phase: Phase = "backward"
        frames = [
            Frame(one.batch, one.name, one.class_name, tuple(own), phase, one.recomputed)
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
        start: object,
        *,
        in_compiled_code: bool = False,
    ) -> None:
        if self._gradients is not None:
            parts: list[Any] = [one for one in tensors if one[0] != "buffer"]
            keep = self._gradients.follow(parts, call, start, in_compiled_code=in_compiled_code)
            if in_compiled_code:
                self._compiled_calls[call[1]] = keep
