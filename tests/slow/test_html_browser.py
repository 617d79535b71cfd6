"""The page in headless Chromium: it draws, filters, sorts, takes hostile names as text, and asks for nothing."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from nanwatch.records.note import Note
from nanwatch.records.record import Frame, Record
from nanwatch.report.finding import find
from nanwatch.report.histogram import StoredHistogram
from nanwatch.report.report import Report
from nanwatch.util.visible import visible
from support import chromium
from support.chromium import Browser, Tab, overlaps
from support.html_page import HOSTILE, growing, many, record

pytestmark = [
    pytest.mark.skipif(chromium.PATH is None, reason="needs Chromium: apt-get install chromium"),
]
pytest.importorskip("jinja2", reason="the page needs jinja2: pip install jinja2")

Open = Callable[[str], Tab]

ROWS = "[...document.querySelectorAll('#table tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
CHART = "drawing.charts.chart"
COUNT = "document.getElementById('count').textContent"


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Open:
    """Opens a document from a file, as a reader does."""

    def opened(document: str) -> Tab:
        path = tmp_path / "report.html"
        path.write_text(document, encoding="utf-8")
        return browser.open(path)

    return opened


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """The address of an HTTP server, and the paths it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_address[1]}", asked
    running.shutdown()
    running.server_close()
    thread.join()


def all_records(report: Report) -> list[tuple[Frame, Record]]:
    return [(frame, one) for frame in report.frames for one in frame.records]


def test_the_chart_draws_every_record(show: Open) -> None:
    """A point for each finite abs max and abs min, marks on the edges for zeros and the inf, limits and culprit."""
    report = growing()
    tab = show(report.to_html())
    tab.drawn()
    made = [one for _, one in all_records(report) if one.abs_min is not None]
    finite = [one for one in made if one.isfinite]
    traces = tab.ask(f"Object.fromEntries({CHART}.made.traces.map((t) => [t.name || 'bars', t.x.length]))")
    assert traces == {
        "bars": 3 * sum(one.abs_min > 0 for one in finite),  # type: ignore[operator]
        "abs min": sum(one.abs_min > 0 for one in made),  # type: ignore[operator]
        **{
            f"{role} abs max": sum(one.role == role for one in finite)
            for role in ("output", "input", "weight")
        },
        "holds a zero": sum(one.abs_min == 0 for one in made),
        "nan or inf": 1,
    }
    assert tab.ask(f"{CHART}.points.length") == sum(traces.values()) - traces["bars"]
    texts = tab.ask("[...chart.querySelectorAll('.note')].map((t) => t.textContent)")
    assert sorted(texts) == [
        "batch 1",
        "float16 largest finite 6.55e+04",
        "float16 smallest normal 6.10e-05",
        "inf, first: encoder.block.6.wo output",
    ]
    low, high = tab.ask(f"{CHART}.seen.y")
    assert 10**low < 1e-6 < 65504 < 10**high
    hover = tab.ask(f"{CHART}.made.traces.at(-1).words(0)")
    for part in ("encoder.block.6.wo", "Linear", "output", "float16", "[2, 2]", "abs max inf", "none left"):
        assert part in hover
    assert (tab.requests, tab.complaints) == ([], [])


def test_limits_out_of_sight_are_told_and_come_into_view(show: Open) -> None:
    """bfloat16 ends far above ordinary values: the chart fits the values, and shows the whole format on demand."""
    frames = (Frame(0, "a", "Linear", (record("output", "output", 3.0, dtype="bfloat16"),)),)
    tab = show(Report(frames, None, 0).to_html())
    tab.drawn()
    beyond = "document.getElementById('beyond').textContent"
    assert (
        tab.ask(beyond) == "Out of view: bfloat16 ends at 3.39e+38; bfloat16 turns subnormal below 1.18e-38."
    )
    assert tab.ask("drawing.charts.chart.seen.y")[1] < 2
    tab.click("#whole")
    tab.wait("drawing.charts.chart.seen.y[1] > 38.5 && drawing.charts.chart.seen.y[0] < -37.9")
    assert tab.ask(beyond) == ""
    assert tab.ask("chart.querySelectorAll('.note').length") == 2
    tab.click("#fit")
    tab.wait("drawing.charts.chart.seen.y[1] < 2")


