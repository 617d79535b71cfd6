"""Forms of a report: each is found by its module, and renders failures and spikes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from nanwatch.report.finding import Place
from nanwatch.report.forms import FORMS
from nanwatch.report.report import Report
from nanwatch.report.spike import Departure, SpikeReport, read_saved
from support.html_page import growing

SPIKE = SpikeReport(410, 0, (Departure("", "loss", 9.1, 2.4, 55.0),), "loss")


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
    begins = ("spike in batch 410", "inf first seen in")
    assert result["message"]["text"].startswith(begins)


def test_sarif_has_rule_level_and_place() -> None:
    """A viewer opens the file at the line; without an operation only the module is known."""
    report = growing()
    assert report.finding is not None
    found = replace(report, finding=replace(report.finding, place=Place("/a b/model.py", 12)))
    run = json.loads(FORMS["sarif"].render(found))["runs"][0]
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("made-by-the-module", "error")
    assert run["tool"]["driver"]["rules"] == [{"id": "made-by-the-module"}]
    (location,) = result["locations"]
    assert location["physicalLocation"] == {
        "artifactLocation": {"uri": "file:///a%20b/model.py"},
        "region": {"startLine": 12},
    }
    (bare,) = json.loads(FORMS["sarif"].render(report))["runs"][0]["results"]
    assert "physicalLocation" not in bare["locations"][0]
    healthy = replace(report, finding=None)
    assert json.loads(FORMS["sarif"].render(healthy))["runs"][0]["results"] == []
