"""The rule for a value that leaves its history, against distributions whose tails are known."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from nanwatch.monitoring.spikes import CHANGED, LEAST, LEVEL, WINDOW, Histories, Signal

DEPTH = WINDOW + LEVEL + 1


def histories(bits: np.ndarray) -> Histories:
    """Return histories of these values, a row for each step."""
    made = Histories()
    made.meet([(f"m{i}", "output", "float32") for i in range(bits.shape[1])])
    for row in bits:
        made.add(np.exp2(row))
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


def test_past_steps_are_judged_by_what_came_before_them() -> None:
    bits = np.random.default_rng(1).normal(scale=0.1, size=(DEPTH, 2))
    bits[-4, 1] = 8.0
    made = histories(bits)
    assert [[one.module for one in made.departures(ago)] for ago in range(5)] == [[], [], [], ["m1"], []]


def test_tensor_that_comes_only_sometimes_leaves_no_history() -> None:
    bits = np.random.default_rng(2).normal(size=(DEPTH, 64))
    bits[np.random.default_rng(3).random(bits.shape) < 0.5] = -inf  # an expert that few tokens reach
    bits[-1] = np.random.default_rng(4).normal(size=64)
    assert histories(bits).departures() == []


@pytest.mark.parametrize("late", [0, 1, 20, 43])
def test_tensor_that_comes_late_was_missing_before(late: int) -> None:
    """The oracle knew of it from the beginning."""
    bits = np.random.default_rng(5).normal(scale=0.1, size=(100, 3))
    bits[:late, 2] = -inf
    bits[-1] = 8.0
    made = Histories()
    made.meet([(f"m{i}", "output", "float32") for i in range(2)])
    for step, row in enumerate(np.exp2(bits)):
        if step == late:
            made.meet([("m2", "output", "float32")])
        made.add(row[: len(made.names)])
    assert made.departures() == histories(bits).departures()
    assert [one.module for one in made.departures()] == ["m0", "m1", "m2"]
    limits = made.limits(np.array([2, 0]))
    np.testing.assert_array_equal(limits, histories(bits).limits(np.array([2, 0])))
    assert ((limits[0] > 0.7) & (limits[0] < limits[1]) & (limits[1] < 256)).all()


@pytest.mark.parametrize("kind", ["normal", "exponential", "standard_cauchy"])
def test_signal_keeps_to_the_rule_in_each_step(kind: str) -> None:
    """The rule of docs/spikes.md, computed with numpy from all values."""
    values = np.abs(getattr(np.random.default_rng(6), kind)(size=600)) + 1.0
    signal = Signal("loss", in_bits=False)
    found = [signal.add(float(x)) is not None for x in values]
    levels = np.array([np.median(values[i - LEVEL : i]) for i in range(LEVEL, 600)])
    distances = values[LEVEL:] - levels
    expected = [False] * (LEVEL + LEAST)
    for i in range(LEAST, len(distances)):
        before = np.sort(distances[max(0, i - WINDOW) : i])
        middle, high = (before[round(part * (len(before) - 1))] for part in (0.5, 0.9))
        spread = np.sort(np.abs(before - middle))[round(0.5 * (len(before) - 1))]
        deviation = max(1.4826 * spread, (high - middle) / 1.2816, 0.01 * max(levels[i], levels[0]))
        expected.append(bool(distances[i] >= middle + 10 * deviation))
    assert found == expected
    assert any(found) == (kind == "standard_cauchy")


@pytest.mark.parametrize("shape", ["falls", "rises", "steps down", "noise"])
def test_signal_without_a_jump_is_silent(shape: str) -> None:
    step, noise = np.arange(400), np.random.default_rng(0).normal(scale=0.03, size=400)
    loss = {
        "falls": 8 * np.exp(-step / 40) + 0.1,
        "rises": 0.1 + step / 50,
        "steps down": np.where(step < 200, 2.0, 0.5),
        "noise": np.full(400, 2.5),
    }[shape] * (1 + noise)
    signal = Signal("loss", in_bits=False)
    assert [one for x in loss if (one := signal.add(float(x)))] == []


@pytest.mark.parametrize("in_bits", [False, True])
def test_signal_tells_of_a_jump_once_it_knows_what_is_usual(in_bits: bool) -> None:
    noise = np.random.default_rng(0).normal(scale=0.03, size=200)
    values = 2.5 * (1 + noise)
    values[[LEVEL + LEAST - 1, 150]] = 9.0
    signal = Signal("loss", in_bits=in_bits)
    found = {step: one for step, x in enumerate(values) if (one := signal.add(float(x)))}
    assert list(found) == [150]
    assert found[150].value == pytest.approx(9)
    assert found[150].usual == pytest.approx(2.5, rel=0.05)


def test_loss_near_zero_jumps_only_by_a_part_of_the_first_loss() -> None:
    """A model that knows its samples by heart has losses that differ by factors."""
    signal = Signal("loss", in_bits=False)
    losses = [4.0] * 50 + [1e-5 * (1 + step % 3) for step in range(200)]
    assert [one for x in [*losses, 0.1] if (one := signal.add(x))] == []
    assert signal.add(1.0) is not None
