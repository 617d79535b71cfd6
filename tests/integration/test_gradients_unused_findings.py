"""watch(gradients=True) of models that make more than the loss uses: which gradient is bad first, and where."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from support.first_backward_fault import first_backward_fault
from support.hooked_gradients import train
from support.recorders import WITH_DEVICE, watched
from support.training import assert_same_bits
from support.unused_results import Case, whole


class Root(nn.Module):
    """Zeros and their root, whose derivative there is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, torch.sqrt(y.square())


class WithRoot(nn.Module):
    """Such a module, of which the root is used or not, or with a factor of zero, as users of DistributedDataParallel
    have it for the sake of weights without a gradient.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.root, self.last, self.how = nn.Linear(4, 4), Root(), nn.Linear(4, 2), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        zeros, root = self.root(x)
        if self.how == "measured":
            with torch.no_grad():
                assert root.isfinite().all()
        if self.how == "used":
            return self.last(x + root)
        if self.how == "times zero":
            return self.last(x) + 0.0 * root.sum()
        if self.how == "beside its zeros":
            return self.last(zeros) + 0.0 * root.sum()
        return self.last(x + zeros)


@pytest.mark.parametrize("how", ["unused", "measured"])
@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_pole_that_no_gradient_reaches_is_no_fault(recorder: str, how: str) -> None:
    """Its derivative is never asked for."""
    case = Case(lambda: WithRoot(how))
    plain, ours = case.built(), case.built()
    expected = train(plain, case.batches(), whole)
    with watched(ours, recorder, gradients=True) as w:
        assert_same_bits(train(ours, case.batches(), whole), expected)
        assert w.report().finding is None


@pytest.mark.parametrize("how", ["used", "times zero"])
@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_pole_that_a_gradient_reaches_is_found(recorder: str, how: str) -> None:
    """Also where that gradient is zero, as zero times inf is nan. Module and operation are those of plain hooks."""
    case = Case(lambda: WithRoot(how))
    plain, ours = case.built(), case.built()
    expected = first_backward_fault(plain, lambda: train(plain, case.batches(), whole))
    assert (expected.module, expected.batch) == ("root", 0)
    with watched(ours, recorder, gradients=True), pytest.raises(nanwatch.NonFiniteError) as error:
        train(ours, case.batches(), whole)
    finding = error.value.report.finding
    assert finding is not None
    assert (finding.module, finding.label, finding.batch) == ("root.layer", "output.grad", 0)
    assert (finding.origin, finding.source_module, finding.value) == ("received", "root", "nan")
    assert finding.operation == expected.operation == "SqrtBackward0"
    assert_same_bits(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_module_that_uses_what_it_returns_may_have_made_the_value(recorder: str) -> None:
    """The gradient of its zeros is a sum: one part comes from the layer that they were given to, the bad one from its
    own root. The layer is not accused alone.
    """
    case = Case(lambda: WithRoot("beside its zeros"))
    plain, ours = case.built(), case.built()
    expected = first_backward_fault(plain, lambda: train(plain, case.batches(), whole))
    with watched(ours, recorder, gradients=True), pytest.raises(nanwatch.NonFiniteError) as error:
        train(ours, case.batches(), whole)
    finding = error.value.report.finding
    assert finding is not None
    assert (finding.module, finding.label) == ("last", "input[0].grad")
    assert expected.module == "root"
    assert [one for one in finding.remarks if one.startswith("the same tensor is an output of root, ")]
    assert not any("given to" in one for one in finding.remarks)


class Narrow(nn.Module):
    """Two branches under float16 autocast, with large weights; one result is never used."""

    def __init__(self, used: int) -> None:
        super().__init__()
        self.stem, self.used = nn.Linear(4, 4, bias=False), used
        self.branches = nn.ModuleList(nn.Linear(4, 8, bias=False) for _ in range(2))
        with torch.no_grad():
            for i, branch in enumerate(self.branches):
                branch.weight.mul_(1000.0 * 4**i)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.float16):
            x = self.stem(x)
            return tuple(branch(x) for branch in self.branches)


def scaled(model: nn.Module, used: int) -> None:
    """Steps whose loss scale doubles with each, of one of the results."""
    x = 1e-3 * torch.rand(16, 4, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(40):
        optimizer.param_groups[0]["lr"] = 1e-6 / 2.0**step
        ((model(x)[used].float() - 3).square().mean() * 2.0**step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_an_overflow_is_found_and_named(recorder: str, used: int) -> None:
    """The finding is in the branch that is used, whether the other has the larger weights or the smaller ones."""
    torch.manual_seed(0)
    plain, ours = Narrow(used), Narrow(used)
    ours.load_state_dict(plain.state_dict())
    expected = first_backward_fault(plain, lambda: scaled(plain, used))
    with (
        watched(ours, recorder, gradients=True, max_skipped_steps=0),
        pytest.raises(nanwatch.NonFiniteError) as error,
    ):
        scaled(ours, used)
    finding = error.value.report.finding
    assert finding is not None
    assert (finding.module, finding.label, finding.origin) == (
        f"branches.{used}",
        "input[0].grad",
        "produced",
    )
    assert (expected.module, expected.batch) == (finding.module, finding.batch)
    assert expected.batch > 1
    assert finding.operation == expected.operation
    assert_same_bits(ours.state_dict(), plain.state_dict())
