"""The records of a `.wandb` file: LevelDB's log format, behind seven bytes of W&B's own."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_HEAD = 7  # of the file; and of each piece: checksum, length, kind
_BLOCK = 32 * 1024
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[bytes]:
    """Each whole record, as it was written; the checksums are not looked at."""
    data = path.read_bytes()
    assert data[:4] in (b":W&B", b"")
    at, whole = _HEAD, b""
    while at + _HEAD <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEAD])
        piece = data[at + _HEAD : at + _HEAD + length]
        if len(piece) < length:
            return
        at += _HEAD + length
        whole = piece if kind in (_FULL, _FIRST) else whole + piece
        if kind in (_FULL, _LAST):
            yield whole
