"""Encodings of GGUF whose elements share a scale with their block: https://github.com/ggml-org/ggml (gguf-py).

The layouts of the blocks are facts of the format. Decoding Q8_0 and Q4_0 is plain arithmetic: value = scale x element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..numerics.formats import BY_NAME

Array = np.ndarray[Any, np.dtype[Any]]


class Encoding(NamedTuple):
    """Block of `elements` numbers in `bytes` bytes, `scales` of which are float16 from byte `place` on."""

    name: str
    number: int
    """Its number in GGUF."""
    elements: int
    bytes: int
    place: int
    scales: int
    decode: Callable[[Array, Array], None] | None = None
    """Writes the float32 values of blocks (n, bytes) to (n, elements)."""


def _scales(blocks: Array) -> Array:
    return blocks.view(np.float16)[:, :1].astype(np.float32)


def _q8_0(blocks: Array, out: Array) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _scales(blocks)


def _q4_0(blocks: Array, out: Array) -> None:
    packed = blocks[:, 2:]
    out[:, :16], out[:, 16:] = packed & 15, packed >> 4
    out -= 8
    out *= _scales(blocks)


_TABLE = (
    Encoding("q4_0", 2, 32, 18, 0, 1, _q4_0),
    Encoding("q4_1", 3, 32, 20, 0, 2),
    Encoding("q5_0", 6, 32, 22, 0, 1),
    Encoding("q5_1", 7, 32, 24, 0, 2),
    Encoding("q8_0", 8, 32, 34, 0, 1, _q8_0),
    Encoding("q2_k", 10, 256, 84, 80, 2),
    Encoding("q3_k", 11, 256, 110, 108, 1),
    Encoding("q4_k", 12, 256, 144, 0, 2),
    Encoding("q5_k", 13, 256, 176, 0, 2),
    Encoding("q6_k", 14, 256, 210, 208, 1),
)
_BITS = {name: form.bits for name, form in BY_NAME.items()}
ENCODINGS = {one.name: one for one in _TABLE}
"""Encodings by their names."""


def bytes_of(dtype: str, elements: int) -> int:
    """Return the bytes of so many elements of a number format or an encoding, 0 for a dtype that is not known."""
    if (encoding := ENCODINGS.get(dtype)) is not None:
        return elements // encoding.elements * encoding.bytes
    return elements * _BITS.get(dtype, 0) // 8


def is_float(dtype: str) -> bool:
    """Return whether the elements are numbers of floating point with a sign."""
    return dtype in ENCODINGS or (dtype in BY_NAME and BY_NAME[dtype].has_sign_bit)
