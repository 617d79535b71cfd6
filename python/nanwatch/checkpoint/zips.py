"""Members of a zip archive, such as a file of torch.save or of numpy.savez, also of one whose end is missing."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from .stored import DamagedError, open_regular

MAGIC = b"PK\x03\x04"
_HEAD = struct.Struct("<8xH16xHH")  # the compression, the bytes of the name, and of what follows it
_NEAR = 1 << 12  # bytes in which the next header is looked for at a time


class Member(NamedTuple):
    """Member of an archive: where its bytes begin in the file. `info` is of one that is compressed.

    One whose size nobody knows `is_cut`: it is compressed, and the archive has no directory.
    """

    name: str
    begin: int
    info: zipfile.ZipInfo | None = None
    is_cut: bool = False


def opened(path: Path, at: int = 0) -> IO[bytes]:
    """Open a regular file for reading from byte `at` on."""
    file = os.fdopen(open_regular(path), "rb")
    file.seek(at)
    return file


def members(path: Path) -> list[Member]:
    """Return the members that the archive's directory names. Raises DamagedError without a directory."""
    found = []
    with opened(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
        # The third is for a compression that zipfile does not know.
        except (zipfile.BadZipFile, ValueError, NotImplementedError, RecursionError, EOFError) as error:
            raise DamagedError(f"its directory is damaged or cut off: {str(error)[:100]}") from None
        for one in infos:
            file.seek(max(one.header_offset, 0))
            if (begin := _begin(file)) is not None:
                info = None if one.compress_type == zipfile.ZIP_STORED else one
                found.append(begin._replace(name=one.filename, info=info, is_cut=False))
    return found


def wrong_checksums(path: Path) -> Iterator[str]:
    """Yield the names of the members whose bytes do not have the CRC-32 that the archive says; none without one."""
    with opened(path) as file:
        if file.read(len(MAGIC)) != MAGIC:
            return
        with zipfile.ZipFile(file) as archive:
            for one in filter(lambda one: one.CRC, archive.infolist()):  # 0: torch.save was told to make none
                try:
                    with archive.open(one) as member:
                        while member.read(1 << 20):
                            pass
                except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError):
                    yield one.filename


def walked(path: Path, at: int, end: int, sizes: Mapping[str, int]) -> Iterator[Member]:
    """Yield the members between two places in the order of the file, by their own headers, as far as they go.

    PyTorch writes sizes only behind a member: the caller puts that of one that it was given into `sizes`.
    """
    with opened(path) as file:
        while at < end:
            file.seek(at)
            window = file.read(min(_NEAR, end - at))
            if (near := window.find(MAGIC)) < 0:
                at += max(len(window) - len(MAGIC) + 1, 1)
                continue
            file.seek(at + near)
            if (found := _begin(file)) is None or found.begin > end:
                return
            yield found
            at = found.begin + sizes.get(found.name, 0)


def _begin(file: IO[bytes]) -> Member | None:
    """Return the member whose header comes next."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        return None
    packed, named, more = _HEAD.unpack(head)
    name = file.read(named).decode("utf-8", "replace")
    return Member(name, file.tell() + more, is_cut=packed != zipfile.ZIP_STORED)
