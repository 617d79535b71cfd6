"""Hooks of a watch with gradients=True: on tensors alone, and each reads what is at its place when it is called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from nanwatch.report.report import NonFiniteError
from support.recorders import WITH_DEVICE, watched

KINDS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
pytestmark = pytest.mark.parametrize("recorder", WITH_DEVICE)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.LayerNorm(4), nn.Linear(4, 1))


def graph_of(loss: Tensor) -> list[str]:
    """The kinds of its nodes, each by the first way to it: a full backward hook of a module would add some."""
    kinds, left, seen = [], [loss.grad_fn], set()
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            kinds.append(type(node).__name__)
            left += [following for following, _ in node.next_functions]
    return kinds


def test_only_tensors_are_hooked(recorder: str) -> None:
    """No module and no registry of all modules has a hook, and the graph has the nodes of an unwatched one."""
    plain, model, x = model_of(), model_of(), torch.ones(2, 3, requires_grad=True)
    with watched(model, recorder, gradients=True) as w:
        loss = model(x).sum()
        assert graph_of(loss) == graph_of(plain(x).sum())
        loss.backward()
        hooks = [getattr(module, f"_{kind}") for module in model.modules() for kind in KINDS]
        assert not any([*hooks, *(getattr(torch_module, f"_global_{kind}") for kind in KINDS)])
        numbers = {frame.name: len(frame.records) for frame in w.frames if frame.phase == "backward"}
    assert numbers == {"3": 4, "2": 4, "1": 1, "0": 4, "": 2}  # the ReLU writes into its input


class Fork(nn.Module):
    """The sum of two layers, to both of which its backward hands the same gradient; a hook writes into it between."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.hook = nn.Linear(4, 4), nn.Linear(4, 4), hook

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), self.second(x)
        second.register_hook(self.hook)
        return first + second


@pytest.mark.parametrize("hook", [lambda g: g.mul_(2), lambda g: setattr(g, "data", g.data * 2)])
def test_what_a_hook_changes_is_read_again(recorder: str, hook: Callable[[Tensor], Any]) -> None:
    """In place, which raises the version, or in another storage: the place behind the hook has what is there then."""
    model = Fork(hook)
    with watched(model, recorder, gradients=True) as w:
        model(torch.ones(2, 4)).backward(torch.full((2, 4), 3.0))
    largest = {f.name: r.abs_max for f in w.frames for r in f.records if r.label == "output.grad"}
    assert largest == {"": 3.0, "second": 3.0, "first": 6.0}
    model.hook = lambda g: g * torch.nan  # of this branch alone: gradients that come later are finite
    model.first.bias.register_hook(lambda g: 1 / 0)  # after it: an exception ends the backward
    with watched(model, recorder, gradients=True, on_nonfinite="record") as w:
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 4)).sum().backward()
        assert w.report().finding.module == "second"


def test_the_first_hook_of_the_user_takes_no_gradient_away(recorder: str) -> None:
    """PyTorch then drops other hooks of the leaf: between forward and backward, while another graph lives."""
    model = nn.Sequential(nn.Linear(2, 2))
    with watched(model, recorder, gradients=True, max_frames=100) as w:
        loss = model(torch.full((1, 2), 1.0)).sum()
        model[0].weight.register_hook(lambda gradient: None)
        model(torch.full((1, 2), 3.0)).sum().backward()
        loss.backward()
        seen = [(f.batch, r.abs_max) for f in w.frames for r in f.records if r.label == "weight.grad"]
    assert seen == [(1, 3.0), (0, 1.0)]


def test_a_finite_sum_of_sparse_gradients_is_told_from_one_that_is_not(recorder: str) -> None:
    """Two that are finite and add up to inf stop the step; what is sparse is read at each place."""
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with watched(model, recorder, gradients=True):
        model(torch.tensor([1])).backward(torch.full((1, 2), 2e38))
        optimizer.step()
        model(torch.tensor([1])).backward(torch.full((1, 2), 2e38))
        model.weight.data.copy_(before)
        with pytest.raises(NonFiniteError, match=r"weight\.grad"):
            optimizer.step()
    assert torch.equal(model.weight, before)


def test_compiled_autograd_finds_nothing_to_compile_in_a_hook(recorder: str) -> None:
    """The backward is one graph: with fullgraph=True a hook that breaks it would be an error."""
    model, x = model_of(), torch.ones(2, 3)
    model(x).sum().backward()
    expected = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    with (
        watched(model, recorder, gradients=True),
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)),
    ):
        model(x).sum().backward()
    for weight, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=0, atol=0)
