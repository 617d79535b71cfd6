"""Memory of the recorder's cache over long runs."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch import nn

from nanwatch.numerics import _extension
from nanwatch.session.api import watch
from support import heap
from support.processes import forked

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder remembers nothing")


def test_nothing_grows_over_200000_batches() -> None:
    """Heap, Python objects, labels and weights after 200,000 batches are those after 20,000, forecasts and all."""
    model = nn.Linear(1, 1)
    x = torch.ones(1, 1)

    def run(batches: int) -> tuple[int, int, int, int]:
        with torch.no_grad():
            for _ in range(batches):
                model(x)
        gc.collect()
        return heap.in_use(), sys.getallocatedblocks(), w.counters["labels"], w.counters["weights_remembered"]

    with watch(model) as w:
        memory, objects, *remembered = run(20_000)
        later_memory, later_objects, *later = run(180_000)
        assert (w.batch, len(w.frames)) == (199_999, 21)
    # Less than a bit a batch.
    assert later_memory - memory < 20_000
    assert later_objects - objects < 1_000
    assert later == remembered


# In a process of its own: the peak of another test would hide this one's. 200 activations of 1 MiB, few alive at once.
PEAK = """
import sys, torch
from torch import nn
from support.heap import resident_peak
from nanwatch.session.api import watch

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


@pytest.mark.skipif(sys.platform != "linux", reason="measures in the units of Linux")
def test_what_is_remembered_does_not_fragment_the_heap() -> None:
    """While 200 activations of 1 MiB come and go, the peak of memory grows by less than 30 MiB, in four runs."""

    def peak(case: str) -> int:
        done = forked("-c", PEAK, case)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    # A weak pointer pins a hundred bytes between two blocks of the heap; where they lie is another matter each run.
    plain = peak("plain")
    assert max(peak("watched") for _ in range(4)) - plain < 30
