"""Gradients on a device that runs when told: reports are those of the host, with one wait a backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nanwatch.numerics import _extension
from nanwatch.report.report import Report
from nanwatch.session.watch import Watch
from support.gradient_models import Net, Spoil, Spoiling, backward_frames, loss_of
from support.stand_in_device import StandIn, stand_in
from support.toys import chain, mlp, text_of
from support.training import stopped
from support.watching import watch

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder waits for each row")
X = torch.ones(2, 3)


class SpoilsLater(nn.Module):
    """The identity, whose gradient gets an inf in the backwards named."""

    def __init__(self, *batches: int) -> None:
        super().__init__()
        self.batches, self.calls = batches, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return Spoil.apply(x) if self.calls - 1 in self.batches else x + 0


@contextlib.contextmanager
def trained(model: nn.Module, **options: Any) -> Iterator[tuple[StandIn, torch.optim.Optimizer, Watch]]:
    """The model watched on a device that runs when told, with its gradients, and an optimizer of its weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings_of_watch = {"rerun": False, "gradients": True, **options}
    with stand_in() as device, watch(model, **settings_of_watch) as w:
        yield device, optimizer, w


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), spoils=st.booleans(), behind=st.booleans(), skips=st.sampled_from([0, 20]))
def test_reports_are_those_of_the_host(seed: int, spoils: bool, behind: bool, skips: int) -> None:
    """Random graphs over three batches, one of which may be spoilt: every frame in its order, and the report."""
    found = {}
    for check, place, holds in (
        ("module", -1, True),
        ("batch", 0, True),
        ("batch", 0, False),
    ):
        model = Net(seed)
        if spoils:
            model.steps[0] = Spoiling(model.steps[0], behind)
        torch.manual_seed(0)
        with stand_in(place=lambda x, place=place: place, holds=holds):
            with watch(
                model,
                gradients=True,
                max_frames=1000,
                on_nonfinite="record",
                act_at=check,
                max_skipped_steps=skips,
            ) as w:
                for _ in range(3):
                    loss_of(model(torch.randn(2, 4, requires_grad=True))).backward()
            found[check, place, holds] = text_of(w)
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("accumulates", [1, 3])
def test_the_step_is_stopped_before_it_takes_a_late_gradient(accumulates: int) -> None:
    """Whichever of the backwards behind it was bad; with the finding and the frames of the host."""
    reports: list[Report] = []
    for place in (-1, 0):
        model = chain(SpoilsLater(2 * accumulates - 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stand_in(place=lambda x, place=place: place):
            w = watch(model, gradients=True, rerun=False)
            for _ in range(accumulates):
                model(X).sum().backward()
            optimizer.step()
            for _ in range(accumulates):
                model(X).sum().backward()
            with stopped(model) as error:
                optimizer.step()
            w._leave()
        reports.append(error.value.report)
    assert reports[0].to_json() == reports[1].to_json()
    finding = reports[0].finding
    assert finding is not None
    assert (finding.phase, finding.module, finding.batch) == ("backward", "1", 2 * accumulates - 1)


def test_a_forward_and_a_backward_wait_once_each() -> None:
    """Each tensor's read is launched when it appears, and awaited when its forward or backward is over."""
    model = mlp()
    with trained(model) as (device, optimizer, w):
        for count in (0, 2):
            loss = model(X).sum()
            assert device.waits == count + 1
            loss.backward()
            assert device.launches[-7:] == [1] * 7  # of three outputs and four weights
            assert device.waits == count + 2
            optimizer.step()
            assert device.waits == count + 2
        assert [frame.name for frame in backward_frames(w)][-4:] == ["2", "1", "0", ""]
