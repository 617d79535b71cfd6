"""own_memory: what a child writes to shared memory ends with the child."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanwatch.diagnosis import own_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="re-runs have a child on Linux alone")


def _in_child(work: Any) -> int:
    """Return how a forked child ends that owns its memory and then calls `work`."""
    pid = os.fork()
    if pid == 0:
        status = 1
        faulthandler.disable()
        try:
            own_memory.own_shared_memory()
            status = int(not work())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_each_kind_of_shared_memory_is_the_childs_own(tmp_path: Path) -> None:
    """A file, the shared value of Python and a shared tensor keep their values, which the child has and changes."""
    file = np.memmap(tmp_path / "counts", "int64", "w+", shape=(1000,))
    value, x = multiprocessing.Value("i", 3), torch.full((2000,), 4.0).share_memory_()
    file[:] = 2

    def work() -> bool:
        is_there = bool((file == 2).all()) and value.value == 3 and bool((x == 4).all())
        file[:] = 20
        with value.get_lock():
            value.value = 30
        x.fill_(40)
        return is_there and file[999] == 20 and value.value == 30 and x[1999].item() == 40

    assert _in_child(work) == 0
    assert (file == 2).all()
    assert value.value == 3
    assert (x == 4).all()
    assert np.fromfile(tmp_path / "counts", "int64").tolist() == [2] * 1000


def test_what_is_too_large_for_a_copy_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that writes to it ends, and the value stays."""
    monkeypatch.setattr(own_memory, "_MOST_COPIED", 0)
    x = torch.ones(2000).share_memory_()
    assert _in_child(lambda: x.sum().item() == 2000) == 0
    assert _in_child(lambda: x.zero_() is x) < 0
    assert (x == 1).all()
