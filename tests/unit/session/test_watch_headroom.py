"""The least headroom between two questions, against by_module of the same frames."""

from __future__ import annotations

from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import nanwatch
from nanwatch.records.headroom import by_module
from nanwatch.session.api import DeferredWatch, LeastHeadroom
from support.toys import Scale

FACTORS = st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4, 1e20, 1e38, inf])


@given(st.lists(st.tuples(FACTORS, FACTORS, st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_it_is_the_least_of_all_frames_since(batches):
    """Over any batches, formats and moments of asking: the least over all frames since the last answer, and where."""
    net = nn.Sequential(Scale(), nn.Linear(2, 2), Scale())
    with nanwatch.watch(net, max_frames=100, on_nonfinite="record") as watch:
        least, answered = LeastHeadroom(watch), 0
        for first, last, half, asks in batches:
            net[0].factor, net[2].factor = first, last
            net.to(torch.float16 if half else torch.float32)
            with torch.no_grad():
                net(torch.ones(1, 2, dtype=torch.float16 if half else torch.float32))
            least.look()
            if asks:
                fresh, answered = watch.frames[answered:], len(watch.frames)
                worst = {name: bits for name, bits in by_module(fresh).items() if bits < inf}
                found = least.take()
                assert found is not None
                assert found.bits == min(worst.values())
                assert worst[found.module] == found.bits
                assert found.label
                assert least.take() is None


def test_a_roomy_watch_misses_nothing():
    """With few frames to show, the least of a batch of many calls is still found, and is not the last."""
    net = nn.Sequential(*[Scale() for _ in range(50)])
    net[3].factor, net[4].factor = 1e30, 1e-30
    deferred = DeferredWatch({"max_frames": 2}, headroom=True)
    watch = deferred.start(net)
    net(torch.ones(2))
    found = deferred.take_least()
    assert found is not None
    assert (found.module, found.label, found.dtype) == ("3", "output", "float32")
    assert found.place == "3 output, float32"
    assert [frame.name for frame in watch.frames] == ["49", ""]
    deferred.stop()


def test_what_is_recorded_before_does_not_count():
    """The first interval begins when the LeastHeadroom is made; zeros and integers have no room to speak of."""
    net = nn.Sequential(Scale(1e30))
    with nanwatch.watch(net) as watch:
        net(torch.ones(2))
        least = LeastHeadroom(watch)
        assert least.take() is None
        net(torch.zeros(2))
        assert least.take() is None


def test_a_deferred_watch_checks_its_options_first():
    """Options are refused when they are given, patterns when there is a model."""
    with pytest.raises(ValueError, match="every"):
        DeferredWatch({"every": 0})
    with pytest.raises(TypeError, match="'max_frame'"):
        DeferredWatch({"max_frame": 1})
    deferred = DeferredWatch({"modules": "encoder"})
    with pytest.raises(ValueError, match="matches no module"):
        deferred.start(nn.Linear(2, 2))
    assert deferred.watch is None


@pytest.mark.parametrize("headroom", [True, False])
def test_a_deferred_watch_watches_one_model_at_a_time(headroom):
    """To start again is to leave the model before; the options count for each."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    deferred = DeferredWatch({"every": 1}, headroom=headroom)
    deferred.stop()
    watches = [deferred.start(first), deferred.start(second)]
    first(torch.ones(1, 2))
    second(torch.ones(1, 2))
    deferred.stop()
    assert [watch.batch for watch in watches] == [None, 0]
    assert all(module._compiled_call_impl is None for module in (first, second))
