"""How the elements of a tensor are spread, in plain torch for every device: statistics, and counts by magnitude.

Memory: as `_reference`, a few temporaries of a chunk; a strided tensor is not copied. Nothing here waits for a GPU.
The counts go by the bits of the elements, so a thread that flushes subnormals sees them all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ._reference import (
    FORMATS,
    RANGE_WIDTH,
    READABLE_DTYPES,
    READABLE_NAMES,
    abs_range,
    chunks,
    on_wide_device,
    stored,
)

# Columns of a row of statistics: those of a range, then mean, rms, kurtosis, and the share beyond 6 sigma.
STATISTICS_WIDTH = RANGE_WIDTH + 4
_FAR = 6.0  # standard deviations

# Columns of an exponent histogram, then one for each exponent of the format.
_NAN, _POSINF, _NEGINF, _ZERO = range(4)
EXPONENT_HEAD = _ZERO + 1

_SIGN_64 = -(1 << 63)
_WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def refuse_complex(dtype: torch.dtype, what: str) -> None:
    """Raise TypeError for a complex dtype, of which `what` would be that of its parts."""
    if dtype.is_complex:
        raise TypeError(
            f"{what} takes no {str(dtype).removeprefix('torch.')}: what a format holds of it are its two parts. "
            "Pass torch.view_as_real(x.resolve_conj()) for those, or x.abs() for the modulus."
        )


def statistics(x: Tensor, range_of: Callable[[Tensor], Tensor] = abs_range) -> Tensor:
    """Return the range of `x`, its mean, root mean square, kurtosis and share beyond 6 sigma: shape (7,).

    All but the range are nan for a tensor with a non-finite element or with none, and the kurtosis where all elements
    are equal. In float64, with the moments of each chunk around its own mean; `range_of` reads the range.
    """
    refuse_complex(x.dtype, "statistics")
    with torch.no_grad():
        part, row = stored(x), range_of(x)
        abs_max = on_wide_device(row[1]).to(torch.float64)
        # The fourth power of a double overflows, so a double is measured in units of the largest. No other format does.
        exponent = torch.frexp(abs_max).exponent.to(torch.float64)
        unit = torch.exp2(exponent - 1) if x.dtype == torch.float64 else torch.ones_like(abs_max)

        def numbers(chunk: Tensor) -> Tensor:
            wide = on_wide_device(chunk).to(torch.float64)
            return wide / unit if x.dtype == torch.float64 else wide

        rows = [_moments(numbers(chunk)) for chunk in chunks(part.values)]
        if part.implicit_zeros:
            rows.append(unit.new_tensor([part.implicit_zeros, 0.0, 0.0, 0.0, 0.0]))
        if not rows:
            return torch.cat([row, row.new_full((STATISTICS_WIDTH - RANGE_WIDTH,), torch.nan)])
        numel, means, second, third, fourth = torch.stack(rows).unbind(1)
        total = numel.sum()
        mean = means[0] + ((means - means[0]) * numel).sum() / total
        away = means - mean
        variance = (second + numel * away**2).sum() / total
        fourth = (fourth + 4 * away * third + 6 * away**2 * second + numel * away**4).sum() / total
        limit = _FAR * variance.sqrt()
        far = torch.zeros_like(mean)
        # Without a wait only a CPU can say that no element is that far. It saves half of the time.
        if abs_max.device.type != "cpu" or bool(abs_max / unit + mean.abs() > limit):
            for chunk in chunks(part.values):
                far += ((numbers(chunk) - mean).abs_() > limit).sum()
            far += part.implicit_zeros * (mean.abs() > limit)
        found = [mean * unit, (variance + mean**2).sqrt() * unit, fourth / variance**2, far / total]
        return torch.cat([row, torch.where(row[2] != 0, torch.stack(found).to(row), torch.nan)])


def _moments(values: Tensor) -> Tensor:
    """Return the number of float64 values, their mean, and the sums of the powers 2 to 4 of their distances from it."""
    first = values[:1]  # around an element, so that equal ones have exactly their mean
    distances = values - first
    offset = distances.mean()
    distances -= offset
    squares = distances * distances
    sums = [squares.sum(), (squares * distances).sum(), (squares * squares).sum()]
    return torch.stack([squares.new_full((), values.numel()), first[0] + offset, *sums])


def exponents_of(dtype: torch.dtype) -> range:
    """Return each e with numbers of 2^e <= |x| < 2^(e+1) in `dtype`; raise TypeError if it is complex or unreadable."""
    refuse_complex(dtype, "an exponent histogram")
    if dtype not in READABLE_DTYPES:
        raise TypeError(
            f"there are no exponents of dtype {str(dtype).removeprefix('torch.')}; accepted: {READABLE_NAMES}, "
            "but no complex one"
        )
    return FORMATS[dtype].exponents


def exponent_histogram(x: Tensor) -> Tensor:
    """Count the elements of `x` in each power of two, int64, on its device.

    Columns: num_nan, num_posinf, num_neginf, num_zero, then one for each exponent of `exponents_of(x.dtype)`, upwards.
    """
    with torch.no_grad():
        exponents = exponents_of(torch.float32 if x.is_quantized else x.dtype)
        part = stored(x)
        counts = torch.zeros(EXPONENT_HEAD + len(exponents), dtype=torch.int64, device=x.device)
        for chunk in chunks(part.values):
            columns = _exponent_columns(on_wide_device(chunk)).to(x.device)
            counts.scatter_add_(0, columns, torch.ones_like(columns))
        counts[_ZERO] += part.implicit_zeros
        return counts * part.repeats


def count_from(x: Tensor, codes: Sequence[int]) -> Tensor:
    """Count the elements of `x` whose magnitude word is at least each of `codes`: shape (len(codes),), int64.

    A magnitude word is the element's bits without the sign, or the magnitude of an integer, as an unsigned number:
    it grows with |x|, through inf to nan. A code above 2^63 - 1 is given as the int64 of the same bits.
    """
    with torch.no_grad():
        exponents_of(torch.float32 if x.is_quantized else x.dtype)  # refuses what has no such words
        part = stored(x)
        counts = torch.zeros(len(codes), dtype=torch.int64, device=x.device)
        for chunk in chunks(part.values):
            # With the top bit turned over the order of signed numbers is that of unsigned ones.
            words = _magnitudes(chunk)[0] ^ _SIGN_64
            for i, code in enumerate(codes):
                counts[i] += (words >= (code ^ _SIGN_64)).sum()
        for i, code in enumerate(codes):
            counts[i] += part.implicit_zeros if code == 0 else 0
        return counts * part.repeats


def _exponent_columns(chunk: Tensor) -> Tensor:
    form = FORMATS[chunk.dtype]
    words, bits = _magnitudes(chunk)
    if not form.is_float:
        # The highest bit alone of those that would round the number up to the next power of two in float64.
        width = _width(words & ~(words >> 1))
        return _ZERO + torch.where(words < 0, 64, width)
    # A subnormal has a width of up to fraction_bits. Then the exponent field goes on, from 1.
    normal = (words >> form.fraction_bits) + (form.fraction_bits + 1 - form.smallest_word)
    columns = _ZERO + torch.where(words < form.smallest_normal_word, _width(words), normal)
    if form.kind != "ieee":
        return torch.where(words > form.largest_word, _NAN, columns)
    inf = form.largest_word + 1
    columns = torch.where(words == inf, torch.where(bits == words, _POSINF, _NEGINF), columns)
    return torch.where(words > inf, _NAN, columns)


def _width(words: Tensor) -> Tensor:
    """Return the number of bits up to the highest that is set, of words below 2^53."""
    return torch.frexp(words.to(torch.float64)).exponent.to(torch.int64)


def _magnitudes(chunk: Tensor) -> tuple[Tensor, Tensor]:
    """Return the magnitude words of the elements, and their bits, which are the same for a positive number."""
    form, chunk = FORMATS[chunk.dtype], chunk.resolve_neg()
    if not form.is_float:
        words = chunk.view(torch.int64) if form.name == "uint64" else chunk.to(torch.int64).abs()
        return words, words
    bits = chunk.view(_WORDS[form.bits]).to(torch.int64)
    if not form.has_sign_bit:
        return bits, bits
    sign = 1 << (form.bits - 1)
    words = bits & (sign - 1)
    return torch.where(bits == sign, bits, words) if form.kind == "fnuz" else words, bits
