"""Conversion of a tensor to a block format and back in plain torch, bit for bit as torchao 0.18 does it on a CPU.

The scale of an MX block is 2^(floor(log2(amax)) - emax) as in OCP MX v1.0, section 6.3. Elements round to nearest, ties
to even, and saturate. Three rules are torchao's where OCP leaves them open or differs. A nan makes its block nan. An
inf becomes the largest element times the largest scale, which is inf in float32. A block with amax below 2^(emax - 126)
is divided by 2^-126 but read back with the scale 2^-127, so it comes out at half its size.

One rule is TransformerEngine's: where the scale of an NVFP4 tensor is 0 or its reciprocal overflows (amax below 8e-36),
torchao 0.18 makes nan of zeros. Here zeros stay zeros.
"""

from __future__ import annotations

from math import floor, log2, prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .block_formats import BlockFormat, block_format
from .formats import NumberFormat
from .readable import dtype_name, type_name

_FLOAT32_BIAS, _FLOAT32_FRACTION = 127, 23
_FLOAT8_EPS = 1e-12  # torchao's: a smaller amax counts as this one
_ACCEPTED = frozenset(
    {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
    | {"float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
)


class Scales(NamedTuple):
    """The scales of all blocks, each of one element where a block is."""

    stored: Tensor
    """The scales in the dtype in which the format stores them."""
    factor: Tensor
    """float32: a value times its factor is rounded to an element."""
    value: Tensor
    """float32: an element times it is the value that is read, unless `divides`."""
    of_tensor: Tensor | None = None


def quantized(x: Tensor, name: str, dim: int = -1, *, generator: torch.Generator | None = None) -> Tensor:
    """Return the values, in float32, that `x` has after conversion to the block format `name` and back.

    `dim`: the axis along which blocks lie, the one that a matmul sums over. The last block may be shorter. A float64 is
    rounded to float32 first. `generator`: round each element up or down by chance, so that its mean is exact.

    Raises ValueError for an unknown format, TypeError for a tensor that is not floating point.
    """
    form = block_format(name, "quantized")
    with torch.no_grad():
        matrices = matrices_of(x, form, dim, "quantized")
        blocks = cut(matrices.values, form.rows, form.columns)
        scales = block_scales(amax_of(blocks), form)
        elements = rounded(blocks * scales.factor, form.element, generator)
        return matrices.joined(read_back(elements, scales, form))


class Matrices(NamedTuple):
    """A tensor as matrices whose rows lie along the axis of its blocks."""

    values: Tensor
    """(batch, rows, columns), in the tensor's dtype."""
    shape: tuple[int, ...]
    """Shape of the tensor with the axis last."""
    scale_shape: tuple[int, ...]
    """`shape` counted in blocks."""
    dim: int
    """Place of the axis in the tensor."""

    def joined(self, blocks: Tensor) -> Tensor:
        """Return a number for each element, cut into blocks, in the shape of the tensor."""
        batch, height, rows, width, columns = blocks.shape
        _, num_rows, num_columns = self.values.shape
        flat = blocks.reshape(batch, height * rows, width * columns)[:, :num_rows, :num_columns]
        flat = flat.reshape(self.shape)
        return flat.movedim(-1, self.dim).contiguous() if flat.ndim else flat


def check_dtype(x: Tensor, caller: str) -> None:
    """Raise TypeError for what is not a tensor of floating point."""
    if not isinstance(x, Tensor) or dtype_name(x.dtype) not in _ACCEPTED:
        kind = f"tensor of {dtype_name(x.dtype)}" if isinstance(x, Tensor) else type_name(x)
        raise TypeError(f"{caller} got a {kind}; accepted are tensors of {', '.join(sorted(_ACCEPTED))}")


def matrices_of(x: Tensor, form: BlockFormat, dim: int, caller: str) -> Matrices:
    """Return a tensor as matrices: a view where its strides allow one.

    Raises TypeError for what is not a tensor of floating point.
    """
    check_dtype(x, caller)
    x = x.detach()
    x = x.movedim(dim, -1) if x.ndim else x
    *leading, last = x.shape or (1,)
    if form.rows is None:
        sizes = (1, 1, x.numel())
    elif form.rows == 1 or not leading:
        sizes = (1, prod(leading), last)
    else:
        sizes = (prod(leading[:-1]), leading[-1], last)
    height, width = -(-sizes[1] // (form.rows or 1)), -(-sizes[2] // (form.columns or max(sizes[2], 1)))
    each_row = leading if form.rows == 1 else [*leading[:-1], height]
    scale_shape = (width,) if form.rows is None else (*each_row, width)
    return Matrices(x.reshape(sizes), tuple(x.shape), scale_shape, dim)


def cut(matrices: Tensor, rows: int | None, columns: int | None) -> Tensor:
    """Return matrices as float32 blocks, filled up with zeros.

    Their shape: (batch, blocks of rows, rows, blocks of columns, columns).
    """
    batch, num_rows, num_columns = matrices.shape
    rows, columns = rows or 1, columns or max(num_columns, 1)
    height, width = -(-num_rows // rows), -(-num_columns // columns)
    padded = pad(matrices.float(), (0, width * columns - num_columns, 0, height * rows - num_rows))
    return padded.reshape(batch, height, rows, width, columns)


def amax_of(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each block; nan where it has a nan."""
    return blocks.abs().amax((2, 4), keepdim=True)


def block_scales(amax: Tensor, form: BlockFormat, of_all: Tensor | None = None) -> Scales:
    """Return the scales of blocks by their largest magnitudes. `of_all`: the largest one, unless it is among them."""
    if form.scale == "float8_e8m0fnu":
        return _powers(amax, form.element)
    if form.scale == "float8_e4m3fn":
        return _two_levels(amax, form.element, of_all)
    largest = form.element.ends.largest
    factor = (largest / amax.double().clamp(min=_FLOAT8_EPS)).float()
    inverse = 1.0 / factor
    return Scales(factor if form.divides else inverse, factor, inverse)


def _powers(amax: Tensor, element: NumberFormat) -> Scales:
    """Return scales in e8m0 for MX blocks."""
    field = amax.view(torch.int32) >> _FLOAT32_FRACTION
    code = (field - floor(log2(element.ends.largest))).clamp(min=0)
    code = torch.where(amax.isnan(), 255, code)
    divisor = _power_of_two(code.clamp(min=1) - _FLOAT32_BIAS)
    value = torch.where(code == 0, 2.0**-127, divisor)
    value = torch.where(amax.isnan(), torch.nan, value)
    return Scales(code.to(torch.uint8).view(torch.float8_e8m0fnu), 1.0 / divisor, value)


def _two_levels(amax: Tensor, element: NumberFormat, of_all: Tensor | None) -> Scales:
    """Return scales in e4m3 under one in float32, for NVFP4."""
    largest, limits = element.ends.largest, torch.finfo(torch.float8_e4m3fn)
    if of_all is None:
        of_all = amax.amax() if amax.numel() else amax.new_zeros(())
    of_tensor = of_all / (limits.max * largest)
    of_tensor = torch.where(of_tensor == 0, 1.0, of_tensor)
    stored = (amax / largest / of_tensor).clamp(limits.tiny, limits.max).to(torch.float8_e4m3fn)
    reciprocal = (1.0 / of_tensor).clamp(max=torch.finfo(torch.float32).max)
    return Scales(stored, reciprocal / stored.float(), of_tensor * stored.float(), of_tensor)


def rounded(scaled: Tensor, element: NumberFormat, generator: torch.Generator | None = None) -> Tensor:
    """Return the nearest numbers of an element format, ties to even, saturated; nan stays nan."""
    largest = element.ends.largest
    magnitude = scaled.abs().clamp(max=largest)
    exponent = (magnitude.view(torch.int32) >> _FLOAT32_FRACTION) - _FLOAT32_BIAS
    step = _power_of_two(exponent.clamp(1 - element.bias, 127) - element.fraction_bits)
    steps = magnitude / step  # exact: a power of two
    if generator is None:
        steps = steps.round()
    else:
        lower = steps.floor()
        chance = torch.rand(steps.shape, generator=generator, device=steps.device)
        steps = lower + (chance < steps - lower)
    return (steps * step).copysign(scaled)


def read_back(elements: Tensor, scales: Scales, form: BlockFormat) -> Tensor:
    """Return the values of elements."""
    return elements / scales.stored if form.divides else elements * scales.value


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float32, inf for 128."""
    return ((exponent + _FLOAT32_BIAS) << _FLOAT32_FRACTION).view(torch.float32)
