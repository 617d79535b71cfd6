"""Gradients on a device that runs when told: reports are those of the host, with one wait a backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nanwatch.numerics import _extension
from nanwatch.session.watch import Watch
from support.gradient_models import Net, Spoiling, backward_frames, loss_of
from support.stand_in_device import StandIn, stand_in
from support.toys import mlp, text_of
from support.watching import watch

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder waits for each row")
X = torch.ones(2, 3)


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
