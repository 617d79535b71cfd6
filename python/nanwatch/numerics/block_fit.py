"""Error of a block format on a tensor: its noise by block, and how many elements saturate or become zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from math import inf, isnan, log2, log10, nan
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _extension
from ._reference import row_dtype
from .block_formats import BlockFormat
from .block_reference import (
    Matrices,
    Scales,
    amax_of,
    block_scales,
    check_dtype,
    cut,
    matrices_of,
    read_back,
    rounded,
)
from .formats import NumberFormat
from .readable import is_plain, only_our_dispatch, readable, type_name

WORST = 5
"""Number of blocks that a BlockFit names."""
_NATIVE = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK = 1 << 20  # elements: a dozen temporaries of 4 and 8 bytes stay below 128 MiB

# Columns of a row: elements, saturated, flushed, lost, non-finite, blocks, flushed blocks, then those named here, then
# (index, signal, noise) of each of the worst blocks, where an index of -1 says that there is none.
_SIGNAL, _NOISE, _LOW, _HIGH = range(7, 11)
HEAD = _HIGH + 1
WIDTH = HEAD + 3 * WORST


class BlockError(NamedTuple):
    """The error of one block."""

    block: tuple[int, ...]
    """Index of the block: that of its first element with the axis last, divided by the size of a block."""
    sqnr: float
    """In dB."""


@dataclass(frozen=True, slots=True)
class BlockFit:
    """Effect of a block format on a tensor. Counts and sums cover finite elements.

    Examples:
        >>> import nanwatch, torch
        >>> fit = nanwatch.would_fit(torch.tensor([1.0, 0.3] * 32), "mxfp8")
        >>> round(fit.sqnr, 1), fit.saturated, fit.flushed, fit.num_blocks
        (38.4, 0.0, 0.0, 2)
    """

    format: str
    dim: int
    """Axis along which the blocks lie."""
    num_elements: int
    """Elements that are finite and not zero. The shares refer to them."""
    num_saturated: int
    """Rounded beyond the largest element."""
    num_flushed: int
    """Rounded to zero."""
    num_lost: int
    """Become nan or inf: they share a scale with one, or come out too large for float32."""
    num_nonfinite: int
    """Elements that were nan or inf before, in float32: a large float64 is inf there."""
    num_blocks: int
    num_flushed_blocks: int
    """Blocks with elements that are finite and not zero, all of which become zero."""
    signal: float
    """Sum of x^2 over the elements that are finite before and after."""
    noise: float
    """Sum of (x - q)^2 over these elements, where q is the value that the format has for x."""
    scales: tuple[float, float]
    """Smallest and largest factor by which elements are read, of finite blocks that are not zero; nan without one."""
    worst: tuple[BlockError, ...]
    """The blocks with the lowest SQNR, at most 5, the lowest first; no block that is exact."""

    @property
    def sqnr(self) -> float:
        """Return the ratio of signal to quantization noise in dB: inf where all is exact, nan where all is zero."""
        return decibel(self.signal, self.noise)

    @property
    def saturated(self) -> float:
        """Return the share of elements that saturate, 0.0 to 1.0."""
        return self.num_saturated / self.num_elements if self.num_elements else 0.0

    @property
    def flushed(self) -> float:
        """Return the share of elements that become zero, 0.0 to 1.0."""
        return self.num_flushed / self.num_elements if self.num_elements else 0.0

    @property
    def flushed_blocks(self) -> float:
        """Return the share of blocks that become zero, 0.0 to 1.0."""
        return self.num_flushed_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def scale_spread(self) -> float:
        """Return the distance of the smallest from the largest scale in powers of two; nan without a scale."""
        low, high = self.scales
        return nan if isnan(low) else log2(high) - log2(low)

    def __str__(self) -> str:
        lost = f", {self.num_lost} become nan or inf" if self.num_lost else ""
        before = f", {self.num_nonfinite} were nan or inf before" if self.num_nonfinite else ""
        return (
            f"{self.format}: SQNR {self.sqnr:.1f} dB, {self.saturated:.3%} saturate, {self.flushed:.3%} become zero, "
            f"{self.flushed_blocks:.3%} of {self.num_blocks} blocks become zero{lost}{before}"
        )


def block_fits(
    x: Tensor, forms: Sequence[BlockFormat], dim: int, amax: float | None = None
) -> tuple[BlockFit, ...]:
    """Measure the effect of block formats on a tensor; `would_fit` has the description.

    `amax`: the largest magnitude of the tensor that `x` is a part of, for a format with a scale for all of it.
    """
    _extension.explain_once()
    with only_our_dispatch(), torch.no_grad():
        x = readable(x, "would_fit")
        if not is_plain(x):
            raise TypeError(
                f"would_fit got a {type_name(x)} of layout {x.layout} for {forms[0].name}; pass a dense tensor"
            )
        check_dtype(x, "would_fit")
        dim = dim % max(x.ndim, 1) if -x.ndim <= dim < max(x.ndim, 1) else dim
        last = x.movedim(dim, -1) if x.ndim else x
        last = (last if last.dtype in _NATIVE else last.float()).contiguous()
        of_all = None  # stays on the device, as the host would wait for a number
        if amax is not None:
            of_all = torch.full((), amax, dtype=row_dtype(last.device), device=last.device)
        elif any(form.rows is None or form.has_tensor_scale for form in forms):
            of_all = _extension.abs_range(last)[1]
        cuts = [matrices_of(last, form, -1, "would_fit") for form in forms]
        native = _native(cuts, forms, of_all)
        return tuple(
            _fit(
                (_errors(cut.values, form, of_all) if rows is None else _merged(rows)).tolist(),
                form, dim, cut.scale_shape,
            )
            for cut, form, rows in zip(cuts, forms, native, strict=True)
        )  # fmt: skip


def _fit(numbers: list[float], form: BlockFormat, dim: int, scale_shape: tuple[int, ...]) -> BlockFit:
    signal, noise, low, high = numbers[_SIGNAL:HEAD]
    worst = tuple(
        BlockError(_place(int(index), scale_shape), decibel(power, error))
        for index, power, error in zip(*(iter(numbers[HEAD:]),) * 3, strict=True)
        if index >= 0
    )
    scales = (low, high) if low <= high else (nan, nan)
    elements, saturated, flushed, lost, nonfinite, blocks, flushed_blocks = map(int, numbers[:_SIGNAL])
    return BlockFit(
        form.name, dim, elements, saturated, flushed, lost, nonfinite, blocks, flushed_blocks, signal, noise, scales,
        worst,
    )  # fmt: skip


def _native(
    cuts: Sequence[Matrices], forms: Sequence[BlockFormat], amax: Tensor | None
) -> list[Tensor | None]:
    """Return rows of each format, on the host, from the compiled loops: csrc/cpu/block_fit.h, cuda/block_fit_cuda.h.

    One pass over the tensor, on a GPU one for each format. None for those that are left to plain torch.
    """
    places = [i for i, form in enumerate(forms) if form.rows is not None]
    rows: list[Tensor | None] = [None] * len(forms)
    if _extension.C is None or not places:
        return rows
    tallest = max(places, key=lambda i: forms[i].rows or 0)
    found = _extension.C.block_fit(cuts[tallest].values, [_items(forms[i]) for i in places], amax)
    if found is None:
        return rows
    found = found.cpu()  # the only wait for a GPU
    if found[..., _NONFINITE].any():  # a kernel can refuse no earlier
        return rows
    for i, table in zip(places, found, strict=True):
        rows[i] = table
    return rows


def _items(form: BlockFormat) -> tuple[int, int, int, int, int, float]:
    scale = {"float8_e8m0fnu": 0, "float8_e4m3fn": 1, "float32": 3 if form.divides else 2}[form.scale]
    element = form.element
    return (
        scale,
        form.rows or 1,
        form.columns or 0,
        element.bias,
        element.fraction_bits,
        element.ends.largest,
    )


def _errors(x: Tensor, form: BlockFormat, amax: Tensor | None) -> Tensor:
    """Return the row of matrices (batch, rows, columns), shape (26,).

    `amax`: the largest magnitude of the whole tensor, for a format with a scale for it.
    """
    of_all = torch.full((), nan, device=x.device) if amax is None else amax.float()
    _, rows, columns = x.shape
    height, width = form.rows or 1, form.columns or 1
    # Pieces of whole blocks, of a whole row where it fits.
    at_once = (
        max(_CHUNK // max(rows * columns, 1), 1),
        max(_CHUNK // max(height * columns, 1), 1) * height,
        max(_CHUNK // (height * width), 1) * width,
    )
    found = [_no_blocks(x.device)]
    num_blocks = 0
    for matrices in x.split(at_once[0]):
        for band in matrices.split(at_once[1], 1):
            pieces = [part for part in band.split(at_once[2], 2) if part.numel()]
            if form.columns is None and pieces:
                amaxes = [of_all] if form.rows is None else [part.abs().amax(2).float() for part in pieces]
                top = reduce(torch.maximum, amaxes).expand(band.shape[:2])[:, :, None, None, None]
                scales = block_scales(top, form)
                tables = [_table(cut(part, 1, None), form, scales) for part in pieces]
                tables = [torch.cat([torch.stack(tables).sum(0)[:, :-1], tables[0][:, -1:]], 1)]
            else:
                blocks = [cut(part, form.rows, form.columns) for part in pieces]
                tables = [_table(part, form, block_scales(amax_of(part), form, of_all)) for part in blocks]
            for table in tables:
                found.append(_row(table, num_blocks))
                num_blocks += len(table)
    return _merged(torch.stack(found))


# A table has a row for each block.
_ELEMENTS, _SATURATED, _FLUSHED, _LOST, _NONFINITE, _BLOCK_SIGNAL, _BLOCK_NOISE, _SCALE = range(8)


def _table(blocks: Tensor, form: BlockFormat, scales: Scales) -> Tensor:
    """Return the numbers of each block, in the order of the blocks."""
    scaled = blocks * scales.factor
    values = read_back(rounded(scaled, form.element), scales, form)
    finite = blocks.isfinite()
    kept, nonzero = finite & values.isfinite(), finite & (blocks != 0)
    wide = row_dtype(blocks.device)
    signal = blocks.where(kept, 0.0).to(wide).square()
    noise = (blocks - values).where(kept, 0.0).to(wide).square()
    saturated = nonzero & (scaled.abs() >= _saturates_from(form.element))
    columns = [nonzero, saturated, nonzero & (values == 0), nonzero & ~kept, ~finite, signal, noise]
    table = torch.stack([column.sum((2, 4), dtype=wide).flatten() for column in columns], 1)
    scale = scales.value.flatten().to(wide)
    is_shown = (table[:, _ELEMENTS] > 0) & (table[:, _NONFINITE] == 0) & scale.isfinite()
    return torch.cat([table, scale.where(is_shown, nan)[:, None]], 1)


def _row(table: Tensor, first: int) -> Tensor:
    """Return the row of blocks, of which the first has the number `first`."""
    flushed = (table[:, _FLUSHED] == table[:, _ELEMENTS]) & (table[:, _ELEMENTS] > 0)
    scale = table[:, _SCALE]
    sums = table.sum(0)
    head = [*sums[:_BLOCK_SIGNAL], sums.new_tensor(len(table)), flushed.sum(), *sums[_BLOCK_SIGNAL:_SCALE]]
    head += [scale.nan_to_num(inf).amin(), scale.nan_to_num(-inf).amax()]
    noise = table[:, _BLOCK_NOISE]
    ratio = (noise / table[:, _BLOCK_SIGNAL]).where(noise > 0, -1.0)
    order = ratio.sort(descending=True, stable=True).indices[:WORST]
    index = (order + first).where(ratio[order] > 0, -1)
    worst = torch.stack([index.to(table), *table[order, _BLOCK_SIGNAL:_SCALE].unbind(1)], 1).flatten()
    return torch.cat(
        [
            torch.stack([number.to(table) for number in head]),
            pad(worst, (0, WIDTH - HEAD - len(worst)), value=-1.0),
        ]
    )


def _no_blocks(device: torch.device) -> Tensor:
    empty = torch.zeros(WIDTH, dtype=row_dtype(device), device=device)
    empty[_LOW], empty[_HIGH], empty[HEAD:] = inf, -inf, -1.0
    return empty


def _merged(table: Tensor) -> Tensor:
    """Return the row of all blocks. `table`: a row for each part of them, in their order."""
    worst = table[:, HEAD:].reshape(-1, 3)
    ratio = (worst[:, 2] / worst[:, 1]).where(worst[:, 0] >= 0, -1.0)
    worst = worst[ratio.sort(descending=True, stable=True).indices[:WORST]]
    return torch.cat(
        [table[:, :_LOW].sum(0), table[:, _LOW].amin()[None], table[:, _HIGH].amax()[None], worst.flatten()]
    )


@cache
def _saturates_from(element: NumberFormat) -> float:
    """Return the lowest float32 that rounds beyond the largest element: half a step above it, a tie goes to even."""
    largest, below = (element.value_of(element.largest_word - back) for back in (0, 1))
    tie = torch.tensor(largest + (largest - below) / 2)
    return float(tie if element.largest_word % 2 else tie.nextafter(torch.tensor(inf)))


def _place(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        place.append(rest)
    return tuple(reversed(place))


def decibel(signal: float, noise: float) -> float:
    """Return the ratio of two sums of squares in dB: inf without noise, nan without either."""
    if noise == 0:
        return inf if signal else nan
    return 10 * log10(signal / noise)
