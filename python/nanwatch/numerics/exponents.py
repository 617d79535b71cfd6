"""Number of elements of a tensor in each power of two: `exponent_histogram`, in one pass and with one sync.

A range says where the ends are. The histogram says how many elements are there, which decides about a format: one
element of 1e-9 among a million is another matter than half a million of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import _extension
from ._reference import chunks, on_wide_device, row_dtype, stored
from .readable import only_our_dispatch, read, readable

_LOWEST, _HIGHEST = -1074, 1023  # exponents of float64
_HEAD = 4  # columns before the exponents: zeros, nans, infinities of either sign


@dataclass(frozen=True)
class ExponentHistogram:
    """Number of elements in each power of two, and of those without one: zeros, nans and infinities."""

    dtype: torch.dtype
    counts: Mapping[int, int] = field(hash=False)
    """From exponent e to the number of elements with 2^e <= |x| < 2^(e+1), ascending, for those that have elements.
    A subnormal counts at its own power of two."""
    num_zero: int = 0
    """Zeros of either sign, and elements that a sparse layout does not store."""
    num_nan: int = 0
    num_posinf: int = 0
    num_neginf: int = 0


def exponent_histogram(x: Tensor) -> ExponentHistogram:
    """Count the elements of `x` by power of two, its zeros, nans and infinities: one pass, one sync.

    Any shape and layout, as `tensor_health` takes them. Integers count by their magnitude, and 64-bit ones are rounded
    to float64. A DTensor gives the counts of its local shard, a quantized tensor those of its float32 values.

    Raises TypeError for a complex tensor (a format holds its parts: pass `torch.view_as_real(x)`), and where
    `abs_range` does.

    Examples:
        >>> import nanwatch, torch
        >>> histogram = nanwatch.exponent_histogram(torch.tensor([0.0, 1.0, -1.5, 6.0]))
        >>> histogram.counts, histogram.num_zero
        ({0: 2, 2: 1}, 1)
    """
    _extension.explain_once()
    with only_our_dispatch():
        x = readable(x, "exponent_histogram")
        if x.is_complex():
            raise TypeError(
                "exponent_histogram takes no complex tensor: pass torch.view_as_real(x.resolve_conj())"
            )
        zeros, nans, posinfs, neginfs, *row = read(_counts, _counts, x).tolist()
        counts = {exponent: num for exponent, num in enumerate(row, _LOWEST) if num}
        dtype = torch.float32 if x.is_quantized else x.dtype
        return ExponentHistogram(dtype, counts, zeros, nans, posinfs, neginfs)


def _counts(x: Tensor) -> Tensor:
    width = _HIGHEST - _LOWEST + 1
    with torch.no_grad():
        part = stored(x)
        counts = torch.zeros(_HEAD + width, dtype=torch.int64, device=x.device)
        for chunk in chunks(part.values):
            wide = on_wide_device(chunk)
            values = wide.to(row_dtype(wide.device)).flatten()
            columns = torch.frexp(values).exponent.long() + (_HEAD - 1 - _LOWEST)
            for column, is_so in enumerate(
                (values == 0, values.isnan(), values.isposinf(), values.isneginf())
            ):
                columns.masked_fill_(is_so, column)
            counts += columns.bincount(minlength=_HEAD + width).to(x.device)
        counts[0] += part.implicit_zeros
        return counts * part.repeats
