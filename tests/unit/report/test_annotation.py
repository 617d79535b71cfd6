"""One sentence of a report for tools: its rule, its level, its place."""

from __future__ import annotations

from dataclasses import replace

from nanwatch.report.annotation import annotation_of
from nanwatch.report.spike import Departure, SpikeReport
from nanwatch.util.place import Place
from support.html_page import growing


def test_a_failure_is_an_error_with_reason_and_advice() -> None:
    """At the line of its operation, where a re-run has found one; nothing of a run without one."""
    report = growing()
    assert report.finding is not None
    bare = annotation_of(report)
    assert bare is not None
    assert (bare.rule, bare.level, bare.place) == ("made-by-the-module", "error", None)
    assert bare.text.startswith("inf first seen in")
    assert " Why: " in bare.text
    assert " Next: " in bare.text
    place = Place("model.py", 3)
    found = annotation_of(replace(report, finding=replace(report.finding, place=place)))
    assert found == bare._replace(place=place)
    assert annotation_of(replace(report, finding=None)) is None


def test_a_spike_is_a_warning_of_its_cause() -> None:
    """At no line; the root module has a name in words."""
    report = SpikeReport(
        410, 0, (Departure("", "loss", 9.0, 1.0, 8.0),), "data", first=Departure("", "output", 9.0, 1.0, 8.0)
    )
    found = annotation_of(report)
    assert found is not None
    assert (found.rule, found.level, found.place) == ("spike-data", "warning", None)
    assert found.module == "the root module"
    assert found.text == report.summary
