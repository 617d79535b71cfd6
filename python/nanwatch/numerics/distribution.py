"""Distribution of the elements of a tensor: `statistics`, and `exponent_histogram` by power of two.

Plain torch on every device, a chunk at a time: a strided tensor is not copied. Nothing waits for a GPU but the copy of
the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import _extension
from ._reference import RANGE_WIDTH, chunks, on_wide_device, row_dtype, stored
from .formats import AbsRange, Statistics
from .ranges import range_row, to_range
from .readable import only_our_dispatch, read, readable

_FAR = 6.0  # standard deviations
_LOWEST, _HIGHEST = -1074, 1023  # exponents of float64
_HEAD = 4  # columns of a histogram before the exponents: zeros, nans, infinities of either sign


def statistics(x: Tensor) -> Statistics:
    """Return mean, root mean square, kurtosis and the share of elements beyond 6 sigma of `x`, with one sync.

    Equal to float64 arithmetic to 1e-6: the mean as a part of the rms, the others as a part of themselves. The share is
    exact up to elements as near to the limit as that. Any shape and layout; floating point down to float8, integers,
    and bool as 0 and 1. A DTensor gives the statistics of its local shard.

    Raises TypeError for a complex tensor (pass `torch.view_as_real(x)` or `x.abs()`), and where `abs_range` does.

    Examples:
        >>> import nanwatch, torch
        >>> x = torch.zeros(1000)
        >>> x[0] = 8.0
        >>> spread = nanwatch.statistics(x)
        >>> round(spread.mean, 4), round(spread.kurtosis), spread.beyond_6_sigma
        (0.008, 998, 0.001)
    """
    _extension.explain_once()
    return range_and_statistics(x)[1]


def range_and_statistics(x: Tensor) -> tuple[AbsRange, Statistics]:
    """Return `abs_range` and `statistics` of `x`."""
    with only_our_dispatch():
        x = real(readable(x, "statistics"), "statistics")
        row = read(_range_and_spread, _range_and_spread, x).tolist()
        return to_range(row[:RANGE_WIDTH]), Statistics(*row[RANGE_WIDTH:])


def real(x: Tensor, caller: str) -> Tensor:
    """Return `x`. Raise TypeError for a complex tensor, of which a format holds the two parts."""
    if x.is_complex():
        raise TypeError(
            f"{caller} takes no complex tensor: pass torch.view_as_real(x.resolve_conj()) for its parts, or x.abs()"
        )
    return x


def _range_and_spread(x: Tensor) -> Tensor:
    """Return the columns of a range, then mean, rms, kurtosis and the share beyond 6 sigma."""
    with torch.no_grad():
        row, part = range_row(x), stored(x)
        numel = part.values.numel() + part.implicit_zeros
        if numel == 0:
            return torch.cat([row, row.new_full((4,), torch.nan)])
        abs_max = on_wide_device(row[1]).to(torch.float64)
        # The fourth power of a double overflows, so a double is measured in units of the largest. No other format does.
        unit = torch.ones_like(abs_max)
        if x.dtype == torch.float64:
            unit = torch.exp2(torch.frexp(abs_max).exponent.to(torch.float64) - 1)

        def parts() -> Iterator[tuple[Tensor, int]]:
            """Yield values in float64, and how many elements each of them stands for."""
            for chunk in chunks(part.values):
                yield on_wide_device(chunk).to(torch.float64) / unit, 1
            if part.implicit_zeros:
                yield torch.zeros_like(unit).reshape(1), part.implicit_zeros

        first = next(parts())[0][0]  # around an element, so that equal ones have exactly their mean
        mean = first + sum((values - first).sum() * times for values, times in parts()) / numel
        second, fourth = torch.zeros_like(unit), torch.zeros_like(unit)
        for values, times in parts():
            squares = (values - mean).square_()
            second += squares.sum() * times
            fourth += squares.square_().sum() * times
        variance = second / numel
        limit = _FAR * variance.sqrt()
        far = torch.zeros_like(unit)
        # Without a wait only a CPU can say that no element is that far, which saves a third read.
        if unit.device.type != "cpu" or bool(abs_max / unit + mean.abs() > limit):
            for values, times in parts():
                far += ((values - mean).abs_() > limit).sum() * times
        rms = (variance + mean**2).sqrt()
        columns = torch.stack([mean * unit, rms * unit, fourth / numel / variance**2, far / numel])
        return torch.cat([row, torch.where(row[2] != 0, columns.to(row), torch.nan)])


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
        x = real(readable(x, "exponent_histogram"), "exponent_histogram")
        zeros, nans, posinfs, neginfs, *row = read(_counts, _counts, x).tolist()
        counts = {exponent: num for exponent, num in enumerate(row, _LOWEST) if num}
        dtype = torch.float32 if x.is_quantized else x.dtype
        return ExponentHistogram(dtype, counts, zeros, nans, posinfs, neginfs)


def _counts(x: Tensor) -> Tensor:
    width = _HEAD + _HIGHEST - _LOWEST + 1
    with torch.no_grad():
        part = stored(x)
        counts = torch.zeros(width, dtype=torch.int64, device=x.device)
        for chunk in chunks(part.values):
            wide = on_wide_device(chunk)
            values = wide.to(row_dtype(wide.device)).flatten()
            columns = torch.frexp(values).exponent.long() + (_HEAD - 1 - _LOWEST)
            kinds = values == 0, values.isnan(), values.isposinf(), values.isneginf()
            for column, kind in enumerate(kinds):
                columns.masked_fill_(kind, column)
            counts += columns.bincount(minlength=width).to(x.device)
        counts[0] += part.implicit_zeros
        return counts * part.repeats
