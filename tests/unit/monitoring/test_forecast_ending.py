"""Endings of growth: exact curves of each kind, what never ends, units that must not matter, and falls."""

from __future__ import annotations

from math import log2
from statistics import mean, median

import numpy as np
import pytest

from nanwatch.monitoring.forecast import LEAST_POINTS, ending, falls

NOW = 400
END = 520


def curve(power: float, batches: np.ndarray) -> np.ndarray:
    """Headroom of a magnitude whose `power` grows in a straight line to the end of the format in batch END."""
    if power == 0:
        return 0.02 * (END - batches)
    if power > 0:
        return -np.log2((batches + 5) / (END + 5)) / power
    return np.log2((800 - batches) / (800 - END)) / -power


@pytest.mark.parametrize("power", [1, 1 / 2, 1 / 4, 0, -1 / 6])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_growth_of_each_kind(power: float, noise: float) -> None:
    """The end is found, within the uncertainty that comes with it and a margin for the family's coarseness."""
    batches = np.arange(40, NOW, 6.0)
    bits = curve(power, batches) + np.random.default_rng(0).normal(0, noise, len(batches))
    found = ending(batches, bits)
    assert found is not None
    left = END - batches[-1]
    assert found.left == pytest.approx(left, rel=0.1 + 1.5 * found.deviation)
    assert found.deviation < 0.6


@pytest.mark.parametrize(
    "bits",
    [
        lambda b: 4 + 0 * b,
        lambda b: 4 + b / 100,
        lambda b: 4 + 4 * np.exp(-b / 60),
        lambda b: 4 - np.minimum(b, 200) / 100,
    ],
    ids=["level", "rising", "settling", "stopped"],
)
def test_what_does_not_end_has_no_certain_end(bits: object) -> None:
    """Neither "never" nor a wide guess can be told."""
    batches = np.arange(0, NOW, 7.0)
    found = ending(batches, bits(batches))  # type: ignore[operator]
    assert found is None or found.deviation > 1 or found.left > 2 * NOW


def test_the_unit_of_time_does_not_matter() -> None:
    """A run of 1,000 times the batches, begun at another one: the same ending, 1,000 times as far."""
    batches = np.arange(0, NOW, 8.0)
    bits = curve(1 / 3, batches) + np.random.default_rng(1).normal(0, 0.05, len(batches))
    one, other = ending(batches, bits), ending(1000 * batches + 7e6, bits)
    assert one is not None
    assert other is not None
    assert log2(other.left / one.left) == pytest.approx(log2(1000), abs=0.01)  # half a batch is the least
    assert other.deviation == pytest.approx(one.deviation, rel=0.02)


def test_a_few_points_say_nothing() -> None:
    batches = np.arange(LEAST_POINTS - 1.0)
    assert ending(batches, 12 - batches) is None


@pytest.mark.parametrize("share", [0.2, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(10))
def test_falls_are_lines_through_medians(seed: int, share: float) -> None:
    """Of tensors with enough points: lines through the medians of the latest five and of five before the middle."""
    rng = np.random.default_rng(seed)
    batches = np.cumsum(rng.integers(1, 9, 64)).astype(float)
    headroom = rng.integers(-8, 9, (64, 5)) / 4
    headroom[rng.random(headroom.shape) >= share] = np.nan
    headroom[-1] = 1.0
    bits, losses, late_losses, spans = falls(batches, headroom)
    for column, values in enumerate(headroom.T):
        points = [(x, y) for x, y in zip(batches, values, strict=True) if y == y]
        if len(points) < 12:
            continue
        middle, latest = len(points) * 3 // 8, points[-5:]
        assert bits[column] == median(y for _, y in latest)
        for loss, early in (
            (losses[column], points[middle - 2 : middle + 3]),
            (late_losses[column], points[-10:-5]),
        ):
            width = mean(x for x, _ in latest) - mean(x for x, _ in early)
            assert loss == pytest.approx((median(y for _, y in early) - bits[column]) / width)
        assert spans[column] == points[-1][0] - points[0][0]


def test_falls_of_few_points_have_no_error() -> None:
    """With one point there is no fall, and no tensors have none."""
    bits, losses, late, spans = falls(np.array([3.0]), np.array([[5.0]]))
    assert (bits[0], spans[0]) == (5.0, 0.0)
    assert not losses[0] > 0
    assert not late[0] > 0
    assert all(len(found) == 0 for found in falls(np.array([3.0]), np.empty((1, 0))))
