"""Report.to_html: structure by html.parser, hostile names and policy."""

import re
import sys
from dataclasses import replace
from math import inf, log2, nan

import pytest

from nanwatch.report.events import Departure, SpikeReport
from nanwatch.report.finding import Cure, Place
from nanwatch.report.page import Chart, Line
from nanwatch.report.report import Report
from nanwatch.util.messages import visible
from support.html_page import HOSTILE, Page, growing

pytest.importorskip("jinja2", reason="the page needs jinja2: pip install jinja2")

EMPTY = Report((), None, None)


def test_the_table_has_every_record_and_the_chart_every_number() -> None:
    """In order, with the headroom of each; what is not finite is a gap of the chart."""
    report = growing()
    page = Page(report.to_html())
    records = [(frame, record) for frame in report.frames for record in frame.records]
    for frame, record in records:
        assert f"{frame.batch} {frame.name} {frame.class_name} {record.label} {record.role}" in page.text
        if record.abs_max is not None and 0 < record.abs_max < inf:
            place = f"{record.label} of {frame.name}, batch {frame.batch}"
            assert f"abs max of {record.role}s, {place}: {record.abs_max:.4g}" in page.titles
    bits = [log2(65504 / record.abs_max) for _, record in records if record.abs_max and record.abs_max < inf]
    assert all(f" {value:.1f} bits " in page.text for value in bits)
    assert "largest of float16, output of encoder, batch 0: 6.55e+04" in page.titles
    assert page.text.count("none left") == 2  # in the table of modules, and in that of records
    assert "first" in page.text.rpartition("none left")[2]


@pytest.mark.parametrize(
    ("report", "headline"),
    [
        (EMPTY, "Nothing was looked at: no watched call has run."),
        (replace(growing(), frames=growing().frames[:-1], finding=None), "All finite up to batch 1"),
        (replace(growing(), frames=()), "inf first seen in output of encoder.block.6.wo"),
    ],
)
def test_every_kind_of_report_has_a_page(report: Report, headline: str) -> None:
    page = Page(report.to_html())
    assert "".join(page.headline).startswith(headline)
    assert page.unbalanced == []
    assert page.open == []


def skeleton(document: str) -> list[tuple[str, list[str]]]:
    """The elements and the names of their attributes, in order."""
    return [(tag, sorted(attributes)) for tag, attributes in Page(document).tags]


def named(name: str) -> Report:
    """A report with this name in every field of text."""
    report = growing(hostile=name)
    facts = dict.fromkeys(("extent", "operation", "source_module"), name) | {"origin": "received"}
    finding = replace(report.finding, cures=(Cure(name, True),), place=Place(name, 3), **facts)
    return replace(report, finding=finding)


def test_a_name_is_text() -> None:
    """In every field there is, a name adds no element, no attribute and no script, and reads as text shows it."""
    document = named(HOSTILE).to_html()
    page = Page(document)
    assert skeleton(document) == skeleton(named("x").to_html())
    assert page.unbalanced == []
    assert visible(f"output{HOSTILE} of encoder.block.6.wo{HOSTILE}") in "".join(page.headline)


def test_a_chart_is_logarithmic_and_has_gaps() -> None:
    line = Line("<a>", "output", list("pqrst"), [1.0, 0.0, 10.0, nan, 100.0])
    mark = Line("mark", "gone", ["r"], [10.0], [2], is_mark=True)
    html = Chart("id", "title", "hint", "label", "call", "abs max", [line, mark]).picture
    circles = re.findall(r'cx="([\d.]+)" cy="([\d.]+)" .*?<title>(.*?)</title>', html)
    titles = ["&lt;a&gt;, p: 1", "&lt;a&gt;, r: 10", "&lt;a&gt;, t: 100", "mark, r: 10"]
    assert [title for *_, title in circles] == titles
    assert (circles[3][:2], html.count("<polyline")) == (circles[1][:2], 3)
    heights = [float(y) for _, y, _ in circles]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


SPIKE = SpikeReport(4, 0, (Departure(HOSTILE, "loss", 9.0, 1.0, 5.0),), "loss")


@pytest.mark.parametrize("report", [growing(hostile=HOSTILE), SPIKE], ids=["failure", "spike"])
def test_a_notebook_has_the_page_in_a_frame_of_its_own(report: Report | SpikeReport) -> None:
    shown = Page(report._repr_html_())
    ((tag, attributes),) = shown.tags
    assert (tag, attributes["sandbox"], shown.text.strip()) == ("iframe", "", "")
    assert attributes["srcdoc"] == report.to_html()


def test_a_notebook_without_jinja2_shows_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of the report is the page, and it is escaped."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    report = growing(hostile=HOSTILE)
    assert [tag for tag, _ in Page(report._repr_html_()).tags] == ["pre"]
