"""Headroom: how far a tensor is from the end of its format.

One bit is one doubling: at 3 bits the largest element may grow eightfold before it overflows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, log2, sqrt

from ..numerics.formats import Limits
from .record import Frame, Record

# 8 bits. From the root of the end on a value may leave it by its own square; for float16 the two are the same.
NEAR_FACTOR = 256

# Bits. Less than a factor of two is what GELU, dropout and a residual sum do in healthy models.
_RECOVERY = 1.0


def is_near_end(largest: float, end: float) -> bool:
    """Return whether a value may leave a format that ends at `end` by a sum, a usual factor or its own square."""
    return largest >= min(end / NEAR_FACTOR, sqrt(end))


def is_normal(smallest: float | None, ends: Limits) -> bool:
    """Return whether no element is zero or subnormal, where `smallest` is the abs_min."""
    return smallest is None or smallest >= ends.smallest_normal


def has_vanished(record: Record) -> bool:
    """Return whether every element is zero or subnormal: the value is lost, or soon will be."""
    ends = record.ends
    if ends is None or record.abs_max is None or not record.isfinite or 0 in (record.shape or ()):
        return False
    return record.abs_max < ends.smallest_normal


def headroom_bits(record: Record) -> float | None:
    """Return log2(largest finite that the tensor can hold / abs_max): how often the largest element may still double.

    0.0 at the end of the format. -inf when the tensor holds a nan or an inf, for which no room is left. inf when it is
    empty or all zero, for which any factor is harmless. None where the number means nothing: integers and bools,
    tensors that were not read, and extremes that are meant (masks, `allow`). May fall to -0.5 for a complex tensor,
    whose modulus may pass what one part can hold.
    """
    ends = record.ends
    if ends is None or record.abs_max is None or record.is_excused:
        return None
    if record.isfinite is False or not isfinite(record.abs_max):
        return -inf
    if record.abs_max <= 0:
        return inf
    # Two logarithms, as the quotient of float64's largest and smallest number is no float64.
    return log2(ends.largest) - log2(record.abs_max)


def least_bits(records: Iterable[Record]) -> float | None:
    """Return the least headroom of the records that is a number, in bits; None without one."""
    bits = map(headroom_bits, records)
    return min((number for number in bits if number is not None and isfinite(number)), default=None)


def by_module(frames: Iterable[Frame]) -> dict[str, float]:
    """Return the least headroom of each module in bits, worst first; modules without any are left out.

    An input counts only when it is non-finite. Otherwise one large output would put its module and all its readers at
    the head of the list.
    """
    least: dict[str, float] = {}
    for frame in frames:
        for record in frame.records:
            bits = headroom_bits(record)
            if bits is not None and (record.role != "input" or record.is_fault):
                least[frame.name] = min(bits, least.get(frame.name, inf))
    return dict(sorted(least.items(), key=lambda item: item[1]))


@dataclass(frozen=True, slots=True)
class Shrinking:
    """A run of outputs whose headroom falls: from `from_bits` at `from_module` to `to_bits` at `to_module`,
    both included in `num_frames`, all of one `dtype`, which ends at `end`."""

    from_module: str
    from_bits: float
    to_module: str
    to_bits: float
    num_frames: int
    dtype: str
    end: float

    def __str__(self) -> str:
        start, end = self.from_module or "the root module", self.to_module or "the root module"
        return (
            f"from {self.from_bits:.1f} bits at {start} to {self.to_bits:.1f} bits at {end}"
            f" over {self.num_frames} frames"
        )


def shrinking(frames: Sequence[Frame]) -> Shrinking | None:
    """Return the longest run of outputs with falling headroom that ends just before the first non-finite record.

    `frames` are the oldest first. The headroom has to fall by more than a bit. None without such a run, or when all is
    finite. A frame counts by the output with the least headroom. One without (integers, unread) is passed over. On its
    way down the headroom may recover by up to one bit, as behind an activation or a dropout. The run starts where the
    headroom was highest. It does not reach over the start of the batch, over a change of dtype, whose bits are no
    measure for these, or over an output that is all zero.
    """
    end = next((i for i, frame in enumerate(frames) if frame.fault is not None), None)
    if end is None:
        return None
    run: list[tuple[Frame, Record, float]] = []
    start = 0
    for frame in reversed(frames[:end]):
        if (frame.batch, frame.phase) != (frames[end].batch, frames[end].phase):
            break
        tightest = _tightest_output(frame)
        if tightest is None:
            continue
        record, bits = tightest
        if bits == inf or (run and (bits < run[start][2] - _RECOVERY or record.dtype != run[0][1].dtype)):
            break
        run.append((frame, record, bits))
        if bits > run[start][2]:
            start = len(run) - 1
    if not run or run[start][2] - run[0][2] <= _RECOVERY:
        return None
    (first, record, most), (last, _, least) = run[start], run[0]
    largest = inf if record.ends is None else record.ends.largest
    return Shrinking(first.name, most, last.name, least, start + 1, record.dtype, largest)


def _tightest_output(frame: Frame) -> tuple[Record, float] | None:
    made = "output" if frame.phase == "forward" else "gradient"
    outputs = [(r, bits) for r in frame.records if r.role == made and (bits := headroom_bits(r)) is not None]
    return min(outputs, key=lambda pair: pair[1], default=None)