def test_the_spreads_are_drawn(show: Open) -> None:
    """A picture each: bars for the counts and for the spans of the formats, in the colours of the page."""
    report = growing()
    assert report.finding is not None
    spreads = (
        StoredHistogram("operand[0]", "float16", -24, (3, 0, 1), num_zero=2),
        StoredHistogram("<b>x</b>", "bfloat16", 100, (1,) * 20),
    )
    tab = show(replace(report, finding=replace(report.finding, spreads=spreads)).to_html())
    tab.drawn()
    every = "[...document.querySelectorAll('svg.spread')]"
    for i, (counts, total) in enumerate(((3, 4), (1, 20))):
        told = tab.ask(f"{every}[{i}].querySelector('rect title').textContent")
        assert told.endswith(f": {counts} elements, {counts / total:.2%}")
    assert tab.ask("document.querySelectorAll('#spreads figcaption')[1].textContent").startswith("<b>x</b>")
    for scheme, ink in (("dark", "rgb(121, 170, 245)"), ("light", "rgb(37, 99, 201)")):
        tab.prefer(scheme)
        tab.wait(
            f"{every}.every((one) => [...one.querySelectorAll('rect')]"
            f".some((r) => getComputedStyle(r).fill === '{ink}'))"
        )
    assert (tab.requests, tab.complaints) == ([], [])


@pytest.mark.parametrize("width", [1280, 400])
def test_legend_and_headline_have_room(show: Open, width: int) -> None:
    """Above the plot nothing lies over anything else, and the page is no wider than the screen."""
    tab = show(growing().to_html())
    tab.resize(width)
    tab.drawn()
    tab.wait(f"!{overlaps('chart')}.length")
    assert tab.ask("document.documentElement.scrollWidth") <= width


def test_nothing_leads_outside(show: Open) -> None:
    """The only link of the page leads to its filter."""
    tab = show(growing().to_html())
    tab.drawn()
    assert tab.ask("[...document.querySelectorAll('a')].map((a) => a.getAttribute('href'))") == ["#filter"]


def test_the_table_filters(show: Open) -> None:
    """The slash key leads to the filter; every word must occur; the box leaves what is near the end of its format."""
    report = growing()
    records = all_records(report)
    tab = show(report.to_html())
    tab.drawn()
    assert len(tab.ask(ROWS)) == len(records)
    tab.press("/")
    assert tab.ask("document.activeElement.id") == "filter"
    tab.press("wo BLOCK.5 wei")
    tab.wait(f"{COUNT} === '1 of {len(records)} records'")
    assert [row[2:5] for row in tab.ask(ROWS)] == [["encoder.block.5.wo", "Linear", "weight"]]
    tab.call("Input.dispatchKeyEvent", {"type": "keyDown", "key": "Escape"})
    tab.wait(f"{COUNT} === '{len(records)} of {len(records)} records'")
    tab.press("int64")
    tab.wait(f"{COUNT} === '1 of {len(records)} records'")
    tab.press("none such")
    tab.wait(f"{COUNT} === '0 of {len(records)} records'")
    assert tab.ask(ROWS) == []
    tab.ask("(() => { filter.value = ''; filter.dispatchEvent(new Event('input')); })()")
    tab.click("#low")
    low = [(frame, one) for frame, one in records if one.abs_max is not None and one.abs_max > 65504 / 2**8]
    tab.wait(f"{COUNT} === '{len(low)} of {len(records)} records'")
    rows = tab.ask(ROWS)
    assert [(row[2], row[4]) for row in rows] == [(frame.name, one.label) for frame, one in low]
    assert rows[-1][9:11] == ["inf", "none left"]
    tab.ask(
        "(() => { const n = document.getElementById('low-bits'); n.value = 2; n.dispatchEvent(new Event('input')); })()"
    )
    assert len(tab.ask(ROWS)) == sum(one.abs_max > 65504 / 2**2 for _, one in low)  # type: ignore[operator]
    assert (tab.requests, tab.complaints) == ([], [])


