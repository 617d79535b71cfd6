"""The update that rounds away against a step in float64."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nanwatch.audit.audit import gathered
from nanwatch.audit.rules import Suspect, update_of
from nanwatch.audit.window import Step, Window


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01, "fused": True}),
        (torch.optim.AdamW, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0}),
    ],
)
def test_the_update_of_a_bfloat16_weight_is_that_of_float64(kind: Any, options: dict[str, Any]) -> None:
    """Within the rounding of the optimizer's state, over four steps of equal gradients."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5).bfloat16()
    reference = nn.Linear(6, 5).double()
    reference.load_state_dict({name: x.double() for name, x in model.state_dict().items()})
    optimizer, exact = kind(model.parameters(), **options), kind(reference.parameters(), **options)
    window: Any = SimpleNamespace(arrivals={}, calls={}, copies=(), sources=0, clips=lambda _: [])
    for _ in range(4):
        for x, twin in zip(model.parameters(), reference.parameters(), strict=True):
            x.grad = torch.randn_like(x)
            twin.grad = x.grad.double()
        audited = Step(model, optimizer, window, lambda _: False, {}, 0, False)
        before = {name: x.detach().clone() for name, x in reference.named_parameters()}
        optimizer.step()
        exact.step()
        audited.finish()
        for name, x in reference.named_parameters():
            update = update_of(audited, audited.weights["", name])
            assert update is not None
            meant = (before[name] - x.detach()).flatten()
            torch.testing.assert_close(update, meant, rtol=0.02, atol=0.01 * options["lr"])
    # A hook of the optimizer changes a gradient after it was sampled.
    next(model.parameters()).grad.mul_(2)
    audited.finish()
    assert [weight.gradient is None for weight in audited.weights.values()] == [True, False]


def test_a_fault_of_a_module_counts_the_weights_that_have_it() -> None:
    weights = {("0", "weight"): 90, ("0", "bias"): 5, ("2", "weight"): 90, ("2", "bias"): 5}
    faults = gathered([Suspect("zero-gradient", *key) for key in [*weights][:3]], weights)
    assert [(*suspect[1:3], count) for suspect, count in faults] == [("", None, 3)]


def test_a_backward_inside_a_backward_is_no_arrival_of_its_own() -> None:
    """Only the first of a scaled loss has a sample of its gradient."""
    model = nn.Linear(2, 2)
    recorder: Any = SimpleNamespace(subscribe=lambda _: SimpleNamespace(active=False), latest_batch=0)
    window = Window(recorder, model, lambda *_: None)
    window.renew(torch.optim.SGD(model.parameters(), lr=0.1))
    for factor in (3.0, 0.25):
        loss = checkpoint(model, torch.ones(1, 2, requires_grad=True), use_reentrant=True).sum()
        (loss * factor if factor > 1 else loss / 4).backward()
    window.taps.remove()
    seen = [(x.factors, x.was_full, x.gradient is None) for x in window.arrivals[id(model.weight)]]
    assert seen == [((3.0,), False, False), ((0.25,), True, True)]
