"""Pictures of a page as inline SVG: charts of lines on a logarithmic scale, heat maps, and exponent histograms.

All text goes through `escape`. Colours are the page's own variables.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape as escape_html
from math import isfinite, log2, log10
from typing import Any

import numpy as np

from ..numerics.formats import limits
from ..util.visible import visible
from .histogram import StoredHistogram, first_normal, histogram_words

_WIDTH, _LEFT, _RIGHT, _TOP = 1100, 80, 16, 12
_PLOT = 340  # height of a chart's area
_MOST_POINTS = 400  # of a line, whose points show their numbers under the pointer
_DASHES = {"dotted": "2 4", "dashed": "7 5"}
_LABELS = 8  # names below a chart


def escape(text: object) -> str:
    """Return text for SVG, spelt out where it is not printable."""
    return escape_html(visible(str(text)))


def _text(x: float, y: float, text: object, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    head = (
        f'<svg class="drawing" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
    )
    return "".join([head, *parts, "</svg>"])


def chart(lines: Sequence[Mapping[str, Any]], across: str, high: str, label: str) -> str:
    """Return a chart. A line has `name`, `color`, `dash`, `x`, `y` and the names `at` each x; a gap has no number.

    A line with `isMark` is points alone. One with `inLegend` False is named by another one.
    """
    points = [
        [
            (float(x), log10(y)) if isinstance(y, int | float) and isfinite(y) and y > 0 else None
            for x, y in zip(line["x"], line["y"], strict=True)
        ]
        for line in lines
    ]
    every = [point for row in points for point in row if point is not None]
    numbers = [float(x) for line in lines for x in line["x"]]
    if not numbers:
        return ""
    left, right = min(numbers), max(numbers)
    low, top = (min(y for _, y in every), max(y for _, y in every)) if every else (0.0, 1.0)
    low, top = low - 0.06 * (top - low or 1), top + 0.06 * (top - low or 1)

    def place(x: float, y: float) -> tuple[float, float]:
        width = _WIDTH - _LEFT - _RIGHT
        return _LEFT + width * (x - left) / (right - left or 1), _TOP + _PLOT * (top - y) / (top - low)

    parts = []
    step = max(1, -(-int(top - low + 1) // 8))
    for power in range(int(-(-low // step)) * step, int(top) + 1, step):
        y = place(left, power)[1]
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 8, y + 4, f"1e{power:+d}", "end"))
    named = dict(zip(numbers, [at for line in lines for at in line.get("at", line["x"])], strict=True))
    shown = sorted(named)[:: max(1, -(-len(named) // _LABELS))]
    for i, x in enumerate(shown):
        anchor = "start" if i == 0 else "end" if x == right else "middle"
        name = str(named[x])
        parts.append(
            _text(place(x, low)[0], _TOP + _PLOT + 18, name if len(name) < 24 else f"…{name[-22:]}", anchor)
        )
    for line, row in zip(lines, points, strict=True):
        parts += _line(line, row, place)
    parts.append(_text((_WIDTH + _LEFT) / 2, _TOP + _PLOT + 38, across, "middle"))
    parts.append(f'<g transform="rotate(-90 14 {_PLOT / 2:.0f})">{_text(14, _PLOT / 2, high, "middle")}</g>')
    legend = [
        f'<span style="color:var(--{escape(line["color"])})">● {escape(line["name"])}</span>'
        for line in lines
        if line.get("inLegend", True)
    ]
    return f'<p class="hint key">{" ".join(legend)}</p>{_svg(_TOP + _PLOT + 46, label, parts)}'


def _line(line: Mapping[str, Any], row: Sequence[tuple[float, float] | None], place: Any) -> list[str]:
    color, runs = f"var(--{escape(line['color'])})", [list[tuple[float, float]]()]
    for point in row:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(place(*point))
    parts = []
    dash = f' stroke-dasharray="{_DASHES[line["dash"]]}"' if line.get("dash") else ""
    is_mark = bool(line.get("isMark"))
    for run in runs:
        if len(run) > 1 and not is_mark:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in run)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}"{dash}/>')
    if len(row) <= _MOST_POINTS:
        names = line.get("at", line["x"])
        for name, point, y in zip(names, row, line["y"], strict=True):
            if point is not None:
                at, up = place(*point)
                size = 6 if is_mark else 2.5
                title = f"{escape(line['name'])}, {escape(name)}: {y:.4g}"
                parts.append(
                    f'<circle cx="{at:.1f}" cy="{up:.1f}" r="{size}" fill="{color}"><title>{title}</title></circle>'
                )
    return parts


_ROW, _MOST_NAMES = 14, 60  # height of a named row; more rows are drawn without names
_GONE, _ZERO, _ABSENT = (196, 35, 47), (120, 160, 215), (232, 233, 230)


def heat_map(
    bits: Any,
    rows: Sequence[str],
    first: Sequence[int],
    last: Sequence[int],
    label: str,
    signs: Sequence[Any],
) -> str:
    """Return a heat map of bits of headroom by row and column: nan where there is none, -inf where one is not finite.

    `signs` are (sign, column, row or None, text), above the map or in it.
    """
    image = base64.b64encode(_png(_colors(np.asarray(bits, float)))).decode()
    is_named = len(rows) <= _MOST_NAMES
    left, height = (
        (260 if is_named else _LEFT),
        (_ROW * len(rows) if is_named else max(min(len(rows), 600), 120)),
    )
    width, top = _WIDTH - left - _RIGHT, 20
    parts = [
        f'<image x="{left}" y="{top}" width="{width}" height="{height}" preserveAspectRatio="none"'
        f' style="image-rendering:pixelated" href="data:image/png;base64,{image}"/>'
    ]
    tall, wide = height / max(len(rows), 1), width / max(len(first), 1)
    if is_named:
        for i, row in enumerate(rows):
            name = row if len(row) < 38 else f"…{row[-36:]}"
            parts.append(_text(left - 8, top + (i + 0.8) * tall, name, "end"))
    for sign, column, place, text in signs:
        y = top - 6 if place is None else top + (place + 0.8) * tall
        parts.append(
            f"<g>{_text(left + (column + 0.5) * wide, y, sign, 'middle')}<title>{escape(text)}</title></g>"
        )
    if len(first):
        parts.append(_text(left, top + height + 16, first[0]))
        parts.append(_text(left + width, top + height + 16, last[-1], "end"))
    return _svg(top + height + 22, label, parts)


def _colors(bits: Any) -> Any:
    """Return the colour of each cell: red below 2 bits, amber below 6, then green, paler with more room."""
    colors = np.empty((*bits.shape, 3), np.uint8)
    colors[...] = _ABSENT
    near, low, fine, paper = (
        np.array(rgb, float) for rgb in ((217, 72, 15), (230, 175, 60), (42, 127, 98), (255,) * 3)
    )
    share = np.clip((bits - 2) / 4, 0, 1)[..., None]
    paler = np.clip((bits - 6) / 34, 0, 0.8)[..., None]
    with np.errstate(invalid="ignore"):
        is_low, is_fine = bits < 6, bits >= 6
        colors[is_low] = (near * (1 - share) + low * share)[is_low]
        colors[is_fine] = (fine * (1 - paler) + paper * paler)[is_fine]
    colors[np.isneginf(bits)] = _GONE
    colors[np.isposinf(bits)] = _ZERO
    return colors


def _png(pixels: Any) -> bytes:
    """Return an image of 8-bit RGB."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", max(width, 1), max(height, 1), 8, 2, 0, 0, 0)
    content = rows if pixels.size else b"\0\0\0\0"
    return (
        b"\x89PNG\r\n\x1a\n"
        + part(b"IHDR", head)
        + part(b"IDAT", zlib.compress(content))
        + part(b"IEND", b"")
    )


