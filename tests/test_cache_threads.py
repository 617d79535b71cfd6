"""The cache, while another thread writes to what is read, replaces it or ends the watch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.numerics import _extension
from nanwatch.session.api import watch
from toys import Own, latest

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder remembers nothing")
NAN = float("nan")

QUIET: dict[str, Any] = {"on_nonfinite": "record", "microscope": False, "forecast": False}


OTHER = torch.optim.SGD([nn.Parameter(torch.ones(1))])


def long_to_read() -> Tensor:
    """Ones of which each is read 4,096 times: some 50 ms of reading in 128 KiB of memory."""
    return torch.ones(1 << 15).as_strided((1 << 14, 1 << 14), (1, 1))


@contextmanager
def during_the_read(module: nn.Module, act: Callable[[], object]) -> Iterator[threading.Thread]:
    """Inside, another thread acts once while the recorder reads what belongs to the first call of the module.

    The recorder looks at the call after the user's hooks, and lets other threads run only while it reads: they get no
    other turn.
    """
    called = threading.Event()

    def run() -> None:
        called.wait()
        act()

    thread = threading.Thread(target=run)
    before, threads = sys.getswitchinterval(), torch.get_num_threads()
    thread.start()
    handle = module.register_forward_hook(lambda *_: called.set())
    sys.setswitchinterval(60)
    torch.set_num_threads(1)
    try:
        yield thread
    finally:
        sys.setswitchinterval(before)
        torch.set_num_threads(threads)
        handle.remove()
        called.set()
        thread.join()


def write(x: Tensor) -> None:
    """Make the element nan that was read first."""
    with torch.no_grad():
        x[0, 0] = NAN


def write_past_the_counter(x: Tensor) -> None:
    """The same as fused optimizers do it: the step's hook is the only sign."""
    x.data[0, 0] = NAN
    OTHER.step()


@pytest.mark.parametrize("write", [write, write_past_the_counter])
def test_a_weight_written_while_it_is_read_is_read_again(write: Callable[[Tensor], None]) -> None:
    """What was read is of the version before: the next batch, if not this one, has the nan."""
    OTHER.step()  # the first one takes long
    model = Own()
    model.weight = nn.Parameter(long_to_read(), requires_grad=False)
    with watch(model, **QUIET) as w:
        with during_the_read(model, lambda: write(model.weight)):
            model(torch.ones(1))
        model(torch.ones(1))
        assert latest(w, "weight").isfinite is False


def test_an_activation_written_while_it_is_read_is_read_again() -> None:
    """The same tensor goes through a second module: its range there is the one that it has by then."""
    model = nn.Sequential(nn.Identity(), nn.Identity())
    x = long_to_read()
    with watch(model, **QUIET) as w, during_the_read(model[0], lambda: write(x)) as writer:
        model[1].register_forward_pre_hook(lambda *_: writer.join())
        model(x)
    assert latest(w, "input[0]", "1").isfinite is False


def test_a_tensor_resized_while_it_is_read_has_the_sizes_that_were_read() -> None:
    """Its record has one tensor's shape and range, not a shape from memory that was freed."""
    model = Own()
    x = long_to_read()
    with (
        watch(model, weights=False, outputs=False, **QUIET) as w,
        during_the_read(model, lambda: x.set_(torch.full((5,), 7.0))),
    ):
        model(x)
    record = latest(w, "input[0]")
    assert (record.shape, record.abs_min, record.abs_max) == ((1 << 14, 1 << 14), 1.0, 1.0)


REPLACED = """
import torch, nanwatch
from torch import nn
from test_cache_threads import QUIET, Own, during_the_read, long_to_read

model = Own()
for _ in range(8):
    model.weight = nn.Parameter(long_to_read(), requires_grad=False)
    watch = nanwatch.watch(model, **QUIET)

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
    pathes = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    # What is freed is overwritten at once.
    environment = os.environ | {"MALLOC_PERTURB_": "165", "PYTHONPATH": pathes}
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", REPLACED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
