"""Number of elements of a tensor in each power of two: `exponent_histogram`, in one pass and with one sync.

A range says where the ends are. The histogram says how many elements are there, which decides about a format: one
element of 1e-9 among a million is another matter than half a million of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import _extension, _spread
from .formats import floor_log2, limits
from .readable import dtype_name, only_our_dispatch, read, readable


class _Counts(dict[int, int]):
    """Counts by exponent, 0 for one that is not listed."""

    def __missing__(self, exponent: int) -> int:
        return 0


@dataclass(frozen=True)
class ExponentHistogram:
    """Number of elements in each power of two, and of those without one: zeros, nans and infinities.

    Raises ValueError for an exponent that `dtype` does not have and for a negative count.

    Examples:
        >>> import nanwatch, torch
        >>> first = nanwatch.exponent_histogram(torch.tensor([1.0, 2.0]))
        >>> both = first + nanwatch.exponent_histogram(torch.tensor([3.0, torch.nan]))
        >>> dict(both.counts), both.num_nan, both.numel
        ({0: 1, 1: 2}, 1, 4)
    """

    dtype: torch.dtype
    counts: Mapping[int, int] = field(hash=False)
    """From exponent e to the number of elements with 2^e <= |x| < 2^(e+1), ascending; 0 for what is not listed.
    A subnormal counts at its own power of two."""
    num_zero: int = 0
    """Zeros of either sign, and elements that a sparse layout does not store."""
    num_nan: int = 0
    num_posinf: int = 0
    num_neginf: int = 0

    def __post_init__(self) -> None:
        exponents = _spread.exponents_of(self.dtype)
        listed = _Counts(sorted((e, n) for e, n in self.counts.items() if n))
        for exponent, num in listed.items():
            if exponent not in exponents or num < 0:
                raise ValueError(
                    f"an exponent histogram got {num} elements at exponent {exponent} of {dtype_name(self.dtype)}; "
                    f"accepted are counts of 0 and more at {exponents.start} to {exponents.stop - 1}"
                )
        object.__setattr__(self, "counts", listed)

    @property
    def num_finite_nonzero(self) -> int:
        """Return the number of elements that have a power of two."""
        return sum(self.counts.values())

    @property
    def num_inf(self) -> int:
        """Return the number of infinities of either sign."""
        return self.num_posinf + self.num_neginf

    @property
    def num_subnormal(self) -> int:
        """Return the number of nonzero elements below the smallest normal number of `dtype`; 0 for integers."""
        ends = limits(dtype_name(self.dtype))
        if ends is None:
            return 0
        normal = floor_log2(ends.smallest_normal)
        return sum(num for exponent, num in self.counts.items() if exponent < normal)

    @property
    def numel(self) -> int:
        """Return the number of all elements."""
        return self.num_finite_nonzero + self.num_zero + self.num_nan + self.num_inf

    def __add__(self, other: ExponentHistogram) -> ExponentHistogram:
        """Return the histogram of both tensors together. Raise ValueError when their dtypes differ."""
        if not isinstance(other, ExponentHistogram):
            return NotImplemented
        if other.dtype != self.dtype:
            raise ValueError(
                f"histograms of {dtype_name(self.dtype)} and {dtype_name(other.dtype)} have no sum: what is "
                "subnormal differs. Convert the tensors to one dtype before they are counted."
            )
        return ExponentHistogram(
            self.dtype,
            {e: self.counts[e] + other.counts[e] for e in {*self.counts, *other.counts}},
            self.num_zero + other.num_zero,
            self.num_nan + other.num_nan,
            self.num_posinf + other.num_posinf,
            self.num_neginf + other.num_neginf,
        )


def exponent_histogram(x: Tensor) -> ExponentHistogram:
    """Count the elements of `x` by power of two, its zeros, subnormals, nans and infinities: one pass, one sync.

    Any shape and layout, as `tensor_health` takes them, strides without a copy. Floating point down to float8 by the
    formats' own codes; integers by their magnitude (int8 -128 is 2^7) and bool as 0 and 1, which have no subnormal
    and no nan. An empty tensor gives no counts, a DTensor those of its local shard, a quantized tensor those of its
    float32 values.

    Raises TypeError for a complex tensor (a format holds its parts: pass `torch.view_as_real(x)`), and where
    `abs_range` does.

    Examples:
        >>> import nanwatch, torch
        >>> histogram = nanwatch.exponent_histogram(torch.tensor([0.0, 1.0, -1.5, 6.0]))
        >>> dict(histogram.counts), histogram.num_zero
        ({0: 2, 2: 1}, 1)
    """
    _extension.explain_once()
    with only_our_dispatch():
        x = readable(x, "exponent_histogram")
        dtype = counted_dtype(x)
        exponents = _spread.exponents_of(dtype)
        row = read(_spread.exponent_histogram, _spread.exponent_histogram, x)
        return _from_row(dtype, exponents, row.tolist())


def counted_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype whose exponents are counted: that of `x`, or float32 for a quantized tensor."""
    return torch.float32 if x.is_quantized else x.dtype


def _from_row(dtype: torch.dtype, exponents: Iterable[int], row: list[int]) -> ExponentHistogram:
    nans, posinfs, neginfs, zeros = row[: _spread.EXPONENT_HEAD]
    counts = dict(zip(exponents, row[_spread.EXPONENT_HEAD :], strict=True))
    return ExponentHistogram(dtype, counts, zeros, nans, posinfs, neginfs)
