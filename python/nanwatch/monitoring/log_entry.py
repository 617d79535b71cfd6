"""What is logged of one batch: numbers, histograms and words by their tags, as any tracker takes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, floor, inf, log2
from typing import TYPE_CHECKING

from ..report.finding import Finding
from ..report.headroom import headroom_bits
from ..report.record import Row, to_record
from ..report.text import summary
from ..util.visible import visible
from .forecast import Forecast

if TYPE_CHECKING:
    from ..report.frame import FrameRows

# The first part of a tag is the group in which TensorBoard and W&B show it: the few numbers of the whole model in one,
# a curve a module in others.
TOTAL = "nanwatch"
HEADROOM, FORECAST, RANGES = "nanwatch_headroom_bits", "nanwatch_forecast_batch", "nanwatch_log2_abs_max"
GROUPS = (TOTAL, HEADROOM, FORECAST, RANGES)
IS_FINITE, LEAST = f"{TOTAL}/is_finite", f"{TOTAL}/headroom_bits"
PLACE, TOLD, FINDING = f"{TOTAL}/headroom_module", f"{TOTAL}/forecast", f"{TOTAL}/finding"

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
        """Of finite values, at least one, in bins a whole number wide: 1 where that makes at most 512."""
        found = sorted(values)
        first = floor(found[0])
        width = max(1, ceil((floor(found[-1]) + 1 - first) / _MOST_BINS))
        counts = [0] * ((floor(found[-1]) - first) // width + 1)
        for value in found:
            counts[(floor(value) - first) // width] += 1
        edges = tuple(float(first + width * i) for i in range(len(counts) + 1))
        return cls(edges, tuple(counts), found[0], found[-1], sum(found), sum(x * x for x in found))


@dataclass(frozen=True, slots=True)
class LogEntry:
    """What is to be logged at `batch`. All numbers are finite."""

    batch: int
    scalars: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


class BatchLog:
    """Takes the frames of one batch, and makes the entry of them.

    Of each tensor by its module, label and dtype the largest counts. An input is left out: it is its maker's output.
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self._largest: dict[tuple[str, str, str], tuple[float, Row]] = {}

    def add(self, frame: FrameRows) -> None:
        """Take a frame of this batch."""
        for row in frame.rows:
            abs_max = row.abs_max
            # Finite complex numbers may have a modulus that is too large for a float.
            if abs_max and row.isfinite and row.role != "input" and abs_max != inf:
                key = (frame.name, row.label, row.dtype)
                largest = self._largest.get(key)
                if largest is None or abs_max > largest[0]:
                    self._largest[key] = (abs_max, row)

    @cached_property
    def headroom(self) -> dict[str, tuple[float, str, str]]:
        """Of each module the least bits that are a number, with label and dtype; the worst first.

        To be asked for when all frames are taken.
        """
        least: dict[str, tuple[float, str, str]] = {}
        for (module, label, dtype), (_, row) in self._largest.items():
            bits = headroom_bits(to_record(row))
            if bits is not None and bits < least.get(module, (inf,))[0]:
                least[module] = (bits, label, dtype)
        return dict(sorted(least.items(), key=lambda item: item[1][0]))

    def ranges(self) -> dict[str, Histogram]:
        """By role, how many tensors have their largest magnitude in each power of two."""
        found: dict[str, list[float]] = {}
        for abs_max, row in self._largest.values():
            found.setdefault(row.role, []).append(log2(abs_max))
        return {role: Histogram.of(values) for role, values in found.items()}

    def entry(self, shown: Iterable[str], forecasts: Sequence[Forecast] = ()) -> LogEntry:
        """The entry, with a number for each of the modules in `shown` that has one."""
        headroom = self.headroom
        scalars = {IS_FINITE: 1.0}
        texts = {}
        if headroom:
            module, (bits, label, dtype) = next(iter(headroom.items()))
            scalars[LEAST] = bits
            texts[PLACE] = visible(f"{spell_module(module)} {label}, {dtype}")
        scalars |= {
            f"{HEADROOM}/{spell_module(name)}": headroom[name][0] for name in shown if name in headroom
        }
        scalars |= {f"{FORECAST}/{spell_module(one.module)}": float(one.batch) for one in forecasts}
        if forecasts:
            texts[TOLD] = "\n\n".join(map(str, forecasts))
        histograms = {f"{RANGES}/{role}": made for role, made in self.ranges().items()}
        return LogEntry(self.batch, scalars, histograms, texts)


def fault_entry(finding: Finding) -> LogEntry:
    """The entry of a batch that went wrong."""
    return LogEntry(finding.batch, {IS_FINITE: 0.0}, texts={FINDING: summary(finding)})


def spell_module(name: str) -> str:
    """The name of a module within a tag."""
    return visible(name) or "(root)"