def test_the_table_sorts(show: Open) -> None:
    """By the value of the column and not by its letters, in both directions, what has no value last in either."""
    report = growing()
    records = all_records(report)
    tab = show(report.to_html())
    tab.drawn()
    read = sorted(one.abs_max for _, one in records if one.abs_max is not None)
    unread = [""] * (len(records) - len(read))
    tab.click("#table th:nth-child(10) button")
    assert [row[9] for row in tab.ask(ROWS)] == [f"{value:.2e}" for value in read] + unread
    tab.click("#table th:nth-child(10) button")
    assert [row[9] for row in tab.ask(ROWS)] == [f"{value:.2e}" for value in read[::-1]] + unread
    assert tab.ask("document.querySelector('[aria-sort]').textContent") == "abs max"
    assert tab.ask("document.querySelector('[aria-sort]').getAttribute('aria-sort')") == "descending"
    tab.click("#table th:nth-child(11) button")
    assert tab.ask(ROWS)[0][10] == "none left"
    tab.click("#table th:nth-child(3) button")
    assert [row[2] for row in tab.ask(ROWS)] == sorted(frame.name for frame, _ in records)


def test_a_click_on_a_point_finds_its_module(show: Open) -> None:
    """The chart leads to the table."""
    tab = show(growing().to_html())
    tab.drawn()
    x, y = tab.ask(
        "(() => { const box = chart.querySelector('.plot').getBoundingClientRect();"
        f" const [x, y] = {CHART}.points.find(([, , , i], n, all) => all[n][2].records[i].index === 8);"
        " return [box.x + x, box.y + y]; })()"
    )
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        event = {
            "type": kind,
            "x": x,
            "y": y,
            "button": "none" if kind == "mouseMoved" else "left",
            "clickCount": 1,
        }
        tab.call("Input.dispatchMouseEvent", event)
    assert "encoder.block.1.wo" in tab.ask("chart.querySelector('.tip').textContent")
    assert {row[2] for row in tab.ask(ROWS)} == {"encoder.block.1.wo"}


def test_the_tree_folds(show: Open) -> None:
    """A module's row opens and closes what is below it, by mouse and by key."""
    tab = show(many(400).to_html())
    tab.drawn()
    closed = "[...document.querySelectorAll('#tree details:not([open])')].length"
    before = tab.ask(closed)
    assert before > 0
    tab.click("#tree details:not([open]) summary")
    assert tab.ask(closed) == before - 1
    tab.call("Input.dispatchKeyEvent", {"type": "keyDown", "key": "Enter", "text": "\r"})
    assert tab.ask(closed) == before


def test_hostile_names_stay_text(show: Open, server: tuple[str, list[str]]) -> None:
    """With every hostile name at once nothing runs, nothing is fetched, and nothing is refused, for nothing tries."""
    address, asked = server
    markup = f"<img src='{address}/x' onerror='document.title=1'><a href='{address}/'>a</a>"
    names = [*HOSTILE, markup, f"</script><script src={address}/y></script>"]
    frames = []
    for i, name in enumerate(names):
        made = record(name, "output", inf if i == len(names) - 1 else 2.0**i)
        unread = Record(name, "input", None, name, None, None, None, None, Note("not_checked", name))
        frames.append(Frame(0, name, name, (made, unread)))
    tab = show(Report(tuple(frames), find(frames), 0).to_html())
    tab.drawn()
    assert [row[2] for row in tab.ask(ROWS)] == [visible(name) for name in names for _ in "ab"]
    for number, name in enumerate(names):
        tab.ask(
            f"(() => {{ const hit = {CHART}.points.find(([, , one, i]) => one.records[i].frame === {number});"
            f" {CHART}.tell([hit[0], hit[1]]); }})()"
        )
        assert tab.ask("document.querySelectorAll('img, iframe, object, #chart a').length") == 0
        if name in HOSTILE:
            assert " ".join(visible(name).split()) in " ".join(
                tab.ask("chart.querySelector('.tip').textContent").split()
            )
    # The data and the page's own script.
    assert tab.ask("document.querySelectorAll('script').length") == 2
    assert tab.ask("document.title") == "Detected inf in batch 0 · nanwatch"
    assert (tab.requests, tab.complaints, asked) == ([], [], [])


