"""Reader of safetensors files: 8 bytes with the length of a header in JSON, the header, the tensors."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from ...util.reading import fail, refuse_constant, shorten
from ..stored import Contents, DamagedError, OpenFiles, Span, StoredTensor, whole

# In bytes. safetensors itself takes 100 MB, of which Python's objects would be some GB. 100,000 tensors have 12 MB.
_MOST = 1 << 25
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "C128": "complex128",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_BITS = {"F64": 64, "F32": 32, "C64": 64, "C128": 128, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "F4": 4}
_BITS |= {"F6_E2M3": 6, "F6_E3M2": 6, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}


def matches(head: bytes, path: Path) -> bool:
    """Return whether a file that begins like this is read here."""
    is_header = head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MOST
    return is_header or path.suffix == ".safetensors"


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
            found.tensors.append(
                StoredTensor(name, "unknown", (), path, lost=f"its entry is damaged: {error}")
            )
            continue
        spans.append((begin, end, name))
        known = _DTYPES.get(dtype, dtype)
        lost = whole(path, start + begin, end - begin, size)
        unread = "" if dtype in _DTYPES else f"dtype {shorten(dtype)} has no value per byte"
        found.tensors.append(
            StoredTensor(name, known, shape, path, Span(path, start + begin), unread=unread, lost=lost)
        )
    found.problems += [(path, text) for text in _gaps(sorted(spans), size - start)]
    return found


def _header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    with OpenFiles() as files:
        head = bytearray(8)
        if size < 8:
            raise DamagedError(f"{path.name} has {size} bytes, too few for a safetensors file")
        files.read(path, 0, memoryview(head))
        length = int.from_bytes(head, "little")
        if length > _MOST:
            raise DamagedError(f"its header would have {length:,} bytes; the most that is read is {_MOST:,}")
        if 8 + length > size:
            raise DamagedError(
                f"its header should have {length:,} bytes, and the file ends after {size - 8:,}: all is lost"
            )
        text = bytearray(length)
        files.read(path, 8, memoryview(text))
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
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if not isinstance(dtype, str) or not all(type(one) is int and 0 <= one < 1 << 62 for one in numbers):
        raise fail("it", "a dtype, sizes and offsets", entry)
    if len(offsets) != 2 or len(shape) > 64:
        raise fail("data_offsets", "two numbers", offsets)
    bits = prod(shape) * _BITS.get(dtype, 8)
    if (dtype in _DTYPES or dtype in _BITS) and (offsets[1] - offsets[0]) * 8 != bits:
        raise ValueError(
            f"{dtype} {shorten(shape)} needs {bits / 8:,.0f} bytes, not {offsets[1] - offsets[0]:,}"
        )
    return dtype, tuple(shape), offsets[0], offsets[1]


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
