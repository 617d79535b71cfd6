"""Headroom: how far a tensor is from the end of its format.

One bit is one doubling: at 3 bits the largest element may grow eightfold before it overflows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite, log2, sqrt
from operator import itemgetter
from typing import NamedTuple

from ..util.messages import module_name
from .record import Frame, Record

# 8 bits. From the root of the end on a value may leave it by its own square; for float16 the two are the same.
NEAR_FACTOR = 256

# Bits. Less than a factor of two is what GELU, dropout and a residual sum do in healthy models.
_RECOVERY = 1.0


def is_near_end(largest: float, end: float) -> bool:
    """Return whether a value may leave a format that ends at `end` by a sum, a usual factor or its own square."""
    return largest >= min(end / NEAR_FACTOR, sqrt(end))


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


class Least(NamedTuple):
    """Tensor with the least headroom: its `bits` as in headroom_bits, -inf when it was not finite."""

    bits: float
    module: str
    label: str
    dtype: str

    @property
    def place(self) -> str:
        """Module, label and format in words: "encoder.wo output, float16"."""
        return f"{module_name(self.module)} {self.label}, {self.dtype}"


def by_module(frames: Iterable[Frame]) -> dict[str, Least]:
    """Return the least headroom of each module, worst first; modules without any are left out.

    An input counts only when it is non-finite. Otherwise one large output would put its module and all its readers at
    the head of the list.
    """
    least: dict[str, Least] = {}
    for frame in frames:
        for record in frame.records:
            bits = headroom_bits(record) if record.role != "input" or record.is_fault else None
            if bits is not None and (frame.name not in least or bits < least[frame.name].bits):
                least[frame.name] = Least(bits, frame.name, record.label, record.dtype)
    return dict(sorted(least.items(), key=lambda item: item[1].bits))


def shrinking(frames: Sequence[Frame]) -> str:
    """Return one sentence on the outputs whose headroom fell before the first non-finite record, "" where none did.

    `frames` are the oldest first. The headroom has to fall by more than a bit, until a sum or a square could leave the
    format. A frame counts by the output with the least headroom, and is passed over without one. On the way down the
    headroom may recover by up to one bit, as behind an activation or a dropout. The run starts where the headroom was
    highest. It does not reach over the start of the batch, a change of dtype or an output that is all zero.
    """
    fault = next((frame for frame in frames if frame.fault is not None), None)
    if fault is None:
        return ""
    before = frames[: frames.index(fault)]
    last: tuple[str, float, Record] | None = None  # module, bits and record at the end of the run
    first, num_frames, seen = ("", -inf), 0, 0
    for frame in reversed(before):
        if (frame.batch, frame.phase) != (fault.batch, fault.phase):
            break
        role = "output" if frame.phase == "forward" else "gradient"
        outputs = [(record, headroom_bits(record)) for record in frame.records if record.role == role]
        headrooms = [(bits, record) for record, bits in outputs if bits is not None]
        if not headrooms:
            continue
        bits, record = min(headrooms, key=itemgetter(0))
        last = last or (frame.name, bits, record)
        if bits == inf or bits < first[1] - _RECOVERY or record.dtype != last[2].dtype:
            break
        seen += 1
        if bits > first[1]:
            first, num_frames = (frame.name, bits), seen
    if last is None or last[2].ends is None or first[1] - last[1] <= _RECOVERY:
        return ""
    end = last[2].ends.largest
    if not is_near_end(end * 2.0 ** -last[1], end):
        return ""
    return (
        f"headroom in {last[2].dtype} fell from {first[1]:.1f} bits at {module_name(first[0])} to {last[1]:.1f} bits at"
        f" {module_name(last[0])} over {num_frames} frames."
    )
