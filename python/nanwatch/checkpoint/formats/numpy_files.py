"""Reader of .npy files, and of .npz archives of them."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from tokenize import TokenError

import numpy as np

from ...numerics.formats import BY_NAME
from ..stored import Contents, DamagedError, Deflated, OpenFiles, Span, StoredTensor, are_sizes, whole
from ..zips import MAGIC, Member, members, opened, walked

_MAGIC = b"\x93NUMPY"
_MOST_HEADER = 1 << 14  # bytes
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file that begins like this is read here."""
    return head.startswith(_MAGIC) or (head[:4] == MAGIC and path.suffix == ".npz")


def read(path: Path) -> Contents:
    """Return the arrays of a file."""
    size = path.stat().st_size
    found, sizes = Contents(), dict[str, int]()
    with opened(path) as file:
        is_archive = file.read(4) == MAGIC
    try:
        archive: Iterable[Member] = members(path) if is_archive else [Member(path.stem + ".npy", 0)]
    except DamagedError as error:
        found.problems.append((path, f"{error}; its members were looked for one by one"))
        archive = walked(path, 0, size, sizes)
    for member in archive:
        if member.name.endswith(".npy"):
            tensor, header = _array(path, member, size)
            sizes[member.name] = header + tensor.nbytes
            found.tensors.append(tensor)
    if not found.tensors:
        found.problems.append((path, "it has no array"))
    return found


def _array(path: Path, member: Member, end: int) -> tuple[StoredTensor, int]:
    """Return the array of a member, and the bytes of its header. One whose header cannot be read is lost."""
    lost = StoredTensor(member.name.removesuffix(".npy"), "unknown", (), path)
    if member.is_cut:
        return lost._replace(lost="it is compressed, and the archive is cut off"), 0
    try:
        head = _beginning(path, member)
        version = np.lib.format.read_magic(head)
        shape, is_fortran, dtype = _READERS[version](head, max_header_size=_MOST_HEADER)
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError, TokenError) as error:
        return lost._replace(lost=f"its header is damaged: {str(error)[:100]}"), 0
    if not are_sizes(shape):
        return lost._replace(lost="its header is damaged: a shape that no array has"), 0
    order = tuple(reversed(range(len(shape)))) if is_fortran and len(shape) > 1 else None
    tensor = lost._replace(dtype=str(dtype.name)[:40], shape=shape, order=order)
    skip = head.tell()
    if dtype.name not in BY_NAME or dtype.hasobject or not dtype.isnative:
        why = "pickled objects are not read" if dtype.hasobject else f"dtype {dtype.str[:40]} is not read"
        return tensor._replace(order=None, unread=why), skip
    if (info := member.info) is None:
        source = Span(path, member.begin + skip)
        return tensor._replace(source=source, lost=whole(path, source.offset, tensor.nbytes, end)), skip
    why = ""
    if skip + tensor.nbytes > info.file_size:
        why = f"it needs {tensor.nbytes:,} bytes, and the archive has {info.file_size - skip:,} of it"
    return tensor._replace(source=Deflated(path, info, skip), lost=why), skip


def _beginning(path: Path, member: Member) -> io.BytesIO:
    """Return the first bytes of a member, with the header in them."""
    if member.info is None:
        with opened(path, member.begin) as file:
            return io.BytesIO(file.read(_MOST_HEADER))
    data = bytearray(min(_MOST_HEADER, member.info.file_size))
    with OpenFiles() as files:
        Deflated(path, member.info).read(files, 0, memoryview(data))
    return io.BytesIO(data)
