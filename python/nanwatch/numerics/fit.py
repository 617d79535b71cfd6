"""The effect of a cast on a tensor: how many elements overflow, become zero or become subnormal.

Plain torch on every device, a chunk at a time. Nothing waits for a GPU but the copy of the result.

A cast rounds to the nearest number of the format, ties to even. So three magnitudes decide: a value overflows from half
a step above the largest finite number on, becomes zero up to half the smallest number, and is normal from half a step
below the smallest normal number on. The elements beyond each are counted in float64.

Block formats: elements of few bits share a scale with their block.

MX formats: OCP Microscaling Formats v1.0. NVFP4: blocks of 16 under a second scale. Scaled float8: as torchao scales
tensors and rows, and DeepSeek's blocks of 1x128 for activations and 128x128 for weights.

Values equal torchao 0.18's on a CPU bit for bit. Three rules are torchao's where OCP leaves them open or differs. A nan
makes its block nan. An inf becomes the largest element times the largest scale, which is inf in float32. A block with
amax below 2^(emax - 126) is divided by 2^-126 but read back with the scale 2^-127, so it comes out at half its size.
One rule is TransformerEngine's: where the scale of an NVFP4 tensor is 0 or its reciprocal overflows (amax below 8e-36),
zeros stay zeros. torchao makes nan of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import floor, inf, isfinite, log2, log10, nan, nextafter
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..util.messages import close_names
from . import _extension
from ._reference import chunks, row_dtype, stored
from .formats import BY_NAME, NumberFormat
from .readable import dtype_name, is_plain, only_our_dispatch, read, readable, type_name

# A format of scales has no zero, no sign and no fraction: no element of a tensor would come through a cast.
FORMATS = tuple(name for name, form in BY_NAME.items() if form.is_float and form.kind != "powers")
"""Number formats that `would_fit` takes, beside those with blocks."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Effect of a format on a tensor: its elements multiplied by `scale` and converted to `dtype`.

    Counts and shares cover the elements that are finite and not zero.

    Examples:
        >>> import nanwatch, torch
        >>> fit = nanwatch.would_fit(torch.tensor([1.0, 70000.0]), torch.float16)
        >>> fit.fits, fit.num_overflow, fit.overflow
        (False, 1, 0.5)
    """

    dtype: torch.dtype
    scale: float
    num_elements: int
    """Elements that are finite and not zero. The shares refer to them."""
    num_overflow: int
    """Rounded beyond the largest finite number: inf, nan or saturated, as the format and the cast have it."""
    num_underflow: int
    """Rounded to zero."""
    num_subnormal: int
    """Not zero, below the smallest normal number: stored with fewer significant bits."""

    @property
    def overflow(self) -> float:
        """Return the share of elements that overflow, 0.0 to 1.0."""
        return self.num_overflow / max(self.num_elements, 1)

    @property
    def underflow(self) -> float:
        """Return the share of elements that become zero, 0.0 to 1.0."""
        return self.num_underflow / max(self.num_elements, 1)

    @property
    def subnormal(self) -> float:
        """Return the share of elements that become subnormal, 0.0 to 1.0."""
        return self.num_subnormal / max(self.num_elements, 1)

    @property
    def fits(self) -> bool:
        """Return whether no element overflows and none becomes zero."""
        return self.num_overflow == self.num_underflow == 0

    def __str__(self) -> str:
        scaled = "" if self.scale == 1.0 else f" scaled by {self.scale:g}"
        return (
            f"{dtype_name(self.dtype)}{scaled}: {self.overflow:.3%} overflow, {self.underflow:.3%} become zero, "
            f"{self.subnormal:.3%} become subnormal"
        )


@overload
def would_fit(x: Tensor, dtype: torch.dtype, *, scale: float = 1.0) -> Fit: ...
@overload
def would_fit(x: Tensor, dtype: str, *, scale: float = 1.0, dim: int = -1) -> Fit | BlockFit: ...
def would_fit(x: Tensor, dtype: torch.dtype | str, *, scale: float = 1.0, dim: int = -1) -> Fit | BlockFit:
    """Count the elements of `x` that would overflow, or become zero or subnormal, in `(x * scale).to(dtype)`.

    `x`: a tensor of any real dtype, shape and layout, in one pass over it and with one sync. `dtype`: a floating-point
    format, or its name. `scale`: above zero, 1.0 for a cast of the elements as they are, without the scale of a loss or
    of a float8 recipe. The product is rounded to float64 before the cast.

    With the name of a block format, such as "mxfp8", "mxfp4", "nvfp4" or "float8_rowwise", return a BlockFit: the ratio
    of signal to quantization noise, and the elements that saturate or become zero. `dim`: the axis along which blocks
    lie, the one that the matmul sums over. A float64 is rounded to float32 first.

    Raises TypeError for a tensor without values to read, a complex tensor, and a `dtype` that is no floating-point
    format; for a block format also for integers. Raises ValueError for a scale that is not above zero and finite, or
    given with a block format, and for a `dim` without one.

    Examples:
        >>> import nanwatch, torch
        >>> gradient = torch.tensor([1e-9, 1e-3, 1.0, 0.0])
        >>> print(nanwatch.would_fit(gradient, torch.float16))
        float16: 0.000% overflow, 33.333% become zero, 0.000% become subnormal
        >>> nanwatch.would_fit(gradient, "float16", scale=2.0**15).fits
        True
        >>> print(nanwatch.would_fit(torch.linspace(-1, 1, 64), "mxfp4"))
        mxfp4: SQNR 20.3 dB, 0.000% saturate, 6.250% become zero
    """
    target = str(dtype).removeprefix("torch.")
    if target in BLOCKS_BY_NAME:
        if scale != 1.0:
            raise ValueError(f"would_fit got scale={scale!r} for {dtype}, whose blocks have their own")
        return block_fit(x, BLOCKS_BY_NAME[target], dim)
    if target not in FORMATS:
        accepted = (*FORMATS, *BLOCKS_BY_NAME)
        hint = close_names(target, accepted, "docs/block-formats.md describes those with blocks")
        raise TypeError(f"would_fit got the format {target}; accepted are {', '.join(accepted)}; {hint}")
    if dim != -1:
        raise ValueError(f"would_fit got dim={dim!r} for {target}, which has no blocks: leave it out")
    if not isfinite(scale) or scale <= 0:
        raise ValueError(f"would_fit got scale={scale!r}; a finite number above 0 is accepted, 1.0 for none")
    _extension.explain_once()
    with only_our_dispatch(), torch.no_grad():
        x = readable(x, "would_fit")
        if x.is_complex():
            raise TypeError(
                "would_fit takes no complex tensor: pass torch.view_as_real(x.resolve_conj()) for its parts, or x.abs()"
            )

        def count(x: Tensor) -> Tensor:
            part, total = stored(x), torch.zeros(4, dtype=torch.int64, device=x.device)
            for chunk in chunks(part.values):
                wide = chunk if row_dtype(x.device) is torch.float64 else chunk.cpu()
                size = wide.double().abs()
                is_counted, size = size.isfinite() & (size != 0), size * scale
                is_zero = size <= ends.zero_up_to
                kinds = size >= ends.overflows_from, is_zero, (size < ends.normal_from) & ~is_zero
                counts = [is_counted, *(kind & is_counted for kind in kinds)]
                total += torch.stack([kind.sum() for kind in counts]).to(x.device)
            return total * part.repeats

        ends = edges(target)
        return Fit(getattr(torch, target), float(scale), *map(int, read(count, count, x).tolist()))


class Edges(NamedTuple):
    """The magnitudes, all of them float64, at which a cast to a format changes what it does."""

    overflows_from: float
    zero_up_to: float
    normal_from: float


@lru_cache
def edges(name: str) -> Edges:
    """Return the edges of a floating-point format."""
    form, ends = BY_NAME[name], BY_NAME[name].ends
    halfway_up = ends.largest + (ends.largest - form.value_of(form.largest_word - 1)) / 2
    is_even = form.largest_word % 2 == 0  # then the tie goes down to it
    half = ends.smallest_subnormal / 2
    return Edges(nextafter(halfway_up, inf) if is_even else halfway_up, half, ends.smallest_normal - half)


# Block formats.

# PyTorch has no dtype with one such element a word, so they are no rows of NUMBER_FORMATS.
_FLOAT6_E3M2 = NumberFormat("float6_e3m2fn", -1, "", "finite", 6, exponent_bits=3, bias=3)
_FLOAT6_E2M3 = NumberFormat("float6_e2m3fn", -1, "", "finite", 6, exponent_bits=2, bias=1)
_FLOAT4_E2M1 = NumberFormat("float4_e2m1fn", -1, "", "finite", 4, exponent_bits=2, bias=1)
_E4M3, _E5M2 = BY_NAME["float8_e4m3fn"], BY_NAME["float8_e5m2"]

_CHUNK = 1 << 20  # elements: a dozen temporaries of 4 and 8 bytes stay below 128 MiB
_FLOAT8_EPS = 1e-12  # torchao's: a smaller amax counts as this one


class BlockFormat(NamedTuple):
    """A format whose elements share a scale with their block: value = element x scale."""

    name: str
    element: NumberFormat
    rows: int | None
    """Size of a block across the axis, in the dimension before it. None: all of the tensor."""
    columns: int | None
    """Size of a block along the axis that a matmul sums over. None: all of it."""
    scale: Literal["float8_e8m0fnu", "float8_e4m3fn", "float32"]
    """Format of the scales; one in float8_e4m3fn lies under a scale of the tensor in float32."""
    divides: bool = False
    """Whether the stored scale is the factor of the conversion, so that reading divides by it (torchao's training)."""


BLOCK_FORMATS = (
    BlockFormat("mxfp8", _E4M3, 1, 32, "float8_e8m0fnu"),
    BlockFormat("mxfp8_e5m2", _E5M2, 1, 32, "float8_e8m0fnu"),
    BlockFormat("mxfp6_e3m2", _FLOAT6_E3M2, 1, 32, "float8_e8m0fnu"),
    BlockFormat("mxfp6_e2m3", _FLOAT6_E2M3, 1, 32, "float8_e8m0fnu"),
    BlockFormat("mxfp4", _FLOAT4_E2M1, 1, 32, "float8_e8m0fnu"),
    BlockFormat("nvfp4", _FLOAT4_E2M1, 1, 16, "float8_e4m3fn"),
    BlockFormat("float8_tensorwise", _E4M3, None, None, "float32", divides=True),
    BlockFormat("float8_rowwise", _E4M3, 1, None, "float32", divides=True),
    BlockFormat("float8_block1x128", _E4M3, 1, 128, "float32"),
    BlockFormat("float8_block128x128", _E4M3, 128, 128, "float32"),
)
BLOCKS_BY_NAME: Mapping[str, BlockFormat] = {form.name: form for form in BLOCK_FORMATS}


@dataclass(frozen=True, slots=True)
class BlockFit:
    """Effect of a block format on a tensor. Counts and sums cover finite elements.

    Examples:
        >>> import nanwatch, torch
        >>> fit = nanwatch.would_fit(torch.tensor([1.0, 0.3] * 32), "mxfp8")
        >>> round(fit.sqnr, 1), fit.saturated, fit.flushed
        (38.4, 0.0, 0.0)
    """

    format: str
    num_elements: int
    """Elements that are finite and not zero. The shares refer to them."""
    num_saturated: int
    """Rounded beyond the largest element."""
    num_flushed: int
    """Rounded to zero."""
    num_lost: int
    """Become nan or inf: they share a scale with one, or come out too large for float32."""
    signal: float
    """Sum of x^2 over the elements that are finite before and after."""
    noise: float
    """Sum of (x - q)^2 over these elements, where q is the value that the format has for x."""

    @property
    def sqnr(self) -> float:
        """Return the ratio of signal to quantization noise in dB: inf where all is exact, nan where all is zero."""
        if self.noise == 0:
            return inf if self.signal else nan
        return 10 * log10(self.signal / self.noise)

    @property
    def saturated(self) -> float:
        """Return the share of elements that saturate, 0.0 to 1.0."""
        return self.num_saturated / max(self.num_elements, 1)

    @property
    def flushed(self) -> float:
        """Return the share of elements that become zero, 0.0 to 1.0."""
        return self.num_flushed / max(self.num_elements, 1)

    def __str__(self) -> str:
        lost = f", {self.num_lost} become nan or inf" if self.num_lost else ""
        shares = f"{self.saturated:.3%} saturate, {self.flushed:.3%} become zero"
        return f"{self.format}: SQNR {self.sqnr:.1f} dB, {shares}{lost}"


def block_fit(x: Tensor, form: BlockFormat, dim: int = -1) -> BlockFit:
    """Measure the effect of a block format on a tensor; `would_fit` has the description."""
    with only_our_dispatch(), torch.no_grad():
        x = readable(x, "would_fit")
        if not is_plain(x):
            raise TypeError(
                f"would_fit got a {type_name(x)} of {x.layout} for {form.name}; pass a dense tensor"
            )
        if not hasattr(dim, "__index__"):
            raise TypeError(f"would_fit got dim={dim!r}; a whole number is accepted, -1 for the last axis")
        if not x.is_floating_point():
            raise TypeError(f"would_fit got {dtype_name(x.dtype)} for {form.name}; pass floating point")
        x = x.movedim(dim, -1) if x.ndim else x.reshape(1)
        of_all = None
        if form.rows is None or form.scale == "float8_e4m3fn":
            of_all = _extension.abs_range(x)[1].float()
        sums = torch.zeros(6, dtype=row_dtype(x.device), device=x.device)
        for blocks in _pieces(x, form) if x.numel() else ():
            sums += _errors(blocks, form, of_all)
        *counts, signal, noise = sums.tolist()
        elements, saturated, flushed, lost = map(int, counts)
        return BlockFit(form.name, elements, saturated, flushed, lost, signal, noise)


def _pieces(x: Tensor, form: BlockFormat) -> Iterator[Tensor]:
    """Yield a tensor in float32 blocks, filled up with zeros: (batch, blocks, rows, blocks, columns)."""
    rows, columns = form.rows or 1, form.columns or x.shape[-1]
    if form.rows is None:  # one scale for all of the tensor, so it may be cut anywhere
        matrices, columns = x.reshape(1, -1, 1), 1
    elif rows == 1:
        matrices = x.reshape(-1, 1, x.shape[-1] if x.shape[-1] % columns else columns)
    else:
        matrices = x if x.ndim > 2 else x.reshape(1, -1, x.shape[-1])
        matrices = matrices.flatten(0, -3)
    _, height, width = matrices.shape
    for part in matrices.split(max(_CHUNK // (height * width), 1)):
        for band in part.split(max(_CHUNK // (rows * width), 1) * rows, 1):
            padded = pad(band.float(), (0, -width % columns, 0, -band.shape[1] % rows))
            yield padded.unflatten(2, (-1, columns)).unflatten(1, (-1, rows))


def _errors(blocks: Tensor, form: BlockFormat, of_all: Tensor | None) -> Tensor:
    """Return the numbers of a BlockFit from `num_elements` on."""
    values, saturates = converted(blocks, form, of_all)
    finite = blocks.isfinite()
    kept, nonzero = finite & values.isfinite(), finite & (blocks != 0)
    wide = row_dtype(blocks.device)
    signal = blocks.where(kept, 0.0).to(wide).square()
    noise = (blocks - values).where(kept, 0.0).to(wide).square()
    parts = [nonzero, nonzero & saturates, nonzero & (values == 0), nonzero & ~kept, signal, noise]
    return torch.stack([part.sum(dtype=wide) for part in parts])


def converted(blocks: Tensor, form: BlockFormat, of_all: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the value of each element after conversion to a format and back, and whether it saturates.

    `of_all`: the largest magnitude of the tensor, for a format with a scale for all of it.
    """
    amax = of_all if form.rows is None else blocks.abs().amax((2, 4), keepdim=True)
    assert amax is not None
    factor, scale = _scales(amax, form, of_all)
    scaled, largest = blocks * factor, form.element.ends.largest
    magnitude = scaled.abs()
    exponent = (magnitude.view(torch.int32) >> 23) - 127
    step = _power_of_two(exponent.clamp(1 - form.element.bias, 127) - form.element.fraction_bits)
    rounded = (magnitude / step).round() * step  # to nearest, ties to even: the division is exact
    elements = rounded.clamp(max=largest).copysign(scaled)
    return elements / scale if form.divides else elements * scale, rounded > largest


def _scales(amax: Tensor, form: BlockFormat, of_all: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what values are multiplied by before they are rounded, and the scale by which elements are read."""
    largest = form.element.ends.largest
    if form.scale == "float8_e8m0fnu":
        code = ((amax.view(torch.int32) >> 23) - floor(log2(largest))).clamp(min=0)
        divisor = _power_of_two(code.clamp(min=1) - 127)
        return 1.0 / divisor, torch.where(code == 0, 2.0**-127, divisor).where(~amax.isnan(), nan)
    if form.scale == "float8_e4m3fn":
        assert of_all is not None
        ends = torch.finfo(torch.float8_e4m3fn)
        of_tensor = of_all / (ends.max * largest)
        of_tensor = torch.where(of_tensor == 0, 1.0, of_tensor)
        stored = (amax / largest / of_tensor).clamp(ends.tiny, ends.max).to(torch.float8_e4m3fn).float()
        return (1.0 / of_tensor).clamp(max=torch.finfo(torch.float32).max) / stored, of_tensor * stored
    factor = (largest / amax.double().clamp(min=_FLOAT8_EPS)).float()
    return factor, factor if form.divides else 1.0 / factor


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent in float32, inf for 128."""
    return ((exponent + 127) << 23).view(torch.float32)
