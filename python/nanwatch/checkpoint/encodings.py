"""Encodings of GGUF whose elements share a scale with their block: https://github.com/ggml-org/ggml (gguf-py).

The sizes of the blocks are facts of the format. The package gguf decodes them.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from ..numerics.formats import BY_NAME

Array = np.ndarray[Any, np.dtype[Any]]


class Encoding(NamedTuple):
    """Block of `elements` numbers in `bytes` bytes."""

    number: int
    """Its number in GGUF."""
    elements: int
    bytes: int


ENCODINGS = {
    "q4_0": Encoding(2, 32, 18),
    "q4_1": Encoding(3, 32, 20),
    "q5_0": Encoding(6, 32, 22),
    "q5_1": Encoding(7, 32, 24),
    "q8_0": Encoding(8, 32, 34),
    "q2_k": Encoding(10, 256, 84),
    "q3_k": Encoding(11, 256, 110),
    "q4_k": Encoding(12, 256, 144),
    "q5_k": Encoding(13, 256, 176),
    "q6_k": Encoding(14, 256, 210),
}
"""Encodings by their names."""
_BITS = {name: form.bits for name, form in BY_NAME.items()}


def cannot_decode() -> str:
    """Return why no encoding can be decoded, "" where they can."""
    return "" if find_spec("gguf") else "its blocks are decoded by the package gguf: pip install gguf"


def decoded(blocks: Array, dtype: str) -> Array:
    """Return the float32 values (n, elements) of blocks (n, bytes)."""
    import gguf

    with np.errstate(all="ignore"):
        values: Array = gguf.dequantize(blocks, gguf.GGMLQuantizationType(ENCODINGS[dtype].number))
    return values


def bytes_of(dtype: str, elements: int) -> int:
    """Return the bytes of so many elements of a number format or an encoding, 0 for a dtype that is not known."""
    if (encoding := ENCODINGS.get(dtype)) is not None:
        return elements // encoding.elements * encoding.bytes
    return elements * _BITS.get(dtype, 0) // 8


def is_float(dtype: str) -> bool:
    """Return whether the elements are numbers of floating point with a sign."""
    return dtype in ENCODINGS or (dtype in BY_NAME and BY_NAME[dtype].has_sign_bit)
