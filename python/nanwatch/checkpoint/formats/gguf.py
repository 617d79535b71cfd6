"""Reader of GGUF files, versions 2 and 3: the page "GGUF" among the docs of ggml-org/ggml."""

from __future__ import annotations

import io
import struct
from math import prod
from pathlib import Path
from typing import IO

from ..encodings import ENCODINGS, cannot_decode
from ..stored import Contents, DamagedError, Span, StoredTensor, whole
from ..zips import opened

_DTYPES = {
    0: "float32",
    1: "float16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    30: "bfloat16",
} | {encoding.number: name for name, encoding in ENCODINGS.items()}
# Sizes of the values of metadata by their type: u8, i8, u16, i16, u32, i32, f32, bool, string, array, u64, i64, f64.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _U32 = 8, 9, 4
_MOST_NAME, _MOST_ITEMS = 1 << 16, 1 << 24  # bytes; of one list: vocabularies have a quarter of a million
_MOST_TENSORS = 1 << 20


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file that begins like this is read here."""
    return head.startswith(b"GGUF")


def read(path: Path) -> Contents:
    """Return the tensors of a file."""
    size = path.stat().st_size
    with opened(path) as file:
        header = _Header(file, size)
        version, tensors, pairs = header.numbers("<4xIQQ")
        if version not in (2, 3):
            raise DamagedError(
                f"GGUF of version {version}, or of a big-endian machine, is not read: 2 and 3 are"
            )
        if tensors > _MOST_TENSORS or pairs > _MOST_TENSORS:
            raise DamagedError(f"its header is damaged: {tensors:,} tensors, {pairs:,} facts")
        alignment = 32
        for _ in range(pairs):
            key, (kind,) = header.text(), header.numbers("<I")
            if key == "general.alignment" and kind == _U32:
                (alignment,) = header.numbers("<I")
            else:
                header.skip(kind)
        if not 1 <= alignment <= 1 << 20:
            raise DamagedError(f"its header is damaged: an alignment of {alignment:,}")
        entries = []
        for _ in range(tensors):
            name, (dims,) = header.text(), header.numbers("<I")
            if dims > 64:
                raise DamagedError(f"its header is damaged: a tensor of {dims:,} dimensions")
            *sizes, kind, offset = header.numbers(f"<{dims}QIQ")
            # GGUF names the fastest dimension first.
            entries.append((name, tuple(reversed(sizes)), kind, offset))
        start = -(-file.tell() // alignment) * alignment
    found = Contents(
        [_tensor(path, name, shape, kind, start + at, size) for name, shape, kind, at in entries]
    )
    if lost := sum(bool(one.lost) for one in found.tensors):
        text = f"truncated or damaged: {lost} of {len(entries)} tensors are not all there"
        found.problems.append((path, text))
    return found


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, size: int) -> StoredTensor:
    dtype = _DTYPES.get(kind)
    if dtype is None:
        return StoredTensor(name, f"type {kind}", shape, path, unread=f"GGUF type {kind} is not read")
    tensor = StoredTensor(name, dtype, shape, path, Span(path, offset))
    lost = whole(path, offset, tensor.nbytes, size)
    if (encoding := ENCODINGS.get(dtype)) and prod(shape[-1:]) % encoding.elements:
        lost = f"its rows are no whole blocks of {encoding.elements}"
    return tensor._replace(lost=lost, unread=cannot_decode() if encoding else "")


class _Header:
    """Header of a file, read from front to back."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._size = file, size

    def numbers(self, form: str) -> tuple[int, ...]:
        """Return the next numbers in this form of `struct`."""
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def text(self) -> str:
        """Return the next string."""
        (length,) = self.numbers("<Q")
        if length > _MOST_NAME:
            raise DamagedError(f"its header is damaged: a name of {length:,} bytes")
        return self._take(length).decode("utf-8", "replace")

    def skip(self, kind: int) -> None:
        """Pass over a value."""
        count = 1
        if kind == _ARRAY:
            kind, count = self.numbers("<IQ")
            if count > _MOST_ITEMS:
                raise DamagedError(f"its header is damaged: a list of {count:,}")
        if kind in _SIZES:
            self._check(_SIZES[kind] * count)
            self._file.seek(_SIZES[kind] * count, io.SEEK_CUR)
        elif kind == _STRING:
            for _ in range(count):
                (length,) = self.numbers("<Q")
                self._check(length)
                self._file.seek(length, io.SEEK_CUR)
        else:
            raise DamagedError(f"its header is damaged: a value of type {kind}")

    def _take(self, count: int) -> bytes:
        self._check(count)
        return self._file.read(count)

    def _check(self, count: int) -> None:
        if count > self._size - self._file.tell():
            raise DamagedError("its header is cut off or damaged: all is lost")
