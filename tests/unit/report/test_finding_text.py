"""The advice of a report fits the numbers: what it names is there, and what it says happened did."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.records.record import Phase
from nanwatch.report.finding import Cure, Finding, OriginKind, working_first
from nanwatch.report.finding_text import Explanation, explain
from nanwatch.report.report import Report
from nanwatch.session import rerun_policy
from support.overflows import Op, linear
from support.paths import ROOT

pytestmark = pytest.mark.usefixtures("each_recorder")


@pytest.fixture(autouse=True)
def patient_reruns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let re-runs take a minute: on a busy machine one may take more than 5 s."""
    monkeypatch.setattr(rerun_policy, "LEAST_SECONDS", 60.0)


def lines_of(report: Report) -> dict[str, str]:
    """The first line of each kind."""
    found: dict[str, str] = {}
    for line in report.to_text().splitlines():
        kind, _, text = line.partition(":")
        found.setdefault(kind, text.strip())
    return found


def failed(model: nn.Module, *args: Any) -> Report:
    """The report of a forward that fails."""
    with torch.no_grad(), nanwatch.watch(model), pytest.raises(nanwatch.NonFiniteError) as error:
        model(*args)
    report = error.value.report
    assert repr(Report.from_json(report.to_json())) == repr(report)
    return report


def told(model: nn.Module, *args: Any) -> dict[str, str]:
    """The lines of the report of a forward that fails."""
    return lines_of(failed(model, *args))


def explanation_of(report: Report) -> Explanation:
    assert report.explanation is not None
    return report.explanation


def failed_backward(model: nn.Module, x: Tensor, scale: float = 1.0) -> Report:
    """The report of a step whose gradients failed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanwatch.watch(model, gradients=True):
        (model(x).float().sum() * scale).backward()
        with pytest.raises(nanwatch.NonFiniteError) as error:
            optimizer.step()
    return error.value.report


@pytest.mark.parametrize(
    ("norm", "shape", "dtype"),
    [
        (nn.LayerNorm(8), (2, 8), torch.float32),
        (nn.LayerNorm(8), (2, 8), torch.bfloat16),
        (nn.GroupNorm(2, 8), (2, 8, 4), torch.float32),
        (nn.BatchNorm1d(8), (4, 8), torch.float32),
    ],
    ids=str,
)
def test_a_norm_whose_square_leaves_the_format(
    norm: nn.Module, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The input is far from the end, and its square is past it."""
    torch.manual_seed(0)
    x = (torch.randn(shape) * 1e20).to(dtype)
    advice = explanation_of(failed(nn.Sequential(norm.to(dtype)), x)).advice
    end = torch.finfo(torch.float32).max
    assert advice == (
        "square of the input",
        {"largest": x.abs().max().item(), "dtype": "float32", "end": end},
    )


def test_a_norm_that_squares_nothing_large() -> None:
    """A variance of one element is no overflow."""
    report = failed(nn.Sequential(Op(lambda x: x.var(0))), torch.ones(1, 4))
    assert explanation_of(report).advice.code == "inputs and weights"


def test_by_says_what_the_operation_made() -> None:
    """inf, of which the caller made nan; nothing more where the record shows the same."""

    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = x * x
            return self.layer(y - y)

    assert told(Difference(), torch.full((2, 4), 1e30))["By"].startswith("aten.mul.Tensor made inf at ")
    assert told(nn.Sequential(Op(lambda x: x * x)), torch.full((2, 4), 1e30))["By"].startswith(
        "aten.mul.Tensor at "
    )


def test_a_weight_that_was_bad_before_the_first_batch() -> None:
    """Nothing had been watched before."""
    model = nn.Sequential(nn.Linear(2, 2))
    nn.init.constant_(model[0].weight, torch.nan)
    reason, advice = explanation_of(failed(model, torch.ones(1, 2)))
    assert (reason.code, advice.code) == ("weight before the first batch", "initialisation")


def test_a_weight_that_became_bad_under_the_watch() -> None:
    """The weight was read and finite in the batch before."""
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanwatch.watch(model):
        (model(torch.ones(1, 2)).sum() * torch.nan).backward()
        optimizer.step()
        with pytest.raises(nanwatch.NonFiniteError) as error:
            model(torch.ones(1, 2))
    reason, advice = explanation_of(error.value.report)
    assert reason == ("weight since a batch", {"batch": 0})
    assert advice.code == "gradients and step"


def test_a_derivative_that_leaves_its_format() -> None:
    """x is 182, and 3 x**2 past the end of float16: no operand is zero, and float32 helps."""
    cube = Op(lambda x: torch.tanh(x + 0.04 * x.pow(3.0)) * x)
    model = nn.Sequential(linear(1, 1), cube, linear(1e-2, 1)).half()
    report = failed_backward(model, torch.full((2, 1), 182.0).half())
    advice = explanation_of(report).advice
    assert advice.code == "derivative in float32"
    assert (advice.values["dtype"], advice.values["end"]) == ("float16", 65504.0)
    assert lines_of(report)["Cure"].startswith("works: run `1` in float32, nanwatch.run_in_fp32(model[1])")


