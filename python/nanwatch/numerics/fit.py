"""The effect of a cast on a tensor: how many elements overflow, become zero or become subnormal.

Plain torch on every device, a chunk at a time. Nothing waits for a GPU but the copy of the result.

A cast rounds to the nearest number of the format, ties to even. So three magnitudes decide: a value overflows from half
a step above the largest finite number on, becomes zero up to half the smallest number, and is normal from half a step
below the smallest normal number on. The elements beyond each are counted in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite, nextafter
from typing import NamedTuple, SupportsIndex, overload

import torch
from torch import Tensor

from ..util.visible import close_names
from . import _extension
from ._reference import chunks, row_dtype, stored
from .block_fit import BLOCKS_BY_NAME, BlockFit, block_fit
from .formats import BY_NAME
from .readable import dtype_name, only_our_dispatch, read, readable, type_name

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
    format; for a block format also for integers and a `dim` that is no integer. Raises ValueError for a scale that is
    not above zero and finite, or given with a block format, and for a `dim` without one.

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
    if isinstance(dtype, str) and dtype in BLOCKS_BY_NAME:
        if scale != 1.0:
            raise ValueError(f"would_fit got scale={scale!r} for {dtype}, whose blocks have their own")
        if not isinstance(dim, SupportsIndex):
            raise TypeError(f"would_fit got dim={dim!r}; the number of an axis is accepted")
        return block_fit(x, BLOCKS_BY_NAME[dtype], dim)
    target = _target(dtype)
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
                total += _count_kinds(wide.double().abs(), edges(target), float(scale)).to(x.device)
            return total * part.repeats

        return Fit(getattr(torch, target), float(scale), *map(int, read(count, count, x).tolist()))


def _count_kinds(magnitude: Tensor, limits: Edges, scale: float) -> Tensor:
    """Return the elements that are finite and not zero, and how many of them overflow, become zero, or subnormal."""
    is_counted = magnitude.isfinite() & (magnitude != 0)
    product = magnitude * scale
    is_zero = product <= limits.zero_up_to
    kinds = product >= limits.overflows_from, is_zero, (product < limits.normal_from) & ~is_zero
    return torch.stack([is_counted.sum(), *((kind & is_counted).sum() for kind in kinds)])


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


def _target(dtype: torch.dtype | str) -> str:
    if not isinstance(dtype, torch.dtype | str):
        raise TypeError(
            f"would_fit got a {type_name(dtype)}; accepted are a torch.dtype and the name of a format"
        )
    name = str(dtype).removeprefix("torch.")
    if name not in FORMATS:
        accepted = (*FORMATS, *BLOCKS_BY_NAME)
        hint = close_names(name, accepted, "docs/block-formats.md describes those with blocks")
        raise TypeError(f"would_fit got the format {name}; accepted are {', '.join(accepted)}; {hint}")
    return name
