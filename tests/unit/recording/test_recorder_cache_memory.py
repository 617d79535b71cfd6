"""The recorder's cache stays small, however long the run and whatever tensors the model makes."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import weakref

import pytest
import torch
from torch import nn

from nanwatch.numerics import _extension
from nanwatch.session.api import watch
from support.toys import mlp

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


def test_a_batch_that_a_thread_left_open_is_freed_by_the_next_thread() -> None:
    """A thread ends by an exception in compiled code, where no operator reports the end of the call."""
    model, x = mlp(), torch.ones(1, 3)
    with watch(model) as w:
        for target in (lambda: w._recorder.begin_compiled(0, "\x1fit input[0]", [x]), lambda: model(x)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        assert weakref.getweakrefcount(x) == 0
