"""The samples that carry a failure: against runs of each sample alone, within the runs that are allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import nanwatch
from nanwatch.diagnosis.batch_snapshot import BatchSnapshot, Forwards
from nanwatch.diagnosis.diagnosis import bad_rows
from nanwatch.diagnosis.rerun import batch_size, find_samples
from nanwatch.report.finding import Finding
from nanwatch.report.report import Report
from support.overflows import Op

SIZE = 8


def batch(*bad: int, size: int = SIZE) -> Tensor:
    """Ones, with zeros for the bad samples."""
    x = torch.ones(size, 3)
    x[list(bad)] = 0.0
    return x


def search(
    model: nn.Module, *args: Tensor, seen: tuple[Tensor, ...] = (), most_runs: int = 8
) -> tuple[int, ...]:
    """Search among the samples of a call. It takes no more runs than allowed, and leaves no trace."""
    snapshot = replace(BatchSnapshot.capture(model, args, {}), forwards=Forwards(), grad=False)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    random = torch.get_rng_state()
    names = {module: name for name, module in model.named_modules()}
    found = find_samples(snapshot, names, list(map(bad_rows, seen)), most_runs)
    assert snapshot.forwards is not None
    assert snapshot.forwards.made <= most_runs
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    return found


def divides() -> nn.Module:
    return nn.Sequential(Op(lambda x: x / x.sum(-1, keepdim=True)), nn.Dropout(0.5))


@given(st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=SIZE // 2))
@settings(max_examples=8)
def test_the_bad_rows_are_the_samples_that_fail_alone(bad: set[int]) -> None:
    """Two runs are enough, also where the samples are flattened with time, or are not the first dimension."""
    x, model = batch(*bad), divides()
    alone = tuple(i for i in range(SIZE) if not bool(model(x[i : i + 1]).isfinite().all()))
    result = model(x)
    for seen in (result, result.repeat_interleave(5, dim=0), result.unsqueeze(0)):
        assert search(model, x, seen=(seen,), most_runs=2) == alone


@pytest.mark.parametrize("bad", range(SIZE))
def test_halving_finds_one_sample(bad: int) -> None:
    """A normalisation over the batch hands what is bad in one sample to all of them."""
    x = torch.rand(SIZE, 3, 4, generator=torch.Generator().manual_seed(0))
    x[bad, 1] = 1e30
    model = nn.Sequential(Op(lambda x: x * x), nn.BatchNorm1d(3))
    made = model(x)
    assert not bool(made[:, 1].isfinite().any())
    model[1].reset_running_stats()
    assert search(model, x, seen=(made,)) == (bad,)
    assert search(model, x, seen=(made,), most_runs=4) == ()


class Mean(nn.Module):
    """The mean over what is above zero: bad where the whole batch has none."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].mean()


@pytest.mark.parametrize(
    ("model", "args", "seen"),
    [
        pytest.param(Mean(), (batch(*range(SIZE)),), (), id="all of it"),
        pytest.param(divides(), (batch(*range(5)),), (divides()(batch(*range(5))),), id="most of it"),
        pytest.param(
            Op(lambda x, y: x / x.sum(-1)[:, None] + y.sum()), (batch(1), torch.ones(3)), (), id="sizes"
        ),
        pytest.param(Op(lambda x: x.view(SIZE, 3) / x.sum(-1, True)), (batch(1),), (), id="fixed size"),
        pytest.param(Op(lambda x: x / x.min()), (batch(1, 6),), (), id="two, in one result"),
        pytest.param(divides(), (batch(0, size=1),), (), id="one"),
    ],
)
def test_no_samples_are_told_where_none_are_known(
    model: nn.Module, args: tuple[Tensor, ...], seen: tuple[Tensor, ...]
) -> None:
    assert search(model, *args, seen=seen) == ()


def test_a_wrong_suspect_is_not_told() -> None:
    """The rows of a tensor may be anything: the run without them decides."""
    seen = torch.ones(SIZE, 2)
    seen[3] = torch.nan
    assert search(divides(), batch(5), seen=(seen,)) == ()


def test_the_size_of_a_batch() -> None:
    x, y = torch.ones(4, 2), torch.ones(3, 4)
    for args, size in (((x, {"a": x}), 4), ((x, 2.0, torch.tensor(1.0)), 4), ((x, y), 0), ((), 0)):
        assert batch_size(BatchSnapshot.capture(nn.Identity(), args, {})) == size
    assert batch_size(BatchSnapshot.capture(nn.Identity(), (x.to_sparse(),), {})) == 0


class Stateful(nn.Module):
    """Divides by what it kept of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.ones(SIZE, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        self.calls = len(x)
        return x / x.sum(-1, keepdim=True)


def test_a_state_for_fewer_samples_is_not_left_behind() -> None:
    model = Stateful()
    last = model.last
    assert search(model, batch(4), seen=(Stateful()(batch(4)),)) == (4,)
    assert model.last is last
    assert not hasattr(model, "calls")


class Model(nn.Module):
    """A layer, and a function of its rows; gives its loss."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        self.function = Op(function)

    def forward(self, x: Tensor, idx: Tensor) -> Tensor:
        return self.function(self.layer(x)).mean()


def finding_of(model: nn.Module, x: Tensor) -> tuple[Finding, str]:
    """The finding of a step, as it is read back from its JSON, and the text of the report."""

    def step() -> None:
        model(x, idx=torch.arange(100, 100 + len(x))).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    with nanwatch.watch(model, gradients=True), pytest.raises(nanwatch.NonFiniteError) as error:
        step()
    report = Report.from_json(error.value.report.to_json())
    assert report.to_json() == error.value.report.to_json()
    assert report.finding is not None
    return report.finding, report.to_text()


@pytest.mark.parametrize(
    ("phase", "function"),
    [("forward", lambda x: x / x.norm(dim=-1, keepdim=True)), ("backward", lambda x: x.norm(dim=-1).sqrt())],
)
def test_the_report_names_the_samples(phase: str, function: Callable[[Tensor], Tensor]) -> None:
    finding, text = finding_of(Model(function), batch(2, 5))
    assert (finding.phase, finding.samples) == (phase, (2, 5))
    assert "Data:  samples 2 and 5 of the batch carry it; without them: finite." in text.splitlines()
    assert "Note:  input[idx] of these samples is 102, 105." in text.splitlines()


def test_bad_data_names_its_sample() -> None:
    x = batch()
    x[3, 1] = torch.inf
    finding, text = finding_of(Model(torch.tanh), x)
    assert (finding.origin, finding.samples) == ("data", (3,))
    assert "Data:  sample 3 of the batch carries it; without it: finite." in text.splitlines()
