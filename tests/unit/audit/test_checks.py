"""The rules of optimizers against torch's own: what a step makes of a weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.audit.checks import expected, spacing
from nanwatch.audit.samples import sample_after, sample_step


def steps(
    kind: Any, options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    """Return what the rule gives and what the optimizer did, in four steps of a small model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    optimizer = kind(model.parameters(), **options)
    found = []
    for step in range(1, 5):
        optimizer.zero_grad()
        model(torch.randn(7, 6, dtype=dtype)).square().mean().backward()
        samples = sample_step(model, optimizer, step)
        optimizer.step()
        sample_after(samples)
        for weight in samples.by_key.values():
            values = expected(optimizer, weight, samples)
            assert values is not None
            assert weight.after is not None
            found.append((values, weight.after))
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": False}),
        (torch.optim.SGD, {"lr": 0.1, "maximize": True, "fused": True}),
        (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}),
        (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "fused": True}),
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "maximize": True}),
        (torch.optim.AdamW, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3, "fused": True}),
    ],
)
def test_a_rule_gives_what_the_optimizer_does(kind: Any, options: dict[str, Any]) -> None:
    """Each form of each optimizer, in float64 beside the optimizer's own float64."""
    for values, after in steps(kind, options, torch.float64):
        torch.testing.assert_close(values, after, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("state", [{"compensation": torch.zeros(2, 3)}, {"exp_avg": torch.zeros(7)}])
def test_a_rule_says_nothing_of_a_state_that_it_does_not_know(state: dict[str, Tensor]) -> None:
    """More than AdamW has, or the mean of a shard that could not be sampled."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight].update(state)
    samples = sample_step(model, optimizer, 2)
    assert [expected(optimizer, weight, samples) is None for weight in samples.by_key.values()] == [
        True,
        False,
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_spacing_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    """Over the magnitudes of a format."""
    x = (2.0 ** torch.arange(-10, 10) * 1.3).to(dtype)
    following = torch.nextafter(x, torch.tensor(float("inf"), dtype=dtype))
    torch.testing.assert_close(spacing(x), following.double() - x.double(), rtol=0, atol=0)
