"""Exponent histogram of one tensor as a report keeps it, and its picture over the ranges of formats. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import inf, log2
from typing import TYPE_CHECKING

from ..numerics.formats import Limits, floor_log2, limits

if TYPE_CHECKING:
    from ..numerics.exponents import ExponentHistogram

_MOST = 2**63


@dataclass(frozen=True, slots=True)
class StoredHistogram:
    """Exponent histogram of one tensor in plain numbers, as a report keeps it.

    `counts[i]` elements of `label` have 2^(first + i) <= |x| < 2^(first + i + 1). The others have no power of two.

    `dtype` is of floating point. There are no zeros at either end of `counts`. Raises ValueError for a dtype without
    limits, for powers of two that it does not have, and for counts that no tensor has.
    """

    label: str
    dtype: str
    first: int
    counts: tuple[int, ...]
    num_zero: int = 0
    num_nan: int = 0
    num_posinf: int = 0
    num_neginf: int = 0

    def __post_init__(self) -> None:
        ends = limits(self.dtype)
        if ends is None:
            raise ValueError(f"the spread of {self.label} has the dtype {self.dtype!r}, which has no limits")
        least, most = floor_log2(ends.smallest_subnormal), floor_log2(ends.largest)
        last = self.first + len(self.counts) - 1
        if self.counts and not least <= self.first <= last <= most:
            raise ValueError(
                f"the spread of {self.label} goes from 2^{self.first} to 2^{last};"
                f" {self.dtype} has 2^{least} to 2^{most}"
            )
        beside = (self.num_zero, self.num_nan, self.num_posinf, self.num_neginf)
        if min(self.counts + beside) < 0 or max(self.counts + beside) >= _MOST:
            raise ValueError(f"the spread of {self.label} has a count that is below 0 or above {_MOST - 1}")

    @classmethod
    def of(cls, histogram: ExponentHistogram, label: str) -> StoredHistogram:
        """Return the histogram of a tensor of floating point in plain numbers."""
        first, counts = _dense(histogram.counts)
        beside = (histogram.num_zero, histogram.num_nan, histogram.num_posinf, histogram.num_neginf)
        return cls(label, _name(histogram), first, counts, *beside)


def _dense(by_exponent: Mapping[int, int]) -> tuple[int, tuple[int, ...]]:
    """Return the lowest exponent and the counts from there to the highest."""
    exponents = range(min(by_exponent, default=0), max(by_exponent, default=-1) + 1)
    return exponents.start, tuple(by_exponent.get(exponent, 0) for exponent in exponents)


def _name(histogram: ExponentHistogram | StoredHistogram) -> str:
    return str(histogram.dtype).removeprefix("torch.")


SHOWN_FORMATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")
"""The formats that a tensor may be narrowed to, narrowest first."""

# Colours of a page, and those of a picture by itself.
_NORMAL, _SUBNORMAL = "var(--output, #2563c9)", "var(--low, #b07a00)"
_INK, _LINE = "var(--quiet, #646b73)", "var(--line, #e2e3e0)"
_MARGIN = 3  # powers of two beside the data, so that an end of a format just beyond it is seen
_WIDTH, _LEFT, _RIGHT, _BARS, _SPAN = 560, 96, 8, 190, 18  # pixels; a span is the line of a format


def histogram_words(histogram: ExponentHistogram | StoredHistogram) -> str:
    """Return how many elements there are, and how many of them are zero, subnormal, nan or inf."""
    first, counts = _counts(histogram)
    normal = _first_normal(_name(histogram))
    num_inf = histogram.num_posinf + histogram.num_neginf
    beside = (
        (histogram.num_zero, "zero"),
        (sum(num for exponent, num in enumerate(counts, first) if exponent < normal), "subnormal"),
        (histogram.num_nan, "nan"),
        (num_inf, "inf"),
    )
    numel = sum(counts) + histogram.num_zero + histogram.num_nan + num_inf
    return ", ".join(
        [f"{numel} elements of {_name(histogram)}", *(f"{num} {what}" for num, what in beside if num)]
    )


def exponent_picture(
    histogram: ExponentHistogram | StoredHistogram, formats: Sequence[str] = SHOWN_FORMATS, *, title: str = ""
) -> str:
    """Return an SVG image: bars for the share of finite non-zero elements in each power of two, and below them the span
    of each format.

    The tensor's own subnormals, and the part of each format's span where its numbers are subnormal, are of another
    colour. Zeros, nans and infinities have no power of two and stand in the subtitle. The axis shows the data; formats
    go on beyond it. Raises ValueError for a format that has no ends.
    """
    spans = {name: _ends(name) for name in formats}
    first, counts = _counts(histogram)
    counts = counts or (0,)
    low, high = first - _MARGIN, first + len(counts) + _MARGIN
    step = (_WIDTH - _LEFT - _RIGHT) / (high - low)
    height = _BARS + 40 + _SPAN * len(spans)
    words = ". ".join(filter(None, (title, histogram_words(histogram))))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="spread" viewBox="0 0 {_WIDTH} {height}" role="img"'
        f' font-family="sans-serif" font-size="11"><title>{escape(words)}</title>'
    ]

    def bar(from_: float, to: float, y: float, tall: float, color: str, told: str) -> None:
        a, b = (_LEFT + (min(max(end, low), high) - low) * step for end in (from_, to))
        if b > a:
            parts.append(
                f'<rect x="{a:.1f}" y="{y:.1f}" width="{b - a:.1f}" height="{tall:.1f}" fill="{color}">'
                f"<title>{escape(told)}</title></rect>"
            )

    def label(x: float, y: float, anchor: str, text: str) -> None:
        parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_INK}">{escape(text)}</text>'
        )

    total, most, normal = sum(counts) or 1, max(max(counts), 1), _first_normal(_name(histogram))
    for share in (0.0, 0.5, 1.0):
        y = _BARS - share * (_BARS - 10)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{_LINE}"/>')
        label(_LEFT - 6, y + 4, "end", f"{share * most / total:.1%}")
    for exponent, count in enumerate(counts, first):
        tall = (_BARS - 10) * count / most
        color = _NORMAL if exponent >= normal else _SUBNORMAL
        told = f"from 2^{exponent}: {count} elements, {count / total:.2%}"
        bar(exponent, exponent + 1, _BARS - tall, tall, color, told)
    every = max(1, -(-(high - low) // 10))
    for exponent in range(-(-low // every) * every, high, every):
        label(_LEFT + (exponent - low) * step, _BARS + 15, "middle", f"2^{exponent}")
    for i, (name, ends) in enumerate(spans.items()):
        y = _BARS + 28 + _SPAN * i
        low_end, normal_end, high_end = (
            log2(end) for end in (ends.smallest_subnormal, ends.smallest_normal, ends.largest)
        )
        bar(
            low_end,
            normal_end,
            y,
            _SPAN - 6,
            _SUBNORMAL,
            f"{name}, subnormal: 2^{low_end:.1f} to 2^{normal_end:.1f}",
        )
        bar(
            normal_end,
            high_end,
            y,
            _SPAN - 6,
            _NORMAL,
            f"{name}, normal: 2^{normal_end:.1f} to 2^{high_end:.1f}",
        )
        label(_LEFT - 6, y + 10, "end", name)
    return "".join([*parts, "</svg>"])


def _ends(name: str) -> Limits:
    ends = limits(name)
    if ends is None:
        raise ValueError(
            f"exponent_picture got {name!r}, which is no floating-point format such as 'float16'"
        )
    return ends


def _counts(histogram: ExponentHistogram | StoredHistogram) -> tuple[int, tuple[int, ...]]:
    """Return the lowest power of two and the counts from there on."""
    if isinstance(histogram, StoredHistogram):
        return histogram.first, histogram.counts
    return _dense(histogram.counts)


def _first_normal(dtype: str) -> float:
    """Return the power of two from which on numbers are normal. All integers are."""
    ends = limits(dtype)
    return -inf if ends is None else floor_log2(ends.smallest_normal)