def test_the_policy_stops_what_would_leave(show: Open, server: tuple[str, list[str]]) -> None:
    """A page that does try is refused by the policy; without the policy the very same page gets through."""
    address, asked = server
    leak = (
        f"<img src='{address}/image'><script src='{address}/script'></script><script>alert(1)</script></main>"
    )
    document = growing().to_html().replace("</main>", leak, 1)
    tab = show(document)
    tab.drawn()
    assert tab.ask(f"fetch('{address}/fetch').then(() => 'got', () => 'refused')") == "refused"
    refused = [text for text in tab.complaints if "Content Security Policy" in text]
    for what in (f"'{address}/image'", f"'{address}/script'", f"'{address}/fetch'", "inline script"):
        assert any(what in text for text in refused), what
    assert asked == []
    free, count = re.subn(r"<meta http-equiv=[^>]*>", "", document.replace("<script>alert(1)</script>", ""))
    assert count == 1
    tab = show(free)
    tab.drawn()
    tab.ask(f"fetch('{address}/fetch', {{ mode: 'no-cors' }}).then(() => 1, () => 0)")
    assert sorted(asked) == ["/fetch", "/image", "/script"]
    assert len(tab.requests) == 3


def test_ten_thousand_records_are_shown(show: Open) -> None:
    """The chart has them all; the table shows a part at once, more on demand, and finds the rest."""
    report = many(10_000)
    tab = show(report.to_html())
    tab.drawn()
    outputs = [one for _, one in all_records(report) if one.role == "output" and one.isfinite]
    assert tab.ask(f"{CHART}.made.traces.find((t) => t.name === 'output abs max').x.length") == len(outputs)
    assert len(tab.ask(ROWS)) == 300
    tab.click("#more")
    assert len(tab.ask(ROWS)) == 600
    tab.press("/")
    tab.press("block.49.layer.9")
    found = sum("block.49.layer.9" in frame.name for frame, _ in all_records(report))
    tab.wait(f"{COUNT} === '{found} of 10,000 records'")
    assert (tab.requests, tab.complaints) == ([], [])


UNREAD = Record("x", "input", (2,), "float16", None, None, None, None, Note("not_checked", "meta"))


@pytest.mark.parametrize(
    "records",
    [
        (),
        (UNREAD,),
        (record("x", "input", 0.0, 0.0),),
        (record("x", "output", 5e-324, 5e-324, "float64"), record("y", "output", 1.7e308, 1e308, "float64")),
        (record("x", "input", nan),),
        (record("x", "input", 7.0, 1.0, "int64"),),
        (Record("x", "input", (10**30, 0), "float32", -1.0, -1.0, True, None),),
    ],
)
def test_odd_reports_make_no_error(records: tuple[Record, ...], show: Open) -> None:
    """No records, none read, all zero, the ends of float64, only a nan, no limits, nonsense: the page stands."""
    frames = (Frame(0, "", "Model", records),)
    tab = show(Report(frames, find(frames), 0).to_html())
    if records in ((), (UNREAD,)):
        tab.wait("document.readyState === 'complete'")
        said = tab.ask("document.querySelector('#chart')?.textContent ?? null")
        assert said == ("No record has a range: nothing could be read." if records else None)
    else:
        tab.drawn()
    assert len(tab.ask(ROWS)) == len(records)
    assert (tab.requests, tab.complaints) == ([], [])


def test_the_page_follows_the_colour_scheme(show: Open) -> None:
    """Page and chart turn dark, and light again, while they are open."""
    tab = show(growing().to_html())
    tab.drawn()
    for scheme, page, line in (
        ("dark", "rgb(20, 23, 26)", "rgb(121, 170, 245)"),
        ("light", "rgb(250, 250, 248)", "rgb(37, 99, 201)"),
    ):
        tab.prefer(scheme)
        tab.wait(f"getComputedStyle(document.body).backgroundColor === '{page}'")
        strokes = "[...chart.querySelectorAll('.points')].map((one) => getComputedStyle(one).stroke)"
        tab.wait(f"{strokes}.includes('{line}')")
    assert tab.complaints == []
