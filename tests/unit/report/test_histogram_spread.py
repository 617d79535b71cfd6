"""Spreads: what a report keeps of an exponent histogram, where it comes from, and its way through JSON and HTML."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import nanwatch
from nanwatch.numerics.exponents import ExponentHistogram, exponent_histogram
from nanwatch.recording.observe import histogram_of
from nanwatch.report.finding import Finding
from nanwatch.report.histogram import StoredHistogram
from nanwatch.report.report import Report
from nanwatch.util.visible import visible
from support.html_page import HOSTILE, Page, growing
from support.toys import fault_of

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
SPREAD = StoredHistogram(
    "operand[0]", "float16", -24, (1, 0, 5), num_zero=2, num_nan=1, num_posinf=3, num_neginf=4
)


def restored(one: StoredHistogram) -> ExponentHistogram:
    """Return the histogram that `one` was made from."""
    counts = dict(enumerate(one.counts, one.first))
    beside = (one.num_zero, one.num_nan, one.num_posinf, one.num_neginf)
    return ExponentHistogram(getattr(torch, one.dtype), counts, *beside)


@given(
    st.sampled_from(DTYPES),
    st.lists(st.floats() | st.sampled_from([0.0, -0.0, 6e-8, 65504.0, -3.0]), max_size=12),
)
def test_a_spread_is_the_histogram(dtype: torch.dtype, values: list[float]) -> None:
    """Any values of any format survive the round trip; a histogram begins and ends with a count that is not 0."""
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    found = histogram_of(x, "x")
    assert found is not None
    assert restored(found) == exponent_histogram(x)
    assert not found.counts or (found.counts[0] and found.counts[-1])
    assert sum(found.counts) + found.num_zero + found.num_nan + found.num_posinf + found.num_neginf == len(
        values
    )


@pytest.mark.parametrize(
    "x",
    [torch.arange(3), torch.ones(2, dtype=torch.complex64), torch.ones(2, device="meta"), torch.ones(2) > 0],
)
def test_what_has_no_spread_has_none(x: Tensor) -> None:
    """Integers, complex numbers and what has no values are passed over in silence."""
    assert histogram_of(x, "x") is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "int8"}, "'int8', which has no limits"),
        ({"dtype": "<b>"}, "which has no limits"),
        ({"first": -25}, r"goes from 2\^-25 to 2\^-23; float16 has 2\^-24 to 2\^15"),
        ({"first": 14}, r"goes from 2\^14 to 2\^16"),
        ({"counts": (1, -1)}, "a count that is below 0"),
        ({"num_zero": 2**63}, "or above 9223372036854775807"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], words: str) -> None:
    """A document is anybody's: what no tensor has is an error that names the spread."""
    with pytest.raises(ValueError, match=words):
        replace(SPREAD, **changes)
    report = replace(growing(), finding=replace(finding_of(growing()), spreads=(SPREAD,)))
    document = json.loads(report.to_json())
    document["finding"]["spreads"][0].update(changes)
    with pytest.raises(ValueError, match="not a nanwatch report: the spread of"):
        Report.from_json(json.dumps(document))


def finding_of(report: Report) -> Finding:
    assert report.finding is not None
    return report.finding


def test_reports_with_and_without_them_are_read() -> None:
    """JSON has the counts as one list; a document of before there were any is whole."""
    report = replace(growing(), finding=replace(finding_of(growing()), spreads=(SPREAD,)))
    document = json.loads(report.to_json())
    assert document["finding"]["spreads"][0]["counts"] == [1, 0, 5]
    assert finding_of(Report.from_json(report.to_json())).spreads == (SPREAD,)
    del document["finding"]["spreads"]
    assert finding_of(Report.from_json(json.dumps(document))) == finding_of(growing())


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone().mul_(x)


X = torch.tensor([[1.0, -2.0, 0.0, 300.0]], dtype=torch.float16)


def spreads_of(report: Report) -> dict[str, StoredHistogram]:
    return {one.label: one for one in finding_of(report).spreads}


def test_the_rerun_keeps_operands_and_result() -> None:
    """The operands of the guilty operation are kept, and the bad tensor that it made."""
    net = nn.Sequential(Squares())
    with nanwatch.watch(net):
        report = fault_of(net, X)
    found = spreads_of(report)
    assert found.keys() == {"operand[0]", "operand[1]", "output"}
    assert restored(found["operand[0]"]) == restored(found["operand[1]"]) == exponent_histogram(X)
    assert restored(found["output"]) == exponent_histogram(X * X)
    assert found["output"].num_posinf == 1
    assert finding_of(Report.from_json(report.to_json())).spreads == finding_of(report).spreads


def test_an_operand_that_was_written_over_has_none() -> None:
    """In place: what the operation was given is gone, and no picture of anything else stands for it."""
    net = nn.Sequential(Writes())
    with nanwatch.watch(net):
        found = spreads_of(fault_of(net, X))
    assert restored(found["operand[1]"]) == exponent_histogram(X)
    assert "operand[0]" not in found
    assert restored(found["output"]) == exponent_histogram(X * X)


def test_a_weight_and_the_data_have_theirs() -> None:
    """Where nothing has to be run again, the tensor itself is at hand."""
    net = nn.Sequential(nn.Linear(4, 1, bias=False).half())
    with torch.no_grad():
        net[0].weight[0, 1] = float("nan")
    with nanwatch.watch(net):
        found = spreads_of(fault_of(net, X))
    assert {label: restored(one) for label, one in found.items()} == {
        "weight": exponent_histogram(net[0].weight)
    }
    squares = Squares()
    bad = torch.tensor([float("inf"), 1.0])
    with nanwatch.watch(squares):
        found = spreads_of(fault_of(squares, bad))
    assert {label: restored(one) for label, one in found.items()} == {"input[0]": exponent_histogram(bad)}


def test_without_a_rerun_there_is_no_picture_and_no_error() -> None:
    """rerun=False: no spread, and a page without the section."""
    pytest.importorskip("jinja2")
    net = nn.Sequential(Squares())
    with nanwatch.watch(net, rerun=False):
        report = fault_of(net, X)
    assert finding_of(report).spreads == ()
    page = Page(report.to_html())
    assert not any(attributes.get("class") == "spread" for _, attributes in page.tags)
    assert "power of two" not in page.text


def test_the_page_has_a_figure_for_each() -> None:
    """With the formats that it may be kept in, its own among them; labels are text, and never part of a figure."""
    pytest.importorskip("jinja2")
    spreads = tuple(replace(SPREAD, label=name) for name in HOSTILE)
    spreads += (StoredHistogram("wide", "float32", 3, (9,)),)
    document = replace(growing(), finding=replace(finding_of(growing()), spreads=spreads)).to_html()
    page = Page(document)
    assert page.unbalanced == []
    pictures = pictures_of(document)
    assert len(pictures) == len(spreads)
    assert "1 elements, 16.67%" in pictures[0]
    formats = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"]
    shown = [re.findall(r">((?:b?float)[^ <]*)</text>", picture) for picture in (pictures[0], pictures[-1])]
    assert shown == [formats, [*formats, "float32"]]
    assert "wide 9 elements of float32" in page.text
    for name in HOSTILE:
        assert not any(visible(name) in picture for picture in pictures)


def test_a_report_without_frames_still_draws_them() -> None:
    pytest.importorskip("jinja2")
    report = Report((), replace(finding_of(growing()), spreads=(SPREAD,)), 1)
    assert len(pictures_of(report.to_html())) == 1


def pictures_of(document: str) -> list[str]:
    return re.findall(r"<svg xmlns.*?</svg>", document)
