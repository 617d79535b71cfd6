"""watch(gradients=True) of models of which a part is frozen: which gradient overflows first, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from support.first_backward_fault import first_backward_fault
from support.gradient_models import Adapted, freeze
from support.recorders import WITH_DEVICE, watched
from support.training import assert_same_bits


class Half(nn.Module):
    """A residual network under float16 autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.up, self.act, self.down = nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            x = self.embed(x)
            return self.head(x + self.down(self.act(self.up(x))))


def half(choose: Callable[[Half], list[nn.Module]], factor: float) -> nn.Module:
    """Return a network with these parts frozen, and large weights in one layer."""
    torch.manual_seed(0)
    model = Half()
    freeze(*choose(model))
    with torch.no_grad():
        model.down.weight.mul_(factor)
    return model


def adapted_half(factor: float) -> nn.Module:
    """All frozen but adapters."""
    model = half(lambda m: [m], factor)
    model.up, model.down = Adapted(model.up), Adapted(model.down)
    return model


class Overflow(NamedTuple):
    """A model, the size of its inputs, the gradient that overflows, and what is frozen after the first step."""

    make: Callable[[], nn.Module]
    size: float
    where: tuple[str, str]
    freezes: str = ""

    def train(self, model: nn.Module) -> None:
        """Steps whose loss scale doubles with each, so that a gradient leaves float16 in the end."""
        x = self.size * torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(40):
            optimizer.param_groups[0]["lr"] = 1e-6 / 2.0**step
            loss = (model(x).float() - 3).square().mean()
            (loss * 2.0**step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if self.freezes and step == 0:
                freeze(model.get_submodule(self.freezes))


# Small inputs and large weights: the gradient of the inputs overflows. The other way round: that of the weights.
OVERFLOWS = {
    "in a frozen layer": Overflow(lambda: half(lambda m: [m.down], 1e3), 1e-3, ("down", "input[0].grad")),
    "behind a frozen embedding": Overflow(
        lambda: half(lambda m: [m.embed], 1e3), 1e-3, ("down", "input[0].grad")
    ),
    "in the head alone": Overflow(
        lambda: half(lambda m: [m.embed, m.up, m.down], 40.0), 10.0, ("head", "weight.grad")
    ),
    "in the frozen layer beside an adapter": Overflow(
        lambda: adapted_half(1e3), 1e-3, ("down.base", "input[0].grad")
    ),
    "in an adapter": Overflow(lambda: adapted_half(1.0), 100.0, ("down.up", "weight.grad")),
    "in a layer that was frozen after a step": Overflow(
        lambda: half(lambda m: [], 1e3), 1e-3, ("down", "input[0].grad"), "down"
    ),
}


@pytest.mark.parametrize("case", OVERFLOWS)
@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_an_overflow_is_found_and_named(case: str, recorder: str) -> None:
    """A loss scale that grows until a gradient leaves float16: the operation, the module and the batch are those that
    plain hooks on the graph's nodes find first, and the weights are those before the step that would take it.
    """
    plain, ours = OVERFLOWS[case].make(), OVERFLOWS[case].make()
    expected = first_backward_fault(plain, lambda: OVERFLOWS[case].train(plain))
    with (
        watched(ours, recorder, gradients=True, max_skipped_steps=0),
        pytest.raises(nanwatch.NonFiniteError) as error,
    ):
        OVERFLOWS[case].train(ours)
    finding = error.value.report.finding
    assert finding is not None
    assert (finding.phase, finding.origin, finding.value) == ("backward", "produced", "inf")
    assert (finding.module, finding.label) == OVERFLOWS[case].where
    assert finding.module == expected.module
    assert finding.batch == expected.batch > 1
    assert finding.operation == expected.operation
    assert_same_bits(ours.state_dict(), plain.state_dict())
