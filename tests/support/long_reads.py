"""Tensors that take long to read, and threads that act meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from support.implementations import threads


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
    before = sys.getswitchinterval()
    thread.start()
    handle = module.register_forward_hook(lambda *_: called.set())
    sys.setswitchinterval(60)
    try:
        with threads(1):
            yield thread
    finally:
        sys.setswitchinterval(before)
        handle.remove()
        called.set()
        thread.join()


def long_to_read() -> Tensor:
    """Ones of which each is read 4,096 times: some 50 ms of reading in 128 KiB of memory."""
    return torch.ones(1 << 15).as_strided((1 << 14, 1 << 14), (1, 1))
