"""Results in a notebook: nothing of their page reaches the notebook itself."""

from __future__ import annotations

import sys
from html.parser import HTMLParser

import pytest

from nanwatch.report.report import Report
from nanwatch.report.spike import Departure, SpikeReport
from support.html_page import growing

HOSTILE = '"></iframe><script>alert(1)</script>&quot;'
SPIKE = SpikeReport(4, 0, (Departure(HOSTILE, "loss", 9.0, 1.0, 5.0),), "loss")


class Elements(HTMLParser):
    """The elements of a document with their attributes, and its text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("report", [growing(hostile=HOSTILE), SPIKE], ids=["failure", "spike"])
def test_the_page_is_in_a_frame_of_its_own(report: Report | SpikeReport) -> None:
    """Whatever the names of modules are."""
    shown = Elements(report._repr_html_())
    ((tag, attributes),) = shown.elements
    assert (tag, shown.text) == ("iframe", "")
    assert attributes["sandbox"] == ""
    assert attributes["srcdoc"] == report.to_html()


def test_without_jinja2_the_text_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, and escaped."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    report = growing(hostile=HOSTILE)
    shown = Elements(report._repr_html_())
    assert shown.elements == [("pre", {})]
    assert shown.text == report.to_text()
