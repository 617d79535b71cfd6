"""Calls that gradients come for, as PythonRecorder follows them, and the first non-finite gradient of a backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from ..numerics.readable import unreadable
from ..records.record import Frame, Record, Role
from ..report.finding import Finding, OriginKind, finding_of
from .events import Arrival, BackwardCall, Batch, Part
from .masks import Excuses


class Node(NamedTuple):
    """A watched module: its name, its class, and whether its calls are recorded."""

    name: str
    class_name: str
    observed: bool
    allow_inf: bool | Excuses


@dataclass(eq=False)
class Call:
    """A call under way, and then one that gradients may come for: hooks in the graph keep it."""

    node: Node
    batch: Batch
    caller: Call | None
    frame: Frame
    added: list[tuple[Role, str, Any]] = field(default_factory=list)  # outputs that `add_output` gave it
    number: int = 0
    backward: int = -1  # the one that last brought a gradient of its outputs
    handles: list[Any] = field(default_factory=list)  # of the hooks on leaves, which outlive the graph

    def remove_hooks(self) -> None:
        """Take the hooks off the leaves."""
        for handle in self.handles:
            handle.remove()

    __del__ = remove_hooks


@dataclass(slots=True)
class Backward:
    """Gradients that came in one run of the autograd engine."""

    end: weakref.ref[Any]  # the callback at its end, which is gone if an exception has ended it
    # The third item is the gradient's place, tensor and version. One gradient may come to several calls in turn.
    arrivals: list[tuple[Call, Part, object, Record]] = field(default_factory=list)
    weights: set[object] = field(default_factory=set)

    @property
    def has_fault(self) -> bool:
        """Whether a gradient so far is not finite, and not meant to be so."""
        return any(record.is_fault for *_, record in self.arrivals)

    def frames(self) -> tuple[list[BackwardCall], list[Arrival]]:
        """Return the calls with their frames, a parent after its children as in the forward, and the arrivals."""
        # A call is done when it and all calls in it had their last gradient.
        records: dict[Call, list[Record]] = {call: [] for call, *_ in self.arrivals}
        done: dict[Call, int] = {}
        for position, (call, *_) in enumerate(self.arrivals):
            around: Call | None = call
            while around in records:
                done[around] = position
                around = around.caller
        calls = sorted(records, key=lambda call: (done[call], call.number))
        positions: dict[Call | None, int] = {call: position for position, call in enumerate(calls)}
        arrivals: list[Arrival] = []
        time, latest = 0, None
        for call, part, gradient, record in self.arrivals:
            time, latest = time + (gradient != latest), gradient
            arrivals.append(Arrival(positions[call], len(records[call]), part, time))
            records[call].append(record)
        ended = []
        for call in calls:
            frame = call.frame._replace(records=tuple(records[call]), phase="backward")
            ended.append(BackwardCall(frame, positions.get(call.caller), call.number))
        return ended, arrivals


def place_of(x: Tensor) -> tuple[Any, ...]:
    """Return the place of a tensor in the graph: a leaf's own, or an output of a node."""
    return ("leaf", id(x)) if x.grad_fn is None else (x.grad_fn._sequence_nr(), x.output_nr)


def has_gradient(x: Any) -> bool:
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


def find_in_backward(
    calls: Sequence[BackwardCall], arrivals: Sequence[Arrival], *, rank: int = 0
) -> tuple[Finding, tuple[Frame, ...]] | None:
    """Return the finding of the first non-finite gradient and the frames up to there, or None.

    `calls` are in the order of their frames, `arrivals` in the order in which they came. The finding's sequence is the
    place among the calls of its batch.
    """
    bad = [arrival for arrival in arrivals if _record(calls, arrival).is_fault]
    if not bad:
        return None
    time = bad[0].time
    now = [arrival for arrival in bad if arrival.time == time]
    # Calls whose outputs had gradients before, all of them finite.
    reached = {arrival.call for arrival in arrivals if arrival.part == "output" and arrival.time < time}
    # One gradient is that of a module's input and of another's output: whose backward made it is the one to name, and
    # of these the innermost, whose call ended first.
    makers = [arrival for arrival in now if arrival.part != "output" and arrival.call in reached]
    origin: OriginKind = "produced" if makers else "received"
    first = min(makers or now, key=lambda arrival: (calls[arrival.call].number, arrival.part != "output"))
    above = [*_above(calls, first.call)]
    # Where no call made the value, the code of a call around it did, between the calls that it made.
    around = None if makers else next((call for call in above if call in reached), None)
    source = None if around is None else calls[around].frame.name
    frame = calls[first.call].frame
    sequence = sum(call.frame.batch == frame.batch for call in calls[: first.call])
    finding = finding_of(frame, _record(calls, first), origin, source, rank, sequence)
    frames = [call.frame for call in calls[: first.call + 1]]
    if around is not None:
        # The frame of the module around keeps the gradients that came before this one: only they led here.
        early = [_record(calls, x) for x in arrivals if x.call == around and x.time < time]
        frames.insert(-1, calls[around].frame._replace(records=tuple(early)))
    # A gradient is the sum over all uses of the tensor. A module that returns what it has used itself is one of them.
    users = {arrival.call for arrival in now if makers and arrival.call in reached} - {first.call, *above}
    names = ", ".join(sorted({calls[call].frame.name or "the root module" for call in users}))
    what = "weight is shared with" if first.part == "weight" else "same tensor is used or returned by"
    remark = f"the {what} {names}: the gradient is the sum over all uses, and each may have made the value"
    return replace(finding, remarks=(remark,) if names else ()), tuple(frames)


def _record(calls: Sequence[BackwardCall], arrival: Arrival) -> Record:
    return calls[arrival.call].frame.records[arrival.record]


def _above(calls: Sequence[BackwardCall], position: int) -> Iterator[int]:
    """Yield the calls around the one at this position, the nearest first."""
    while (caller := calls[position].caller) is not None:
        position = caller
        yield position
