"""The figure as plotly understands it: its bars against the histogram, its spans against the formats."""

from __future__ import annotations

import json
from math import log2
from typing import Any

import pytest
import torch

from nanwatch import ExponentHistogram, exponent_histogram
from nanwatch.report.histogram import SHOWN_FORMATS, exponent_figure

HISTOGRAM = ExponentHistogram(
    torch.float16, {-20: 2, -14: 3, 0: 4, 15: 1}, num_zero=7, num_nan=1, num_neginf=2
)


def spans(figure: dict[str, Any]) -> dict[tuple[str, str], tuple[float, float]]:
    """From (format, part of it) to the powers of two where the bar begins and ends."""
    return {
        (name, trace["name"]): (base, base + length)
        for trace in figure["data"][1:]
        for name, base, length in zip(trace["y"], trace["base"], trace["x"], strict=True)
    }


@pytest.mark.parametrize(
    "histogram", [HISTOGRAM, exponent_histogram(torch.arange(9)), exponent_histogram(torch.empty(0))]
)
def test_plotly_takes_it(histogram: ExponentHistogram) -> None:
    """plotly's own validation accepts every name and value, and the dict is JSON without a nan."""
    graph_objects = pytest.importorskip("plotly.graph_objects")
    figure = exponent_figure(histogram, title="encoder.0")
    assert len(graph_objects.Figure(figure).data) == 3
    assert json.loads(json.dumps(figure, allow_nan=False)) == figure


def test_the_bars_are_the_counts() -> None:
    """One bar for each power of two between the ends, empty ones too, as a share of what has a power of two."""
    bars = exponent_figure(HISTOGRAM)["data"][0]
    assert bars["x"] == list(range(-20, 16))
    assert sum(bars["y"]) == pytest.approx(1.0)
    shown = {x: (y, n) for x, y, n in zip(bars["x"], bars["y"], bars["customdata"], strict=True) if n}
    assert shown == {-20: (0.2, 2), -14: (0.3, 3), 0: (0.4, 4), 15: (0.1, 1)}


def test_subnormals_have_a_colour_of_their_own() -> None:
    """The bars below the smallest normal number of the dtype differ from the others; integers have none."""
    colors = exponent_figure(HISTOGRAM)["data"][0]["marker"]["color"]
    assert len(set(colors[:6])) == len(set(colors[6:])) == 1
    assert colors[5] != colors[6]
    whole = exponent_figure(exponent_histogram(torch.arange(9)))["data"][0]["marker"]["color"]
    assert set(whole) == {colors[6]}


def test_formats_lie_where_they_end() -> None:
    """Each format's bar goes from its smallest number to its smallest normal one and on to its largest."""
    found = spans(exponent_figure(HISTOGRAM))
    assert list(found)[: len(SHOWN_FORMATS)] == [(name, "normal") for name in SHOWN_FORMATS]
    for name in SHOWN_FORMATS:
        info = torch.finfo(getattr(torch, name))
        assert found[name, "normal"] == pytest.approx((log2(info.smallest_normal), log2(info.max)))
        assert found[name, "subnormal"][1] == found[name, "normal"][0]
    assert found["float8_e4m3fn", "subnormal"][0] == -9
    assert spans(exponent_figure(HISTOGRAM, ["float64"]))["float64", "subnormal"] == (-1074, -1022)


def test_what_has_no_power_of_two_is_in_the_title() -> None:
    """Zeros, nans and infinities are named with their numbers, and only where there are any."""
    title = exponent_figure(HISTOGRAM, title="encoder.0")["layout"]["title"]["text"]
    assert title == "encoder.0<br>20 elements of float16, 7 zero, 2 subnormal, 1 nan, 2 inf"
    plain = exponent_figure(ExponentHistogram(torch.int8, {3: 5}))["layout"]["title"]["text"]
    assert plain == "5 elements of int8"


def test_the_axis_opens_on_the_data() -> None:
    """float64 has 2098 powers of two; what is shown first is where the elements are."""
    begin, end = exponent_figure(exponent_histogram(torch.ones(3, dtype=torch.float64)))["layout"]["xaxis"][
        "range"
    ]
    assert begin < 0
    assert end > 1
    assert end - begin < 10


def test_an_unknown_format_is_named() -> None:
    """A dtype without ends is an error in words."""
    with pytest.raises(ValueError, match="'int8', which is no floating-point format"):
        exponent_figure(HISTOGRAM, ["int8"])
