"""Endings of growth: exact curves of each kind, what never ends, and units that must not matter."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest

from nanwatch.monitoring.forecast import LEAST_POINTS, ending

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
