"""The page of a difference in headless Chromium: it draws both sides, takes names as text, and asks for nothing."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from nanwatch.trace.difference import Difference, Growth, RecordPair, Series, diff_html
from nanwatch.util.visible import visible
from support import chromium
from support.chromium import Browser, Tab, overlaps
from support.html_page import HOSTILE

pytestmark = [
    pytest.mark.skipif(chromium.PATH is None, reason="needs Chromium: apt-get install chromium"),
]
pytest.importorskip("jinja2", reason="the page needs jinja2: pip install jinja2")

DRAWN = "['calls-chart', 'series-chart'].every((id) => document.getElementById(id)?.dataset.drawn)"
CALLS, SERIES = ("drawing.charts['calls-chart']", "drawing.charts['series-chart']")


def difference(names: tuple[str, ...]) -> Difference:
    """Two runs of six batches that part in every module, one of which overflows in B."""
    series = tuple(
        Series(name, tuple(range(6)), (1.0 + i,) * 6, (2.0, 4.0, 8.0, 0.0, 32.0, inf))
        for i, name in enumerate(names)
    )
    first = RecordPair(0, names[0], "Linear", "output", "range", "abs_max 1 against 2", 0, names[0], "Linear")
    grew = tuple(Growth(name, "output", 4, 1.0 + i, 32.0) for i, name in enumerate(names))
    calls = Series("batch 0", names, tuple(1.0 + i for i in range(len(names))), (2.0,) * len(names))
    return Difference(
        a="a.parquet", b="b.parquet", rtol=1e-3, first=first, firsts=(first,), sketched=None, grew=grew,
        num_records=12, num_apart=6, num_bits=0, batches=((0, 5),) * 6, only_a=(), only_b=((names[-1], 3),),
        remarks=(), calls=calls, series=series,
    )  # fmt: skip


def show(browser: Browser, path: Path, found: Difference, width: int = 1280) -> Tab:
    path.write_text(diff_html(found), encoding="utf-8")
    tab = browser.open(path)
    tab.resize(width)
    tab.wait(f"document.readyState === 'complete' && {DRAWN}")
    return tab


def test_both_sides_are_drawn(browser: Browser, tmp_path: Path) -> None:
    """A line a side for the calls and for each module; zero and inf are gaps, and told where the mouse is."""
    tab = show(browser, tmp_path / "diff.html", difference(("encoder.0.wo", "encoder.1.wo", "head")))
    assert tab.ask(f"{CALLS}.made.traces.map((one) => one.y)") == [[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]]
    lines = tab.ask(f"{SERIES}.made.traces.map((one) => [one.name, one.y, one.inLegend])")
    assert lines[0] == ["encoder.0.wo", [1.0] * 6, True]
    assert lines[1] == ["encoder.0.wo", [2.0, 4.0, 8.0, 0.0, 32.0, "inf"], False]
    assert len(lines) == 6
    assert tab.ask(f"[0, 1, 2, 3, 4, 5].map({SERIES}.made.traces[1].words)") == [
        f"encoder.0.wo, batch {i}\nB: {told}"
        for i, told in enumerate(("2.00e+0", "4.00e+0", "8.00e+0", "0.00e+0", "3.20e+1", "inf"))
    ]
    # Zero and inf have no point.
    assert tab.ask(f"{SERIES}.points.length") == 3 * (6 + 4)
    assert tab.ask("document.querySelectorAll('#calls-chart .points').length") == 2
    assert (tab.requests, tab.complaints) == ([], [])


def test_a_name_hides_its_lines_and_a_drag_zooms(browser: Browser, tmp_path: Path) -> None:
    """A click on the legend takes both sides of a module away and brings them back; a double click shows all again."""
    tab = show(browser, tmp_path / "diff.html", difference(("encoder.0.wo", "encoder.1.wo")))
    tab.click("#series-chart .legend button")
    assert tab.ask(f"{SERIES}.points.length") == 10
    tab.click("#series-chart .legend button")
    assert tab.ask(f"{SERIES}.points.length") == 20
    x, y = tab.ask(
        "(() => { const box = document.querySelector('#series-chart .plot').getBoundingClientRect();"
        " return [box.x, box.y + 100]; })()"
    )
    for kind, at in (("mousePressed", x + 100), ("mouseMoved", x + 300), ("mouseReleased", x + 300)):
        event = {"type": kind, "x": at, "y": y, "button": "left", "clickCount": 1}
        tab.call("Input.dispatchMouseEvent", event)
    zoomed = tab.ask(f"{SERIES}.view.x")
    assert 0 < zoomed[0] < zoomed[1] < 5
    assert 0 < tab.ask(f"{SERIES}.points.length") < 20
    tab.ask("document.querySelector('#series-chart svg').dispatchEvent(new Event('dblclick'))")
    assert tab.ask(f"{SERIES}.points.length") == 20


def test_hostile_names_stay_text(browser: Browser, tmp_path: Path) -> None:
    """Nothing of a name runs, leads anywhere or is fetched, on the page, in the legend and under the mouse."""
    tab = show(browser, tmp_path / "diff.html", difference(HOSTILE))
    assert tab.ask("document.querySelectorAll('img, iframe, object, a, svg[onload]').length") == 0
    assert tab.ask("document.querySelectorAll('script').length") == 2
    cells = tab.ask("[...document.querySelectorAll('.operands tbody tr')].map((r) => r.cells[0].textContent)")
    assert cells == [visible(name) for name in HOSTILE]
    shown = tab.ask(
        "[...document.querySelectorAll('#series-chart .legend button')].map((one) => one.textContent)"
    )
    assert len(shown) == len(HOSTILE)
    assert "● <script>alert(1)</script>" in shown
    assert (tab.requests, tab.complaints) == ([], [])


@pytest.mark.parametrize("width", [1280, 400])
def test_legend_and_buttons_have_room(browser: Browser, tmp_path: Path, width: int) -> None:
    """Above the plot nothing lies over anything else, and the page is no wider than the screen."""
    names = tuple(f"encoder.block.{i}.layer.{i}.feed_forward.wo" for i in range(8))
    tab = show(browser, tmp_path / "diff.html", difference(names), width)
    tab.wait(f"!{overlaps('calls-chart')}.length && !{overlaps('series-chart')}.length")
    assert tab.ask("document.documentElement.scrollWidth") <= width


def test_the_charts_follow_the_colour_scheme(browser: Browser, tmp_path: Path) -> None:
    """They turn dark, and light again, while the page is open."""
    tab = show(browser, tmp_path / "diff.html", difference(("a", "b")))
    for scheme, ink in (("dark", "rgb(121, 170, 245)"), ("light", "rgb(37, 99, 201)")):
        tab.prefer(scheme)
        tab.wait(f"getComputedStyle(document.querySelector('#calls-chart .points')).stroke === '{ink}'")
    assert tab.complaints == []
