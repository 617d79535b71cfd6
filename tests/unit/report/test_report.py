"""Report: its text, its JSON, and the finding it is built on."""

import copy
import json
import pickle
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanwatch.records.record import CAPTURED, Frame
from nanwatch.report.finding import find
from nanwatch.report.report import BatchLimitError, NonFiniteError, Report
from support.html_page import frame, record, unread

GROWING = (
    frame("up", record("weight", "weight"), record("input[0]", "input"), record("output", "output", 6e4)),
    frame(
        "drop",
        record("input[0]", "input", 6e4),
        unread("input[1]", "absent"),
        unread("input[2]", "not_a_tensor"),
        unread("input[3]", "not_checked", "meta tensor, no data", (2,), "float32"),
        record("output", "output", inf),
        batch=3,
        class_name="Dropout",
    ),
)
REPORT = Report(GROWING, find(GROWING), 3)


def test_captured_calls_are_named_in_one_line() -> None:
    """However many records of the frames were not read in the capture."""
    row = unread("input[0]", "not_checked", CAPTURED, (2,), "float32")
    read = row._replace(abs_min=1.0, abs_max=1.0, isfinite=True, note=None)
    for rows, count in (((row, row), 1), ((read,), 0)):
        frame = Frame(0, "a", "Linear", rows)
        assert Report((frame, frame), None, 0).to_text().count("captured into a CUDA graph") == count


def test_what_an_operation_made_is_told_where_the_record_has_something_else() -> None:
    finding = replace(REPORT.finding, operation="aten.exp.default", made="nan")
    assert "By:    aten.exp.default made nan.\n" in replace(REPORT, finding=finding).to_text()


def test_color_changes_no_character() -> None:
    """As rich reads the escape sequences: the same text, and the first non-finite record in red."""
    text = REPORT.to_text()
    shown = pytest.importorskip("rich.text").Text.from_ansi(REPORT.to_text(color=True))
    assert shown.plain == text
    red = [text[span.start : span.end] for span in shown.spans if "color(1)" in str(span.style)]
    assert red == ["5.00e-01      inf output  <-- inf, first"]


@given(st.from_type(Report))
@settings(max_examples=30)
def test_json_round_trips_exactly(report: Report) -> None:
    again = Report.from_json(report.to_json())
    assert repr(again) == repr(report)  # repr, as nan is not equal to itself
    assert again == report
    assert hash(again) == hash(report)


def _edited(**changes: Any) -> str:
    return json.dumps({**json.loads(REPORT.to_json()), **changes})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (REPORT.to_json()[:-20], "pass the whole text"),
        ("[]", "no document of the schema 'nanwatch.report'"),
        ("[" * 100_000, "nested too deeply"),
        (_edited(version=99), "its version is 99, this nanwatch reads version 2"),
        (_edited(frames=[{"batch": 0}]), r"report.frames\[0\] has no 'name'"),
        (
            _edited().replace('"abs_max": "inf"', '"abs_max": "huge"'),
            r"records\[4\].abs_max should be a number",
        ),
    ],
)
def test_a_damaged_or_later_document_is_one_clear_error(document: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Report.from_json(document)
    assert str(error.value).startswith("not a nanwatch report")
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "error",
    [
        NonFiniteError(REPORT),
        NonFiniteError("Caught NonFiniteError\nin a worker"),
        BatchLimitError(3, "abort_after_batch"),
        BatchLimitError("Caught BatchLimitError\nin a worker"),
    ],
)
def test_errors_survive_a_process_boundary(error: ValueError) -> None:
    error.__notes__ = ["step 3"]  # `add_note` is of Python 3.11
    with pytest.raises(type(error)) as caught:
        raise error from KeyError("batch")
    for again in (pickle.loads(pickle.dumps(caught.value)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.__notes__ == ["step 3"]
        if isinstance(error, NonFiniteError):
            assert again.report.to_json() == error.report.to_json()


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.data())
def test_a_text_with_a_finding_fits_a_screen(sizes: list[int], data: st.DataObject) -> None:
    """It has fewer than forty lines and shows the guilty frame; `whole` shows all frames, as without a finding."""
    guilty = data.draw(st.integers(0, len(sizes) - 1))
    frames = [
        frame(f"layer{i}", *(record(f"input[{j}]", "input") for j in range(size)), batch=i // 4)
        for i, size in enumerate(sizes)
    ]
    frames[guilty] = frame(f"layer{guilty}", record("output", "output", inf), batch=guilty // 4)
    report = Report(tuple(frames), find([frames[guilty]], num_frames=len(frames)), guilty // 4)
    assert report.finding.label in Report((), report.finding, 0).to_text()
    lines = report.to_text().splitlines()
    assert len(lines) < 40
    assert sum("<-- inf, first" in line for line in lines) == 1
    shown = [line.split()[0] for line in lines if line.strip().startswith("layer")]
    everything = report.to_text(whole=True).splitlines()
    names = [line.split()[0] for line in everything if line.strip().startswith("layer")]
    assert names == [one.name for one in frames]
    # A run of frames without a gap, and one more would be too much.
    first = names.index(shown[0])
    assert shown == names[first : first + len(shown)]
    assert len(everything) >= 40 or shown == names
    if first > 0:
        assert len(lines) + 1 + len(frames[first - 1].records) + 1 >= 40
