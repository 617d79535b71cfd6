"""What the recorder remembers stays small, however long the run and whatever the model makes anew."""

from __future__ import annotations

import collections
import gc
import itertools
import os
import subprocess
import sys
import tracemalloc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heap
from nanwatch.numerics import _extension
from nanwatch.session.api import watch
from toys import Own

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder remembers nothing")


def test_nothing_grows_over_many_batches() -> None:
    """After 20,000 batches: no more labels, weights or Python memory than after 2,000, and max_frames frames."""
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
            later = run(18_000)
            assert later[1:] == (labels, weights)
            assert later[0] - memory < 40_000  # 2 bytes a batch
            assert (w.batch, len(w.frames)) == (19_999, 21)
    finally:
        tracemalloc.stop()
    assert (labels, weights) == (5, 2)


@pytest.mark.slow
def test_nothing_grows_over_a_million_batches() -> None:
    """Heap, Python objects, labels and weights after 1,000,000 batches are those after 100,000, forecasts and all."""
    model = nn.Linear(1, 1)
    x = torch.ones(1, 1)

    def run(batches: int) -> tuple[int, int, int, int]:
        with torch.no_grad():
            for _ in range(batches):
                model(x)
        gc.collect()
        return heap.in_use(), sys.getallocatedblocks(), w.counters["labels"], w.counters["weights_remembered"]

    with watch(model) as w:
        memory, objects, *remembered = run(100_000)
        later_memory, later_objects, *later = run(900_000)
        assert (w.batch, len(w.frames)) == (999_999, 21)
    # Less than a bit a batch.
    assert later_memory - memory < 100_000
    assert later_objects - objects < 5_000
    assert later == remembered


def test_parameters_that_are_gone_are_forgotten() -> None:
    """A model that makes new parameters each step: entries of the dead are swept, those of the living stay."""
    model = Own()
    with watch(model, inputs=False, outputs=False) as w:
        alive = []
        for i in range(6_000):
            model.weight = nn.Parameter(torch.ones(1))
            alive.append(model.weight)  # so that each has an address of its own
            model(torch.ones(1))
            if i % 1000 == 999:
                alive.clear()
        assert w.counters["weights_remembered"] <= 2 * 1024
        assert w.counters["tensors_read"] == 6_000


# In a process of its own: the peak of another test would hide this one's. 200 activations of 1 MiB, few alive at once.
PEAK = """
import sys, torch
from torch import nn
from heap import resident_peak
from nanwatch.watch import watch

class Multiply(nn.Module):
    def forward(self, x):
        return x * 1.01

model = nn.Sequential(*[Multiply() if i % 2 else nn.GELU() for i in range(200)])
w = watch(model) if sys.argv[1] == "watched" else None
for _ in range(5):
    with torch.no_grad():
        model(torch.randn(2**18))
print(resident_peak() // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measures in the units of Linux")
def test_what_is_remembered_does_not_fragment_the_heap() -> None:
    """Of 200 activations of 1 MiB that come and go, the peak of memory grows by less than 30 MiB, in four runs."""

    def peak(case: str) -> int:
        command = [sys.executable, "-c", PEAK, case]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return int(
            subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        )

    # A weak pointer pins a hundred bytes between two blocks of the heap; where they lie is another matter each run.
    plain = peak("plain")
    assert max(peak("watched") for _ in range(4)) - plain < 30


@pytest.mark.parametrize("kind", ["dict", "OrderedDict"])
def test_the_same_keys_made_anew_cost_no_new_label(kind: str) -> None:
    """Keys spelt by an f-string are other objects in each batch; their labels are the same few."""
    make = dict if kind == "dict" else collections.OrderedDict

    class Named(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return make((f"loss_{i}", None) for i in range(20))

    model = Named()
    with watch(model) as w:
        for _ in range(3_600):
            model(torch.ones(1))
    assert w.counters["labels"] <= 30
    assert w.frames[-1].records[-1].label == "output[loss_19]"


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
