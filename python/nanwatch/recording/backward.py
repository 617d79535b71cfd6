"""The first non-finite gradient of a backward, and the module that made it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..records.record import Frame, Record
from ..report.finding import Finding, OriginKind, finding_of
from .events import Arrival, BackwardCall


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
    now = [arrival for arrival in bad if arrival.time == bad[0].time]
    # One gradient is that of a module's input and of another's output: whose backward made it is the one to name, and
    # of these the innermost, whose call ended first.
    makers = [x for x in now if x.part != "output" and _was_reached(arrivals, x.call, x.time)]
    origin: OriginKind = "produced" if makers else "received"
    first = min(makers or now, key=lambda arrival: (calls[arrival.call].number, arrival.part != "output"))
    around = None if makers else _around(calls, arrivals, first)
    source = None if around is None else calls[around].frame.name
    frame = calls[first.call].frame
    sequence = sum(call.frame.batch == frame.batch for call in calls[: first.call])
    finding = finding_of(frame, _record(calls, first), origin, source, rank, sequence)
    remarks = _remarks(calls, arrivals, now, first)
    frames = [call.frame for call in calls[: first.call + 1]]
    if around is not None:
        # The frame of the module around keeps the gradients that came before this one: only they led here.
        early = [_record(calls, x) for x in arrivals if x.call == around and x.time < first.time]
        frames.insert(-1, calls[around].frame._replace(records=tuple(early)))
    return replace(finding, remarks=remarks), tuple(frames)


def _record(calls: Sequence[BackwardCall], arrival: Arrival) -> Record:
    return calls[arrival.call].frame.records[arrival.record]


def _was_reached(arrivals: Sequence[Arrival], call: int, time: int) -> bool:
    """Return whether a gradient of the call's outputs came before `time`, that of the first non-finite one."""
    return any(x.call == call and x.part == "output" and x.time < time for x in arrivals)


def _above(calls: Sequence[BackwardCall], position: int) -> Iterator[int]:
    """Yield the calls around the one at this position, the nearest first."""
    while (caller := calls[position].caller) is not None:
        position = caller
        yield position


def _around(calls: Sequence[BackwardCall], arrivals: Sequence[Arrival], here: Arrival) -> int | None:
    """Return the nearest call around this one whose own outputs had finite gradients; None without one.

    Code between the calls that it made then made the value in its backward.
    """
    above = _above(calls, here.call)
    return next((call for call in above if _was_reached(arrivals, call, here.time)), None)


def _remarks(
    calls: Sequence[BackwardCall], arrivals: Sequence[Arrival], now: Sequence[Arrival], first: Arrival
) -> tuple[str, ...]:
    """Name the other calls that may have made the value: a gradient is the sum over all uses of the tensor."""
    if first.part == "output" or not _was_reached(arrivals, first.call, first.time):
        return ()
    above = {first.call, *_above(calls, first.call)}
    # Also a module that returns what it has used itself, and whose other outputs had gradients.
    others = [x for x in now if x.call not in above and _was_reached(arrivals, x.call, first.time)]
    names = sorted({calls[x.call].frame.name or "the root module" for x in others})
    if not names:
        return ()
    what = "weight is shared with" if first.part == "weight" else "same tensor is used or returned by"
    return (
        f"the {what} {', '.join(names)}: the gradient is the sum over all uses, and each may have made the value",
    )
