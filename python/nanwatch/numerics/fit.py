"""Effect of a cast on a tensor's numbers: how many would overflow, become zero or become subnormal.

A cast rounds to the nearest number of the format, ties to even. So one magnitude decides each of the three: a value
overflows from half a step above the largest finite number on, becomes zero up to half the smallest number, and is
normal from half a step below the smallest normal number on. The bits of a float without its sign grow with |x|, so each
of these magnitudes is one word of the tensor's own dtype. It is found here in exact arithmetic, and counting the
elements that reach it compares integers. Nothing is cast, scaled or rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from math import ceil, floor, inf, isfinite, nextafter
from typing import NamedTuple, SupportsIndex, overload

import torch
from torch import Tensor

from ..util.visible import close_names
from . import _extension, _spread
from .block_fit import BLOCKS_BY_NAME, BlockFit, block_fit
from .exponents import ExponentHistogram, counted_dtype
from .formats import BY_NAME
from .readable import dtype_name, only_our_dispatch, read, readable, type_name

FORMATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")
"""Formats that `narrowest` chooses from: the narrowest first, and of one width the more precise first."""

# A format of scales has no zero, no sign and no fraction: no element of a tensor would come through a cast.
_NO_TARGETS = tuple(name for name, form in BY_NAME.items() if form.kind == "powers")
_OTHERS = tuple(
    name for name, form in BY_NAME.items() if form.is_float and name not in (*FORMATS, *_NO_TARGETS)
)
_TARGETS = (*FORMATS, *_OTHERS)

_MAX_MARGIN = 1000.0  # bits; 2^±1000 is still a normal float64


@dataclass(frozen=True, slots=True)
class Fit:
    """Effect of a format on a tensor: its elements multiplied by `scale` and converted to `dtype`.

    Counts and shares cover the elements that are finite and not zero. For a tensor they are exact. For a histogram they
    are upper bounds, and the `certain_` counts are lower bounds.

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
    certain_overflow: int
    certain_underflow: int
    certain_subnormal: int

    @property
    def overflow(self) -> float:
        """Return the share of elements that overflow, 0.0 to 1.0."""
        return self._share(self.num_overflow)

    @property
    def underflow(self) -> float:
        """Return the share of elements that become zero, 0.0 to 1.0."""
        return self._share(self.num_underflow)

    @property
    def subnormal(self) -> float:
        """Return the share of elements that become subnormal, 0.0 to 1.0."""
        return self._share(self.num_subnormal)

    @property
    def fits(self) -> bool:
        """Return whether no element overflows and none becomes zero."""
        return self.num_overflow == self.num_underflow == 0

    @property
    def is_exact(self) -> bool:
        """Return whether the counts are exact, as those of a tensor always are."""
        return (self.num_overflow, self.num_underflow, self.num_subnormal) == (
            self.certain_overflow,
            self.certain_underflow,
            self.certain_subnormal,
        )

    def __str__(self) -> str:
        most = "" if self.is_exact else "at most "
        scaled = "" if self.scale == 1.0 else f" scaled by {self.scale:g}"
        return (
            f"{dtype_name(self.dtype)}{scaled}: {most}{self.overflow:.3%} overflow, {self.underflow:.3%} become zero, "
            f"{self.subnormal:.3%} become subnormal"
        )

    def _share(self, num: int) -> float:
        return num / self.num_elements if self.num_elements else 0.0


