"""Statistics of the elements of a tensor, in plain torch for every device.

Memory: as `_reference`, a few temporaries of a chunk; a strided tensor is not copied. Nothing here waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._reference import RANGE_WIDTH, abs_range, chunks, on_wide_device, stored

# Columns of a row of statistics: those of a range, then mean, rms, kurtosis, and the share beyond 6 sigma.
STATISTICS_WIDTH = RANGE_WIDTH + 4
_FAR = 6.0  # standard deviations


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
