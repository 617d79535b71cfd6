"""Frames of a backward, and the first non-finite gradient in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, TypeAlias

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from ..records.record import Frame, Record
from ..report.finding import Finding, OriginKind, finding_of
from .events import Arrival, BackwardCall, Part
from .observe import observe

# A gradient that came to a call of a PythonRecorder: the call, of which part, whether one of the call's outputs had its
# gradient before, and the record.
Gradient: TypeAlias = tuple[Any, Part, bool, Record]


def loss_of(frame: FrameType) -> Record | None:
    """Return the record of the single number whose backward the frame runs, None where it runs none."""
    roots: Any = frame.f_locals["t_outputs"] if frame.f_code.co_name == "_engine_run_backward" else ()
    is_number = len(roots) == 1 and isinstance(roots[0], Tensor) and roots[0].numel() == 1
    return observe(roots[0].detach(), "", "output") if is_number else None


def place_of(x: Any) -> tuple[Any, ...] | None:
    """Return the place of a tensor in the graph: an output of a node, or a leaf's own; None where hooks see nothing."""
    if not issubclass(type(x), Tensor) or not x.requires_grad or x.is_meta or is_functorch_wrapped_tensor(x):
        return None
    try:
        return ("leaf", id(x)) if x.grad_fn is None else (x.grad_fn._sequence_nr(), x.output_nr)
    except RuntimeError:
        return None  # one of several views whose base was written into: autograd refuses each use of it


def backward_frames(groups: Iterable[list[Gradient]]) -> tuple[list[BackwardCall], list[Arrival]]:
    """Return the calls, a parent after its children as in the forward, and the arrivals; a group came at one place."""
    received = [(time, *x) for time, group in enumerate(groups, start=1) for x in _receivers(group)]
    records: dict[Any, list[Record]] = {call: [] for _, call, *_ in received}
    latest: dict[Any, int] = {}  # of a call and all calls in it
    for position, (_, call, *_) in enumerate(received):
        while call in records:
            latest[call], call = position, call.caller
    calls = sorted(latest, key=lambda call: (latest[call], call.number))
    positions = {call: position for position, call in enumerate(calls)}
    arrivals = []
    for time, call, part, _, record in received:
        arrivals.append(Arrival(positions[call], len(records[call]), part, time))
        records[call].append(record)
    frames = [call.frame._replace(records=tuple(records[call]), phase="backward") for call in calls]
    callers = [positions.get(call.caller) for call in calls]
    return list(map(BackwardCall, frames, callers, [call.number for call in calls])), arrivals


def _receivers(group: list[Gradient]) -> Iterable[Gradient]:
    """Return the gradients of those calls that have a part in the backward."""
    first: dict[tuple[object, str], Gradient] = {}
    # A weight that is used past its module alone is the latest call's.
    for gradient in [gradient for gradient in group if gradient[2]] or group[-1:]:
        call, part, _, record = gradient
        # The gradient of a weight is the sum over all calls of its module. It belongs to the first, which the backward
        # reaches last.
        first.setdefault((call.node if part == "weight" else call, record.label), gradient)
    return first.values()


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
