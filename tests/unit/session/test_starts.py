"""The snapshot that gradients=True keeps for the re-run lives as long as a backward may come, and no longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanwatch import NonFiniteError, watch

pytestmark = pytest.mark.usefixtures("each_recorder")


class Root(nn.Module):
    """The root of its input and a weight, whose gradient at zero is inf. Its graph does not hold the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.weight).sqrt()


class Keeps(nn.Module):
    """Keeps its latest output, and with it the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Root()
        self.latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.latest = self.root(x)
        return self.latest


def given() -> Tensor:
    """The input of a batch."""
    return torch.tensor([0.0, 1.0, 4.0])


def is_alive(reference: weakref.ref[Any]) -> bool:
    """Return whether the object it refers to is still there, cycles apart."""
    gc.collect()
    return reference() is not None


@pytest.mark.parametrize("observed", ["*", "0"])
def test_the_inputs_of_an_evaluation_go_with_its_outputs(observed: str) -> None:
    """In grad mode too, also where the outermost module is not observed; while an output lives, so do they."""
    model = nn.Sequential(Root())
    x = given()
    alive = weakref.ref(x)
    with watch(model, gradients=True, modules=observed):
        y = model(x)
        del x
        assert is_alive(alive)
        del y
        assert not is_alive(alive)


def test_the_inputs_go_with_a_backward_that_is_fine_and_with_the_next_batch() -> None:
    """Nothing is left for a step where no gradient was bad. At most one batch is kept, while the graphs of two live."""
    model = Root()
    with watch(model, gradients=True):
        x = given() + 1
        alive = weakref.ref(x)
        model(x).sum().backward()
        del x
        assert not is_alive(alive)
        x = given()
        alive = weakref.ref(x)
        first = model(x)
        del x
        second = model(given())
        assert not is_alive(alive)
        del first, second


def test_nothing_is_kept_after_stop() -> None:
    """Neither the inputs nor the model, whether a graph is left or a bad backward that no step took."""
    for backward in (False, True):
        model, x = Root(), given()
        alive = [weakref.ref(model), weakref.ref(x)]
        w = watch(model, gradients=True, on_nonfinite="record", rerun=True)
        y = model(x)
        if backward:
            y.sum().backward()
        w.stop()
        del model, x
        assert not any(map(is_alive, alive))
        del y


def test_a_model_that_keeps_its_output_is_collected() -> None:
    """A model that holds its graph is freed: no part of the watch that the graph holds refers to the model."""
    model, x = Keeps(), given()
    alive = [weakref.ref(model), weakref.ref(x)]
    w = watch(model, gradients=True)
    model(x)
    del model, x, w
    assert not any(map(is_alive, alive))


def backward_of_all_that_is_left(model: nn.Module) -> None:
    """No name refers to the batch, its output or its loss when the step comes."""
    model(given()).sum().backward()


def backward_through_a_checkpoint(model: nn.Module) -> None:
    """The forward is run again in the backward."""
    x = given().requires_grad_()
    checkpoint(model, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("way", [backward_of_all_that_is_left, backward_through_a_checkpoint])
def test_the_rerun_has_what_it_needs_when_a_step_takes_a_bad_backward(
    way: Callable[[nn.Module], Any],
) -> None:
    """Also where the graph, and with it all else that knows the batch, is gone by then."""
    model = nn.Sequential(Root())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, gradients=True) as w:
        _ = way(model)
        with pytest.raises(NonFiniteError) as raised:
            optimizer.step()
        finding = raised.value.report.finding
        assert finding is not None
        assert finding.operation == "SqrtBackward0"
        assert w.report().finding is not None