@overload
def would_fit(x: ExponentHistogram, dtype: torch.dtype | str, *, scale: float = 1.0) -> Fit: ...
@overload
def would_fit(x: Tensor, dtype: torch.dtype, *, scale: float = 1.0) -> Fit: ...
@overload
def would_fit(x: Tensor, dtype: str, *, scale: float = 1.0, dim: int = -1) -> Fit | BlockFit: ...
def would_fit(
    x: Tensor | ExponentHistogram, dtype: torch.dtype | str, *, scale: float = 1.0, dim: int = -1
) -> Fit | BlockFit:
    """Count the elements of `x` that would overflow, or become zero or subnormal, in `(x * scale).to(dtype)`.

    `x`: a tensor of any real dtype, shape and layout, in one pass over it and with one sync; or a histogram, for
    which the counts are bounds wherever an end of the format lies inside one of its powers of two. `dtype`: a
    floating-point format, or its name. `scale`: above zero.

    With the name of a block format, such as "mxfp8", "mxfp4", "nvfp4" or "float8_rowwise", return a BlockFit: the ratio
    of signal to quantization noise, and the elements that saturate or become zero. `dim`: the axis along which blocks
    lie, the one that the matmul sums over. A float64 is rounded to float32 first.

    The product is taken as exact and rounded once, to nearest, ties to even. torch may round twice: the product to its
    own dtype, and a float64 to float32 on its way to a narrower format. So torch may treat an element within such a
    rounding of an end (2^-24 of it, for float32) differently.

    Raises TypeError for a tensor without values to read, a complex tensor, and a `dtype` that is no floating-point
    format; for a block format also for integers, a histogram, and a `dim` that is no integer. Raises ValueError for a
    scale that is not above zero and finite, or given with a block format, and for a `dim` without one.

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
        if isinstance(x, ExponentHistogram):
            raise TypeError(
                f"would_fit got a histogram for {dtype}; it does not say which elements share a block: pass the tensor"
            )
        if scale != 1.0:
            raise ValueError(
                f"would_fit got scale={scale!r} for {dtype}, whose blocks have their own: leave it out"
            )
        if not isinstance(dim, SupportsIndex):
            raise TypeError(
                f"would_fit got dim={dim!r}; the number of an axis is accepted: leave it out for the last"
            )
        return block_fit(x, BLOCKS_BY_NAME[dtype], dim)
    target = _target(dtype)
    if dim != -1:
        raise ValueError(f"would_fit got dim={dim!r} for {target}, which has no blocks: leave it out")
    if not isfinite(scale) or scale <= 0:
        raise ValueError(f"would_fit got scale={scale!r}; a finite number above 0 is accepted, 1.0 for none")
    if isinstance(x, ExponentHistogram):
        return _fit_of_histogram(x, target, float(scale))
    _extension.explain_once()
    with only_our_dispatch():
        x = readable(x, "would_fit")
        marks = _marks(dtype_name(counted_dtype(x)), target, float(scale))
        # The marks ascend, and only uint64 has some beyond its words, which no element reaches.
        codes = [word - (1 << 64) if word >> 63 else word for word in marks if word < 1 << 64]  # as int64
        count = partial(_spread.count_from, codes=codes)
        row = read(count, count, x)
        nonzero, kept, normal, overflow, nonfinite = row.tolist() + [0] * (len(marks) - len(codes))
    found = (overflow - nonfinite, nonzero - kept, kept - normal)
    return Fit(getattr(torch, target), float(scale), nonzero - nonfinite, *found, *found)


def narrowest(
    values: ExponentHistogram | tuple[float, float],
    *,
    margin_bits: float = 1.0,
    lost: float = 0.0,
    subnormals: bool = True,
    formats: Sequence[str] = FORMATS,
) -> str | None:
    """Return the name of the first of `formats` that holds the values; None when none does, or when one is nan or inf.

    `values`: a histogram, or `(abs_min, abs_max)` of a tensor as a record has them; an `abs_min` of 0.0 says nothing
    about the other elements, and then the upper end alone decides. A format holds them when no value overflows at
    2^margin_bits times its size and none becomes zero at 2^-margin_bits of it. The margin is for the batches to come.
    The share `lost` of a histogram may become zero; where the histogram leaves a count open, the larger one decides.
    Without `subnormals`, elements that become subnormal, and so keep fewer bits, count as zero.

    Raises TypeError for other values, ValueError for an invalid pair, a margin outside 0 to 1000, a share outside
    0 to 1, an unknown format.

    Examples:
        >>> import nanwatch, torch
        >>> nanwatch.narrowest((1e-3, 1e3))
        'float8_e5m2'
        >>> nanwatch.narrowest(nanwatch.exponent_histogram(torch.tensor([1e-3, 1e6])))
        'bfloat16'
    """
    check_margin(margin_bits)
    if not 0 <= lost <= 1:
        raise ValueError(f"narrowest got lost={lost!r}; accepted is a share of 0.0 to 1.0")
    for name in formats:
        if name not in _TARGETS:
            raise ValueError(f"narrowest got the format {name!r}; accepted are {', '.join(_TARGETS)}")
    if isinstance(values, ExponentHistogram):
        if values.num_nan or values.num_inf:
            return None
    else:
        if not isinstance(values, Sequence) or len(values) != 2:
            raise TypeError(
                f"narrowest got a {type_name(values)}; accepted are (abs_min, abs_max) and a histogram: pass"
                " nanwatch.exponent_histogram(x) for a tensor x"
            )
        values = (0.0, 0.0) if values == (inf, 0.0) else values  # the range of an empty tensor
        if not all(map(isfinite, values)):
            return None
        if not 0 <= values[0] <= values[1]:
            raise ValueError(
                f"narrowest got {values!r}; accepted is (abs_min, abs_max) with 0 <= abs_min <= abs_max"
            )
    return next((name for name in formats if _holds(name, values, 2.0**margin_bits, lost, subnormals)), None)


class Edges(NamedTuple):
    """The magnitudes, all of them float64, at which a cast to a format changes what it does."""

    overflows_from: float
    zero_up_to: float
    normal_from: float


def edges(name: str) -> Edges:
    """Return the edges of one of FORMATS but float64, whose largest number has no next one."""
    ends = _ends(name)
    top = float(ends.halfway_up)
    return Edges(
        top if ends.overflows_halfway else nextafter(top, inf),
        float(ends.kept_above),
        float(ends.normal_from),
    )


def check_margin(margin_bits: float) -> None:
    """Raise ValueError unless `margin_bits` is a margin."""
    if not 0 <= margin_bits <= _MAX_MARGIN:
        raise ValueError(f"margin_bits is {margin_bits!r}; accepted are 0 to {_MAX_MARGIN:g} bits")


def _holds(
    name: str, values: ExponentHistogram | tuple[float, float], room: float, lost: float, subnormals: bool
) -> bool:
    if isinstance(values, ExponentHistogram):
        at_top, at_bottom = (_fit_of_histogram(values, name, scale) for scale in (room, 1 / room))
        gone = at_bottom.underflow if subnormals else at_bottom.underflow + at_bottom.subnormal
        return at_top.num_overflow == 0 and gone <= lost
    ends, exact_room = _ends(name), Fraction(room)
    smallest, largest = Fraction(values[0]) / exact_room, Fraction(values[1]) * exact_room
    is_held = smallest > ends.kept_above if subnormals else smallest >= ends.normal_from
    return not ends.overflows(largest) and (smallest == 0 or is_held)


# The ends of a format.


class _Ends(NamedTuple):
    """The magnitudes at which a cast to a format changes what it does."""

    halfway_up: Fraction  # between the largest finite number and the next that there would be
    overflows_halfway: bool  # whether that tie goes up
    kept_above: Fraction  # half the smallest number, a tie that goes to zero
    normal_from: Fraction  # half a step below the smallest normal number, a tie that goes up

    def overflows(self, value: Fraction) -> bool:
        return value > self.halfway_up or (value == self.halfway_up and self.overflows_halfway)


@lru_cache(maxsize=32)
def _ends(name: str) -> _Ends:
    form = BY_NAME[name]
    largest, before = (Fraction(form.value_of(form.largest_word - back)) for back in (0, 1))
    step, half = largest - before, Fraction(form.ends.smallest_subnormal) / 2
    normal_from = Fraction(form.ends.smallest_normal) - half
    return _Ends(largest + step / 2, largest / step % 2 == 1, half, normal_from)


def _target(dtype: torch.dtype | str) -> str:
    if not isinstance(dtype, torch.dtype | str):
        raise TypeError(
            f"would_fit got a {type_name(dtype)} as dtype; accepted are a torch.dtype and the name of a format"
        )
    name = str(dtype).removeprefix("torch.")
    if name not in _TARGETS:
        why = (
            "holds no zero, no sign and no fraction" if name in _NO_TARGETS else "is no floating-point format"
        )
        accepted = (*_TARGETS, *BLOCKS_BY_NAME)
        hint = close_names(name, accepted, "docs/block-formats.md describes those with blocks")
        raise TypeError(
            f"would_fit got dtype {name}, which {why}; accepted are {', '.join(accepted)}; {hint}"
        )
    return name


# The words of a dtype.


class _Ladder(NamedTuple):
    """The magnitudes of a dtype in the order of their words, in units of the smallest above zero.

    Of integers all are "subnormal": as far apart as the smallest is from zero.
    """

    fraction_bits: int
    unit: Fraction
    first: int  # the word of one unit
    last: int  # the word of the largest finite magnitude

    def first_reaching(self, units: int) -> int:
        """Return the lowest word worth at least `units` (1 and more); last + 1, where inf or nan begin, if no number
        is.
        """
        shift = max(0, units.bit_length() - (self.fraction_bits + 1))
        significant = -(-units >> shift)  # rounded up; one bit more than it had is the next field's first
        word = (shift << self.fraction_bits) + significant - 1 + self.first
        return min(word, self.last + 1)


@lru_cache(maxsize=32)
def _ladder(name: str) -> _Ladder:
    form = BY_NAME[name]
    if form.is_float:
        unit = Fraction(2) ** form.exponents.start
        return _Ladder(form.fraction_bits, unit, form.smallest_word, form.largest_word)
    width = form.exponents.stop
    return _Ladder(width, Fraction(1), 1, 1 << (width - 1) if form.kind == "signed" else (1 << width) - 1)


class _Marks(NamedTuple):
    """The words of a dtype from which on an element ..."""

    nonzero: int  # is not zero
    kept: int  # does not become zero
    normal: int  # becomes normal
    overflow: int  # overflows
    nonfinite: int  # is inf or nan


@lru_cache(maxsize=1024)
def _marks(source: str, target: str, scale: float) -> _Marks:
    words, ends = _ladder(source), _ends(target)
    unit = words.unit * Fraction(scale)
    top = ends.halfway_up / unit
    return _Marks(
        words.first,
        words.first_reaching(floor(ends.kept_above / unit) + 1),
        words.first_reaching(ceil(ends.normal_from / unit)),
        words.first_reaching(ceil(top) if ends.overflows_halfway else floor(top) + 1),
        words.last + 1,
    )


# A histogram alone.


def _fit_of_histogram(histogram: ExponentHistogram, target: str, scale: float) -> Fit:
    """Return bounds: a power of two counts as certain when all its numbers agree, as possible when one of them does."""
    source = dtype_name(histogram.dtype)
    words, marks = _ladder(source), _marks(source, target, scale)
    lowest = _spread.exponents_of(histogram.dtype).start
    most, least = [0, 0, 0], [0, 0, 0]
    spans = ((marks.overflow, marks.nonfinite), (marks.nonzero, marks.kept), (marks.kept, marks.normal))
    for exponent, num in histogram.counts.items():
        begin = words.first_reaching(1 << (exponent - lowest))
        end = words.first_reaching(2 << (exponent - lowest))
        for i, (start, stop) in enumerate(spans):
            most[i] += num if max(begin, start) < min(end, stop) else 0
            least[i] += num if start <= begin and end <= stop else 0
    return Fit(getattr(torch, target), scale, histogram.num_finite_nonzero, *most, *least)
