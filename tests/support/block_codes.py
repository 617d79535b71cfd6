"""Codes and scales of a tensor in a block format, for comparison with libraries that store them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nanwatch.numerics.block_formats import BLOCKS_BY_NAME
from nanwatch.numerics.block_reference import amax_of, block_scales, cut, matrices_of, rounded
from nanwatch.numerics.formats import NumberFormat


class Encoded(NamedTuple):
    """A tensor in a block format: `codes` in its shape, uint8, and `scales` in the scale's dtype, one a block."""

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None


def encoded(x: Tensor, name: str, dim: int = -1) -> Encoded:
    """Return the codes and scales of `x`. The codes of a block whose scale is nan have no meaning."""
    form = BLOCKS_BY_NAME[name]
    with torch.no_grad():
        matrices = matrices_of(x, form, dim, "encoded")
        blocks = cut(matrices.values, form.rows, form.columns)
        scales = block_scales(amax_of(blocks), form)
        codes = matrices.joined(codes_of(rounded(blocks * scales.factor, form.element), form.element))
        return Encoded(codes, scales.stored.reshape(matrices.scale_shape), scales.of_tensor)


def codes_of(elements: Tensor, element: NumberFormat) -> Tensor:
    """Return the words of numbers of an element format, as uint8."""
    if element.bits == 8:
        return elements.to(getattr(torch, element.name)).view(torch.uint8)
    magnitudes = torch.tensor(
        [element.value_of(word) for word in range(element.largest_word + 1)], device=elements.device
    )
    words = torch.bucketize(elements.abs().nan_to_num(0.0), magnitudes)
    return (words + (elements.signbit() << (element.bits - 1))).to(torch.uint8)
