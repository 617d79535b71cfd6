"""Reader of .npy files, and of .npz archives of them."""

from __future__ import annotations

import io
from pathlib import Path
from tokenize import TokenError

import numpy as np

from ...numerics.formats import BY_NAME
from ..stored import Contents, DamagedError, Deflated, OpenFiles, Source, Span, StoredTensor, whole
from ..zips import Member, Window, members, salvaged

_MAGIC = b"\x93NUMPY"
_MOST_HEADER = 1 << 14  # bytes, also of an archive's members
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file that begins like this is read here."""
    return head.startswith(_MAGIC) or (head[:4] == b"PK\x03\x04" and path.suffix == ".npz")


def read(path: Path) -> Contents:
    """Return the arrays of a file."""
    size = path.stat().st_size
    with OpenFiles() as files:
        head = bytearray(min(6, size))
        files.read(path, 0, memoryview(head))
        if head == _MAGIC:
            return Contents([_array(files, Member(path.stem, Span(path, 0), size, size, False), size)])
        found = Contents()
        try:
            archive = members(files, path, 0, size)
        except DamagedError as error:
            found.problems.append((path, f"{error}; its members were looked for one by one"))
            archive = list(salvaged(files, path, 0, size, lambda _: None))
        arrays = [one for one in archive if one.name.endswith(".npy")]
        found.tensors = [_array(files, one, size) for one in arrays]
        if not found.tensors:
            found.problems.append((path, "it has no array"))
        return found


def _array(files: OpenFiles, member: Member, end: int) -> StoredTensor:
    """Return the array of a member. One whose header cannot be read is lost."""
    path, name = member.span.path, member.name.removesuffix(".npy")
    try:
        head = _beginning(files, member, end)
        version = np.lib.format.read_magic(head)
        shape, is_fortran, dtype = _READERS[version](head, max_header_size=_MOST_HEADER)
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError, TokenError) as error:
        return StoredTensor(name, "unknown", (), path, lost=f"its header is damaged: {str(error)[:100]}")
    if len(shape) > 64 or not all(type(one) is int and 0 <= one < 1 << 62 for one in shape):
        return StoredTensor(
            name, "unknown", (), path, lost="its header is damaged: a shape that no array has"
        )
    order = tuple(reversed(range(len(shape)))) if is_fortran and len(shape) > 1 else None
    tensor = StoredTensor(name, dtype.name, shape, path, order=order)
    skip = head.tell()
    if dtype.name not in BY_NAME or dtype.hasobject or not dtype.isnative:
        why = "pickled objects are not read" if dtype.hasobject else f"dtype {dtype.str[:40]} is not read"
        return StoredTensor(name, str(dtype.name)[:40], shape, path, unread=why)
    source: Source
    if member.deflated:
        source = Deflated(member.span, member.stored, skip)
        lost = whole(path, member.span.offset, member.stored, end)
    else:
        source = Span(path, member.span.offset + skip)
        lost = whole(path, source.offset, tensor.nbytes, end)
    if not lost and member.size and skip + tensor.nbytes > member.size:
        lost = f"it needs {tensor.nbytes:,} bytes, and the archive has {member.size - skip:,} of it"
    return StoredTensor(name, dtype.name, shape, path, source, order, lost=lost)


def _beginning(files: OpenFiles, member: Member, end: int) -> io.BytesIO:
    """Return the first bytes of a member, with the header in them."""
    if not member.deflated:
        span = member.span
        window = Window(files, span.path, span.offset, max(0, min(_MOST_HEADER, end - span.offset)))
        return io.BytesIO(window.read())
    most = min(_MOST_HEADER, member.size)
    data = bytearray(most)
    Deflated(member.span, member.stored, 0).read(files, 0, memoryview(data))
    return io.BytesIO(data)
