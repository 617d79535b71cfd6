"""Forms of a SpikeReport."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanwatch.report.report import Report
from nanwatch.report.spike import Departure, SpikeReport, read_saved
from support.html_page import Page

HOSTILE = "<script>alert(1)</script>\x1b[31m"
REPORT = SpikeReport(
    410,
    1,
    (Departure("", "loss", 9.1, 2.4, 55.0),),
    "learning rate",
    Departure(HOSTILE, "weight.grad", 0.5, 0.0, inf),
    forward=(Departure("head", "output", 80.0, 4.0, 12.0), Departure("", "output", 80.0, 4.0, 11.0)),
    rates=(0.001, 0.1),
    shares=((7, 0.91), (0, 0.02)),
)


def test_the_page_has_a_row_for_each_departure_and_escapes_names() -> None:
    page = Page(replace(REPORT, backward=(Departure(HOSTILE, "weight.grad", 0.5, 0.0, inf),)).to_html())
    assert "script" not in {tag for tag, _ in page.tags}
    assert [tag for tag, _ in page.tags].count("tr") == 1 + 3
    assert r"backward <script>alert(1)</script>\x1b[31m weight.grad 0.5 0 inf" in page.text


@given(st.from_type(SpikeReport))
def test_json_round_trips_exactly(report: SpikeReport) -> None:
    again = SpikeReport.from_json(report.to_json())
    assert repr(again) == repr(report)  # repr, as nan is not equal to itself
    assert repr(read_saved(report.to_json())) == repr(report)


def test_saved_report_of_a_failure_is_told_from_one_of_a_spike() -> None:
    failure = Report((), None, 3, 1)
    assert read_saved(failure.to_json()) == failure
    with pytest.raises(ValueError, match=r"no document of the schema 'nanwatch\.spike'"):
        SpikeReport.from_json(failure.to_json())