SHOWN_FORMATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")
"""The formats that a tensor may be narrowed to, narrowest first."""
_BARS, _SPAN = 160, 18  # heights of the bars, and of the line of a format
_MARGIN = 3  # powers of two beside the data, so that an end of a format just beyond it is seen


def exponents(histogram: StoredHistogram) -> str:
    """Return bars for the share of elements in each power of two, and below them the span of each format.

    Subnormal numbers, and the part of each span where numbers are subnormal, are of another colour.
    """
    counts = histogram.counts or (0,)
    low, high = histogram.first - _MARGIN, histogram.first + len(counts) + _MARGIN
    step = (_WIDTH - 2 * _LEFT) / (high - low)
    total, most, normal = sum(counts) or 1, max(max(counts), 1), first_normal(histogram.dtype)
    parts: list[str] = []

    def bar(begin: float, end: float, y: float, tall: float, is_normal: bool, words: str) -> None:
        a, b = (2 * _LEFT + (min(max(x, low), high) - low) * step for x in (begin, end))
        if b > a:
            color = "output" if is_normal else "low"
            parts.append(
                f'<rect x="{a:.1f}" y="{y:.1f}" width="{b - a:.1f}" height="{tall:.1f}" fill="var(--{color})">'
                f"<title>{escape(words)}</title></rect>"
            )

    for exponent, count in enumerate(counts, histogram.first):
        tall = (_BARS - 10) * count / most
        words = f"from 2^{exponent}: {count} elements, {count / total:.2%}"
        bar(exponent, exponent + 1, _BARS - tall, tall, exponent >= normal, words)
    every = max(1, -(-(high - low) // 10))
    for exponent in range(-(-low // every) * every, high, every):
        parts.append(_text(2 * _LEFT + (exponent - low) * step, _BARS + 15, f"2^{exponent}", "middle"))
    names = list(dict.fromkeys((*SHOWN_FORMATS, histogram.dtype)))
    for i, name in enumerate(names):
        ends, y = limits(name), _BARS + 28 + _SPAN * i
        if ends is not None:
            smallest, middle, largest = (
                log2(ends.smallest_subnormal),
                log2(ends.smallest_normal),
                log2(ends.largest),
            )
            bar(
                smallest,
                middle,
                y,
                _SPAN - 6,
                False,
                f"{name}, subnormal: 2^{smallest:.1f} to 2^{middle:.1f}",
            )
            bar(middle, largest, y, _SPAN - 6, True, f"{name}, normal: 2^{middle:.1f} to 2^{largest:.1f}")
            parts.append(_text(2 * _LEFT - 8, y + 11, name, "end"))
    return _svg(_BARS + 34 + _SPAN * len(names), histogram_words(histogram), parts)
