"""loss_scale: the scale that is named ends the failure when a user takes it, and a larger one does not."""

from __future__ import annotations

import re
from math import log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from support.gradient_models import Length, dead, failing_backward

END = torch.finfo(torch.float16).max
INPUT = torch.full((2, 8), 1e-3, dtype=torch.float16)


def half_model(weight: float) -> nn.Sequential:
    """Two layers in float16, the second with this weight everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 64, bias=False)).half()
    nn.init.constant_(model[1].weight, weight)
    return model


def gradients_are_finite(weight: float, scale: float) -> bool:
    """Return whether the gradients are finite when one trains with that scale, without any watch."""
    model = half_model(weight)
    (model(INPUT).float().sum() * scale).backward()
    return all(bool(one.grad.isfinite().all()) for one in model.parameters())


def scaler_of(scale: float) -> torch.amp.GradScaler:
    """A GradScaler in use, with that scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    return scaler


@settings(max_examples=10, deadline=None)
@given(power=st.integers(8, 15), weight=st.sampled_from([30.0, 64.0, 100.0, 999.0, 3000.0]))
def test_the_scale_that_is_named_is_right(power: int, weight: float) -> None:
    """With it, and with twice of it, a user's gradients are finite; with four times of it they are not."""
    present = 2.0**power
    if gradients_are_finite(weight, present):
        return
    scaler = scaler_of(present)
    report = failing_backward(half_model(weight), INPUT, lambda y: y.float().sum() * present, scaler=scaler)
    (cure,) = (cure for cure in report.finding.cures if "loss scale" in cure.what)
    if not cure.works:
        # Not finite with the least scale either, or within a bit of the end.
        assert gradients_are_finite(weight, 1.0) == (cure.verdict == "not enough")
        return
    match = re.fullmatch(r"a loss scale of (\S+) in place of (\S+)", cure.what)
    smaller = float(match[1])
    assert float(match[2]) == present
    assert gradients_are_finite(weight, smaller)
    assert gradients_are_finite(weight, 2 * smaller) or smaller == 1
    assert not gradients_are_finite(weight, 4 * smaller)
    # The largest gradient is that of the second layer's input: 64 outputs, each with the scale as its gradient.
    assert cure.headroom_bits == pytest.approx(log2(END / (64 * weight * smaller)), abs=0.01)


@pytest.mark.parametrize("known", [True, False])
def test_a_pole_is_not_cured_and_that_is_said(known: bool) -> None:
    """The derivative of a norm at zero is not finite with any scale; of an unknown one nothing is told."""
    model, x = dead(Length()).half(), torch.ones(2, 3, dtype=torch.float16)
    report = failing_backward(model, x, lambda y: y.sum() * 256, scaler=scaler_of(256.0) if known else None)
    told = [(cure.what, cure.works) for cure in report.finding.cures if not cure.patch]
    assert told == ([("a loss scale of 1 in place of 256", False)] if known else [])
