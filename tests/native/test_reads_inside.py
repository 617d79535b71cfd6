"""The CPU kernels read nothing outside of a tensor: its neighbours are pages that nobody may read."""

from __future__ import annotations

import ctypes
import functools
import mmap
import random

import pytest
import torch

from support.cuda_emulation import dtypes
from support.implementations import Implementation, threads
from support.oracle import expected, same

PAGE = mmap.PAGESIZE
LENGTHS = [*range(1, 70), 127, 128, 129, 255, 256, 257, 511, 600]


@functools.cache
def between_closed_pages(pages: int) -> mmap.mmap:
    """Pages between two that end the process when they are read."""
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    memory[:] = bytes(random.Random(0).choices(range(0x30, 0x40), k=len(memory)))  # finite in every format
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None).mprotect
    for page in (0, pages + 1):
        assert protect(ctypes.c_void_p(address + page * PAGE), ctypes.c_size_t(PAGE), 0) == 0
    return memory


@dtypes
def test_each_read_ends_where_the_tensor_ends(implementation: Implementation, dtype: torch.dtype) -> None:
    """Runs and strided views that begin or end at the edge, every length up to a few vectors."""
    if not implementation.is_native or dtype is torch.bool:
        pytest.skip("torch's own loops, or bytes that are no bools")
    for stride in (1, 2, 3, 9):
        for length in LENGTHS:
            span = ((length - 1) * stride + 1) * dtype.itemsize
            if span > 2 * PAGE:
                continue
            for start in (PAGE, 3 * PAGE - span):
                run = torch.frombuffer(
                    between_closed_pages(2), dtype=dtype, count=span // dtype.itemsize, offset=start
                )
                x = run[::stride]
                want = expected(x)
                assert same(implementation.abs_range(x), want[:3])
                assert same(implementation.tensor_health(x), want)


def test_the_streams_of_a_large_tensor_end_where_it_ends(implementation: Implementation) -> None:
    """It is read 1 MiB at a time, here up to the last vector, whatever the size of a vector is."""
    memory = between_closed_pages((1 << 20) // PAGE + 1)
    with threads(1):  # several share it, in smaller parts
        for vector in (16, 32, 64):
            size = (1 << 20) + 2 * vector
            x = torch.frombuffer(memory, dtype=torch.int32, count=size // 4, offset=len(memory) - PAGE - size)
            assert implementation.abs_range(x)[:2] == (x.min(), x.max())  # all are above 0
