"""Summary of one batch: the headroom of its modules, and how its tensors are spread over the powers of two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, inf, log2

from ..records.headroom import headroom_bits
from ..records.record import Frame, Record

_MOST_BINS = 512  # W&B takes no more


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between edges, of which there is one more; with the sums that TensorBoard asks for."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    least: float
    most: float
    sum: float
    sum_of_squares: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Histogram:
        """Make a histogram of finite values, at least one. Bins are whole numbers wide: 1 if 512 bins suffice."""
        ordered = sorted(values)
        first = floor(ordered[0])
        width = max(1, ceil((floor(ordered[-1]) + 1 - first) / _MOST_BINS))
        counts = [0] * ((floor(ordered[-1]) - first) // width + 1)
        for value in ordered:
            counts[(floor(value) - first) // width] += 1
        edges = tuple(float(first + width * i) for i in range(len(counts) + 1))
        return cls(edges, tuple(counts), ordered[0], ordered[-1], sum(ordered), sum(x * x for x in ordered))


class BatchSummary:
    """The frames of one finite batch, as far as a sink wants them.

    The largest record counts for each tensor by its module, label and dtype. Inputs are left out: each is another
    module's output. Ask for the numbers when all frames are taken.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._largest: dict[tuple[str, str, str], tuple[float, Record]] = {}

    def add(self, frame: Frame) -> None:
        """Take a frame of this batch."""
        for record in frame.records:
            abs_max = record.abs_max
            # Finite complex numbers may have a modulus that is too large for a float.
            if abs_max and record.isfinite and record.role != "input" and abs_max != inf:
                key = (frame.name, record.label, record.dtype)
                largest = self._largest.get(key)
                if largest is None or abs_max > largest[0]:
                    self._largest[key] = (abs_max, record)

    @cached_property
    def headroom(self) -> dict[str, tuple[float, str, str]]:
        """The least headroom of each module in bits, with label and dtype, the worst first."""
        least: dict[str, tuple[float, str, str]] = {}
        for (module, label, dtype), (_, record) in self._largest.items():
            bits = headroom_bits(record)
            if bits is not None and bits < least.get(module, (inf,))[0]:
                least[module] = (bits, label, dtype)
        return dict(sorted(least.items(), key=lambda item: item[1][0]))

    @cached_property
    def ranges(self) -> dict[str, Histogram]:
        """How many tensors have their largest magnitude in each power of two, by role."""
        bits: dict[str, list[float]] = {}
        for abs_max, record in self._largest.values():
            bits.setdefault(record.role, []).append(log2(abs_max))
        return {role: Histogram.of(values) for role, values in bits.items()}
