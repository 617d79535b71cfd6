"""State that a step keeps from run to run: `nanwatch.twice` finds, names and restores it."""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import nanwatch

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Last(nn.Module):
    """Multiplies by what its function returns."""

    def __init__(self, function: Callable[[], float]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x * self.function()


def python_generator() -> tuple[Callable[[], float], Callable[[], Any]]:
    kept = random.Random(0)
    return lambda: kept.random(), kept.getstate


def numpy_generator() -> tuple[Callable[[], float], Callable[[], Any]]:
    kept = np.random.default_rng(0)
    return lambda: float(kept.random()), lambda: kept.bit_generator.state


def elements_of_a_set() -> tuple[Callable[[], float], Callable[[], Any]]:
    kept = {0}

    def grow() -> float:
        kept.add(len(kept))
        return float(len(kept))

    return grow, lambda: set(kept)


def argument_of_a_partial() -> tuple[Callable[[], float], Callable[[], Any]]:
    kept = [1.0]

    def grow(values: list[float]) -> float:
        values[0] *= 2
        return values[0]

    return functools.partial(grow, kept), lambda: list(kept)


def default_of_a_function() -> tuple[Callable[[], float], Callable[[], Any]]:
    kept = {"calls": 0}

    def count(counts: dict[str, int] = kept) -> float:
        counts["calls"] += 1
        return float(counts["calls"])

    return count, lambda: dict(kept)


KEPT = [python_generator, numpy_generator, elements_of_a_set, argument_of_a_partial, default_of_a_function]


@pytest.mark.parametrize("make", KEPT, ids=lambda make: make.__name__)
def test_an_object_that_a_step_keeps_is_named_and_put_back(make: Any) -> None:
    """Each of these goes on from run to run; the trial that puts it back shows that nothing else does."""
    function, state = make()
    model = nn.Sequential(nn.Linear(4, 4), Last(function))
    before = state()
    found = nanwatch.twice(lambda: model(X))
    assert found.difference is not None
    assert "keeps from run to run" in found.difference.cause
    assert [one.outcome for one in found.tried][-1] == "equal"
    assert state() == before


def test_an_optimizer_that_no_name_leads_to_is_found_by_its_weights() -> None:
    """The step holds a weak reference; the optimizer's momentum is put back all the same."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hidden = weakref.ref(optimizer)

    def step() -> None:
        model(X).sum().backward()
        held = hidden()
        assert held is not None
        held.step()

    assert nanwatch.twice(step, times=3).equal
    assert not optimizer.state


def test_lists_and_sets_in_an_optimizers_state_are_put_back() -> None:
    """An optimizer of the user's may keep a history beside its tensors."""

    class History(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for x in group["params"]:
                    held = self.state[x].setdefault("norms", [])
                    held.append(x.grad.norm().item())
                    x.grad.mul_(1 / len(held))
            super().step()

    model = nn.Linear(4, 4)
    optimizer = History(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(X).sum().backward()
        optimizer.step()

    step()
    before = {name: list(optimizer.state[x]["norms"]) for name, x in model.named_parameters()}
    found = nanwatch.twice(step, times=3)
    assert found.equal, found.to_text()
    assert {name: optimizer.state[x]["norms"] for name, x in model.named_parameters()} == before


def test_tensors_without_bits_to_compare_are_remarked_and_nothing_fails() -> None:
    """Sparse and meta tensors as inputs and as attributes; a variable of the step that has no value."""
    model = nn.Sequential(nn.Identity())
    model.kept = torch.eye(2).to_sparse()
    if model is None:  # so that the variable has no value
        none: Any = None

    def step() -> Tensor:
        if model is None:
            none()
        model(torch.ones(2, device="meta"))
        return model(torch.eye(2).to_sparse()).to_dense()

    found = nanwatch.twice(step)
    assert found.equal
    (remark,) = found.remarks
    assert remark.startswith(
        "8 tensors could not be compared, the first input[0]: float32 [2], not compared: "
    )


def test_a_module_that_is_made_during_the_call_of_another_has_a_name() -> None:
    """By the module around it and its class, as no attribute leads to it."""

    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.Dropout(0.5)(x) * random.SystemRandom().random()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.makes = nn.Linear(4, 4), Makes()

        def forward(self, x: Tensor) -> Tensor:
            return self.makes(nn.Dropout(random.SystemRandom().random() / 2)(self.linear(x)))

    model = Outer()
    found = nanwatch.twice(lambda: model(X))
    assert found.difference is not None
    assert (found.difference.module, found.difference.class_name) == ("(Dropout)", "Dropout")
