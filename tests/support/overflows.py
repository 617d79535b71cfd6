"""Models that overflow, the finding of each, the cures expected of it, and a user who applies what a cure says.

CASES: for each the model, its input, the dtype of autocast or None for half
weights, and the cures in their order of trial, each by the start of its text and whether it works.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.diagnosis.batch_snapshot import BatchSnapshot
from nanwatch.diagnosis.cures import try_formats
from nanwatch.diagnosis.trials import Trials
from nanwatch.report.finding import Finding, working_first
from programs.case import Setup, follow
from support.examined import snapshot_of
from support.toys import Does

HALF = torch.float16


class Attention(nn.Module):
    """Attention with itself, its logits not scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x)
        return (q @ q.transpose(-1, -2)).softmax(-1) @ q


def linear(value: float, size: int = 4) -> nn.Linear:
    """A layer with all weights `value` and no bias."""
    layer = nn.Linear(size, size, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def big(value: float) -> Tensor:
    return torch.full((1, 3, 4), value)


def outlier(value: float) -> Tensor:
    """One row of `value`, the others small."""
    x = big(1.0)
    x[0, 0] = value
    return x


def context_of(autocast: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if autocast is None else torch.autocast("cpu", autocast)


def failed(
    model: nn.Module, *args: Any, autocast: torch.dtype | None = None, grad: bool = False, **kwargs: Any
) -> tuple[BatchSnapshot, Finding]:
    """Return the start of the batch and the finding of the failing call, without what a re-run may have found."""
    with context_of(autocast), nanwatch.watch(model), torch.set_grad_enabled(grad):
        start = snapshot_of(model, args, kwargs)
        try:
            model(*args, **kwargs)
        except nanwatch.NonFiniteError as error:
            finding = error.report.finding
            assert finding is not None
            return start, replace(finding, transient=None, operands=(), cures=(), remarks=())
    raise AssertionError("the call should fail, and did not")


def formats_of(start: BatchSnapshot, finding: Finding, model: nn.Module) -> Any:
    """Return the cures by other formats, and the remarks on what could not be tried."""
    trials = Trials(start, finding, model)
    try_formats(trials)
    return working_first(trials.cures), tuple(trials.remarks)


def is_finite(model: nn.Module, args: Any, kwargs: Any, autocast: torch.dtype | None, what: str) -> bool:
    """Return whether all of the forward is finite with the cure that `what` names, applied to a copy of the model."""
    setup = Setup(copy.deepcopy(model), args, kwargs, autocast)
    assert follow(what, setup)
    try:
        with nanwatch.watch(setup.model), torch.no_grad():
            setup.run()
    except nanwatch.NonFiniteError:
        return False
    return True


def half(model: nn.Module) -> nn.Module:
    return model.half()


CASES: dict[str, tuple[Callable[[], nn.Module], Any, torch.dtype | None, list[tuple[str, bool]]]] = {
    "a leaf whose result does not fit, under autocast": (
        lambda: nn.Sequential(linear(100), linear(100), Does(torch.tanh), linear(1)),
        big(100.0),
        HALF,
        [("run `1` in float32", False), ("use bfloat16 in autocast", True)],
    ),
    "an ancestor is enough, with half weights": (
        lambda: half(
            nn.Sequential(
                linear(1),
                nn.Sequential(nn.Sequential(linear(300), Does(torch.relu)), linear(1e-4)),
                linear(1),
            )
        ),
        big(100.0).half(),
        None,
        [
            ("run `1.0.0` in float32", False),
            ("load the weights in bfloat16", True),
            ("run `1` in float32, nanwatch.run_in_fp32(model[1])", True),
        ],
    ),
    "an exponential that fits in float32": (
        lambda: half(nn.Sequential(linear(1), Does(torch.exp), Does(torch.log))),
        big(5.0).half(),
        None,
        [("run `1` in float32", False), ("load the weights in bfloat16", True)],
    ),
    "an exponential that fits nowhere": (
        lambda: nn.Sequential(linear(1), Does(torch.exp)),
        big(100.0),
        HALF,
        [("run `1` in float32", False)],
    ),
    "half precision written into the code": (
        lambda: nn.Sequential(linear(1), Does(lambda x: (x.half() * x.half()).float())),
        big(500.0),
        HALF,
        [("run `1` in float32", False)],
    ),
}


def wrong_cures(name: str) -> str:
    """Return "", or what is wrong: a cure is not the expected one, or is not what it says when a user applies it."""
    build, x, autocast, expected = CASES[name]
    torch.manual_seed(0)
    model = build()
    start, finding = failed(model, x, autocast=autocast)
    cures, remarks = formats_of(start, finding, model)
    told = [(cure.what, cure.works) for cure in cures]
    expected = sorted(expected, key=lambda case: not case[1])
    if len(told) != len(expected) or remarks:
        return f"told {told} and {remarks}, expected {expected}"
    for (what, works), (begin, should_work) in zip(told, expected, strict=True):
        if not what.startswith(begin) or works is not should_work or "\n" in what:
            return f"told {what!r}, which works: {works}; expected {begin!r}, which works: {should_work}"
        if is_finite(model, (x,), {}, autocast, what) is not works:
            return f"told of {what!r} that it works: {works}; applied, it is otherwise"
    if is_finite(model, (x,), {}, autocast, "clamp the input of `0` to ±inf"):
        return "the model is finite without a cure"
    return ""
