"""Pictures of pages: bars and spans of histograms, points of charts, and colours of heat maps."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from math import inf, log2, nan
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from nanwatch.numerics.distribution import ExponentHistogram, exponent_histogram
from nanwatch.report.drawing import SHOWN_FORMATS, chart, exponents, heat_map
from nanwatch.report.histogram import StoredHistogram, histogram_words

HISTOGRAM = StoredHistogram.of(
    ExponentHistogram(torch.float16, {-20: 2, -14: 3, 0: 4, 15: 1}, num_zero=7, num_nan=1, num_neginf=2), "x"
)


def rectangles(picture: str) -> dict[str, dict[str, str]]:
    """Return the attributes of each rectangle by its title."""
    return {rect[0].text or "": dict(rect.attrib) for rect in ElementTree.fromstring(picture).iter("rect")}


def test_the_bars_are_the_counts() -> None:
    """One bar for each power of two between the ends, as high as its share, subnormals of another colour."""
    bars = [
        (title, rect) for title, rect in rectangles(exponents(HISTOGRAM)).items() if title.startswith("from")
    ]
    assert len(bars) == 36
    heights = {title: float(rect["height"]) for title, rect in bars if float(rect["height"])}
    assert list(heights) == [
        f"from 2^{power}: {count} elements, {count / 10:.2%}"
        for power, count in ((-20, 2), (-14, 3), (0, 4), (15, 1))
    ]
    assert [tall / max(heights.values()) for tall in heights.values()] == pytest.approx(
        [0.5, 0.75, 1.0, 0.25]
    )
    colors = [rect["fill"] for _, rect in bars]
    assert len(set(colors[:6])) == len(set(colors[6:])) == 1
    assert colors[5] != colors[6]


def test_formats_lie_where_they_end() -> None:
    """Each format's span goes from its smallest number to its smallest normal one and on to its largest."""
    wide = StoredHistogram.of(exponent_histogram(torch.tensor([2.0**-40, 2.0**40])), "x")
    titles = set(rectangles(exponents(wide)))
    for name in SHOWN_FORMATS:
        info = torch.finfo(getattr(torch, name))
        assert f"{name}, normal: 2^{log2(info.smallest_normal):.1f} to 2^{log2(info.max):.1f}" in titles
    assert "float8_e4m3fn, subnormal: 2^-9.0 to 2^-6.0" in titles
    # A span ends where the picture ends, and what lies outside it is left out.
    assert not any("bfloat16, subnormal" in title for title in titles)


def test_what_has_no_power_of_two_is_in_words() -> None:
    """Zeros, nans and infinities are named with their numbers, and only where there are any."""
    assert histogram_words(HISTOGRAM) == "20 elements of float16, 7 zero, 2 subnormal, 1 nan, 2 inf"


def test_a_chart_is_logarithmic_and_has_gaps() -> None:
    """Equal factors are equal distances; zeros and what is not finite are no points."""
    line = {
        "name": "<a>",
        "color": "output",
        "at": list("pqrst"),
        "x": range(5),
        "y": [1.0, 0.0, 10.0, nan, 100.0],
    }
    html = chart([line], "call", "abs max", "label")
    circles = re.findall(r'cy="([\d.]+)" .*?<title>(.*?)</title>', html)
    assert [title for _, title in circles] == [
        f"&lt;a&gt;, {x}: {y}" for x, y in (("p", 1), ("r", 10), ("t", 100))
    ]
    heights = [float(y) for y, _ in circles]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert chart([], "call", "abs max", "label") == ""


def test_a_heat_map_has_a_pixel_for_each_cell() -> None:
    """Not finite is red, no number is grey, and less room is redder."""
    bits = np.array([[-inf, nan, 1.0, 3.0], [5.0, 10.0, 40.0, inf]])
    html = heat_map(bits, ["<a>", "b"], range(4), range(4), "label", [("▼", 0, None, "batch 0")])
    png = base64.b64decode(re.search(r"base64,([^\"]+)", html).group(1))  # type: ignore[union-attr]
    assert struct.unpack(">II", png[16:24]) == (4, 2)
    size = struct.unpack(">I", png[33:37])[0]
    rows = zlib.decompress(png[41 : 41 + size])
    pixels = np.frombuffer(rows, np.uint8).reshape(2, 13)[:, 1:].reshape(2, 4, 3)
    assert pixels[0, 0].tolist() == [196, 35, 47]
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, 3).tolist()}) == 8
    assert pixels[0, 2, 1] < pixels[0, 3, 1]
    assert "&lt;a&gt;" in html
    assert "<title>batch 0</title>" in html
