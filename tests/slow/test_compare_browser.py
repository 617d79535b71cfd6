"""The page of a comparison in headless Chromium: it draws depth and tokens, takes names as text, asks for nothing."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from nanwatch.equivalence.comparison import Comparison, ModuleError
from nanwatch.report.page import ABSENT, GONE
from nanwatch.util.visible import visible
from support import chromium
from support.chromium import Browser, Tab, overlaps
from support.html_page import HOSTILE

pytestmark = [
    pytest.mark.skipif(chromium.PATH is None, reason="needs Chromium: apt-get install chromium"),
]
pytest.importorskip("jinja2", reason="the page needs jinja2: pip install jinja2")

DRAWN = "['depth-chart', 'map'].every((id) => document.getElementById(id)?.dataset.drawn)"
DEPTH = "drawing.charts['depth-chart'].made.traces"
CELLS = "field.rows.map((_, row) => [...cells.slice(row * columns, (row + 1) * columns)])"


def comparison(names: tuple[str, ...], num_tokens: int = 4) -> Comparison:
    """Two models whose first module is equal, the second far apart in its last token, and all behind it."""
    rows = tuple(
        ModuleError(
            name, name, "Linear", "Linear", 0.0 if i < 2 else 0.25, 0.25 if i else 0.0, 1e-7,
            (0.0,) * (num_tokens - 1) + ((0.5 if i > 1 else inf) if i else 0.0,),
        )
        for i, name in enumerate(names)
    )  # fmt: skip
    return Comparison(
        equal=False, first=rows[1], where="", likely=("token 3 of 4 only",), why="", floor="error of A", factor=8.0,
        calls_a=len(rows), calls_b=len(rows), modules=rows, remarks=(names[-1],),
    )  # fmt: skip


def show(browser: Browser, path: Path, found: Comparison, width: int = 1280) -> Tab:
    path.write_text(found.to_html(), encoding="utf-8")
    tab = browser.open(path)
    tab.resize(width)
    tab.wait(f"document.readyState === 'complete' && {DRAWN}")
    return tab


def test_depth_and_tokens_are_drawn(browser: Browser, tmp_path: Path) -> None:
    """A zero is a gap, the first module has a mark, an inf the last colour, and the mouse is told each number."""
    tab = show(browser, tmp_path / "compare.html", comparison(("embed", "h.0.mlp", "head")))
    lines = tab.ask(f"Object.fromEntries({DEPTH}.map((one) => [one.name, one.y]))")
    assert lines["error"] == [0.0, 0.25, 0.25]
    assert lines["error of the input"] == [0.0, 0.0, 0.25]
    assert lines["limit"] == pytest.approx([8e-7] * 3)
    assert (tab.ask(f"{DEPTH}.at(-1).x"), lines["first"]) == ([1], [0.25])
    assert tab.ask(f"{DEPTH}.at(-1).words(0)") == "h.0.mlp (Linear)\nfirst: 2.50e-1"
    # A zero has no point.
    assert tab.ask("drawing.charts['depth-chart'].points.length") == 2 + 1 + 3 + 3 + 1
    assert tab.ask(CELLS) == [[ABSENT] * 4, [ABSENT] * 3 + [GONE], [ABSENT] * 3 + [30]]
    assert tab.ask("words(1, 3)") == "h.0.mlp (Linear) · token 3 · not finite · error inf"
    assert tab.ask("words(2, 3)") == "head (Linear) · token 3 · error 5.00e-1"
    assert tab.ask("words(2, 0)") == "head (Linear) · token 0 · no difference"
    assert (tab.requests, tab.complaints) == ([], [])


def test_no_error_of_many_tokens_is_lost(browser: Browser, tmp_path: Path) -> None:
    """Cells stand for several tokens and modules, and have the largest error and the name of its module."""
    found = comparison(("embed", *(f"h.{i}" for i in range(700))), 1001)
    tab = show(browser, tmp_path / "compare.html", found)
    made = tab.ask(CELLS)
    assert (len(made), len(made[0])) == (234, 167)
    assert all(row[-1] != ABSENT and row[0] == ABSENT for row in made)
    assert tab.ask("words(0, columns - 1)") == "h.0 (Linear) · tokens 996 to 1000 · not finite · error inf"


def test_hostile_names_stay_text(browser: Browser, tmp_path: Path) -> None:
    """Nothing of a name runs, leads anywhere or is fetched, on the page, at the axis and under the mouse."""
    tab = show(browser, tmp_path / "compare.html", comparison(HOSTILE))
    assert tab.ask("document.querySelectorAll('iframe, object, a, svg[onload], main > img').length") == 0
    assert tab.ask("document.querySelectorAll('script').length") == 2
    cells = tab.ask("[...document.querySelectorAll('.operands tbody tr')].map((r) => r.cells[1].textContent)")
    assert cells == [visible(name) for name in HOSTILE[1:]]
    assert tab.ask("field.rows").count("<script>alert(1)</script> (Linear)") == 1
    assert (tab.requests, tab.complaints) == ([], [])


@pytest.mark.parametrize("width", [1280, 400])
def test_legend_and_buttons_have_room(browser: Browser, tmp_path: Path, width: int) -> None:
    """Above the plot nothing lies over anything else, and the page is no wider than the screen."""
    names = tuple(f"encoder.block.{i}.layer.{i}.feed_forward.wo" for i in range(8))
    tab = show(browser, tmp_path / "compare.html", comparison(names), width)
    tab.wait(f"!{overlaps('depth-chart')}.length")
    assert tab.ask("document.documentElement.scrollWidth") <= width


def test_the_charts_follow_the_colour_scheme(browser: Browser, tmp_path: Path) -> None:
    """They turn dark, and light again, while the page is open."""
    tab = show(browser, tmp_path / "compare.html", comparison(("a", "b")))
    for scheme, ink, gone in (
        ("dark", "rgb(121, 170, 245)", [255, 111, 116]),
        ("light", "rgb(37, 99, 201)", [196, 35, 47]),
    ):
        tab.prefer(scheme)
        tab.wait(f"getComputedStyle(document.querySelector('#depth-chart .points')).stroke === '{ink}'")
        tab.wait(
            f"[0, 8, 16].map((bits) => (shade(field.gone) >> bits) & 255).join() === '{','.join(map(str, gone))}'"
        )
    assert tab.complaints == []
