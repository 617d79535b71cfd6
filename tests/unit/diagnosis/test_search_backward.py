"""The re-run of a backward that failed: it finds the operation, and nobody else notices it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanwatch.diagnosis.search import find_operation
from nanwatch.report.report import NonFiniteError, Report
from nanwatch.session.api import watch
from support.examined import comment_of, snapshot_of
from support.gradient_models import failing_backward
from support.recorders import WITH_DEVICE, watched
from support.toys import Does, fault_of
from support.training import assert_same_bits


class Product(nn.Module):
    """The gradient of its weight is the product of what comes from both sides: 1e20 times 1e20 leaves float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def loss_of(model: nn.Module, size: float = 1e20) -> Tensor:
    return (model(torch.full((2,), size)) * size).sum()


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_the_operation_behind_a_weights_gradient_is_found(recorder: str) -> None:
    """The frames are those of the one backward, and no weight changes."""
    model = nn.Sequential(Product())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, recorder, gradients=True) as w:
        loss_of(model).backward()
        finding = fault_of(optimizer.step).finding
        phases = [(frame.phase, frame.name) for frame in w.frames]
    assert phases == [(phase, name) for phase in ("forward", "backward") for name in ("0", "")]
    assert (finding.module, finding.label, finding.operation) == ("0", "weight.grad", "MulBackward0")
    assert finding.source == f"{__file__}:{Product.forward.__code__.co_firstlineno + 1}"
    assert torch.equal(model[0].weight, torch.ones(2))


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_run_that_goes_on_is_as_it_was(recorder: str) -> None:
    """Told of it, the user drops the gradient: the weights are those of a run that had none, and no step is skipped."""
    reports: list[Report] = []
    plain, model = nn.Sequential(Product()), nn.Sequential(Product())

    def drop(report: Report) -> None:
        reports.append(report)
        model[0].weight.grad.zero_()

    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for size in (1.0, 0.0, 1.0):
        optimizer.zero_grad()
        loss_of(plain, size).backward()
        optimizer.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watched(model, recorder, gradients=True, on_nonfinite=drop, rerun=True) as w:
        for size in (1.0, 1e20, 1.0):
            optimizer.zero_grad()
            loss_of(model, size).backward()
            optimizer.step()
        assert w.skipped_steps == ()
    assert [one.finding.operation for one in reports if one.finding] == ["MulBackward0"]
    assert_same_bits(plain.state_dict(), model.state_dict())


def test_hooks_and_other_watches_are_not_called_for_it() -> None:
    """A hook of the user's on the weight is called once a backward, and a second watch sees one backward."""
    model = nn.Sequential(Product())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[float] = []
    model[0].weight.register_hook(lambda g: calls.append(g.max().item()))
    with watch(model, gradients=True, on_nonfinite="record") as other, watch(model, gradients=True):
        loss_of(model).backward()
        finding = fault_of(optimizer.step).finding
        assert (len([f for f in other.frames if f.phase == "backward"]), other.skipped_steps) == (2, ())
    assert (finding.operation, len(calls)) == ("MulBackward0", 1)
    assert list(model[0]._parameters) == ["weight"]
    assert model[0].weight is optimizer.param_groups[0]["params"][0]


def test_a_loss_that_may_not_run_again_leaves_the_model() -> None:
    """Data is handed out once: the gradient of a mean at the model's outputs shows the operation too."""
    model = nn.Sequential(nn.Linear(2, 2), Does(lambda x: x.mul(0).norm(dim=-1).sqrt()))
    sizes = iter([2.0, 1.0])
    with watch(model, gradients=True):
        (model(torch.ones(3, 2)) * next(sizes)).sum().backward()
        finding = fault_of(torch.optim.SGD(model.parameters()).step).finding
    assert (finding.operation, list(sizes)) == ("SqrtBackward0", [1.0])
    assert any("found by running the batch without its loss" in remark for remark in finding.remarks)


