"""Members of a zip archive, such as a file of torch.save or of numpy.savez, also of one whose end is missing."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .stored import DamagedError, OpenFiles, Span

_LOCAL = b"PK\x03\x04"
_HEAD = 30  # bytes, before the name
_ALL_ONES = 0xFFFFFFFF


class Window(io.RawIOBase):
    """Bytes `offset` to `offset + size` of a file, as a file."""

    def __init__(self, files: OpenFiles, path: Path, offset: int, size: int) -> None:
        self._files, self._path, self._offset, self._size = files, path, offset, size
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move, as files do."""
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise ValueError("a place before the beginning")
        self._at = at
        return at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def readinto(self, into: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill the buffer as far as the window goes, and return the number of bytes."""
        count = max(0, min(len(into), self._size - self._at))
        self._files.read(self._path, self._offset + self._at, memoryview(into)[:count])
        self._at += count
        return count


class Member(NamedTuple):
    """Member of an archive: where its bytes begin, how many they are, in the file and expanded."""

    name: str
    span: Span
    stored: int
    size: int
    deflated: bool


def members(files: OpenFiles, path: Path, offset: int, size: int) -> list[Member]:
    """Return the members that the archive's directory names. Raises DamagedError without a directory."""
    try:
        with zipfile.ZipFile(Window(files, path, offset, size)) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RecursionError, EOFError) as error:
        raise DamagedError(f"its directory is damaged or cut off: {str(error)[:100]}") from None
    found = []
    for one in infos:
        head = bytearray(_HEAD)
        if not 0 <= one.header_offset <= size - _HEAD:
            continue
        files.read(path, offset + one.header_offset, memoryview(head))
        at = _data_offset(head, offset + one.header_offset)
        if head[:4] == _LOCAL and one.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            deflated = one.compress_type == zipfile.ZIP_DEFLATED
            found.append(Member(one.filename, Span(path, at), one.compress_size, one.file_size, deflated))
    return found


def salvaged(
    files: OpenFiles, path: Path, offset: int, size: int, size_of: Callable[[Member], int | None]
) -> Iterator[Member]:
    """Yield the members in the order of the file, by their own headers, as far as they go.

    PyTorch writes sizes only behind a member. `size_of` is asked for them, and answers None where it cannot know.
    """
    at, end = offset, offset + size
    while at + _HEAD <= end:
        window = bytearray(min(1 << 12, end - at))
        files.read(path, at, memoryview(window))
        found = window.find(_LOCAL)
        if found < 0 or len(window) < found + _HEAD:
            return
        head = window[found : found + _HEAD]
        at += found
        data = _data_offset(head, at)
        name = bytearray(int.from_bytes(head[26:28], "little"))
        if data > end:
            return
        files.read(path, at + _HEAD, memoryview(name))
        stored, whole = (int.from_bytes(head[i : i + 4], "little") for i in (18, 22))
        if _ALL_ONES in (stored, whole):
            stored, whole = _zip64(files, path, at, head)
        known = Member(name.decode("utf-8", "replace"), Span(path, data), stored, whole, head[8] == 8)
        if head[6] & 8:
            asked = size_of(known)
            known = known._replace(stored=asked or 0, size=asked or 0)
        yield known
        at = data + known.stored


def _data_offset(head: bytearray, at: int) -> int:
    return at + _HEAD + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")


def _zip64(files: OpenFiles, path: Path, at: int, head: bytearray) -> tuple[int, int]:
    """Return the sizes of a member above 4 GiB, or of one that was written as if it could be."""
    skip, count = (int.from_bytes(head[i : i + 2], "little") for i in (26, 28))
    extra = bytearray(count)
    files.read(path, at + _HEAD + skip, memoryview(extra))
    i = 0
    while i + 20 <= len(extra):
        kind, length = (int.from_bytes(extra[j : j + 2], "little") for j in (i, i + 2))
        if kind == 1:
            whole, stored = (int.from_bytes(extra[j : j + 8], "little") for j in (i + 4, i + 12))
            return stored, whole
        i += 4 + length
    return 0, 0


def content(files: OpenFiles, member: Member, most: int) -> bytes:
    """Return the bytes of a small member that is not compressed. Raises DamagedError for one that is large."""
    if member.stored > most or member.deflated:
        raise DamagedError(
            f"{member.name[-60:]} has {member.stored:,} bytes; the most that is read is {most:,}"
        )
    data = bytearray(member.stored)
    files.read(member.span.path, member.span.offset, memoryview(data))
    return bytes(data)
