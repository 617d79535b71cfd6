"""Reader of safetensors files: 8 bytes with the length of a header in JSON, the header, the tensors."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from ...numerics.formats import BY_NAME, SAFETENSORS
from ...util.reading import fail, refuse_constant, shorten
from ..stored import Contents, DamagedError, Span, StoredTensor, whole
from ..zips import MAGIC, opened

# In bytes. safetensors itself takes 100 MB, of which Python's objects would be some GB. 100,000 tensors have 12 MB.
_MOST = 1 << 25
_BITS = {name: BY_NAME[dtype].bits for name, dtype in SAFETENSORS.items()}
_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file that begins like this is read here."""
    is_header = head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MOST
    return is_header or (path.suffix == ".safetensors" and head[:4] != MAGIC)


def read(path: Path) -> Contents:
    """Return the tensors of a file."""
    size = path.stat().st_size
    found = Contents()
    header, start = _header(path, size)
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, begin, end = _entry(entry)
        except ValueError as error:
            lost = f"its entry is damaged: {error}"
            found.tensors.append(StoredTensor(name, "unknown", (), path, lost=lost))
            continue
        spans.append((begin, end, name))
        unread = "" if dtype in SAFETENSORS else f"dtype {shorten(dtype)} has no value per byte"
        lost = whole(path, start + begin, end - begin, size)
        source, dtype = Span(path, start + begin), SAFETENSORS.get(dtype, dtype)
        found.tensors.append(StoredTensor(name, dtype, shape, path, source, None, unread, lost))
    found.problems += [(path, text) for text in _gaps(sorted(spans), size - start)]
    return found


def _header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    with opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST:
            raise DamagedError(
                f"it does not begin as a safetensors file does: its header would have {length:,} bytes, and"
                f" {_MOST:,} are the most that is read"
            )
        if 8 + length > size:
            raise DamagedError(f"its header should end at byte {8 + length:,} of {size:,}: all is lost")
        text = file.read(length)
    try:
        header = json.loads(text, parse_constant=refuse_constant, object_pairs_hook=_members)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"its header is damaged: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise DamagedError("its header is damaged: no JSON object")
    return header, 8 + length


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("it names one member twice")
    return members


def _entry(entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise fail("it", "an object with dtype, shape and data_offsets", entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else []
    are_integers = set(map(type, numbers)) == {int}
    if not isinstance(dtype, str) or not are_integers or min(numbers) < 0 or max(numbers) >= 1 << 62:
        raise fail("it", "a dtype, sizes and offsets", entry)
    if len(offsets) != 2 or len(shape) > 64:
        raise fail("data_offsets", "two numbers", offsets)
    begin, end = offsets
    bits = prod(shape) * _BITS.get(dtype, 0)
    if dtype in _BITS and (end - begin) * 8 != bits:
        raise ValueError(f"{dtype} {shorten(shape)} needs {bits / 8:,.0f} bytes, not {end - begin:,}")
    return dtype, tuple(shape), begin, end


def _gaps(spans: list[tuple[int, int, str]], size: int) -> list[str]:
    """Return what is wrong with the places of the tensors."""
    said: list[str] = []
    at, before = 0, ""
    for begin, end, name in spans:
        if begin < at:
            said.append(f"{shorten(name)} overlaps {shorten(before)}")
        elif begin > at:
            said.append(f"{begin - at:,} bytes before {shorten(name)} belong to no tensor")
        if end > at:
            at, before = end, name
    if at > size:
        said.append(f"truncated: the header describes {at:,} bytes of tensors, {max(size, 0):,} are there")
    elif at < size:
        said.append(f"{size - at:,} bytes at the end belong to no tensor")
    return said
