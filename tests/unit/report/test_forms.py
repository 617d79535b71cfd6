"""Forms of a report: each is found by its module, and renders failures and spikes."""

from __future__ import annotations

import pytest

from nanwatch.report.forms import forms
from nanwatch.report.report import Report
from nanwatch.report.spike import Departure, SpikeReport, read_saved
from nanwatch.util.progress import silent
from support.html_page import growing

SPIKE = SpikeReport(410, 0, (Departure("", "loss", 9.1, 2.4, 55.0),), "loss")


def test_the_forms_are_the_modules_of_the_folder() -> None:
    """By their names, with the suffixes of their files."""
    assert {name: form.suffix for name, form in forms().items()} == {
        "html": "html",
        "json": "json",
        "text": "txt",
    }


@pytest.mark.parametrize("report", [growing(), SPIKE], ids=["failure", "spike"])
def test_each_form_has_the_headline(report: Report | SpikeReport) -> None:
    pytest.importorskip("jinja2")
    shown = {name: form.render(report, silent) for name, form in forms().items()}
    headline = report.headline if isinstance(report, SpikeReport) else "Detected inf in batch 1"
    assert shown["text"].startswith(headline)
    assert f"<title>{headline} · nanwatch</title>" in shown["html"]
    assert read_saved(shown["json"]) == report
