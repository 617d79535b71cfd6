"""try_cures leaves nothing behind, raises nothing and runs the batch five times at most."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.diagnosis.cures import MAX_RUNS, try_cures
from support.overflows import CASES, HALF, Attention, Op, big, failed, half, is_finite, linear, outlier
from support.spy import Spy


class Stateful(nn.Module):
    """Dropout, running statistics, half and single precision, a flag that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        self.drop.training = not self.drop.training
        y = self.drop(self.norm(x)) * 0 + x
        return self.attention(y[None])


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize("is_watched", [False, True])
def test_the_model_is_left_as_it_was(is_half: bool, is_watched: bool) -> None:
    """Parameters, buffers, flags, hooks, gradients, random states and every module's __dict__ are as before."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(1), Stateful())
    x = torch.full((3, 4), 2000.0)
    if is_half:
        model, x = model.half(), x.half()
    hook = model[1].register_forward_hook(lambda *_: None)
    start, finding = failed(model, x, autocast=None if is_half else HALF)
    watch = nanwatch.watch(model) if is_watched else None
    state = {name: value.clone() for name, value in model.state_dict().items()}
    objects = [*model.parameters(), *model.buffers()]
    dicts = [
        {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()}
        for module in model.modules()
    ]
    random_state = torch.get_rng_state()
    cures, remarks = try_cures(start, finding, model)
    assert sum(cure.works for cure in cures) == 2
    assert remarks == ()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(a is b for a, b in zip(objects, [*model.parameters(), *model.buffers()], strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert dicts == [
        {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()}
        for module in model.modules()
    ]
    assert hook.id in model[1]._forward_hooks
    assert not torch.is_autocast_enabled("cpu")
    if watch is not None:
        assert watch.frames == ()
        assert watch.batch is None
        watch.stop()


def test_at_most_five_runs() -> None:
    """However the trials end, the batch is run no more than MAX_RUNS times, and once in float64."""
    calls = Spy()

    def count(x: Tensor) -> Tensor:
        calls.add()
        return x

    for name, (build, x, autocast, expected) in CASES.items():
        model = build()
        model.insert(0, Op(count))
        start, finding = failed(model, x, autocast=autocast)
        before = len(calls.values)
        cures, _ = try_cures(start, finding, model)
        assert len(cures) == len(expected), name
        assert 1 <= len(calls.values) - before <= MAX_RUNS + 1
        assert sum(cure.works for cure in cures) <= 2


@pytest.mark.parametrize("known", [None, False])
def test_a_trial_that_raises_is_a_remark(known: bool | None) -> None:
    """A module that cannot take float32 or bfloat16 is reported so, one line for each trial, and nothing is raised."""

    def only_half(x: Tensor) -> Tensor:
        if x.dtype is not HALF:
            raise RuntimeError("float16 only\nand a second line")
        return x * x

    model = half(nn.Sequential(linear(1), Op(only_half)))
    x = outlier(1000.0).half()
    start, finding = failed(model, x)
    cures, remarks = try_cures(start, replace(finding, transient=known), model)
    assert [cure.what for cure in cures] == ["clamp the output of `1` to ±65504"]
    assert is_finite(model, (x,), {}, None, cures[0].what)
    assert remarks
    assert all(remark.endswith("RuntimeError: float16 only") for remark in remarks)
    assert all(remark.startswith("could not try to ") for remark in remarks)


def test_ctrl_c_passes_and_leaves_nothing() -> None:
    """KeyboardInterrupt in a trial goes up, with every change taken back."""
    calls = Spy()
    most: int | None = None

    def square(x: Tensor) -> Tensor:
        calls.add()
        if most is not None and len(calls.values) > most:
            raise KeyboardInterrupt
        return x * x / x

    model = half(nn.Sequential(linear(1), Op(square)))
    start, finding = failed(model, big(1000.0).half())
    before = [dict(module.__dict__) for module in model.modules()]
    most = len(calls.values) + 1
    with pytest.raises(KeyboardInterrupt):
        try_cures(start, finding, model)
    assert before == [module.__dict__ for module in model.modules()]
    assert all(parameter.dtype is HALF for parameter in model.parameters())
