"""Difference in words, JSON and a page; its numbers come from test_comparison.py."""

from __future__ import annotations

import json

import pytest

from nanwatch.trace.difference import Difference, Growth, RecordPair, RowErrors, Series
from support.html_page import HOSTILE, Page


def pair(name: str = "m", **changes: object) -> RecordPair:
    """A pair of records that differ in their largest magnitude."""
    plain = RecordPair(1, name, "M", "weight", "range", "abs_max 1 against 2", 1, name, "M", role="weight")
    return RecordPair(**{field: changes.get(field, getattr(plain, field)) for field in RecordPair.__slots__})


def difference(first: RecordPair | None, *others: RecordPair, grew: tuple[Growth, ...] = ()) -> Difference:
    """The result of a comparison of two batches."""
    firsts = () if first is None else (first, *others)
    return Difference(
        a="a.parquet", b="b.parquet", rtol=1e-3, first=first, firsts=firsts, sketched=None, grew=grew, num_records=8,
        num_apart=len(firsts), num_bits=0, batches=((0, 0), (1, 1)), only_a=(), only_b=(), remarks=(),
        calls=Series("batch 1", (HOSTILE[0],), (1.0,), (2.0,)),
        series=(Series(HOSTILE[1], (0, 1), (1.0, 1.0), (1.0, 2.0)),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (pair(), "so a step between batch 0 and batch 1 made the difference"),
        (pair(batch=0, batch_b=0), "The weights differ from the first batch on"),
        (pair(batch_b=2), ""),
        (pair(kind="dtype"), ""),
        (pair(role="output", label="output"), ""),
    ],
)
def test_a_weight_that_differs_first_points_at_the_step(first: RecordPair, told: str) -> None:
    """Or at where the weights came from, in the first batch; nothing else says anything of it."""
    text = difference(first).to_text()
    assert f"First: `{first.label}` of m (M)" in text
    advice = [
        line for line in text.splitlines() if "step between" in line or "from the first batch on" in line
    ]
    assert [told in line for line in advice] == ([True] if told else [])


def test_each_kind_has_a_line_and_another_module_of_b_is_named() -> None:
    """The second kind after the first, with batch and module of both sides where they differ."""
    other = pair(
        kind="shape",
        what="shape [2] against [3]",
        batch_b=5,
        module_b="n",
        class_b="N",
        role="output",
        label="output",
    )
    text = difference(pair(), other).to_text()
    assert (
        "First by shape: `output` of m (M), in B n (N) in batch 1 and batch 5: shape [2] against [3]" in text
    )


def test_errors_of_rows_are_in_words() -> None:
    """With the worst row, as a record with sketches has them."""
    rows = RowErrors(
        relative_error=0.125,
        worst_relative_error=0.25,
        worst_row=(0, 3),
        cosine=0.5,
        worst_cosine=-1.0,
        num_rows=4,
    )
    found = difference(pair(rows=rows))
    assert (
        "relative error about 0.12 over 4 rows, worst 0.25 in row [0, 3]; cosine 0.5, worst -1"
        in found.to_text()
    )


def test_a_factor_beyond_all_numbers_is_json() -> None:
    """From 1e-300 to 1e300 in float64."""
    found = difference(None, grew=(Growth("m", "output", 0, 1e-300, 1e300),))
    assert json.loads(found.to_json())["grew"][0]["factor"] == "inf"


def test_hostile_names_stay_names() -> None:
    """Names that are markup, script or templates are text in the page, and its only scripts are its own."""
    pytest.importorskip("jinja2")
    pairs = [pair(name, class_name=name, label="x" + name) for name in HOSTILE]
    page = Page(difference(*pairs, grew=tuple(Growth(name, name, 0, 1.0, 5.0) for name in HOSTILE)).to_html())
    assert page.unbalanced == []
    assert {tag for tag, _ in page.tags} <= {
        "html", "head", "meta", "title", "link", "style", "body", "header", "span", "main", "section", "h1", "h2", "dl",
        "div", "dt", "dd", "code", "noscript", "p", "table", "thead", "tbody", "tr", "th", "td", "footer", "script",
        "svg",
    }  # fmt: skip
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert set(page.scripts) == {"data", "own"}
