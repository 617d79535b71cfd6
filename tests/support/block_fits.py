"""Tensors that would_fit's block formats find hard, and the numbers of plain torch for them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import nanwatch
from nanwatch.numerics import block_fit
from nanwatch.numerics.block_fit import BlockFit, block_fits
from nanwatch.numerics.block_formats import BLOCKS_BY_NAME
from support.oracle import from_patterns

NAMES = [name for name, form in BLOCKS_BY_NAME.items() if form.rows is not None]
FIVE = ["mxfp8", "mxfp4", "nvfp4", "float8_rowwise", "float8_block128x128"]
"""Formats for one call."""


def plain(x: torch.Tensor, names: list[str]) -> tuple[BlockFit, ...]:
    """Return the numbers of plain torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_fit, "_native", lambda cuts, forms, amax: [None] * len(forms))
        return block_fits(x, [BLOCKS_BY_NAME[name] for name in names], -1)


def is_native(x: torch.Tensor, name: str) -> bool:
    """Return whether compiled loops take the tensor."""
    form = BLOCKS_BY_NAME[name]
    cut = block_fit.matrices_of(x, form, -1, "test")
    amax = torch.tensor(nanwatch.abs_range(x).abs_max, dtype=torch.float64, device=x.device)
    return block_fit._native([cut], [form], amax)[0] is not None


def check(x: torch.Tensor, names: list[str], *, has_ties: bool = False) -> None:
    """Compare with plain torch on the host. With ties the sums' last bits decide which blocks are the worst."""
    for ours, theirs in zip(nanwatch.would_fit(x, names), plain(x.cpu(), names), strict=True):
        exact = ("num_elements", "num_saturated", "num_flushed", "num_lost", "num_blocks")
        for field in (*exact, "num_nonfinite", "num_flushed_blocks"):
            assert getattr(ours, field) == getattr(theirs, field), (ours.format, field)
        assert ours.scales == pytest.approx(theirs.scales, rel=0, nan_ok=True), ours.format
        assert ours.signal == pytest.approx(theirs.signal, rel=1e-6), ours.format
        assert ours.noise == pytest.approx(theirs.noise, rel=1e-6), ours.format
        assert [one.sqnr for one in ours.worst] == pytest.approx([one.sqnr for one in theirs.worst], abs=1e-5)
        if not has_ties:
            assert [one.block for one in ours.worst] == [one.block for one in theirs.worst], ours.format
        assert [one.sqnr for one in ours.worst] == pytest.approx([one.sqnr for one in theirs.worst], rel=1e-6)


def rough(*shape: int) -> torch.Tensor:
    """Return numbers of many sizes, with zeros, blocks of zeros, numbers on ties and ones that a block flushes."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 13, (*shape[:-1], 1), generator=generator))
    x[..., ::7] *= 2.0**-9
    x[..., 3::11] = (x[..., 3::11] * 8).round() / 8
    x[..., 5::13] = 0.0
    x.view(-1)[40:90] = 0.0
    return x


def every_number(dtype: torch.dtype, factor: float) -> torch.Tensor:
    """Return all finite numbers of 16 bits in rows of 32, the first of each so many times as large as the others."""
    every = from_patterns(np.arange(1 << 16).astype("u2"), dtype)
    numbers = every[every.isfinite() & (every.abs() < 1e36)]
    blocks = numbers[: len(numbers) // 31 * 31].reshape(-1, 31)
    tops = blocks.float().abs().amax(1, keepdim=True).clamp(min=1e-20)
    return torch.cat([(tops * factor).to(dtype).nan_to_num(0.0, 1.0), blocks], 1)


def every_step(name: str, scale: float) -> torch.Tensor:
    """Return the ties of an element format and their neighbours, under its largest number, so many times."""
    element = BLOCKS_BY_NAME[name].element
    values = torch.tensor([element.value_of(word) for word in range(element.largest_word + 1)])
    ties = (values[1:] + values[:-1]) / 2
    near = torch.cat(
        [values, ties, ties.nextafter(torch.tensor(math.inf)), ties.nextafter(torch.tensor(0.0))]
    )
    x = torch.cat([near, -near]) * scale
    return torch.cat([x.repeat(32, 1), torch.full((32, 1), element.ends.largest * scale)], 1).contiguous()
