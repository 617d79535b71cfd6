"""Histories of magnitudes, against distributions whose tails are known."""

from math import inf

import numpy as np
import pytest

from nanwatch.history.forecast import CHANGED, DEPTH, LEAST, LEVEL, WINDOW, PeakHistory
from nanwatch.history.spikes import Signal


def histories(bits: np.ndarray) -> PeakHistory:
    """Return histories of these values, a row for each step."""
    made = PeakHistory()
    made.add_names([(f"m{i}", "output", "float32") for i in range(bits.shape[1])])
    for step, row in enumerate(bits):
        made.add(step, np.exp2(row))
    return made


@pytest.mark.parametrize(("kind", "most"), [("normal", 0), ("laplace", 8)])
def test_rate_of_false_alarms_is_the_one_in_the_docs(kind: str, most: int) -> None:
    """About one of 30,000 tensors, 4e-5, leaves its history by chance where logarithms have exponential tails."""
    bits = getattr(np.random.default_rng(0), kind)(size=(DEPTH, 30_000))
    assert len(histories(bits).departures()) <= most


def test_departures_come_in_order_with_their_numbers() -> None:
    bits = np.random.default_rng(0).normal(scale=0.1, size=(DEPTH, 5))
    bits[-1, [3, 1]] = 8.0
    bits[:-1, 4] = -inf  # all zero until now
    found = histories(bits).departures()
    assert [one.module for one in found] == ["m1", "m3", "m4"]
    level = 2 ** float(np.sort(bits[-1 - LEVEL : -1, 1])[LEVEL // 2])
    assert found[0].value == pytest.approx(256)
    assert found[0].usual == pytest.approx(level, rel=1e-5)
    assert CHANGED < found[0].deviations < 200
    assert (found[2].usual, found[2].deviations) == (0.0, inf)


@pytest.mark.parametrize("late", [0, 1, 20, 43])
def test_tensor_that_comes_late_was_missing_before(late: int) -> None:
    """The oracle knew of it from the beginning."""
    bits = np.random.default_rng(5).normal(scale=0.1, size=(100, 3))
    bits[:late, 2] = -inf
    bits[-1] = 8.0
    made = PeakHistory()
    made.add_names([(f"m{i}", "output", "float32") for i in range(2)])
    for step, row in enumerate(np.exp2(bits)):
        if step == late:
            made.add_names([("m2", "output", "float32")])
        made.add(step, row[: len(made.names)])
    assert made.departures() == histories(bits).departures()
    assert [one.module for one in made.departures()] == ["m0", "m1", "m2"]


def test_tensor_of_a_forward_leaves_its_history_downwards_and_to_zero() -> None:
    """A zero counts only beside other tensors of the module, or the module may not have been called."""
    bits = np.random.default_rng(7).normal(scale=0.1, size=(DEPTH, 5))
    bits[-1] = [0, -8, -np.inf, -np.inf, -np.inf]
    made = PeakHistory()
    made.add_names([(*name, "float32") for name in ("ax", "ay", "az", "bx", "by")])
    for step, row in enumerate(np.exp2(bits)):
        made.add(step, row)
    found = {(one.module, one.label): one for one in made.departures(falls=True)}
    assert list(found) == [("a", "y"), ("a", "z")]
    assert found["a", "y"].value == pytest.approx(2**-8)
    assert CHANGED < found["a", "y"].deviations < 200
    assert (found["a", "z"].value, found["a", "z"].deviations) == (0.0, inf)
    assert found["a", "z"].usual == pytest.approx(1, rel=0.2)


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
