"""The rule for a loss or a gradient norm that jumps."""

from __future__ import annotations

import numpy as np
import pytest

from nanwatch.history.peaks import LEAST, LEVEL, WINDOW
from nanwatch.history.signals import Signal


@pytest.mark.parametrize("kind", ["normal", "exponential", "standard_cauchy"])
def test_signal_keeps_to_the_rule_in_each_step(kind: str) -> None:
    """The rule of docs/spikes.md, computed with numpy from all values."""
    values = np.abs(getattr(np.random.default_rng(6), kind)(size=600)) + 1.0
    signal = Signal("loss", in_bits=False)
    jumps = [signal.add(float(x)) is not None for x in values]
    levels = np.array([np.median(values[i - LEVEL : i]) for i in range(LEVEL, 600)])
    units = np.maximum(levels, 0.02 * levels[0])
    distances = values[LEVEL:] - levels

    def far(distances: np.ndarray, i: int, least: float) -> float:
        before = np.sort(distances[max(0, i - WINDOW) : i])
        middle, high = (before[round(part * (len(before) - 1))] for part in (0.5, 0.9))
        spread = np.sort(np.abs(before - middle))[round(0.5 * (len(before) - 1))]
        return float((distances[i] - middle) / max(1.4826 * spread, (high - middle) / 1.2816, least))

    expected = [False] * (LEVEL + LEAST)
    for i in range(LEAST, len(distances)):
        share = far(distances / units, i, max(0.01 * levels[i], 0.001 * levels[0]) / units[i])
        plain = far(distances, i, 0.01 * max(levels[i], levels[0]))
        is_jump = plain >= 12 or (share >= 30 and distances[i] >= 0.05 * levels[0])
        expected.append(bool(distances[i] > 0 and is_jump))
    assert jumps == expected
    assert any(jumps) == (kind == "standard_cauchy")


def test_loss_near_zero_jumps_only_by_a_part_of_the_first_loss() -> None:
    """A model that knows its samples by heart has losses that differ by factors."""
    signal = Signal("loss", in_bits=False)
    losses = [4.0] * 50 + [1e-5 * (1 + step % 3) for step in range(200)]
    assert not any(signal.add(x) for x in [*losses, 0.1])
    assert signal.add(1.0) is not None
