"""Streams the values of stored tensors through one buffer: memory stays the same whatever a file's size.

Files are read with `pread`, not mapped: a file that another process cuts off gives an error in place of a SIGBUS, and
the pages of a mapping would count as this process's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..numerics.formats import BY_NAME
from ..numerics.partial_health import BLOCK
from .encodings import ENCODINGS, Array
from .stored import OpenFiles, StoredTensor

# In bytes. Half of a second cache of 1 MiB, as the kernel of the system writes what the next read finds there.
CHUNK = 1 << 19
_SPAN = 1 << 16


class Chunk(NamedTuple):
    """Elements of a tensor from number `start` on, valid until the next one is read."""

    start: int
    raw: Tensor
    """Its bytes, from number `raw_start` of the tensor on."""
    raw_start: int
    values: Tensor | None
    """Its numbers, float32 where they were decoded; None where the encoding is not decoded."""


def step_of(tensor: StoredTensor, size: int) -> int:
    """Return the bytes of a chunk of about `size`: whole elements or blocks, and whole blocks of a fingerprint."""
    unit = BLOCK
    if (encoding := ENCODINGS.get(tensor.dtype)) is not None:
        unit *= encoding.bytes
    return max(size // unit, 1) * unit


def buffer_of(x: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, for writing."""
    array: Any = x.view(torch.uint8).numpy()
    return memoryview(array)


class Streamer:
    """Reader of chunks, for one thread."""

    def __init__(self, files: OpenFiles, size: int = CHUNK) -> None:
        self._files = files
        self._size = size
        self._bytes = torch.empty(size, dtype=torch.uint8)
        self._memory = buffer_of(self._bytes)
        self._decoded = torch.empty(0)

    def chunks(self, tensor: StoredTensor, begin: int = 0, end: int | None = None) -> Iterator[Chunk]:
        """Yield the chunks of bytes `begin` to `end` of a tensor. Raises DamagedError and OSError."""
        end, step = tensor.nbytes if end is None else end, step_of(tensor, self._size)
        for at in range(begin, end, step):
            yield self.read(tensor, at, min(step, end - at))

    def read(self, tensor: StoredTensor, begin: int, nbytes: int) -> Chunk:
        """Return the chunk of these bytes, at most `size` or a `step` of them."""
        assert tensor.source is not None
        if nbytes > len(self._memory):
            self._bytes = torch.empty(nbytes, dtype=torch.uint8)
            self._memory = buffer_of(self._bytes)
        tensor.source.read(self._files, begin, self._memory[:nbytes])
        raw = self._bytes[:nbytes]
        encoding = ENCODINGS.get(tensor.dtype)
        if encoding is None:
            # A byte of a bool may hold anything.
            dtype: torch.dtype = torch.uint8 if tensor.dtype == "bool" else getattr(torch, tensor.dtype)
            return Chunk(begin // dtype.itemsize, raw, begin, raw.view(dtype))
        count = nbytes // encoding.bytes
        values = None
        if encoding.decode is not None:
            if self._decoded.numel() < count * encoding.elements:
                self._decoded = torch.empty(count * encoding.elements)
            values = self._decoded[: count * encoding.elements]
            encoding.decode(
                raw.numpy().reshape(count, encoding.bytes), values.numpy().reshape(count, encoding.elements)
            )
        return Chunk(begin // encoding.bytes * encoding.elements, raw, begin, values)


class Dead(NamedTuple):
    """Rows or columns that are all zero: how many, and the numbers of the first."""

    total: int
    first: tuple[int, ...]


class NonzeroLines:
    """Rows and columns of a matrix in which a number that is not zero was seen. Threads may add at the same time.

    The rows are those of the first dimension, the columns all others together. Only chunks with enough zeros for a
    whole row or column are looked at, and of these first a part.
    """

    # A longer row is an embedding of 16 Mi columns, or no row.
    _MOST = 1 << 24
    _GLANCE = 32

    def __init__(self, rows: int, columns: int) -> None:
        self._width = columns
        self.rows = np.zeros(rows, dtype=bool)
        self.columns = np.zeros(columns, dtype=bool)

    @classmethod
    def of(cls, tensor: StoredTensor) -> NonzeroLines | None:
        """Return the lines of a matrix of floating point, None for other tensors."""
        form = BY_NAME.get(tensor.dtype)
        is_float = ENCODINGS.get(tensor.dtype) is not None or (form is not None and form.has_sign_bit)
        shape = tensor.shape
        if not is_float or len(shape) < 2 or tensor.numel == 0:
            return None
        if tensor.order is not None:
            if len(shape) != 2:
                return None
            shape = shape[::-1]
        rows, columns = shape[0], tensor.numel // shape[0]
        return cls(rows, columns) if max(rows, columns) <= cls._MOST and min(rows, columns) > 1 else None

    def add(self, values: Tensor, start: int, zeros: int) -> None:
        """Look at the elements from number `start` on, of which so many are zero."""
        count = values.numel()
        if zeros == count:
            return
        width = self._width
        first, head = divmod(start, width)
        last, tail = divmod(start + count, width)
        whole_rows = last - first - (head > 0)
        shortest = min([width, *([width - head] if head else []), *([tail] if tail else [])])
        if whole_rows >= 1 and zeros < whole_rows and not self.columns.all():
            self.columns[:] = True
        columns_live = bool(self.columns.all())
        if zeros < shortest and first != last:
            self.rows[first : last + (tail > 0)] = True
            if columns_live:
                return
        bits = values.view(
            {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[values.itemsize]
        )
        words = bits.numpy()
        magnitude = words.dtype.type((1 << (8 * words.itemsize - 1)) - 1)
        if first == last:
            self._part(words, magnitude, first, head)
            return
        begin = width - head if head else 0
        if head:
            self._part(words[:begin], magnitude, first, head)
        end = begin + max(whole_rows, 0) * width
        if tail:
            self._part(words[end:], magnitude, last, 0)
        if whole_rows > 0:
            at = first + (head > 0)
            self._rows(words[begin:end].reshape(whole_rows, width), magnitude, slice(at, at + whole_rows))

    def _part(self, words: Array, magnitude: np.generic, row: int, column: int) -> None:
        live = (words & magnitude) != 0
        if live.any():
            self.rows[row] = True
            self.columns[column : column + len(live)] |= live

    def _rows(self, words: Array, magnitude: np.generic, rows: slice) -> None:
        glance = ((words[:, : self._GLANCE] & magnitude) != 0).any(1)
        left = np.flatnonzero(~glance)
        if len(left):
            glance[left] = ((words[left] & magnitude) != 0).any(1)
        self.rows[rows] |= glance
        dead = np.flatnonzero(~self.columns)
        if len(dead):
            self.columns[:] |= ((words[: self._GLANCE] & magnitude) != 0).any(0)
            dead = np.flatnonzero(~self.columns)
        if len(dead):
            self.columns[dead] = ((words[:, dead] & magnitude) != 0).any(0)

    def dead(self, tensor: StoredTensor, most: int) -> tuple[Dead, Dead]:
        """Return the rows and the columns that are all zero, with the numbers of the first `most`."""
        found = _dead(self.rows, most), _dead(self.columns, most)
        return found if tensor.order is None else (found[1], found[0])


def _dead(live: Array, most: int) -> Dead:
    # A large matrix may have millions, whose numbers would take more memory than the scan.
    first: list[int] = []
    for begin in range(0, len(live), _SPAN):
        if len(first) >= most:
            break
        first += (np.flatnonzero(~live[begin : begin + _SPAN]) + begin).tolist()
    return Dead(len(live) - int(np.count_nonzero(live)), tuple(first[:most]))
