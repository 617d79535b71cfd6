"""Report: its text, also against a golden one, its JSON, the finding it is built on, and the forms of all reports."""

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanwatch.numerics.formats import TensorHealth
from nanwatch.records.record import CAPTURED, Frame, Note, Record, Role
from nanwatch.report.events import Departure, SpikeReport
from nanwatch.report.finding import Cure, Place, find
from nanwatch.report.report import FORMS, BatchLimitError, NonFiniteError, Report, read_saved
from support.html_page import SPIKE, Page, frame, growing, record, unread

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


@given(st.from_type(Report) | st.from_type(SpikeReport))
@settings(max_examples=60)
def test_json_round_trips_exactly(report: Report | SpikeReport) -> None:
    again = type(report).from_json(report.to_json())
    assert repr(again) == repr(read_saved(report.to_json())) == repr(report)  # as nan is not equal to itself
    assert isinstance(report, SpikeReport) or (again == report and hash(again) == hash(report))


def _edited(**changes: Any) -> str:
    return json.dumps({**json.loads(REPORT.to_json()), **changes})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (REPORT.to_json()[:-20], "pass the whole text"),
        ("[]", "no document of the schema 'nanwatch.report'"),
        ("[" * 100_000, "recursion"),
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
        BatchLimitError(3),
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


def finite(label: str, role: Role, low: float, high: float, dtype: str = "float32") -> Record:
    return Record(label, role, (4, 128), dtype, low, high, True, None)


def infinite(plain: Record, note: Note, *, infs: int = 0, neginfs: int = 0) -> Record:
    """The same record with so many infinities among its elements."""
    health = TensorHealth(plain.abs_min, inf, False, *plain[4:6], 0, infs, neginfs, 0, 0, 512, (0, 1))
    return plain._replace(abs_max=inf, isfinite=False, health=health, note=note)


def test_text_of_what_is_excused(golden: Callable[[str, str], None]) -> None:
    """Values that are not finite and no fault, values that nobody could read, and a step that was skipped."""
    skip = Note("skipped_step", "scale 65536 → 32768")
    attention = (
        finite("input[0]", "input", 2e-2, 3.5),
        infinite(finite("input[1]", "input", 0.0, 0.0), Note("mask"), neginfs=96),
        unread("input[2]", "absent"),
        unread("input[3]", "not_a_tensor"),
        unread("input[4]", "not_checked", "meta tensor, no data", (2,), "float32"),
        infinite(finite("output", "output", 0.25, 4.0), Note("allowed"), infs=1),
    )
    gradient = infinite(finite("weight.grad", "gradient", 0.5, 64.0, "float16"), skip, infs=3)
    frames = (
        Frame(5, "attention", "Attention", attention),
        Frame(5, "attention", "Attention", (finite("output", "output", 0.1, 1.0),), recomputed=True),
        Frame(5, "head", "Linear", (gradient,), "backward"),
    )
    golden("excused.txt", Report(frames, None, 5).to_text() + "\n")


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
