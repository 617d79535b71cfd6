"""GGUF files made by hand."""

from __future__ import annotations

import struct

Entry = tuple[str, tuple[int, ...], int, bytes]


def gguf_bytes(entries: list[Entry]) -> bytes:
    """Return a GGUF file of tensors: the name of each, its sizes, its type and its bytes."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(entries), 2)
    head += text("general.alignment") + struct.pack("<II", 4, 64)
    head += text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    data = b""
    for name, shape, kind, stored in entries:
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, len(data))
        data += stored + b"\0" * (-len(stored) % 64)
    return head + b"\0" * (-len(head) % 64) + data
