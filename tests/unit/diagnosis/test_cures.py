"""try_cures: what it says works, applied as a user would, ends the failure; what it says does not help, does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.diagnosis import cures as cures_module
from nanwatch.diagnosis.batch_snapshot import BatchSnapshot
from nanwatch.diagnosis.cures import try_cures
from nanwatch.diagnosis.experiment import Conditions
from nanwatch.report.finding import Cure
from support.overflows import (
    CASES,
    HALF,
    Attention,
    Op,
    Scaled,
    big,
    failed,
    half,
    is_finite,
    linear,
    wrong_cures,
)


@pytest.mark.parametrize("known", [None, False], ids=["transient unknown", "comes back"])
@pytest.mark.parametrize("name", list(CASES))
def test_the_cures_are_true(name: str, known: bool | None) -> None:
    """Each cure is what it says it is when a user applies it, and the cures are those expected."""
    build, _, autocast, _ = CASES[name]
    if autocast is None:
        assert next(build().parameters()).dtype is HALF
    wrong = wrong_cures(name, transient=known)
    assert not wrong, wrong


def test_the_smallest_ancestor_that_is_enough() -> None:
    """The nearest module around the guilty one that works is named: every smaller one is seen not to."""
    build, x, autocast, _ = CASES["an ancestor is enough, with half weights"]
    model = build()
    start, finding = failed(model, x, autocast=autocast)
    cures, _ = try_cures(start, finding, model)
    assert [cure.what for cure in cures if cure.works][-1].endswith("nanwatch.run_in_fp32(model[1])")
    for smaller in ("model[1][0][0]", "model[1][0]"):
        assert not is_finite(model, (x,), {}, autocast, f"nanwatch.run_in_fp32({smaller})")


def test_no_float32_for_what_is_float32() -> None:
    """Where no narrow format takes part there is no cure, and but one run."""
    model = nn.Sequential(linear(1), Op(torch.exp))
    start, finding = failed(model, big(1000.0))
    with mock.patch.object(cures_module, "run", wraps=cures_module.run) as runs:
        assert try_cures(start, finding, model) == ((), ())
    assert runs.call_count == 1
    half_elsewhere = nn.Sequential(linear(1), Op(torch.exp), Op(lambda x: x.half()))
    half_elsewhere.append(linear(1).half())
    start, finding = failed(half_elsewhere, big(1000.0))
    assert finding.module == "1"
    for known in (None, False):
        assert try_cures(start, replace(finding, transient=known), half_elsewhere) == ((), ())


def test_what_does_not_come_back_is_not_cured() -> None:
    """A failure that a re-run does not show gets a remark and no cure, known before or not."""
    bad = iter([True])
    model = half(
        nn.Sequential(linear(1), Op(lambda x: x * float("inf") if next(bad, False) else x), linear(1))
    )
    start, finding = failed(model, big(1.0).half())
    cures, (remark,) = try_cures(start, finding, model)
    assert cures == ()
    assert "did not come back" in remark
    with mock.patch.object(cures_module, "run") as run:
        assert try_cures(start, replace(finding, transient=True), model) == ((), (remark,))
    assert not run.called


def test_no_trial_of_a_model_that_several_ranks_share() -> None:
    """Nothing is run, and a remark says why."""
    sharded = type("Sharded", (Attention,), {"__module__": "deepspeed.runtime"})
    model = half(nn.Sequential(linear(1), sharded()))
    start, finding = failed(model, big(2000.0).half())
    with (
        mock.patch.object(torch.distributed, "is_initialized", return_value=True),
        mock.patch.object(torch.distributed, "get_world_size", return_value=2),
        mock.patch.object(cures_module, "run") as run,
    ):
        cures, (remark,) = try_cures(start, finding, model)
    assert cures == ()
    assert "2 processes" in remark
    assert not run.called


@pytest.mark.parametrize("scale", [65536.0, torch.tensor(65536.0)])
def test_a_smaller_loss_scale(scale: Any) -> None:
    """A scale that the batch was called with is made smaller, and what is told makes the call finite."""
    model = Scaled()
    start, finding = failed(model, big(3.0), autocast=HALF, scale=scale)
    first, *others = try_cures(start, finding, model, conditions=Conditions(65536.0))[0]
    assert Cure("a loss scale of 256 in place of 65536", True, first.headroom_bits) == first
    assert is_finite(model, (big(3.0),), {"scale": 256.0}, HALF, "clamp the input of `layer` to ±inf")
    assert try_cures(start, finding, model, conditions=Conditions(3.5))[0] == tuple(others)


def test_infinities_that_the_watch_allows() -> None:
    """A fault before the first that anybody minded stays out of the judgement."""
    model = half(nn.Sequential(Op(lambda x: (x.log(), x)[0]), Op(lambda x: x.nan_to_num(neginf=2000.0))))
    model.append(linear(1).half())
    model.append(Attention().half())
    x = torch.zeros(1, 3, 4, dtype=HALF)
    with nanwatch.watch(model, allow_inf=["0", "1"]):
        start = BatchSnapshot.capture(model, (x,), {})
        with pytest.raises(nanwatch.NonFiniteError) as error:
            model(x)
    finding = error.value.report.finding
    assert finding is not None
    assert finding.module == "3"
    cures, _ = try_cures(start, finding, model)
    assert cures[0].works


class Unbound(nn.Module):
    """The backward of unbind stacks what comes to it, which autocast refuses for bfloat16 inside a float16 block."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(x).view(-1, 2, 4).unbind(1)
        return self.b(torch.cat([first, second], -1))


def test_the_backward_of_a_trial_runs_behind_autocast() -> None:
    """As that of the user does: the best cure is the same with gradients as without."""
    torch.manual_seed(0)
    model, x = Unbound(), torch.randn(4, 8)
    with torch.no_grad():
        model.b.weight.mul_(1e5)
    found = []
    for gradients in (False, True):
        autocast = torch.autocast("cpu", dtype=torch.float16)
        with (
            nanwatch.watch(model, gradients=gradients),
            autocast,
            pytest.raises(nanwatch.NonFiniteError) as error,
        ):
            model(x)
        finding = error.value.report.finding
        assert finding is not None
        found.append(finding.cures)
    assert found[0] == found[1]
    assert found[0][0].what == 'use bfloat16 in autocast, torch.autocast("cpu", dtype=torch.bfloat16)'
