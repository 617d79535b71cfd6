"""Findings about what comes before a step: the order of an epoch, a first evaluation, a checkpoint that is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from nanwatch import watch

pytestmark = pytest.mark.filterwarnings("ignore:the optimizer's step", "ignore:.*more finding")
DATA = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(0)))


def kinds(w: Any) -> list[tuple[str, str]]:
    return [(found.kind, found.module) for found in w.updates]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("shuffles", "is_told_epochs", "evaluates", "found"),
    [
        (True, False, False, [("data-order", "")]),
        (True, True, False, []),
        (False, False, False, []),
        (True, False, True, []),
    ],
)
def test_an_epoch_in_the_order_of_the_one_before(
    shuffles: bool, is_told_epochs: bool, evaluates: bool, found: list[tuple[str, str]]
) -> None:
    """Unless nothing is shuffled, or it is the data of an evaluation."""
    sampler = DistributedSampler(DATA, num_replicas=1, rank=0, shuffle=shuffles)
    loader = DataLoader(DATA, batch_size=8, sampler=sampler)
    own = DataLoader(DATA, batch_size=8, shuffle=True) if evaluates else loader
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, updates=True, black_box=False) as w:
        for epoch in range(3):
            if is_told_epochs:
                sampler.set_epoch(epoch)
            for (x,) in own:
                step(model, optimizer, x)
            if evaluates:
                model.eval()
                with torch.no_grad():
                    for (x,) in loader:
                        model(x)
                model.train()
    assert kinds(w) == found
    assert not hasattr(DistributedSampler.__iter__, "_nanwatch")


@pytest.mark.parametrize(
    ("norm", "is_trained_before", "found"),
    [
        (spectral_norm, False, [("eval-mode-wrong", "0")]),
        (spectral_norm, True, []),
        (parametrizations.spectral_norm, False, []),
    ],
)
def test_an_evaluation_with_a_norm_that_nothing_has_estimated(
    norm: Any, is_trained_before: bool, found: list[tuple[str, str]]
) -> None:
    """A trainer checks its validation loop before the first epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(24, 24)), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(16, 24)
    with watch(model, updates=True, black_box=False) as w:
        if is_trained_before:
            step(model, optimizer, x)
            step(model, optimizer, x)
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        step(model, optimizer, x)
    assert kinds(w) == found


@pytest.mark.parametrize("is_loaded_into_both", [False, True])
def test_a_checkpoint_that_the_masters_replace(is_loaded_into_both: bool) -> None:
    """Loaded into a bfloat16 model whose optimizer has copied the weights already."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).bfloat16()
    loaded = {name: torch.randn_like(x) for name, x in model.state_dict().items()}
    masters = [x.detach().float().requires_grad_() for x in model.parameters()]
    model.load_state_dict(loaded)
    optimizer = torch.optim.SGD(masters, lr=0.1)
    pairs = list(zip(masters, model.parameters(), strict=True))
    with torch.no_grad():
        for master, x in pairs if is_loaded_into_both else ():
            master.copy_(x)
    with watch(model, updates=True, black_box=False) as w:
        for _ in range(4):
            model(torch.ones(4, 8, dtype=torch.bfloat16)).float().square().mean().backward()
            for master, x in pairs:
                master.grad, x.grad = x.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for master, x in pairs:
                    x.copy_(master)
    assert kinds(w) == ([] if is_loaded_into_both else [("master-differs", "")])
