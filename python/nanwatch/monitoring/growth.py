"""When a growing magnitude will reach the end of its format: many models of growth, weighed by back-tests.

Optimizers make magnitudes grow in few ways. Steps of one size (Adam, Lion) let a weight grow in a straight line, and an
output as a power of that line; a learning rate that is too high lets both grow by a constant factor; growth that ends
slows down. One family holds all of these: a power of the magnitude grows in a straight line (the transformation of Box
and Cox, JRSS B 1964). The power is 1 for a weight under Adam, 1/p for a product of p such weights, 0 for a constant
factor, below 0 for what grows ever faster, above 1 for what slows down.

A model is such a power and the window of points that its line is laid through. Each model has to foretell the latest
points of its window from the earlier ones. The errors of these back-tests weigh the models and give the uncertainty.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.floating[Any]]]"
LEAST_POINTS = 12
POWERS = np.array([2, 1, 1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 12, 1e-9, -1 / 12, -1 / 6])
# Windows reach from the latest point so far back: all of the time, half of it, a quarter.
_WINDOWS = (1.0, 0.5, 0.25)
# Back-tests lay the line through the first 55 % of a window's points, through 65 %, ...; the last line is the forecast.
_CUTS = (0.55, 0.65, 0.75, 0.85, 1.0)
# The ends of a line are the thirds of its points, each by the quantile of its headroom: what overflows first is a batch
# with less headroom than most.
_QUANTILE = 0.3
# Errors are logarithms of times: a back-test that is 5 times too late says no more than one 7 times too late.
_MOST_ERROR = 2.0
# An error of a back-test below 0.15 is luck: models do not differ by it.
_LUCK = 0.15
# Models that see no end within 10^8 batches may have a tenth of the weight.
_NEVER = log(1e8)
_MOST_NEVER = 0.1


class Ending(NamedTuple):
    """The overflow comes in `left` batches, give or take a factor of exp(`deviation`) (one standard deviation)."""

    left: float
    deviation: float


def ending(batches: Floats, bits: Floats) -> Ending | None:
    """Foretell when `bits` of headroom reach 0, from points with the oldest first; None for "never" or "unknown"."""
    if len(batches) < LEAST_POINTS:
        return None
    now = float(batches[-1])
    spans = now - np.array(_WINDOWS) * (now - batches[0])
    starts = np.unique(np.minimum(np.searchsorted(batches, spans), len(batches) - LEAST_POINTS))
    lines = [_ends_of_line(batches[start:], bits[start:], cut) for start in starts for cut in _CUTS]
    # By window, cut and power. The three points of a line: its two ends, and the one that it has to foretell.
    shape = (len(starts), len(_CUTS), 1)
    points = np.array(lines).reshape(*shape, 6)
    first, last, held = (points[..., i] for i in (0, 2, 4))
    low, high, goal = (np.expm1(-log(2) * POWERS * points[..., i]) / POWERS for i in (1, 3, 5))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        slope = (high - low) / (last - first)
        ahead = np.where(slope > 0, (goal - high) / slope, np.inf)
        errors = np.log(np.where(ahead > 0, ahead, 0) / (held - last))[:, :-1]
        left = np.log(np.clip(ahead[:, -1] + last[:, -1] - now, 0.5, None))
    errors = np.clip(np.nan_to_num(errors, nan=_MOST_ERROR), -_MOST_ERROR, _MOST_ERROR)
    squares = np.square(errors).mean(axis=1)
    # A power that fits one window by chance fails in the others, as a window of noise fails with most powers.
    by_power, by_window = squares.mean(axis=0, keepdims=True), squares.mean(axis=1, keepdims=True)
    weights = 1 / ((_LUCK**2 + squares) * (_LUCK**2 + by_power) * (_LUCK**2 + by_window))
    weights /= weights.sum()
    if float(weights[~(left < _NEVER)].sum()) > _MOST_NEVER:
        return None
    left = np.fmin(left, _NEVER)
    mean = float((weights * left).sum())
    return Ending(exp(mean), sqrt(float((weights * (squares + np.square(left - mean))).sum())))


def _ends_of_line(batches: Floats, bits: Floats, cut: float) -> tuple[float, ...]:
    """Return the first and the last third of the points before the cut, and what is to be foretold."""
    count = len(batches)
    known = round(cut * count)
    third = known // 3
    held = max(2, (count - known) // 2)
    goal = (float(batches[-1]), 0.0) if cut == 1 else _middle(batches[-held:], bits[-held:])
    return (
        *_middle(batches[:third], bits[:third]),
        *_middle(batches[known - third : known], bits[known - third : known]),
        *goal,
    )


def _middle(batches: Floats, bits: Floats) -> tuple[float, float]:
    """Return the quantile of the bits, and the batch at which bits that fall without noise are there."""
    place = _QUANTILE * (len(bits) - 1)
    below = int(place)
    part = place - below
    ordered = np.sort(bits)
    left, right = batches[-1 - below], batches[-2 - below]
    return float(left + part * (right - left)), float(
        ordered[below] + part * (ordered[below + 1] - ordered[below])
    )
