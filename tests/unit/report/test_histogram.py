"""The picture of an exponent histogram: its bars against the counts, its spans against the formats."""

from __future__ import annotations

from math import log2
from xml.etree import ElementTree

import pytest
import torch

from nanwatch import ExponentHistogram, exponent_histogram
from nanwatch.report.histogram import SHOWN_FORMATS, exponent_picture, histogram_words

SVG = "{http://www.w3.org/2000/svg}"
HISTOGRAM = ExponentHistogram(
    torch.float16, {-20: 2, -14: 3, 0: 4, 15: 1}, num_zero=7, num_nan=1, num_neginf=2
)


def rectangles(picture: str) -> dict[str, dict[str, str]]:
    """Return the attributes of each rectangle by what it tells."""
    return {
        rect[0].text or "": dict(rect.attrib) for rect in ElementTree.fromstring(picture).iter(f"{SVG}rect")
    }


def test_the_bars_are_the_counts() -> None:
    """One bar for each power of two between the ends, empty ones too, as high as its share of what has a power."""
    bars = {
        told: rect
        for told, rect in rectangles(exponent_picture(HISTOGRAM)).items()
        if told.startswith("from")
    }
    assert len(bars) == 36
    heights = {told: float(rect["height"]) for told, rect in bars.items() if float(rect["height"])}
    assert list(heights) == [
        f"from 2^{power}: {count} elements, {count / 10:.2%}"
        for power, count in ((-20, 2), (-14, 3), (0, 4), (15, 1))
    ]
    assert [height / max(heights.values()) for height in heights.values()] == pytest.approx(
        [0.5, 0.75, 1.0, 0.25]
    )


def test_subnormals_have_a_colour_of_their_own() -> None:
    """The bars below the smallest normal number of the dtype differ from the others; integers have none."""
    colors = [
        rect["fill"]
        for told, rect in rectangles(exponent_picture(HISTOGRAM)).items()
        if told.startswith("from")
    ]
    assert len(set(colors[:6])) == len(set(colors[6:])) == 1
    assert colors[5] != colors[6]
    whole = rectangles(exponent_picture(exponent_histogram(torch.arange(9))))
    assert {rect["fill"] for told, rect in whole.items() if told.startswith("from")} == {colors[6]}


def test_formats_lie_where_they_end() -> None:
    """Each format's span goes from its smallest number to its smallest normal one and on to its largest."""
    told = set(rectangles(exponent_picture(exponent_histogram(torch.tensor([2.0**-40, 2.0**40])))))
    for name in SHOWN_FORMATS:
        info = torch.finfo(getattr(torch, name))
        assert f"{name}, normal: 2^{log2(info.smallest_normal):.1f} to 2^{log2(info.max):.1f}" in told
    assert "float8_e4m3fn, subnormal: 2^-9.0 to 2^-6.0" in told
    # A span ends where the picture ends, and what lies outside it is left out.
    assert not any("bfloat16, subnormal" in one for one in told)


def test_what_has_no_power_of_two_is_in_words() -> None:
    """Zeros, nans and infinities are named with their numbers, and only where there are any."""
    words = "20 elements of float16, 7 zero, 2 subnormal, 1 nan, 2 inf"
    assert histogram_words(HISTOGRAM) == words
    assert histogram_words(ExponentHistogram(torch.int8, {3: 5})) == "5 elements of int8"
    title = ElementTree.fromstring(exponent_picture(HISTOGRAM, title="<encoder>")).find(f"{SVG}title")
    assert title is not None
    assert title.text == f"<encoder>. {words}"


@pytest.mark.parametrize(
    "histogram", [exponent_histogram(torch.empty(0)), exponent_histogram(torch.ones(3, dtype=torch.float64))]
)
def test_the_axis_shows_the_data(histogram: ExponentHistogram) -> None:
    """float64 has 2098 powers of two; what is shown is where the elements are."""
    texts = [
        text.text or "" for text in ElementTree.fromstring(exponent_picture(histogram)).iter(f"{SVG}text")
    ]
    powers = [int(text.removeprefix("2^")) for text in texts if text.startswith("2^")]
    assert 4 < len(powers) < 12
    assert min(powers) < 0 < max(powers)


def test_an_unknown_format_is_named() -> None:
    """A dtype without ends is an error in words."""
    with pytest.raises(ValueError, match="'int8', which is no floating-point format"):
        exponent_picture(HISTOGRAM, ["int8"])
