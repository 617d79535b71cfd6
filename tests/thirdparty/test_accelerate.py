"""Accelerate: a watch before or after `prepare`, and nothing else to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from support.first_fault import first_fault


class Net(nn.Module):
    """A residual network of two layers, without bounds on what it computes."""

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


def accelerate_loop(
    model: nn.Module,
    lr: float,
    *,
    precision: str = "no",
    watch: str = "",
    gradients: bool = False,
    **options: Any,
) -> Any:
    """Train under Accelerate; returns the Watch, which begins before or after `prepare`."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    given = {"gradients": gradients, "max_frames": 1000}
    watched = nanwatch.watch(model, **given) if watch == "before" else None
    prepared, optimizer = accelerator.prepare(model, optimizer)
    watched = nanwatch.watch(prepared, **given) if watch == "after" else watched
    x = data().to(next(model.parameters()).dtype)
    for _ in range(12):
        with accelerator.accumulate(prepared):
            loss = (prepared(x).float() - 3).abs().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.unwrap_model(prepared) is model
    return watched


@pytest.mark.parametrize(
    ("precision", "half", "lr", "watch"),
    [("no", False, 1e3, "after"), ("bf16", False, 1e3, "before"), ("no", True, 30.0, "after")],
    ids=["fp32", "bf16", "fp16-weights"],
)
def test_an_overflow_is_found_and_named(precision, half, lr, watch):
    """A learning rate that is too high makes the forward leave the format; the module is the one that hooks find."""

    def made() -> nn.Module:
        return net().half() if half else net()

    plain = made()
    expected = first_fault(plain, lambda: accelerate_loop(plain, lr, precision=precision))
    with pytest.raises(nanwatch.NonFiniteError) as error:
        accelerate_loop(made(), lr, precision=precision, watch=watch)
    finding = error.value.report.finding
    assert (finding.module, finding.label, finding.origin) == (expected, "output", "produced")
    assert finding.transient is False  # the batch could be run again, autocast and all


@pytest.mark.parametrize(("watch", "precision"), [("before", "bf16"), ("after", "no")])
def test_gradients_are_watched_bit_equal(precision, watch):
    """gradients=True under `accumulate`: weights of an unwatched training, frames of each backward, no step skipped."""
    plain, watched = net(), net()
    options = {"precision": precision, "gradient_accumulation_steps": 4}
    accelerate_loop(plain, 0.01, **options)
    seen = accelerate_loop(watched, 0.01, watch=watch, gradients=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    frames = [(f.batch, f.name) for f in seen.frames if f.phase == "backward"]
    assert sorted(frames) == [(batch, name) for batch in range(12) for name in ("", "act", "down", "up")]
    assert seen.skipped_steps == ()


@pytest.mark.parametrize("prepared", [False, True])
def test_the_state_of_a_prepared_optimizer_is_seen(prepared):
    """`optimizer=` takes what `prepare` returns, whose step is made by the optimizer inside, or that one itself."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
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