def test_at_zero_only_where_an_operand_is_zero() -> None:
    """The root of zero; the square root of nothing in float32 that is no zero, but a subnormal."""
    model = nn.Sequential(linear(0), Op(torch.sqrt))
    assert explanation_of(failed_backward(model, torch.ones(1, 4))).advice.code == "derivative at zero"
    model = nn.Sequential(linear(1, 1), Op(lambda x: x**-1.0 * x))
    advice = explanation_of(failed_backward(model, torch.full((1, 1), 1e-30), 1e-10)).advice
    assert (advice.code, advice.values["dtype"]) == ("large derivative", "float32")


def test_bad_data_has_its_extent() -> None:
    """In the words that all else has, of the batch's own tensor, whatever shape the model gives it before a call."""
    x = torch.ones(3, 3)
    x[1] = torch.nan
    model = nn.Sequential(Op(lambda x: x.t()), nn.Linear(3, 3))
    assert told(model, x)["Where"].startswith("3 of 9 elements (1 of 3 rows, row 1), the first at [1, 0]")


def test_the_guide_has_the_words_of_every_why() -> None:
    """Each Why begins with the words of one line of the guide's table, and each line has a Why."""
    guide = (ROOT / "docs/how-to/loss-is-nan.md").read_text(encoding="utf-8")
    table = guide.partition("## Read the `Why` line")[2].partition("\n## ")[0]
    begins = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ")][1:]
    found = Finding("a", "Linear", "output.grad", 1, 0, "nan", "produced", None, None, 1, None)
    origins: list[OriginKind] = ["produced", "received", "weight", "buffer", "data"]
    findings = [
        replace(found, origin=origin, source_module=source, class_name=name, batch=batch)
        for origin in origins
        for source, name, batch in ((None, "Linear", 0), ("b", "Function", 1))
    ]
    findings.append(replace(found, label="input[0]"))
    ends = [("output.grad", None), ("output.grad", "b"), ("weight.grad", None), ("exp_avg[0.weight]", None)]
    findings += [
        replace(found, phase=phase, origin=origin, label=label, source_module=source)
        for phase in get_args(Phase)[1:]
        for origin in origins[:2]
        for label, source in ends
    ]
    reasons = [str(explain(one, None, None, ()).reason) for one in findings]
    used = [[begin for begin in begins if reason.startswith(begin)] for reason in reasons]
    assert all(len(one) == 1 for one in used), used
    assert {begin for one in used for begin in one} == set(begins)


@nanwatch.watched
def log_loss(p: Tensor) -> Tensor:
    return -torch.log(p).mean()


def test_a_cure_that_works_is_the_advice() -> None:
    """The log of probabilities that are 0 and 1: no word of headroom, of weights, of a mask, or of other causes."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(linear(4), linear(4))

        def forward(self, p: Tensor) -> Tensor:
            return log_loss(p + 0 * self.layers(p.reshape(1, -1)).mean())

    report = failed(Model(), torch.tensor([0.0, 1.0, 1.0, 1.0]))
    lines, (reason, advice) = lines_of(report), explanation_of(report)
    assert lines["What"].startswith("inf first seen in `output` of log_loss (Function)")
    assert lines["Where"] == "the only element; float32 of shape []."
    assert reason == ("made by the function", {"largest_input": 1.0})
    assert lines["Cure"].startswith("works: keep what the logarithm is taken of away from 0")
    assert advice.code == "apply the cure"
    assert lines.keys().isdisjoint(("Room", "Note"))


def test_the_verdict_comes_first() -> None:
    """Working cures first, in the text and on the page."""
    cures = [Cure("a", False), Cure("b", True, 3.25), Cure("c", False, 0.5)]
    assert [str(cure) for cure in working_first(cures)] == [
        "works: b, 3.2 bits of room left",
        "does not help: a",
        "not enough: c, 0.5 bits of room left",
    ]


@pytest.mark.parametrize("rate", [1e-3, 3.0])
def test_a_weight_that_grows_by_its_steps(rate: float) -> None:
    """The weight and both its magnitudes are named; a weight that stays as it is does not have the blame."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), Op(lambda x: x.square().mean()))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    largest: list[float] = []

    def train() -> None:
        for _ in range(20):
            largest.append(model[0].weight.abs().max().item())
            optimizer.zero_grad()
            model(torch.randn(6, 8)).backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.full((6, 8), 1e30))

    with nanwatch.watch(model), pytest.raises(nanwatch.NonFiniteError) as error:
        train()
    advice = explanation_of(error.value.report).advice
    finding = error.value.report.finding
    assert finding is not None
    if rate < 1:
        assert advice.code != "weight that grew"
        return
    first = min(frame.batch for frame in error.value.report.frames if frame.name == "0")
    batches = {"first_batch": first, "last_batch": finding.batch}
    sizes = {"before": pytest.approx(largest[first]), "largest": pytest.approx(largest[-1])}
    assert advice == ("weight that grew", {"label": "weight", "module": "0", **batches, **sizes})
