"""The picture of an exponent histogram over the ranges of formats, as a plotly figure in plain data.

The dict is what `Plotly.react(element, figure.data, figure.layout)` and `plotly.graph_objects.Figure(figure)` take;
it is JSON as it stands, and nothing here needs plotly.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Any

from ..numerics.exponents import ExponentHistogram
from ..numerics.formats import Limits, floor_log2, limits
from ..numerics.ranges import _dtype_name

SHOWN_FORMATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")
"""The formats that a tensor may be narrowed to, narrowest first."""

_NORMAL, _SUBNORMAL = "#3b6fb6", "#e0a030"
_MARGIN = 3  # powers of two beside the data, so that an end of a format just beyond it is seen


def exponent_figure(
    histogram: ExponentHistogram, formats: Sequence[str] = SHOWN_FORMATS, *, title: str = ""
) -> dict[str, Any]:
    """Bars for the share of finite non-zero elements in each power of two, and under them the span of each format.

    The tensor's own subnormals, and the part of each format's span where its numbers are subnormal, are of another
    colour. Zeros, nans and infinities have no power of two and stand in the subtitle. The axis opens on the data;
    formats go on beyond it. plotly reads a little HTML in `title`. Raises ValueError for a format that has no ends.
    """
    spans = {name: _ends(name) for name in formats}
    exponents = _drawn(histogram)
    return {
        "data": [_bars(histogram, exponents), *_span_bars(spans)],
        "layout": {
            "title": {"text": _title(histogram, title), "x": 0},
            "barmode": "overlay",
            "bargap": 0,
            "showlegend": False,
            "hovermode": "closest",
            "xaxis": {
                "title": {"text": "power of two"},
                "range": [exponents.start - _MARGIN, exponents.stop + _MARGIN],
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


def _drawn(histogram: ExponentHistogram) -> range:
    """The powers of two from the lowest with an element to the highest."""
    return range(min(histogram.counts, default=0), max(histogram.counts, default=0) + 1)


def _bars(histogram: ExponentHistogram, exponents: range) -> dict[str, Any]:
    own = limits(_dtype_name(histogram.dtype))
    normal = exponents.start if own is None else floor_log2(own.smallest_normal)
    total = histogram.num_finite_nonzero or 1
    counts = [histogram.counts[exponent] for exponent in exponents]
    return {
        "type": "bar",
        "name": _dtype_name(histogram.dtype),
        "x": list(exponents),
        "y": [count / total for count in counts],
        "customdata": counts,
        # From 2^e to 2^(e+1), where the formats' ends are on the same axis.
        "width": 1,
        "offset": 0,
        "marker": {"color": [_NORMAL if exponent >= normal else _SUBNORMAL for exponent in exponents]},
        "hovertemplate": "from 2^%{x}: %{customdata} elements, %{y:.2%}<extra></extra>",
    }


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


def _title(histogram: ExponentHistogram, title: str) -> str:
    parts = [f"{histogram.numel} elements of {_dtype_name(histogram.dtype)}"]
    parts += [
        f"{num} {what}"
        for num, what in (
            (histogram.num_zero, "zero"),
            (histogram.num_subnormal, "subnormal"),
            (histogram.num_nan, "nan"),
            (histogram.num_inf, "inf"),
        )
        if num
    ]
    return "<br>".join(part for part in (title, ", ".join(parts)) if part)
