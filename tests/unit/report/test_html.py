"""Report.to_html: structure by html.parser, hostile names, policy and data."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import sys
from dataclasses import replace
from math import inf, isfinite, log2
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanwatch.records.note import NOTE_KINDS, Note
from nanwatch.records.record import Frame, Record
from nanwatch.report.finding import Cure, Finding
from nanwatch.report.report import Report
from nanwatch.util.place import Place
from nanwatch.util.visible import visible
from support.html_page import HOSTILE, Page, growing

pytest.importorskip("jinja2", reason="the page needs jinja2: pip install jinja2")

EMPTY = Report((), None, None)


def test_the_data_has_every_record() -> None:
    """One row a record, in order, with its numbers to the last bit and its headroom to a thousandth."""
    report = growing()
    data = Page(report.to_html()).data
    records = [(i, r) for i, f in enumerate(report.frames) for r in f.records]
    assert len(data["records"]) == len(records)
    for row, (number, one) in zip(data["records"], records, strict=True):
        assert row[:3] == [number, one.label, one.role]
        assert (json.loads(row[3]) if row[3] else None) == (
            one.shape if one.shape is None else list(one.shape)
        )
        assert row[4] == one.dtype
        assert [row[5], row[6]] == [
            x if x is None or isfinite(x) else str(x) for x in (one.abs_min, one.abs_max)
        ]
        assert row[7] is one.isfinite
        if one.dtype == "float16":
            expected = log2(65504 / one.abs_max) if one.isfinite else "-inf"  # type: ignore[operator]
            assert row[8] == (pytest.approx(expected, abs=5.1e-4) if one.isfinite else expected)
        else:
            assert row[8] is None
        assert row[10] == ("" if one.note is None else str(one.note))
    assert [frame[1] for frame in data["frames"]] == [frame.name for frame in report.frames]
    assert data["culprit"] == len(records) - 1
    assert data["limits"] == {"float16": [65504.0, 2.0**-14, 2.0**-24]}


@pytest.mark.parametrize(
    ("report", "headline"),
    [
        (EMPTY, "Nothing was looked at: no watched call has run."),
        (Report((), None, 4), "Nothing was looked at up to batch 4: no watched call has run."),
        (Report((Frame(0, "", "Model", ()),), None, 0), "Nothing could be read up to batch 0"),
        (
            Report(
                (
                    Frame(
                        0,
                        "a",
                        "Linear",
                        (
                            Record(
                                "x",
                                "input",
                                (2,),
                                "float16",
                                None,
                                None,
                                None,
                                None,
                                Note("not_checked", "meta"),
                            ),
                        ),
                    ),
                ),
                None,
                0,
            ),
            "Nothing could be read up to batch 0",
        ),
        (replace(growing(), frames=growing().frames[:-1], finding=None), "All finite up to batch 1"),
        (replace(growing(), frames=()), "inf first seen in output of encoder.block.6.wo"),
    ],
)
def test_every_kind_of_report_has_a_page(report: Report, headline: str) -> None:
    """No frames, no records, nothing read, nothing wrong, or a finding whose frames are gone."""
    page = Page(report.to_html())
    assert "".join(page.headline).startswith(headline)
    assert page.unbalanced == []
    assert page.open == []
    assert len(page.data["records"]) == sum(len(frame.records) for frame in report.frames)


# Hostile names.


def skeleton(document: str) -> list[tuple[str, list[str]]]:
    """The elements and the names of their attributes, in order."""
    return [(tag, sorted(attributes)) for tag, attributes in Page(document).tags]


def named(name: str) -> Report:
    """A report with this name in every field of text."""
    report = growing(hostile=name)
    assert report.finding is not None
    told = {
        "extent": name,
        "operation": name,
        "place": Place(name, 3),
        "source_module": name,
        "origin": "received",
    }
    return replace(report, finding=replace(report.finding, cures=(Cure(name, True),), **told))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HOSTILE, ids=repr)
def test_hostile_names_are_text(name: str) -> None:
    """In every field there is, a name adds no element, no attribute and no script, and reads as text shows it."""
    document = named(name).to_html()
    page = Page(document)
    # Dots make a deeper tree; all else makes the page that a plain letter makes.
    if "." not in name:
        assert skeleton(document) == skeleton(named("x").to_html())
    assert page.unbalanced == []
    assert page.data["frames"][1][1] == visible(f"encoder.block.0.wo{name}")
    assert page.data["records"][0][1] == visible(f"output{name}")
    assert visible(f"output{name} of encoder.block.6.wo{name}") in "".join(page.headline)


NAMES = st.sampled_from(HOSTILE) | st.text(st.characters(), max_size=20)  # lone surrogates among them
NUMBERS = st.none() | st.floats() | st.sampled_from([0.0, inf, -inf, 65504.0, 5e-324, -1.0])
RECORDS = st.builds(
    Record,
    NAMES,
    st.sampled_from(["weight", "buffer", "input", "output", "gradient"]),
    st.none() | st.lists(st.integers(0, 2**62), max_size=5).map(tuple),
    st.sampled_from(["float16", "bfloat16", "float64", "int8", "complex64", ""]) | NAMES,
    NUMBERS,
    NUMBERS,
    st.none() | st.booleans(),
    st.none(),
    st.none() | st.builds(Note, st.sampled_from(NOTE_KINDS), NAMES),
)
FRAMES = st.builds(
    Frame,
    st.integers(0),
    NAMES,
    NAMES,
    st.lists(RECORDS, max_size=3).map(tuple),
    st.sampled_from(["forward", "backward"]),
    st.booleans(),
)
FINDINGS = st.builds(
    Finding,
    NAMES,
    NAMES,
    NAMES,
    st.integers(0),
    st.integers(0),
    st.sampled_from(["nan", "inf", "nan+inf"]),
    st.sampled_from(["produced", "received", "weight", "buffer", "data"]),
    st.none() | NAMES,
    st.none() | st.integers(0),
    st.integers(0),
    st.none() | st.lists(st.integers(0)).map(tuple),
    NAMES,
    st.none() | NAMES,
    st.none() | st.builds(Place, NAMES, st.integers(1)),
    st.none() | st.booleans(),
    st.lists(st.builds(Cure, NAMES, st.booleans(), st.none() | st.floats()), max_size=2).map(tuple),
)
REPORTS = st.builds(
    Report,
    st.lists(FRAMES, max_size=4).map(tuple),
    st.none() | FINDINGS,
    st.none() | st.integers(0),
    st.just(0),
)
ELEMENTS = {
    *("html", "head", "meta", "title", "link", "style", "script", "body", "noscript"),
    *("header", "main", "section", "footer", "h1", "h2", "p", "div", "span", "a", "code", "b", "kbd"),
    *("dl", "dt", "dd", "ul", "ol", "li", "details", "summary"),
    *("table", "thead", "tbody", "tr", "th", "td", "button", "label", "input", "svg"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "rel", "href", "class", "id", "style", "role"),
    *("type", "placeholder", "autocomplete", "spellcheck", "min", "max", "step", "value"),
    *("open", "hidden", "tabindex"),
}


@given(REPORTS)
@settings(max_examples=60, deadline=None)
def test_any_report_is_a_page(report: Report) -> None:
    """With any text in any field the page is balanced UTF-8 of its own elements, and its data has every name."""
    document = report.to_html()
    document.encode("utf-8")
    page = Page(document)
    assert (page.unbalanced, page.open) == ([], [])
    for tag, attributes in page.tags:
        assert tag in ELEMENTS
        assert {name for name in attributes if not name.startswith("aria-")} <= ATTRIBUTES
    assert set(page.scripts) == {"data", "own"}
    assert page.scripts["data"].isascii()
    assert not set("<>&") & set(page.scripts["data"])
    assert [f[1:3] for f in page.data["frames"]] == [
        [visible(f.name), visible(f.class_name)] for f in report.frames
    ]
    assert [r[1] for r in page.data["records"]] == [
        visible(r.label) for f in report.frames for r in f.records
    ]


# Permissions of the page.


def sha256(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def test_the_policy_allows_one_script_and_no_connection() -> None:
    """Everything is refused but the page's own script, by its hash, its style, and inline images."""
    page = Page(growing().to_html())
    policy = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    assert policy.pop("script-src") == sha256(page.scripts["own"])
    assert policy == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    # Only a policy that stands before them binds the elements of the page.
    names = [tag for tag, _ in page.tags]
    assert names[:4] == ["html", "head", "meta", "meta"]


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the optional package the error names it and the extra that brings it."""
    from nanwatch.util import imports

    for name in [name for name in sys.modules if name.split(".")[0] == "jinja2"]:
        monkeypatch.delitem(sys.modules, name)

    def without(name: str, package: str | None = None) -> Any:
        if name.split(".")[0] == "jinja2":
            raise ImportError(name)
        return importlib.import_module(name, package)

    monkeypatch.setattr(imports, "import_module", without)
    with pytest.raises(ImportError, match=r"`jinja2`.*\.\[report\]"):
        growing().to_html()
