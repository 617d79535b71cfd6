"""The least headroom between two questions, against by_module of the same frames."""

from __future__ import annotations

from math import inf

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import nanwatch
from nanwatch.records.headroom import by_module
from nanwatch.session.api import DeferredWatch
from nanwatch.sinks.trackers import LeastHeadroom
from support.toys import Scale

FACTORS = st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e4, 1e20, 1e38, inf])


@given(st.lists(st.tuples(FACTORS, FACTORS, st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_it_is_the_least_of_all_frames_since(batches):
    """Over any batches, formats and moments of asking: the least over all frames since the last answer, and where."""
    net = nn.Sequential(Scale(), nn.Linear(2, 2), Scale())
    least, answered = LeastHeadroom(), 0
    with nanwatch.watch(net, max_frames=100, on_nonfinite="record", sinks=least) as watch:
        for first, last, half, asks in batches:
            net[0].factor, net[2].factor = first, last
            net.to(torch.float16 if half else torch.float32)
            with torch.no_grad():
                net(torch.ones(1, 2, dtype=torch.float16 if half else torch.float32))
            if asks:
                fresh, answered = watch.frames[answered:], len(watch.frames)
                worst = {name: bits for name, bits in by_module(fresh).items() if bits < inf}
                found = least.take()
                assert found is not None
                assert found.bits == min(worst.values())
                assert worst[found.module] == found.bits
                assert found.label
                assert least.take() is None


def test_zeros_and_integers_have_no_room_to_speak_of():
    """The answer is None, and a module's name, label and format make its place."""
    net, least = nn.Sequential(Scale(1e30)), LeastHeadroom()
    deferred = DeferredWatch({}, least)
    deferred.start(net)
    net(torch.zeros(2))
    assert least.take() is None
    net(torch.ones(2))
    found = least.take()
    assert found is not None
    assert found.place == "0 output, float32"
    deferred.stop()
