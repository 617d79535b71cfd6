"""How much memory the process has in use, as the C library and the kernel tell it."""

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


def in_use() -> int:
    """The bytes of the C heap that are in use. Skips the test where the C library does not tell."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        pytest.skip("no mallinfo2 in this C library")
    mallinfo.restype = _Mallinfo2
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def assert_no_growth(run: Callable[[int], None], rounds: int, least: int) -> None:
    """Neither the C heap nor Python's memory in use grows by `least` bytes a round in each of three runs, after one.

    What grows for good grows in all of them; a cache that is filled once does not.
    """

    def growth(used: Callable[[], int]) -> int:
        """The least of three."""
        found = []
        for _ in range(3):
            gc.collect()
            before = used()
            run(rounds)
            gc.collect()
            found.append(used() - before)
        return min(found)

    run(rounds)
    # Apart: tracemalloc keeps its own on the heap.
    grown = growth(in_use)
    assert grown < rounds * least, f"{grown} bytes of the C heap over {rounds} rounds"
    tracemalloc.start()
    try:
        run(rounds)
        grown = growth(lambda: tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert grown < rounds * least, f"{grown} bytes of Python's over {rounds} rounds"
