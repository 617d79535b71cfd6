"""The line that a finding names: that of the call which did it, the latest before the step."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch import watch

pytestmark = pytest.mark.filterwarnings("ignore:the optimizer's step", "ignore:.*more finding")


def model_of(rate: float = 1e-3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=rate)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, each: Any = lambda: None) -> tuple[str, str]:
    """Return kind and line of the first finding."""
    x = torch.ones(4, 8, dtype=next(model.parameters()).dtype, requires_grad=True)
    with watch(model, updates=True, black_box=False) as w:
        for _ in range(8):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            each()
    file, line = str(w.updates[0].place).rsplit(":", 1)
    return w.updates[0].kind, linecache.getline(file, int(line)).strip()


def test_the_conversion_that_narrowed_the_weights() -> None:
    model, optimizer = model_of(1e-6)
    model.to(dtype=torch.bfloat16)
    assert train(model, optimizer) == ("absorbed", "model.to(dtype=torch.bfloat16)")


def test_the_call_that_left_evaluation_mode_on() -> None:
    model, optimizer = model_of()
    model.eval()
    found = train(model, optimizer)
    model.eval()
    assert found == ("train-mode-wrong", "model.eval()")


def test_the_step_of_the_scheduler_that_gives_no_rate() -> None:
    model, optimizer = model_of()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    found = train(model, optimizer, lambda: scheduler.step())  # each step
    assert found == ("zero-lr", "found = train(model, optimizer, lambda: scheduler.step())  # each step")


def test_the_line_that_froze_what_the_optimizer_holds() -> None:
    model, optimizer = model_of()
    for x in model.parameters():
        x.requires_grad = False
    assert train(model, optimizer) == ("no-gradient", "x.requires_grad = False")
