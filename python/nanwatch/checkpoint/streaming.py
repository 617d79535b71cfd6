"""Streams the values of stored tensors through one buffer: memory stays the same whatever a file's size.

Files are read with `pread`, not mapped: a file that another process cuts off gives an error in place of a SIGBUS, and
the pages of a mapping would count as this process's memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from math import lcm, prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..numerics.partial_health import BLOCK
from .encodings import ENCODINGS, Array, bytes_of, decoded, is_float
from .stored import OpenFiles, StoredTensor

# In bytes. Of 384 KiB and more the kernels would share the work among PyTorch's threads, for which readers would wait.
CHUNK = 352 << 10
# A longer row is an embedding of 16 Mi columns, or no row.
_MOST_LINE = 1 << 24
_A = TypeVar("_A")
_B = TypeVar("_B")
_WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def step_of(tensor: StoredTensor, size: int) -> int:
    """Return the bytes of a part of about `size`: whole elements, blocks of a fingerprint, and rows if they fit."""
    unit = BLOCK
    if (encoding := ENCODINGS.get(tensor.dtype)) is not None:
        unit = lcm(unit, encoding.bytes)
    with_rows = lcm(unit, bytes_of(tensor.dtype, prod(tensor.lying[1:])))
    unit = with_rows if 0 < with_rows <= size else unit
    return max(size // unit, 1) * unit


class Piece(NamedTuple):
    """Bytes of a tensor that are read in one go."""

    tensor: StoredTensor
    begin: int
    end: int


class Dead(NamedTuple):
    """Rows or columns that are all zero: how many, and the numbers of the first."""

    total: int
    first: tuple[int, ...]


NONE = Dead(0, ())


class Streamer:
    """Reader of chunks, for one thread."""

    def __init__(self, files: OpenFiles, size: int = CHUNK) -> None:
        self._files = files
        self._bytes = torch.empty(size, dtype=torch.uint8)

    def chunks(self, tensor: StoredTensor, begin: int, end: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield places between two bytes of a tensor, with what `read` returns there."""
        step = step_of(tensor, len(self._bytes))
        for at in range(begin, end, step):
            yield at, *self.read(tensor, at, min(step, end - at))

    def read(self, tensor: StoredTensor, begin: int, nbytes: int) -> tuple[Tensor, Tensor]:
        """Return some bytes, and their numbers: float32 where they were decoded.

        Both are valid until the next ones are read. Raises DamagedError and OSError.
        """
        assert tensor.source is not None
        if nbytes > len(self._bytes):
            self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        raw = self._bytes[:nbytes]
        memory: Any = raw.numpy()
        tensor.source.read(self._files, begin, memoryview(memory))
        if (encoding := ENCODINGS.get(tensor.dtype)) is None:
            return raw, raw.view(_dtype_of(tensor))
        blocks = memory.reshape(-1, encoding.bytes)
        return raw, torch.from_numpy(decoded(blocks, tensor.dtype)).flatten()

    def values(self, tensor: StoredTensor, start: int, count: int) -> Tensor:
        """Return some elements of a tensor that can be decoded, valid until the next are read."""
        return self.read(tensor, bytes_of(tensor.dtype, start), bytes_of(tensor.dtype, count))[1]


def _dtype_of(tensor: StoredTensor) -> torch.dtype:
    # A byte of a bool may hold anything.
    return torch.uint8 if tensor.dtype == "bool" else getattr(torch, tensor.dtype)


def in_threads(call: Callable[[_A], _B], items: Sequence[_A], threads: int) -> Iterator[_B]:
    """Yield the result for each item in their order, by threads that are a few items ahead."""
    if threads == 1 or len(items) < 2:
        yield from map(call, items)
        return
    pool = ThreadPoolExecutor(threads)
    try:
        left = iter(items)
        # No more: a large checkpoint has thousands.
        ahead = deque(pool.submit(call, one) for one in islice(left, 4 * threads))
        while ahead:
            yield ahead.popleft().result()
            ahead.extend(pool.submit(call, one) for one in islice(left, 1))
    finally:
        pool.shutdown(cancel_futures=True)


def lines_of(tensor: StoredTensor) -> tuple[int, int]:
    """Return how many rows a matrix has, and how long they are; (0, 0) where they are not looked at."""
    lying = tensor.lying
    width = prod(lying[1:])
    is_matrix = len(lying) > 1 and min(lying[0], width) > 1 and not (tensor.order and len(lying) > 2)
    if not is_matrix or not is_float(tensor.dtype) or max(lying[0], width) > _MOST_LINE:
        return 0, 0
    return lying[0], width


def dead_lines(tensor: StoredTensor, zeros: int, most: int) -> tuple[Dead, Dead]:
    """Return the rows and the columns that are all zero, with the numbers of the first `most`.

    `zeros` elements of the tensor are zero: with fewer than a line has, nothing is read. The rows are those of the
    first dimension, the columns all others together. Vectors, integers and matrices of longer rows have none.
    """
    rows, width = lines_of(tensor) if zeros else (0, 0)
    if not 0 < min(rows, width) <= zeros:
        return NONE, NONE
    live, columns = np.zeros(rows, dtype=bool), np.full(width, zeros < rows)
    band = max(1, CHUNK // bytes_of(tensor.dtype, width))
    with OpenFiles() as files:
        streamer = Streamer(files)
        for at in range(0, rows if zeros < tensor.numel else 0, band):
            count = min(band, rows - at)
            values = streamer.values(tensor, at * width, count * width)
            words = values.view(_WORDS[values.itemsize]).numpy().reshape(count, width)
            magnitude = words.dtype.type((1 << (8 * words.itemsize - 1)) - 1)
            live[at : at + count] = (np.bitwise_or.reduce(words, 1) & magnitude) != 0
            columns |= (np.bitwise_or.reduce(words, 0) & magnitude) != 0
    found = _dead(live, most), _dead(columns, most)
    return found if tensor.order is None else (found[1], found[0])


def _dead(live: Array, most: int) -> Dead:
    # One by one: a large matrix may have millions, whose numbers would take more memory than the scan.
    total, first = len(live) - int(np.count_nonzero(live)), list[int]()
    while len(first) < min(most, total):
        at = first[-1] + 1 if first else 0
        first.append(at + int(live[at:].argmin()))
    return Dead(total, tuple(first))
