"""The block formats, declared once: elements of few bits that share a scale with their block. Needs no torch.

MX formats: OCP Microscaling Formats v1.0. NVFP4: blocks of 16 under a second scale. Scaled float8: the recipes of
torchao, and DeepSeek's blocks of 1x128 for activations and 128x128 for weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ..util.visible import close_names
from .formats import BY_NAME, NumberFormat

ScaleFormat = Literal["float8_e8m0fnu", "float8_e4m3fn", "float32"]

# PyTorch has no dtype with one such element a word, so they are no rows of NUMBER_FORMATS.
_FLOAT6_E3M2 = NumberFormat("float6_e3m2fn", -1, "", "finite", 6, exponent_bits=3, bias=3)
_FLOAT6_E2M3 = NumberFormat("float6_e2m3fn", -1, "", "finite", 6, exponent_bits=2, bias=1)
_FLOAT4_E2M1 = NumberFormat("float4_e2m1fn", -1, "", "finite", 4, exponent_bits=2, bias=1)
_E4M3, _E5M2 = BY_NAME["float8_e4m3fn"], BY_NAME["float8_e5m2"]


class BlockFormat(NamedTuple):
    """A format whose elements share a scale with their block: value = element x scale."""

    name: str
    element: NumberFormat
    rows: int | None
    """Size of a block across the axis, in the dimension before it. None: all of the tensor."""
    columns: int | None
    """Size of a block along the axis that a matmul sums over. None: all of it."""
    scale: ScaleFormat
    has_tensor_scale: bool = False
    """Whether the tensor has a second scale in float32."""
    divides: bool = False
    """Whether the stored scale is the factor of the conversion, so that reading divides by it (torchao's training)."""


BLOCK_FORMATS = (
    BlockFormat("mxfp8", _E4M3, 1, 32, "float8_e8m0fnu"),
    BlockFormat("mxfp8_e5m2", _E5M2, 1, 32, "float8_e8m0fnu"),
    BlockFormat("mxfp6_e3m2", _FLOAT6_E3M2, 1, 32, "float8_e8m0fnu"),
    BlockFormat("mxfp6_e2m3", _FLOAT6_E2M3, 1, 32, "float8_e8m0fnu"),
    BlockFormat("mxfp4", _FLOAT4_E2M1, 1, 32, "float8_e8m0fnu"),
    BlockFormat("nvfp4", _FLOAT4_E2M1, 1, 16, "float8_e4m3fn", has_tensor_scale=True),
    BlockFormat("float8_tensorwise", _E4M3, None, None, "float32", divides=True),
    BlockFormat("float8_rowwise", _E4M3, 1, None, "float32", divides=True),
    BlockFormat("float8_block1x128", _E4M3, 1, 128, "float32"),
    BlockFormat("float8_block128x128", _E4M3, 128, 128, "float32"),
)
BLOCKS_BY_NAME: Mapping[str, BlockFormat] = {form.name: form for form in BLOCK_FORMATS}


def block_format(name: str, caller: str) -> BlockFormat:
    """Return a block format by its name. Raise ValueError for another name."""
    if (form := BLOCKS_BY_NAME.get(name)) is None:
        known = ", ".join(BLOCKS_BY_NAME)
        hint = close_names(str(name), BLOCKS_BY_NAME, "docs/block-formats.md describes them")
        raise ValueError(f"{caller} got the format {name!r}; accepted are {known}; {hint}")
    return form