def shares(body: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
    """Divides what `head` gets too: the derivative at 0 / 0 adds to the gradient of `head`'s input."""
    h = body(x)
    ratio = h.sum(-1) / x.sum(-1)
    return torch.where(x.sum(-1) > 0, ratio, 0.0) + head(h).squeeze(-1)


def test_code_of_the_parent_that_shares_a_tensor_is_not_the_modules() -> None:
    """`head` alone is finite, and so is the model without the division: why says what the operation says."""
    model = nn.Sequential(Does(shares, nn.Linear(2, 2), nn.Linear(2, 1)))
    report = failing_backward(model, torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    finding = report.finding
    assert (finding.module, finding.label) == ("0.parts.1", "input[0].grad")
    assert finding.operation == "DivBackward0"
    assert (finding.origin, finding.source_module) == ("received", "0")
    assert "it came out of the backward of 0:" in str(report)


def test_a_gradient_that_another_user_of_the_weight_made() -> None:
    """The gradient is that of the module that owns the weight; where it was made is told apart from it."""
    for uses, operation in [
        (lambda weight, x: torch.where(x > 0, weight.sum() / x, 0.0), "DivBackward0"),
        (lambda weight, x: PlainNorm.apply(weight * 0).sum(0), "aten.div.Tensor"),
    ]:
        linear = nn.Linear(2, 2)
        part = Does(partial(uses, linear.weight))
        model = Does(lambda linear, part, x: linear(x) + part(x), linear, part)
        x = torch.tensor([0.0, 1.0])
        start = snapshot_of(model, (x,), {})
        finding = failing_backward(model, x, rerun=False).finding
        assert (finding.module, finding.label, finding.origin) == ("parts.0", "weight.grad", "produced")
        for module, made_in in ("parts.0", "parts.1"), ("parts.1", None):
            seen = find_operation(start, replace(finding, module=module), model=model)
            assert (seen.step.operation, seen.finding.source_module) == (operation, made_in)
            assert not any("left out of the result" in remark for remark in seen.finding.remarks)


class PlainNorm(torch.autograd.Function):
    """Rows over their norms. Its backward divides zero by zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        norm = x.norm(dim=-1, keepdim=True)
        ctx.save_for_backward(x, norm)
        return x / (norm + 1e-12)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, norm = ctx.saved_tensors
        return gradient - x / norm * gradient.sum(-1, keepdim=True)  # aten.div.Tensor


class Elsewhere(torch.autograd.Function):
    """Its backward computes where no operation of torch is seen, as a kernel of the user's does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2  # ElsewhereBackward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        made = torch.ones(3, 4)
        made.numpy()[:] = float("inf")
        return made


def forces(net: nn.Module, x: Tensor) -> Tensor:
    """The gradient of an energy, which a helper takes, of distances that are 0 on the diagonal."""
    x = x.detach().requires_grad_()
    squared = (x[:, None] - x[None]).square().sum(-1)
    distances = squared.sqrt()  # SqrtBackward0
    x.detach().exp()  # an operation without a node is not the one of the root
    return derivative(net(distances[..., None]).sum(), x)


def derivative(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    ("layer", "size", "operation"),
    [
        (Does(PlainNorm.apply), 0.0, "aten.div.Tensor"),
        (Does(Elsewhere.apply), 1.0, "ElsewhereBackward"),
        (Does(forces, nn.Linear(1, 1)), 1.0, "SqrtBackward0"),
    ],
)
def test_the_line_is_where_the_operation_was_written(layer: nn.Module, size: float, operation: str) -> None:
    """In a Python backward, in the forward of one that no operation shows, or whose derivative a helper takes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), layer, nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = (size * torch.rand(3, 4)).requires_grad_()
    with watch(model, gradients=True), pytest.raises(NonFiniteError) as error:  # noqa: PT012 - some in the forward
        model(x).sum().backward()
        optimizer.step()
    finding = error.value.report.finding
    assert (finding.operation, comment_of(finding)) == (operation, operation)
    assert (finding.module if finding.origin == "produced" else finding.source_module) == "1"


def test_a_reentrant_checkpoint_is_looked_into() -> None:
    """Its own backward can give no gradient of chosen tensors, as a re-run asks for: here of the root of zero."""
    root = lambda linear, x: checkpoint(torch.sqrt, linear(x), use_reentrant=True)  # noqa: E731
    finding = failing_backward(Does(root, nn.Linear(2, 2, bias=False)), torch.zeros(1, 2)).finding
    assert (finding.operation, finding.source_module) == ("SqrtBackward0", "")
