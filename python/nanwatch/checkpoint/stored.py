"""Tensors as the files of a checkpoint hold them: where their bytes are, and how to read them."""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Protocol

from ..numerics.formats import BY_NAME
from ..util.reading import check_regular
from .encodings import ENCODINGS

# Of one thread. A sharded checkpoint has more files than a process may open.
_MOST_OPEN = 16


class DamagedError(ValueError):
    """Error for a file, or a part of it, that is not what its format says."""


class OpenFiles:
    """The latest files that a thread has read from."""

    def __init__(self) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        """Fill the buffer from the file. Raises DamagedError where the file ends before."""
        fd = self._open.get(path)
        if fd is None:
            fd = open_regular(path)
            self._open[path] = fd
            if len(self._open) > _MOST_OPEN:
                os.close(self._open.popitem(last=False)[1])
        else:
            self._open.move_to_end(path)
        done = 0
        while done < len(into):
            count = os.preadv(fd, [into[done:]], offset + done)
            if count == 0:
                raise DamagedError(f"{path.name} ends at byte {offset + done:,}")
            done += count


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor. Raises OSError, or ValueError for a pipe or device."""
    check_regular(path)
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class Source(Protocol):
    """Where the bytes of a tensor are, in C order."""

    @property
    def in_order(self) -> bool:
        """Whether the bytes have to be read from the first to the last."""

    @property
    def key(self) -> Hashable:
        """The place: two tensors of one place are one."""

    def read(self, files: OpenFiles, begin: int, into: memoryview) -> None:
        """Fill the buffer with the bytes from `begin` on."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file from `offset` on."""

    path: Path
    offset: int
    in_order = False

    @property
    def key(self) -> Hashable:
        """The place."""
        return self.path, self.offset

    def read(self, files: OpenFiles, begin: int, into: memoryview) -> None:
        """Fill the buffer with the bytes from `begin` on."""
        files.read(self.path, self.offset + begin, into)


@dataclass(frozen=True, slots=True)
class Box:
    """Part of a tensor in a file of its own: the elements from `offsets` on, `sizes` of them in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span


class Boxes:
    """Tensor of several parts, which together cover it, each in C order."""

    in_order = False

    def __init__(self, shape: Sequence[int], width: int, boxes: Sequence[Box]) -> None:
        self._shape, self._width = tuple(shape), width
        self._boxes = sorted(boxes, key=lambda one: one.offsets)
        # The last dimension that parts divide: behind it, the elements of a part follow one another in the tensor too.
        divided = [d for d in range(len(shape)) for one in boxes if one.sizes[d] != shape[d]]
        self._last = max(divided, default=0)
        self._inner = prod(shape[self._last + 1 :]) * width  # bytes of one index of that dimension
        covered = sum(prod(one.sizes) for one in boxes)
        inside = all(
            at >= 0 and at + size <= whole
            for one in boxes
            for at, size, whole in zip(one.offsets, one.sizes, shape, strict=True)
        )
        if covered != prod(shape) or not inside:
            raise DamagedError(f"its {len(boxes)} parts hold {covered:,} of {prod(shape):,} elements")

    @property
    def key(self) -> Hashable:
        """The place."""
        return self._boxes[0].span.key

    def read(self, files: OpenFiles, begin: int, into: memoryview) -> None:
        """Fill the buffer with the bytes from `begin` on, a run of each part after the other."""
        done = 0
        while done < len(into):
            path, offset, count = self._run(begin + done)
            count = min(count, len(into) - done)
            files.read(path, offset, into[done : done + count])
            done += count

    def _run(self, at: int) -> tuple[Path, int, int]:
        """Return the file, the offset in it, and the bytes that follow there, of byte `at` of the tensor."""
        index, inner = divmod(at, self._inner)
        place: list[int] = []
        for size in reversed(self._shape[: self._last + 1]):
            index, i = divmod(index, size)
            place.insert(0, i)
        for one in self._boxes:
            inside = [i - first for i, first in zip(place, one.offsets, strict=False)]
            if all(0 <= i < size for i, size in zip(inside, one.sizes, strict=False)):
                flat = 0
                for i, size in zip(inside, one.sizes, strict=False):
                    flat = flat * size + i
                left = (one.sizes[self._last] - inside[-1]) * self._inner - inner
                return one.span.path, one.span.offset + flat * self._inner + inner, left
        raise DamagedError("its parts overlap and leave gaps")


class Deflated:
    """Compressed member of a zip archive, behind a header of `skip` bytes. Each read goes on where the last ended."""

    in_order = True

    def __init__(self, span: Span, size: int, skip: int) -> None:
        self._span, self._size, self._skip = span, size, skip
        self._stream: Iterator[bytes] = iter(())
        self._left, self._at = b"", -1

    @property
    def key(self) -> Hashable:
        """The place."""
        return self._span.key

    def read(self, files: OpenFiles, begin: int, into: memoryview) -> None:
        """Fill the buffer with the bytes from `begin` on."""
        if begin != self._at:
            self._stream, self._left, self._at = self._inflated(files), b"", 0
            self._fill(memoryview(bytearray(self._skip)))
            for at in range(0, begin, 1 << 16):
                self._fill(memoryview(bytearray(min(1 << 16, begin - at))))
        self._fill(into)
        self._at = begin + len(into)

    def _fill(self, into: memoryview) -> None:
        done = 0
        while done < len(into):
            while not self._left:
                if (data := next(self._stream, None)) is None:
                    raise DamagedError("its compressed bytes end too early")
                self._left = data
            count = min(len(self._left), len(into) - done)
            into[done : done + count] = self._left[:count]
            self._left = self._left[count:]
            done += count

    def _inflated(self, files: OpenFiles) -> Iterator[bytes]:
        stream = zlib.decompressobj(-15)
        try:
            for at in range(0, self._size, 1 << 16):
                raw = bytearray(min(1 << 16, self._size - at))
                self._span.read(files, at, memoryview(raw))
                data: bytes = bytes(raw)
                while data:
                    yield stream.decompress(data, 1 << 16)
                    data = stream.unconsumed_tail
            yield stream.flush()
        except zlib.error as error:
            raise DamagedError(f"its compressed bytes are damaged ({error})") from None


@dataclass(frozen=True, slots=True)
class StoredTensor:
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
        if (encoding := ENCODINGS.get(self.dtype)) is not None:
            return self.numel // encoding.elements * encoding.bytes
        form = BY_NAME.get(self.dtype)
        return 0 if form is None else self.numel * form.bits // 8


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


def whole(path: Path, offset: int, nbytes: int, size: int) -> str:
    """Return "" where a file of `size` bytes has these, else why they are lost."""
    if offset < 0 or nbytes < 0:
        return "its place in the file is below zero"
    end = offset + nbytes
    return "" if end <= size else f"it needs bytes up to {end:,}, and {path.name} has {size:,}"
