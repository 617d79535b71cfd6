"""Tensors of given bits."""

from __future__ import annotations

import torch

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_bits(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """`count` elements of any bits at all: nan, inf, zeros and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    words = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return words.view(dtype)


def random_finite(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """The same with the non-finite elements replaced by one that is finite."""
    x = random_bits(dtype, count, seed)
    if not dtype.is_floating_point:
        return x
    bits = x.view(BITS[dtype.itemsize])
    unit = torch.ones((), dtype=torch.float32).to(dtype).view(bits.dtype)
    return torch.where(torch.isfinite(x.double()), bits, unit).view(dtype)
