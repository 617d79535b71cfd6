"""How much of the process's heap is in use, as the C library tells it."""

from __future__ import annotations

import ctypes
import gc
import tracemalloc
from collections.abc import Callable

import pytest


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def assert_no_growth(run: Callable[[int], None], few: int, many: int, least: int) -> None:
    """Neither the C heap nor Python's memory in use grows by `least` bytes a round over `many` rounds, after `few`.

    Skips the test where the C library does not tell.
    """
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        pytest.skip("no mallinfo2 in this C library")
    mallinfo.restype = _Mallinfo2

    def in_use() -> tuple[int, int]:
        gc.collect()
        found = mallinfo()
        return found.uordblks + found.hblkhd, tracemalloc.get_traced_memory()[0]

    run(few)
    # Of two measures one looks at the heap without what tracemalloc itself keeps there.
    heap = in_use()[0]
    run(many)
    heap = in_use()[0] - heap
    tracemalloc.start()
    try:
        run(few)
        python = in_use()[1]
        run(many)
        python = in_use()[1] - python
    finally:
        tracemalloc.stop()
    assert heap < many * least
    assert python < many * least
