"""Forms of a report: each is found by its module, and renders failures and spikes, which JSON gives back."""

import json
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanwatch.report.finding import Cure, Place
from nanwatch.report.forms import FORMS
from nanwatch.report.report import Report
from nanwatch.report.spike import Departure, SpikeReport, read_saved
from support.html_page import SPIKE, Page, growing


@pytest.mark.parametrize("report", [growing(), SPIKE], ids=["failure", "spike"])
def test_each_form_has_the_headline(report: Report | SpikeReport) -> None:
    pytest.importorskip("jinja2")
    shown = {name: form.render(report) for name, form in FORMS.items()}
    headline = report.headline if isinstance(report, SpikeReport) else "Detected inf in batch 1"
    assert shown["text"].startswith(headline)
    if isinstance(report, Report):
        headline = "inf first seen in output of encoder.block.6.wo"
    assert f"<title>{headline} · nanwatch</title>" in shown["html"]
    assert read_saved(shown["json"]) == report
    (result,) = json.loads(shown["sarif"])["runs"][0]["results"]
    assert result["message"]["text"].startswith(("spike in batch 410", "inf first seen in"))


def test_sarif_has_rule_level_and_place() -> None:
    """A viewer opens the file at the line; without an operation only the module is known."""
    report = growing()
    cures = Cure("use log1p", works=False), Cure("use logsumexp", works=True), Cure("use half", works=True)
    found = replace(report, finding=replace(report.finding, place=Place("/a b/model.py", 12), cures=cures))
    run = json.loads(FORMS["sarif"].render(found))["runs"][0]
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("made-by-the-module", "error")
    assert result["message"]["text"].partition("Cure: ")[2].startswith("use logsumexp. Next: ")
    assert run["tool"]["driver"]["rules"] == [{"id": "made-by-the-module"}]
    (location,) = result["locations"]
    uri, region = {"uri": "file:///a%20b/model.py"}, {"startLine": 12}
    assert location["physicalLocation"] == {"artifactLocation": uri, "region": region}
    (bare,) = json.loads(FORMS["sarif"].render(report))["runs"][0]["results"]
    assert "physicalLocation" not in bare["locations"][0]
    healthy = replace(report, finding=None)
    assert json.loads(FORMS["sarif"].render(healthy))["runs"][0]["results"] == []


def test_the_page_of_a_spike_has_a_row_for_each_departure_and_escapes_names() -> None:
    departure = Departure("<script>", "weight.grad", 0.5, 0.0, inf)
    forward = (Departure("head", "output", 80.0, 4.0, 12.0), Departure("", "output", 80.0, 4.0, 11.0))
    page = Page(replace(SPIKE, first=departure, forward=forward, backward=(departure,)).to_html())
    assert "script" not in {tag for tag, _ in page.tags}
    assert [tag for tag, _ in page.tags].count("tr") == 1 + 3
    assert "backward <script> weight.grad 0.5 0 inf" in page.text


@given(st.from_type(SpikeReport))
def test_json_of_a_spike_round_trips_exactly(report: SpikeReport) -> None:
    again = SpikeReport.from_json(report.to_json())
    assert repr(again) == repr(report)  # repr, as nan is not equal to itself
    assert repr(read_saved(report.to_json())) == repr(report)
