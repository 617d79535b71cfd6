"""Text and JSON of the canonical reports are those in tests/golden; `pytest --update-golden` writes them anew."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from nanwatch.report.report import Report
from support.canonical_reports import REPORTS
from support.paths import GOLDEN

each_report = pytest.mark.parametrize("name", REPORTS)


@each_report
def test_text(name: str, golden: Callable[[str, str], None]) -> None:
    """The text, without colours."""
    golden(f"{name}.txt", REPORTS[name]().to_text() + "\n")


@each_report
def test_json(name: str, golden: Callable[[str, str], None]) -> None:
    """The document, indented to be read, is read back as the report that it was made from."""
    report = REPORTS[name]()
    golden(f"{name}.json", json.dumps(json.loads(report.to_json()), indent=1) + "\n")
    assert (
        Report.from_json((GOLDEN / f"{name}.json").read_text(encoding="utf-8")).to_json() == report.to_json()
    )


def test_no_golden_file_is_left_over() -> None:
    """A report that is gone takes its files along."""
    assert {path.stem for path in GOLDEN.iterdir()} == {*REPORTS}
