"""Module calls of a run: their order, who is inside whom, and their tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nanwatch.equivalence.calls import (
    CallPair,
    ModuleCall,
    alone,
    innermost,
    part_of_difference,
    recorded,
    value,
)
from nanwatch.equivalence.differences import KeptTensor, Store


class Twice(nn.Module):
    """Calls its layer twice, and a module without parameters between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.act = nn.ReLU()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.layer(self.act(self.layer(x)))
        return result


def calls_of(model: nn.Module) -> list[ModuleCall]:
    torch.manual_seed(0)
    with torch.no_grad(), recorded(model, Store(1 << 20)) as log:
        model(torch.ones(2, 3), torch.ones(2, dtype=torch.bool))
    return log.calls


def test_calls_are_in_the_order_of_their_ends() -> None:
    """Each with its number, the call around it, copies of its tensors, and the shape of its weight."""
    model = Twice()
    calls = calls_of(model)
    assert [one.key for one in calls] == [("layer", 0), ("act", 0), ("layer", 1), ("", 0)]
    root = calls[-1]
    assert [one.parent is root for one in calls[:3]] == [True] * 3
    assert all(root.holds(one) and not one.holds(root) for one in calls[:3])
    assert [one.is_leaf for one in calls] == [True, True, True, False]
    assert (calls[0].weight_shape, calls[1].weight_shape) == ((3, 3), ())
    assert len(root.inputs) == 1  # a mask of bools is none of its numbers
    expected = model.layer(torch.ones(2, 3))
    assert torch.equal(calls[0].outputs[0].rows, expected.detach())
    assert calls[1].inputs[0] is calls[0].outputs[0]


def test_a_call_that_raises_ends_there() -> None:
    """Those before it are kept, and the model is as it was."""
    model = nn.Sequential(nn.ReLU(), nn.Linear(9, 9))
    with recorded(model, Store(1 << 20)) as log, pytest.raises(RuntimeError):
        model(torch.ones(2, 3))
    assert [one.path for one in log.calls] == ["0"]
    model[0](torch.ones(1))
    assert len(log.calls) == 1


def test_the_innermost_call_and_what_is_alone() -> None:
    """Between two times, with parameters, and in no pair."""
    first, act, second, root = calls = calls_of(Twice())
    assert innermost(calls, first.start, first.end) is first
    assert innermost(calls, first.start, second.end) is root
    assert alone(calls, [], root.start, root.end) == "layer, layer"
    assert alone(calls, [CallPair((first,), (act,))], root.start, root.end) == "layer"
    assert alone(calls, [], second.end, root.end) == ""


def test_a_pair_has_the_names_and_times_of_its_calls() -> None:
    """Several beside a fused one: their inputs are there at the first start, their outputs at the last end."""
    first, _, second, root = calls_of(Twice())
    pair = CallPair((first, second), (root,))
    assert pair.name == "layer, layer | the root module"
    assert (pair.time("inputs", 0), pair.time("outputs", 0)) == (first.start, second.end)
    assert CallPair((first,), (second,)).name == "layer"


def test_values_of_calls_are_summed_or_laid_side_by_side() -> None:
    """As hidden and residual, or as the parts of a fused projection; one that is not there is None."""
    first, _, second, _ = calls_of(Twice())
    beside = value([first, second], "outputs", (0,))
    assert beside is not None
    assert beside.shape == (2, 6)
    first.outputs.append(KeptTensor((2, 3), torch.ones(2, 3), is_sketch=False))
    both = value([first], "outputs", (0, 1))
    assert both is not None
    assert torch.equal(both.rows, first.outputs[0].rows + 1)
    assert value([second], "outputs", (1,)) is None


def test_the_part_of_a_fused_projection_that_differs() -> None:
    """Named where not all do."""
    first, _, second, _ = calls_of(Twice())
    first.key = ("q", 0)
    a = torch.ones(4, 6)
    b = a.clone()
    b[:, :3] += 1
    assert part_of_difference([first, second], a, b, 0.1) == ["in q only"]
    assert part_of_difference([first, second], a, b + 1, 0.1) == []
    assert part_of_difference([first], a, b, 0.1) == []
