"""The cache, while another thread frees what is read: a process of its own, whose allocator overwrites freed memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nanwatch.numerics import _extension
from support.processes import environment

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder remembers nothing")


REPLACED = """
import torch, nanwatch
from torch import nn
from support.long_reads import during_the_read, long_to_read
from support.toys import Own

model = Own()
for _ in range(8):
    model.weight = nn.Parameter(long_to_read(), requires_grad=False)
    watch = nanwatch.watch(model, on_nonfinite="record", rerun=False, forecast=False)

    def replace():
        model.weight = nn.Parameter(torch.zeros(3), requires_grad=False)
        model(torch.ones(1))
        watch.stop()

    with during_the_read(model, replace):
        model(torch.ones(1))
    assert [frame.records[0].shape for frame in watch.frames] == [(3,), (1 << 14, 1 << 14)]
"""


def test_a_weight_replaced_while_it_is_read() -> None:
    """Another thread gives the module another weight, calls it and ends the watch: nothing freed is written to."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", REPLACED],
        env=environment(MALLOC_PERTURB_="165"),  # overwrites what is freed at once
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
