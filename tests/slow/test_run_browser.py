"""The page of a run in headless Chromium: it draws every cell, tells what lies under the mouse, and zooms."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest

from nanwatch.trace.picture import draw
from nanwatch.trace.trace_file import Trace
from support import chromium
from support.chromium import Browser, Tab
from support.html_page import HOSTILE
from support.written_traces import write_rows

pytestmark = [
    pytest.mark.skipif(chromium.PATH is None, reason="needs Chromium: apt-get install chromium"),
]
pytest.importorskip("jinja2", reason="the page needs jinja2: pip install jinja2")

# The pixel in the middle of a cell as #rrggbb; a colour of the style as the canvas spells it.
PIXEL = """(row, column) => {
  const [high, wide] = [plot.height / (view.toRow - view.row), plot.width / (view.toColumn - view.column)];
  const [x, y] = [plot.left + (column - view.column + 0.5) * wide, MARKS + (row - view.row + 0.5) * high];
  const [r, g, b] = context.getImageData(Math.round(x), Math.round(y), 1, 1).data;
  return "#" + [r, g, b].map((part) => part.toString(16).padStart(2, "0")).join("");
}"""


def show(browser: Browser, path: Path, rows: list[dict[str, Any]], width: int = 1280) -> Tab:
    page = path / "run.html"
    page.write_text(draw(Trace.open(write_rows(path / "run.parquet", rows))).to_html(), encoding="utf-8")
    tab = browser.open(page)
    tab.resize(width)
    tab.wait("document.readyState === 'complete' && !!document.querySelector('#map[data-drawn]')")
    return tab


def complaints(tab: Tab) -> list[str]:
    """Return the complaints of Chromium, but that this test reads the canvas."""
    return [one for one in tab.complaints if "getImageData" not in one]


def made(modules: int, batches: int) -> list[dict[str, Any]]:
    """Outputs of 16 bits in float16, but one in the middle of everything that is not finite, and a skipped step."""
    rows = [
        {"batch": batch, "call": call, "module": f"layer.{call}", "abs_max": 65504.0 / 2**16}
        for batch in range(batches)
        for call in range(modules)
    ]
    rows[(batches // 2) * modules + modules // 2] |= {"abs_max": inf, "isfinite": False}
    rows[modules] |= {"note": "skipped_step"}
    return rows


def mouse(tab: Tab, kind: str, at: tuple[float, float], count: int = 1) -> None:
    """The mouse at this row and column of the whole map."""
    x, y = tab.ask(
        "(() => { map.scrollIntoView({block: 'center'}); const box = map.getBoundingClientRect();"
        f" const [right, down] = [{at[1]} / columns, {at[0]} / rows];"
        " return [box.x + plot.left + plot.width * right, box.y + MARKS + plot.height * down]; })()"
    )
    button = "none" if kind == "mouseMoved" else "left"
    event = {"type": kind, "x": x, "y": y, "button": button, "clickCount": count}
    tab.call("Input.dispatchMouseEvent", event)


def test_levels_marks_and_words(browser: Browser, tmp_path: Path) -> None:
    """Each level has its colour, in both schemes; a cell that is not there has none."""
    bits = {"gone": -inf, "near": 1.0, "low": 5.0, "fine": 8.0}
    rows = [
        {
            "batch": 10 * i,
            "call": call,
            "module": level,
            "abs_max": 65504.0 * 2.0**-room,
            "isfinite": room > -inf,
        }
        for i in range(4)
        for call, (level, room) in enumerate(bits.items())
        if i or level != "low"
    ]
    tab = show(browser, tmp_path, rows)
    for scheme in ("dark", "light"):
        tab.prefer(scheme)
        tab.wait(f"({PIXEL})(0, 1) === color('gone')")
        for row, name in enumerate(tab.ask("field.rows")):
            assert tab.ask(f"({PIXEL})({row}, 1)") == tab.ask(f"color({name!r})")
    (low,) = [row for row, name in enumerate(tab.ask("field.rows")) if name == "low"]
    assert tab.ask(f"({PIXEL})({low}, 0)") == "#000000"  # transparent
    assert tab.ask(f"words({low}, 0)") == "low · batch 0 · no headroom read"
    mouse(tab, "mouseMoved", (low + 0.5, 2.5))
    assert tab.ask("told.textContent") == "low · batch 20 · 5.0 bits · abs max 2.05e+3"
    assert tab.ask("words(0, 3)") == "gone · batch 30 · not finite · abs max inf"
    assert (tab.requests, complaints(tab)) == ([], [])


def test_a_fall_below_the_low_bits_is_seen(browser: Browser, tmp_path: Path) -> None:
    """From 8 bits to 2 every bit has another colour, and the batches below the map are round numbers."""
    rows = [
        {"batch": batch, "call": 0, "module": "a", "abs_max": 65504.0 * 2.0 ** -(8 - batch / 100)}
        for batch in range(600)
    ]
    tab = show(browser, tmp_path, rows)
    shown = tab.ask(f"[50, 150, 250, 350, 450, 550].map((column) => ({PIXEL})(0, column))")
    assert len(set(shown)) == 6
    written = tab.ask(
        "(() => { const seen = []; const write = context.fillText; context.fillText = (text) => seen.push(text);"
        " axis({ columns }, '#000'); context.fillText = write; return seen; })()"
    )
    assert len(written) >= 3
    assert {int(one) % 50 for one in written} == {0}


def test_one_failure_among_many_cells_is_seen_and_zoomed_at(browser: Browser, tmp_path: Path) -> None:
    """None of 900 modules in 640 pixels is passed over. A drag shows its part, a double click all again."""
    tab = show(browser, tmp_path, made(900, 60))
    red = """(() => {
      const all = [...context.getImageData(plot.left, MARKS, plot.width, plot.height).data];
      const gone = rgb("gone");
      return all.filter((_, i) => i % 4 === 0 && gone.every((part, k) => all[i + k] === part)).length;
    })()"""
    assert 0 < tab.ask(red) < 200  # pixels
    mouse(tab, "mousePressed", (440, 20))
    mouse(tab, "mouseMoved", (450, 30))
    mouse(tab, "mouseMoved", (459.9, 39.9))
    mouse(tab, "mouseReleased", (459.9, 39.9))
    assert tab.ask("[view.column, view.toColumn]") == [20, 40]
    first, last = tab.ask("[view.row, view.toRow]")
    assert (abs(first - 440) <= 2, abs(last - 460) <= 2) == (True, True)  # a pixel is 1.4 rows
    assert tab.ask(f"({PIXEL})(450, 30)") == tab.ask("color('gone')")
    assert tab.ask(f"({PIXEL})(450, 29)") != tab.ask("color('gone')")
    tab.ask("map.focus()")
    for key in ("ArrowRight", "+"):
        tab.call("Input.dispatchKeyEvent", {"type": "keyDown", "key": key})
    assert tab.ask("[view.column, view.toColumn]") == [29, 39]
    for count_of in (1, 2):
        mouse(tab, "mousePressed", (10, 10), count_of)
        mouse(tab, "mouseReleased", (10, 10), count_of)
    assert tab.ask("[view.row, view.toRow, view.column, view.toColumn]") == [0, 900, 0, 60]
    assert tab.ask("[field.failed, field.skipped]") == [[30], [1]]
    assert tab.ask("words(0, 1)").endswith("· step skipped")
    assert complaints(tab) == []


def test_spikes_and_forecasts_are_marked_where_they_were_told(browser: Browser, tmp_path: Path) -> None:
    """A sign above the batch, a frame round the module's cell, and the words under the mouse."""
    spike = "spike in batch 40: loss 9.1, usually 2.4 (55 deviations); cause: attention, first in `output` of layer.2"
    forecast = "forecast: `weight` of layer.0: overflow expected near batch 90 (± 4)"
    rows = made(4, 60)
    empty = {
        "role": "output",
        "shape": None,
        "dtype": None,
        "abs_min": None,
        "abs_max": None,
        "isfinite": None,
    }
    for batch, call, note in (
        (40, 2, {"note": "spike", "note_text": spike}),
        (20, 0, {"note": "forecast", "note_text": forecast.removeprefix("forecast: ")}),
    ):
        rows.append({"batch": batch, "call": 9, "module": f"layer.{call}", "phase": "step", **note, **empty})
    tab = show(browser, tmp_path, rows)
    assert tab.ask("words(2, 40)") == f"layer.2 · batch 40 · 16.0 bits · abs max 1.00e+0 · {spike}"
    assert tab.ask("words(1, 40)").endswith("abs max 1.00e+0 · spike at layer.2")
    assert tab.ask("words(0, 20)").endswith(f"· {forecast}")
    assert "at layer" not in tab.ask("words(2, 41)")
    mouse(tab, "mouseMoved", (2.5, 40.5))
    assert tab.ask("told.textContent").endswith(spike)
    signs = (
        "(() => { const seen = {}; const write = context.fillText;"
        " context.fillText = (text, x) => { if ('▼△◆◇'.includes(text))"
        " (seen[text] ??= []).push(Math.floor((x - plot.left) / plot.width * 60)); };"
        " draw(); context.fillText = write; draw(); return seen; })()"
    )
    assert tab.ask(signs) == {"▼": [30], "△": [1], "◇": [20], "◆": [40]}
    edge = """(row, column) => {
      const [high, wide] = [plot.height / rows, plot.width / columns];
      const [x, y] = [plot.left + column * wide, MARKS + (row + 0.5) * high];
      const around = [...context.getImageData(Math.floor(x) - 1, Math.round(y), 3, 1).data];
      const apart = (part, i) => Math.abs(part - rgb("ink")[i]);
      return Math.min(...[0, 4, 8].map((at) => around.slice(at, at + 3).map(apart).reduce((a, b) => a + b)));
    }"""
    distances = {place: tab.ask(f"({edge})({place[0]}, {place[1]})") for place in ((2, 40), (0, 20), (1, 40))}
    assert distances[2, 40] < 200 < distances[1, 40]
    assert distances[0, 20] < 200
    shown = tab.ask("[...document.querySelectorAll('#marks tbody tr')].map((row) => row.innerText)")
    assert shown == [f"40\tlayer.2\t{spike}", f"20\tlayer.0\t{forecast}"]
    for words in ("◆ a spike", "◇ a forecast"):
        assert tab.ask(f"document.body.innerText.includes({words!r})")
    assert (tab.requests, complaints(tab)) == ([], [])


@pytest.mark.parametrize("width", [1280, 400])
def test_hostile_names_stay_text(browser: Browser, tmp_path: Path, width: int) -> None:
    """Nothing of a name runs or is fetched, and the page is no wider than the screen."""
    rows = [
        {
            "batch": batch,
            "call": call,
            "module": name,
            "abs_max": 1.0,
            **({"note": "spike", "note_text": f"spike in batch {name}"} if batch else {}),
        }
        for batch in range(2)
        for call, name in enumerate(HOSTILE)
    ]
    tab = show(browser, tmp_path, rows, width)
    mouse(tab, "mouseMoved", (1.5, 0.5))
    assert tab.ask("told.textContent") == "<script>alert(1)</script> · batch 0 · 16.0 bits · abs max 1.00e+0"
    assert tab.ask("document.querySelectorAll('img, iframe, object, a, svg').length") == 0
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert (tab.requests, tab.complaints) == ([], [])
