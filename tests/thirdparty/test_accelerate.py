"""Accelerate: a watch before or after `prepare`, and nothing else to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.act = nn.ReLU()
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def data() -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def accelerator_of(precision: str, steps: int) -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=steps)


def accelerate_loop(model: nn.Module, precision: str, watch: str = "") -> Any:
    """Train under Accelerate; returns the Watch, which begins before or after `prepare`."""
    accelerator = accelerator_of(precision, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    given = {"gradients": True, "max_frames": 1000}
    watched = nanwatch.watch(model, **given) if watch == "before" else None
    prepared, optimizer = accelerator.prepare(model, optimizer)
    watched = nanwatch.watch(prepared, **given) if watch == "after" else watched
    for _ in range(12):
        with accelerator.accumulate(prepared):
            loss = (prepared(data()).float() - 3).abs().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.unwrap_model(prepared) is model
    return watched


@pytest.mark.parametrize(("watch", "precision"), [("before", "bf16"), ("after", "no")])
def test_gradients_are_watched_bit_equal(precision, watch):
    """gradients=True under `accumulate`: weights of an unwatched training, frames of each backward, no step skipped."""
    plain, watched = net(), net()
    accelerate_loop(plain, precision)
    seen = accelerate_loop(watched, precision, watch)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    frames = [(f.batch, f.name) for f in seen.frames if f.phase == "backward"]
    assert sorted(frames) == [(batch, name) for batch in range(12) for name in ("", "act", "down", "up")]
    assert seen.skipped_steps == ()


@pytest.mark.parametrize("prepared", [False, True])
def test_the_state_of_a_prepared_optimizer_is_seen(prepared):
    """`optimizer=` takes what `prepare` returns, whose step is made by the optimizer inside, or that one itself."""
    accelerator = accelerator_of("bf16", 2)
    inner = torch.optim.AdamW((model := net()).parameters())
    model, outer = accelerator.prepare(model, inner)
    with nanwatch.watch(model, optimizer=outer if prepared else inner, max_frames=100) as watched:
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(data()).square().mean())
                outer.step()
                outer.zero_grad()
        frames = [frame for frame in watched.frames if frame.phase == "step"]
    assert [frame.batch for frame in frames] == [1, 3]
    assert {record.label: record.abs_max for record in frames[-1].records} == {
        f"{key}[{name}]": inner.state[p][key].abs().max().item()
        for name, p in model.named_parameters()
        for key in ("exp_avg", "exp_avg_sq")
    }
