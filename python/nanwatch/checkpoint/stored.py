"""Tensors as the files of a checkpoint hold them: where their bytes are, and how to read them."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..util.reading import check_regular
from .encodings import bytes_of

# Of one thread. A sharded checkpoint has more files than a process may open.
_MOST_OPEN = 16


class DamagedError(ValueError):
    """Error for a file, or a part of it, that is not what its format says."""


class OpenFiles:
    """Some of the files that a thread has read from."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def descriptor(self, path: Path) -> int:
        """Return the file's descriptor, valid until the next call. Raises OSError."""
        if (fd := self._open.get(path)) is None:
            if len(self._open) == _MOST_OPEN:
                self.__exit__()
            fd = self._open[path] = open_regular(path)
        return fd

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Fill the buffer from the file. Raises DamagedError where the file ends before."""
        fd = self.descriptor(path)
        while into:
            if (count := os.preadv(fd, [into], offset)) == 0:
                raise DamagedError(f"{path.name} ends at byte {offset:,}")
            into, offset = into[count:], offset + count


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor. Raises OSError, or ValueError for a pipe or device."""
    try:
        check_regular(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class Source(Protocol):
    """Where the bytes of a tensor are, in C order. Tensors of equal sources are one."""

    def read(self, files: OpenFiles, begin: int, into: memoryview) -> None:
        """Fill the buffer with the bytes from `begin` on."""


class Span(NamedTuple):
    """Bytes of a file from `offset` on."""

    path: Path
    offset: int

    def read(self, files: OpenFiles, begin: int, into: memoryview) -> None:
        """Fill the buffer with the bytes from `begin` on."""
        files.read(self.path, self.offset + begin, into)


class Box(NamedTuple):
    """Part of a tensor: the elements from `offsets` on, `sizes` of them in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    source: Source


class Boxes:
    """Tensor of several parts, which together cover it, each in C order. An element has `width` bytes."""

    def __init__(self, shape: Sequence[int], width: int, boxes: Sequence[Box]) -> None:
        # The last dimension that parts divide: behind it, the elements of a part follow one another in the tensor too.
        last = max([d for one in boxes for d in range(len(shape)) if one.sizes[d] != shape[d]], default=0) + 1
        self._outer, self._inner = tuple(shape[:last]), prod(shape[last:]) * width
        self._boxes = [
            (np.array(one.offsets[:last]), np.array(one.sizes[:last]), one.source) for one in boxes
        ]
        covered = sum(prod(one.sizes) for one in boxes)
        is_inside = all((at + sizes <= self._outer).all() for at, sizes, _ in self._boxes)
        if covered != prod(shape) or not is_inside:
            raise DamagedError(f"its {len(boxes)} parts hold {covered:,} of {prod(shape):,} elements")

    def read(self, files: OpenFiles, begin: int, into: memoryview) -> None:
        """Fill the buffer with the bytes from `begin` on, a run of each part after the other."""
        while into:
            source, at, count = self._run(begin)
            source.read(files, at, into[:count])
            into, begin = into[count:], begin + count

    def _run(self, at: int) -> tuple[Source, int, int]:
        """Return the part with byte `at` of the tensor, the place in it, and the bytes that follow there."""
        index, inner = divmod(at, self._inner)
        place = np.array(np.unravel_index(index, self._outer))
        for offsets, sizes, source in self._boxes:
            inside = place - offsets
            if (inside >= 0).all() and (inside < sizes).all():
                flat = int(np.ravel_multi_index(tuple(inside), tuple(sizes)))
                return source, flat * self._inner + inner, int(sizes[-1] - inside[-1]) * self._inner - inner
        raise DamagedError("its parts overlap and leave gaps")


class Transposed(NamedTuple):
    """Matrix of `rows` and `columns` whose columns lie in the file, with elements of `width` bytes."""

    source: Source
    rows: int
    columns: int
    width: int

    def read(self, files: OpenFiles, begin: int, into: memoryview) -> None:
        """Fill the buffer with the bytes from `begin` on: as much of each column as they touch."""
        start, end = begin // self.width, (begin + len(into)) // self.width
        row, column = divmod(start, self.columns)
        rows = -(-end // self.columns) - row
        columns = range(column, column + end - start) if rows == 1 else range(self.columns)
        found = np.empty((len(columns), rows, self.width), np.uint8)
        for i, one in enumerate(columns):
            self.source.read(files, (one * self.rows + row) * self.width, memoryview(found[i].reshape(-1)))
        skip = 0 if rows == 1 else column * self.width
        into[:] = memoryview(found.swapaxes(0, 1).reshape(-1)[skip : skip + len(into)])


class Deflated:
    """Compressed member of a zip archive, behind a header of `skip` bytes. Each read goes on where the last ended."""

    def __init__(self, path: Path, info: zipfile.ZipInfo, skip: int = 0) -> None:
        self._path, self._info, self._skip = path, info, skip
        self._stream: Any = None
        self._at = 0

    def read(self, files: OpenFiles, begin: int, into: memoryview) -> None:
        """Fill the buffer with the bytes from `begin` on."""
        try:
            if self._stream is None or begin != self._at:
                self._stream = zipfile.ZipFile(self._path).open(self._info)  # noqa: SIM115 - read on later
                self._stream.seek(self._skip + begin)
            self._at = begin + len(into)
            while into:
                if not (count := self._stream.readinto(into)):
                    raise DamagedError("its compressed bytes end too early")
                into = into[count:]
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise DamagedError(f"its compressed bytes are damaged ({error})") from None


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint. `unread` says why its values cannot be checked, `lost` why they are not there.

    `dtype` is the name of a number format ("float16") or of an encoding ("q8_0"). `order` has the dimensions in the
    order in which they lie in the file, None in C order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    source: Source | None = None
    order: tuple[int, ...] | None = None
    unread: str = ""
    lost: str = ""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in the file, 0 for a dtype that is not known."""
        return bytes_of(self.dtype, self.numel)

    @property
    def lying(self) -> tuple[int, ...]:
        """Sizes of the tensor as it lies in the file, slowest first."""
        return self.shape if self.order is None else tuple(self.shape[d] for d in self.order)


@dataclass(slots=True)
class Contents:
    """Tensors of one or several files, and what is wrong with the files, each with its path."""

    tensors: list[StoredTensor] = field(default_factory=list)
    problems: list[tuple[Path, str]] = field(default_factory=list)
    remarks: list[tuple[Path, str]] = field(default_factory=list)

    def add(self, other: Contents) -> None:
        """Add the tensors of more files."""
        self.tensors += other.tensors
        self.problems += other.problems
        self.remarks += other.remarks


def are_sizes(values: Any) -> bool:
    """Return whether it is a tuple of sizes, strides or offsets that a tensor may have."""
    is_short = isinstance(values, tuple) and len(values) <= 64
    return is_short and all(type(one) is int and 0 <= one < 1 << 62 for one in values)


def whole(path: Path, offset: int, nbytes: int, size: int) -> str:
    """Return "" where a file of `size` bytes has these, else why they are lost."""
    end = offset + nbytes
    return "" if end <= size else f"it needs bytes up to {end:,}, and {path.name} has {size:,}"


def transposed(matrix: StoredTensor) -> StoredTensor:
    """Return a view of a matrix that has its rows as columns."""
    columns, rows = matrix.lying
    assert matrix.source is not None
    source = Transposed(matrix.source, rows, columns, bytes_of(matrix.dtype, 1))
    return matrix._replace(shape=(rows, columns), order=None, source=source)


def joined(parts: Sequence[StoredTensor]) -> StoredTensor:
    """Return tensors of one width and dtype as one, their rows one below the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    width, boxes, at = first.nbytes // first.lying[0], list[Box](), 0
    for one in parts:
        assert one.source is not None
        boxes.append(Box((at, 0), (one.lying[0], width), one.source))
        at += one.lying[0]
    return first._replace(shape=(at, *first.lying[1:]), order=None, source=Boxes((at, width), 1, boxes))
