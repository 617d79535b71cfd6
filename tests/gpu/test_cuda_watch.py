"""Whole programs on a GPU: findings, skipped steps, gradients, waits, compiled models, and what a watch leaves behind.

With NANWATCH_GPU_TESTS=cpu they run on the host, as far as they say nothing about a GPU: that shows that the tests run.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nanwatch
from nanwatch.report.report import NonFiniteError
from support.recorders import WAITS, needs_cuda
from support.toys import Does

DEVICE = os.environ.get("NANWATCH_GPU_TESTS", "cuda")
ON_GPU = DEVICE == "cuda"
pytestmark = [needs_cuda] * ON_GPU
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="says something about a GPU only")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 100)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


class Squares(nn.Module):
    """Its square leaves float16."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h * h
        return self.down(h)


def ids(device: str = DEVICE) -> Tensor:
    return torch.arange(64, device=device).view(2, 32) % 100


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(ids()).flatten(0, 1), ids().flatten()).backward()
        optimizer.step()


def waits(step: Any) -> list[str]:
    """Names of the calls with which the host waited for the device in step()."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    return [event.name for event in profile.events() if event.name in WAITS]


def test_frames_are_those_of_the_host() -> None:
    """Names, order, shapes and dtypes are equal, magnitudes up to the devices' rounding."""
    frames = []
    for device in ("cpu", DEVICE):
        model = Net().to(device)
        with nanwatch.watch(model, max_frames=1000) as watch, torch.no_grad():
            for _ in range(2):
                model(ids(device))
        frames.append(watch.frames)
    on_host, on_device = frames
    assert [frame.name for frame in on_device] == [frame.name for frame in on_host]
    for expected, frame in zip(on_host, on_device, strict=True):
        for a, b in zip(expected.records, frame.records, strict=True):
            assert (a.label, a.shape, a.dtype, a.isfinite) == (b.label, b.shape, b.dtype, b.isfinite)
            assert b.abs_max == pytest.approx(a.abs_max, rel=1e-3)


@pytest.mark.parametrize("on_nonfinite", ["raise", "record"])
def test_an_overflow_is_found_with_operation_line_and_cure(on_nonfinite: Any) -> None:
    torch.manual_seed(0)
    model = Squares().half().to(DEVICE)
    with torch.no_grad():
        model.up.weight.fill_(50.0)
    with nanwatch.watch(model, on_nonfinite=on_nonfinite, rerun=True) as watch:
        try:
            model(torch.ones(2, 8, dtype=torch.half, device=DEVICE))
        except NonFiniteError as error:
            report = error.report
        else:
            report = watch.report()
    finding = report.finding
    assert (finding.value, finding.operation) == ("inf", "aten.mul.Tensor")
    assert finding.place.file == __file__
    assert any(cure.works and "bfloat16" in cure.what for cure in finding.cures)


def test_a_rerun_draws_the_same_numbers() -> None:
    """Of 20 draws one is bad: a re-run from another state would find nothing."""
    torch.manual_seed(0)
    model = Does(lambda x: torch.log(torch.rand(1, device=x.device) - 0.05) + x).to(DEVICE)
    x = torch.ones(1000, 1, device=DEVICE)
    with nanwatch.watch(model), torch.no_grad(), pytest.raises(NonFiniteError) as raised:
        list(map(model, x))
    assert raised.value.report.finding.operation == "aten.log.default"
    assert raised.value.report.finding.batch > 0


def test_a_scaler_may_skip_steps() -> None:
    """A scale that is too high is no failure: steps are skipped until it fits, and training goes on."""
    model = Net().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**24)
    before = copy.deepcopy(model.state_dict())
    with nanwatch.watch(model, gradients=True):
        for _ in range(16):
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.float16):
                loss = F.cross_entropy(model(ids()).flatten(0, 1), ids().flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() < 2.0**24
    after = model.state_dict()
    assert all(torch.isfinite(value).all() for value in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_nan_gradient_is_raised_before_the_step() -> None:
    """No weight has changed when the failure is raised."""
    linear = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(linear.weight)
    model = Does(lambda linear, x: torch.sqrt(linear(x)).sum(), linear).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with nanwatch.watch(model, gradients=True):
        model(torch.ones(2, 4, device=DEVICE)).backward()
        with pytest.raises(NonFiniteError):
            optimizer.step()
    assert not linear.weight.any()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_watched_training_is_bit_equal(gradients: bool, fused: bool) -> None:
    """And after stop() the model is as it was."""
    states = []
    for watched in (False, True):
        model = Net().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        if watched:
            with nanwatch.watch(model, gradients=gradients) as watch:
                train(model, optimizer, 6)
            assert watch.frames
            for module in model.modules():
                assert not module._forward_hooks
                assert not module._forward_pre_hooks
        else:
            train(model, optimizer, 6)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@needs_gpu
def test_the_host_waits_once_a_batch() -> None:
    """Once for a forward, whatever its number of modules; a training step waits no more often."""
    model = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with torch.no_grad():
        model(ids())
    train(model, optimizer, 2)
    batch = ids()

    def forward() -> None:
        with torch.no_grad():
            model(batch)

    plain = waits(forward)
    with nanwatch.watch(model):
        for _ in range(3):
            forward()
        watched = waits(forward)
    assert len(watched) - len(plain) <= 1, (plain, watched)


@needs_gpu
def test_stop_leaves_no_memory_behind() -> None:
    model = Net().to(DEVICE)
    with torch.no_grad():
        model(ids())
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with nanwatch.watch(model):
            for _ in range(20):
                model(ids())
        torch.cuda.synchronize()
        # At most the workspaces of the streams that were used, which are kept for the next watch.
        assert torch.cuda.memory_allocated() - before <= 1 << 20


def test_a_compiled_model_has_the_frames_of_eager() -> None:
    names = []
    for compiled in (False, True):
        model = Net().to(DEVICE)
        with nanwatch.watch(model, max_frames=1000) as watch, torch.no_grad():
            called = torch.compile(model) if compiled else model
            called(ids())
            called(ids())
        names.append(sorted(frame.name for frame in watch.frames))
    assert names[0] == names[1]
