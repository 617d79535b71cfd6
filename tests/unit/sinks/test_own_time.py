"""Own time in the summaries that sinks get: measured in few batches, and the recorder's own count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.numerics import _extension
from nanwatch.sinks.batch_summary import BatchSummary
from nanwatch.sinks.own_time import OwnTime
from support import watching


class Summaries(nanwatch.Sink):
    """Keeps the own time of each summary."""

    def __init__(self) -> None:
        self.own: dict[int, OwnTime | None] = {}

    def on_batch(self, summary: BatchSummary) -> None:
        self.own[summary.batch] = summary.own_time


@pytest.mark.skipif(_extension.C is None, reason="no compiled part")
def test_own_time_is_counted_in_two_batches_of_those_between_two_summaries() -> None:
    """The recorder counts in the two batches after a logged one, and the second of them is the next summary's."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    sink = Summaries()
    counted: list[int] = []
    with watching.watch(model, sinks=sink, log_every=5) as watch:
        before = 0
        for _ in range(11):
            model(torch.ones(2, 4))
            before, counted = (
                watch.counters["nanoseconds"],
                [*counted, watch.counters["nanoseconds"] - before],
            )
    assert [batch for batch, spent in enumerate(counted) if spent] == [1, 2, 6, 7]
    assert list(sink.own) == [0, 5, 10]
    assert sink.own[0] is None
    for batch, (first, second) in ((5, counted[1:3]), (10, counted[6:8])):
        own = sink.own[batch]
        assert own is not None
        # The outermost call at the beginning stands for the one at the end.
        assert 0 < own.seconds * 1e9 <= first + second
        assert 0 < own.share <= 1


def test_without_the_compiled_part_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recorder counts no time."""
    monkeypatch.setattr(_extension, "C", None)
    model, sink = nn.Linear(2, 2), Summaries()
    with watching.watch(model, sinks=sink, log_every=2):
        for _ in range(5):
            model(torch.ones(1, 2))
    assert sink.own == {0: None, 2: None, 4: None}
