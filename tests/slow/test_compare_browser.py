"""The page of a comparison in headless Chromium: it draws depth and tokens, takes names as text, asks for nothing."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from nanwatch.equivalence.results import Comparison, ModuleError
from nanwatch.util.visible import visible
from support import chromium
from support.chromium import Browser, Tab, overlaps
from support.html_page import HOSTILE

pytestmark = [
    pytest.mark.skipif(chromium.PATH is None, reason="needs Chromium: apt-get install chromium"),
]
pytest.importorskip("plotly", reason="the page needs plotly: pip install plotly")
pytest.importorskip("jinja2", reason="the page needs jinja2: pip install jinja2")

DRAWN = "['depth', 'tokens'].every((id) => document.getElementById(id)?.dataset.drawn)"


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
    lines = tab.ask("Object.fromEntries(depth.data.map((one) => [one.name, one.y]))")
    assert lines["error"] == [None, 0.25, 0.25]
    assert lines["error of the input"] == [None, None, 0.25]
    assert lines["limit"] == pytest.approx([8e-7] * 3)
    assert (tab.ask("depth.data.at(-1).x"), lines["first"]) == ([1], [0.25])
    assert tab.ask("depth.data.at(-1).hovertext") == ["h.0.mlp (Linear)<br>first: 2.50e-1"]
    assert tab.ask("depth.querySelectorAll('.scatterlayer .trace').length") == 5
    z = tab.ask("tokens.data[0].z")
    assert z[0] == [None] * 4
    assert z[2][:3] == [None] * 3
    assert z[2][3] == pytest.approx(-0.30103)
    assert z[1][3] == tab.ask("tokens.data[0].zmax") > z[2][3]
    assert tab.ask("tokens.data[0].hovertext[1][3]") == "h.0.mlp (Linear), token 3<br>error: inf"
    assert tab.ask("tokens.querySelectorAll('.heatmaplayer image').length") == 1
    assert (tab.requests, tab.complaints) == ([], [])


def test_no_error_of_many_tokens_is_lost(browser: Browser, tmp_path: Path) -> None:
    """Cells stand for several tokens and modules, and have the largest error and the name of its module."""
    found = comparison(("embed", *(f"h.{i}" for i in range(700))), 1001)
    tab = show(browser, tmp_path / "compare.html", found)
    rows, columns = tab.ask("[tokens.data[0].z.length, tokens.data[0].z[0].length]")
    assert (rows, columns) == (234, 167)
    assert tab.ask("tokens.data[0].z.every((row) => row.at(-1) !== null && row[0] === null)")
    assert tab.ask("tokens.data[0].hovertext[0].at(-1)") == "h.0 (Linear), token 996<br>error: inf"


def test_hostile_names_stay_text(browser: Browser, tmp_path: Path) -> None:
    """Nothing of a name runs, leads anywhere or is fetched, on the page, at the axis and under the mouse."""
    tab = show(browser, tmp_path / "compare.html", comparison(HOSTILE))
    assert tab.ask("document.querySelectorAll('iframe, object, a, svg[onload], main > img').length") == 0
    assert tab.ask("document.querySelectorAll('script').length") == 4
    cells = tab.ask("[...document.querySelectorAll('.operands tbody tr')].map((r) => r.cells[1].textContent)")
    assert cells == [visible(name) for name in HOSTILE[1:]]
    marks = tab.ask("[...tokens.querySelectorAll('.ytick text')].map((one) => one.textContent)")
    assert "<script>alert(1)</script>" in marks
    assert (tab.requests, tab.complaints) == ([], [])


@pytest.mark.parametrize("width", [1280, 400])
def test_legend_and_buttons_have_room(browser: Browser, tmp_path: Path, width: int) -> None:
    """Above the plot nothing lies over anything else, and the page is no wider than the screen."""
    names = tuple(f"encoder.block.{i}.layer.{i}.feed_forward.wo" for i in range(8))
    tab = show(browser, tmp_path / "compare.html", comparison(names), width)
    tab.wait(f"!{overlaps('depth')}.length && !{overlaps('tokens')}.length")
    assert tab.ask("document.documentElement.scrollWidth") <= width


def test_the_charts_follow_the_colour_scheme(browser: Browser, tmp_path: Path) -> None:
    """They turn dark, and light again, while the page is open."""
    tab = show(browser, tmp_path / "compare.html", comparison(("a", "b")))
    for scheme, ink, palest in (("dark", "#e4e6e8", "#2e343a"), ("light", "#1c2024", "#e2e3e0")):
        tab.prefer(scheme)
        tab.wait(f"[depth, tokens].every((one) => one.layout.font.color === '{ink}')")
        assert tab.ask("tokens.data[0].colorscale[0][1]") == palest
    assert tab.complaints == []
