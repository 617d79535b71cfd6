"""A batch run once more: what its calls saw, under a change of format, and with a backward that touches nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.diagnosis.batch_snapshot import BatchSnapshot
from nanwatch.diagnosis.experiment import (
    Change,
    Experiment,
    code_of,
    fresh_leaves,
    in_float64,
    is_close,
    loaded,
    mean_gradients,
    run,
    without_hooks,
)
from nanwatch.instrumentation.wrapped_names import module_names

INF = float("inf")


def run_of(model: nn.Module, x: Tensor, change: Change | None = None, **options: Any) -> Experiment:
    return run(BatchSnapshot.capture(model, (x,), {}), module_names(model), change, **options)


def test_a_run_sees_each_call_as_it_was() -> None:
    """In the order of their ends, with copies of what was asked for; an error ends it and is kept."""
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 2))
    x = torch.tensor([[1.0, INF]])
    found = run_of(model, x, keep=("1", "output"))
    assert [call.name for call in found.calls] == ["0", "1", ""]
    assert next(iter(found.nonfinite())) == ("0", "input[0]")
    assert [row.label for row in found.outputs("1")] == ["output"]
    assert torch.equal(found.kept[0], model(x))
    assert found.rows("0", "output")[0].abs_max == INF
    model[1].forward = lambda _: 1 / 0  # type: ignore[method-assign]
    broken = run_of(model, x)
    assert isinstance(broken.error, ZeroDivisionError)
    assert [call.name for call in broken.calls] == ["0"]


def test_a_run_under_a_change() -> None:
    """Float16 in autocast gives way to another dtype, and a clamp holds what one module is given."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.full((1, 2), 3.0)
    with torch.autocast("cpu", torch.float16):
        kept = [run_of(model, x, change, keep=("1", "output")).kept[0].dtype for change in (
            None, Change(autocast=torch.bfloat16), Change(autocast=torch.float32))]  # fmt: skip
    assert kept == [torch.float16, torch.bfloat16, torch.float32]
    clamped = run_of(model, x, Change(clamp=(model[0], 0.5)), keep=("0", "output"))
    assert torch.equal(clamped.kept[0], model[0](torch.full((1, 2), 0.5)))


def test_a_backward_of_a_run_leaves_no_gradient() -> None:
    """A gradient that is not finite is kept; `.grad` and hooks of the user know nothing of it."""
    model = nn.Linear(2, 2, bias=False)
    seen: list[Tensor] = []
    model.weight.register_hook(seen.append)
    with torch.no_grad():
        model.weight.zero_()
    root = nn.Sequential(model)
    root.forward = lambda x: model(x).sqrt()  # type: ignore[method-assign]
    found = run_of(root, torch.ones(1, 2), backward=True)
    assert found.error is None
    assert {row.abs_max for row in found.bad_gradients} == {INF}
    assert (model.weight.grad, seen) == (None, [])


def test_weights_of_another_dtype_are_there_for_the_block() -> None:
    """Tied weights stay tied, whole numbers stay what they are, and afterwards each is the same object."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    before = [*model.parameters(), *model.buffers()]
    with loaded(model, torch.float64):
        assert model[0].weight.dtype is torch.float64
        assert model[0].weight is model[1].weight
        assert model[2].num_batches_tracked.dtype is torch.int64
        assert model(torch.ones(3, 2, dtype=torch.float64)).dtype is torch.float64
    after = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("", "model"),
        ("blocks.0.fc", "model.blocks[0].fc"),
        ("heads.a-b", "model.heads['a-b']"),
        ("odd-name", "model.get_submodule('odd-name')"),
    ],
)
def test_a_module_is_reached_by_python(name: str, code: str) -> None:
    """The expression gives the module of that name."""
    block = nn.Module()
    block.fc = nn.Linear(1, 1)
    model = nn.Module()
    model.blocks = nn.ModuleList([block])
    model.heads = nn.ModuleDict({"a-b": nn.ReLU()})
    model.add_module("odd-name", nn.Tanh())
    assert code_of(model, name) == code
    assert eval(code, {"model": model}) is model.get_submodule(name)


def test_new_leaves_leave_the_users_graph_alone() -> None:
    """A backward reaches the leaf, and nothing behind what the batch was called with."""
    weight = torch.ones(2, requires_grad=True)
    x = weight * 3
    (value,), made = fresh_leaves((x,), lambda one: one.requires_grad)
    value.add_(1)  # as a forward may: it is no leaf itself
    torch.autograd.grad(value.sum(), made)
    assert torch.equal(value, x + 1)
    assert (weight.grad, made[0].grad_fn) == (None, None)
    (same,), none = fresh_leaves((x,), lambda one: False)
    assert (same is x, none) == (True, [])


def test_hooks_of_the_user_run_only_outside_the_block() -> None:
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: seen.append(1))
    with without_hooks([x]):
        torch.autograd.grad((x * 2).sum(), [x])
    assert seen == []
    torch.autograd.grad((x * 2).sum(), [x])
    assert seen == [1]


def test_the_mean_gives_each_element_its_share() -> None:
    """As autograd has it; an empty tensor has none to give."""
    x = torch.ones(2, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(x.mean(), [x])
    assert torch.equal(mean_gradients([x])[0], expected)
    assert mean_gradients([torch.ones(0)])[0].shape == (0,)


@pytest.mark.parametrize(
    ("after", "close"),
    [([1.01, 2.0], True), ([2.0, 4.0], False), ([1.0, INF], False), ([1.0, 2.0, 3.0], True)],
)
def test_healthy_values_stay_about_the_same(after: list[float], close: bool) -> None:
    """By the norm; what was not finite before may be anything, and other shapes say nothing."""
    healthy = torch.tensor([1.0, 2.0])
    assert is_close([torch.tensor(after)], [healthy]) == close
    assert is_close([torch.tensor([1.0, 9.0])], [torch.tensor([1.0, INF])])


def test_values_are_compared_in_float64() -> None:
    """Whole numbers and complex ones too."""
    x, y = in_float64(torch.tensor([1], dtype=torch.int8), torch.tensor([0.1], dtype=torch.bfloat16))
    assert (x.dtype, y.dtype) == (torch.float64, torch.float64)
    assert in_float64(torch.ones(1, dtype=torch.complex64), torch.ones(1))[1].dtype is torch.complex128
