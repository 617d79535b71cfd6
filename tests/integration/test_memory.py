"""The memory that watching takes: nothing from torch's allocator, and a few megabytes of its own that do not grow."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.numerics import _extension
from support.allocated import allocated
from support.processes import environment
from support.sized_models import gpt2, llama, resnet
from support.watching import watch

ROOM = 16 * 1024  # for copies of the state of the random numbers, 5,056 bytes each
# The fallback reads with PyTorch's operations, whose results lie in PyTorch's memory while they are needed: 3.6 MB.
READING = 0 if _extension.C is not None else 4 * 2**20
# Counts by power of two are read with them everywhere.
COUNTING = 2**19


def peak_of(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], watched: bool, **options: Any
) -> tuple[int, int]:
    """Return the peak of two training steps, after a first one that made the optimizer's state."""
    torch.manual_seed(0)
    model, inputs = make()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    watcher = watch(model, **options) if watched else None

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def steps() -> None:
        step()
        step()

    step()
    found = allocated(steps)
    if watcher is not None:
        assert watcher.batch == 2
        watcher.stop()
    return found


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"gradients": True, "counts": True}, marks=pytest.mark.slow)],
    ids=["default", "all"],
)
@pytest.mark.parametrize(
    "make", [gpt2, pytest.param(llama, marks=pytest.mark.slow), pytest.param(resnet, marks=pytest.mark.slow)]
)
def test_the_peak_of_what_torch_allocates_is_the_same(
    make: Callable[[], tuple[nn.Module, dict[str, Any]]], options: dict[str, Any]
) -> None:
    """Forward, backward and step of models of tens of megabytes: the random state is all that comes on top.

    Counts, which are for a few batches, take up to half a mebibyte while they are made.
    """
    reading = max(READING, COUNTING if "counts" in options else 0)
    plain, watched = peak_of(make, watched=False), peak_of(make, watched=True, **options)
    assert plain[0] > 20 * 2**20
    assert abs(watched[0] - plain[0]) <= ROOM + reading
    assert watched[0] <= 1.01 * plain[0] + reading
    assert watched[1] - plain[1] <= ROOM


# In a process of its own: the peak of another test would hide this one's.
PEAK = """
import sys, torch
from support.heap import resident_peak
from support.sized_models import gpt2

torch.set_num_threads(1)
torch.manual_seed(0)
model, inputs = gpt2(width=256, rows=4)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
before = resident_peak()
w = watch(model.train()) if sys.argv[1] == "watched" else None
for _ in range(4):
    model(**inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(before, resident_peak())
"""


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="needs the allocator of glibc"
)
def test_the_peak_of_the_process_grows_by_less_than_a_hundredth() -> None:
    """Four steps of a four-layer GPT-2: resident size, with each large block mapped by itself.

    Where glibc's heap holds them too, peaks of one and the same program differ by 4 % from run to run.
    """

    def peak(case: str) -> tuple[int, int]:
        allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
        command = [sys.executable, "-c", PEAK, case]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment(**allocator)
        )
        before, most = map(int, done.stdout.split())
        return most - before, most

    # The least of two: what else the process does by the way only adds.
    (plain, whole), (watched, _) = (min(peak(case), peak(case)) for case in ("plain", "watched"))
    assert plain > whole / 4  # the steps are what makes the peak
    assert watched < 1.01 * plain
