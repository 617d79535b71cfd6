"""The recorder's cache stays small, however long the run and whatever tensors the model makes."""

from __future__ import annotations

import collections
import gc
import itertools
import tracemalloc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.numerics import _extension
from nanwatch.session.api import watch

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder remembers nothing")


def test_nothing_grows_over_many_batches() -> None:
    """After 10,000 batches: no more labels, weights or Python memory than after 2,000, and max_frames frames."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.randn(1, 2)

    def run(batches: int) -> tuple[int, int, int]:
        with torch.no_grad():
            for _ in range(batches):
                model(x)
        gc.collect()
        counters = w.counters
        return tracemalloc.get_traced_memory()[0], counters["labels"], counters["weights_remembered"]

    tracemalloc.start()
    try:
        with watch(model) as w:
            memory, labels, weights = run(2_000)
            later = run(8_000)
            assert later[1:] == (labels, weights)
            assert later[0] - memory < 16_000  # 2 bytes a batch
            assert (w.batch, len(w.frames)) == (9_999, 21)
    finally:
        tracemalloc.stop()
    assert (labels, weights) == (5, 2)


def test_ever_new_keys_end_in_dots() -> None:
    """Past the limit a label no longer names the key, but still what it is in; memory stays bounded."""
    number = itertools.count()

    class Named(nn.Module):
        def forward(self, x: Tensor) -> Any:
            keys = [f"loss_{next(number)}" for _ in range(500)]
            return {"a": collections.OrderedDict.fromkeys(keys), "b": dict.fromkeys(keys)}

    model = Named()
    with watch(model) as w:
        for _ in range(300):
            model(torch.ones(1))
    labels = {record.label for record in w.frames[-1].records}
    assert labels <= {"input[0]", "output[...]", "output[a][...]", "output[b][...]"}
    assert len(labels) > 1
    assert w.counters["labels"] < 70_000
