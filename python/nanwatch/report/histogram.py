"""Exponent histogram of one tensor as a report keeps it, and its picture over the ranges of formats.

The picture is a plotly figure as plain data: what `Plotly.react(element, figure.data, figure.layout)` and
`plotly.graph_objects.Figure(figure)` take. It is JSON as it stands. Nothing here needs torch or plotly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, log2
from typing import TYPE_CHECKING, Any

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

_NORMAL, _SUBNORMAL = "#3b6fb6", "#e0a030"
_MARGIN = 3  # powers of two beside the data, so that an end of a format just beyond it is seen


def exponent_figure(
    histogram: ExponentHistogram | StoredHistogram,
    formats: Sequence[str] = SHOWN_FORMATS,
    *,
    title: str = "",
) -> dict[str, Any]:
    """Draw bars for the share of finite non-zero elements in each power of two, and below them the span of each format.

    The tensor's own subnormals, and the part of each format's span where its numbers are subnormal, are of another
    colour. Zeros, nans and infinities have no power of two and stand in the subtitle. The axis opens on the data;
    formats go on beyond it. plotly reads a little HTML in `title`. Raises ValueError for a format that has no ends.
    """
    spans = {name: _ends(name) for name in formats}
    dtype = _name(histogram)
    if isinstance(histogram, StoredHistogram):
        first, counts = histogram.first, histogram.counts
    else:
        first, counts = _dense(histogram.counts)
    counts = counts or (0,)
    return {
        "data": [_bars(dtype, first, counts), *_span_bars(spans)],
        "layout": {
            "title": {"text": _title(histogram, dtype, first, counts, title), "x": 0},
            "barmode": "overlay",
            "bargap": 0,
            "showlegend": False,
            "hovermode": "closest",
            "xaxis": {
                "title": {"text": "power of two"},
                "range": [first - _MARGIN, first + len(counts) + _MARGIN],
                "anchor": "y2",
                "zeroline": False,
            },
            "yaxis": {
                "title": {"text": "share of elements"},
                "domain": [0.32, 1.0],
                "tickformat": ".0%",
                "rangemode": "tozero",
            },
            "yaxis2": {"domain": [0.0, 0.24], "autorange": "reversed", "automargin": True},
        },
    }


def _ends(name: str) -> Limits:
    ends = limits(name)
    if ends is None:
        raise ValueError(f"exponent_figure got {name!r}, which is no floating-point format such as 'float16'")
    return ends


def _bars(dtype: str, first: int, counts: Sequence[int]) -> dict[str, Any]:
    normal = _first_normal(dtype)
    total = sum(counts) or 1
    exponents = range(first, first + len(counts))
    return {
        "type": "bar",
        "name": dtype,
        "x": list(exponents),
        "y": [count / total for count in counts],
        "customdata": list(counts),
        # A bar goes from 2^e to 2^(e+1), as the formats' ends are on the same axis.
        "width": 1,
        "offset": 0,
        "marker": {"color": [_NORMAL if exponent >= normal else _SUBNORMAL for exponent in exponents]},
        "hovertemplate": "from 2^%{x}: %{customdata} elements, %{y:.2%}<extra></extra>",
    }


def _first_normal(dtype: str) -> float:
    """Return the power of two from which on numbers are normal. All integers are."""
    ends = limits(dtype)
    return -inf if ends is None else floor_log2(ends.smallest_normal)


def _span_bars(spans: dict[str, Limits]) -> list[dict[str, Any]]:
    traces = []
    for kind, color in (("normal", _NORMAL), ("subnormal", _SUBNORMAL)):
        low = [log2(e.smallest_normal if kind == "normal" else e.smallest_subnormal) for e in spans.values()]
        high = [log2(e.largest if kind == "normal" else e.smallest_normal) for e in spans.values()]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": kind,
                "xaxis": "x",
                "yaxis": "y2",
                "y": list(spans),
                "base": low,
                "x": [b - a for a, b in zip(low, high, strict=True)],
                "customdata": high,
                "width": 0.7,
                "marker": {"color": color, "opacity": 0.6},
                "hovertemplate": f"%{{y}}, {kind}: 2^%{{base:.1f}} to 2^%{{customdata:.1f}}<extra></extra>",
            }
        )
    return traces


def _title(
    histogram: ExponentHistogram | StoredHistogram, dtype: str, first: int, counts: Sequence[int], title: str
) -> str:
    normal = _first_normal(dtype)
    num_inf = histogram.num_posinf + histogram.num_neginf
    beside = (
        (histogram.num_zero, "zero"),
        (sum(num for exponent, num in enumerate(counts, first) if exponent < normal), "subnormal"),
        (histogram.num_nan, "nan"),
        (num_inf, "inf"),
    )
    numel = sum(counts) + histogram.num_zero + histogram.num_nan + num_inf
    parts = [f"{numel} elements of {dtype}", *(f"{num} {what}" for num, what in beside if num)]
    return "<br>".join(part for part in (title, ", ".join(parts)) if part)
