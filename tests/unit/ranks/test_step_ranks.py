"""The comparison of steps over ranks: its judgement here; real ranks are in tests/programs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanwatch.ranks.exchange import Side
from nanwatch.ranks.step_ranks import StepPrints, judge_steps
from nanwatch.recording.optimizer_state import StepWeight

WEIGHT = torch.linspace(-1, 1, 24).reshape(4, 6)
GRADIENT = torch.randn(24, generator=torch.Generator().manual_seed(3))
RANKS = (0, 1, 2)


def side(
    rank: int,
    gradient: Tensor | None,
    weight: Tensor = WEIGHT,
    before: Tensor | None = None,
    step: int = 2,
    forwards: int = 1,
) -> Side:
    """One rank at a step, which had the weight `before` at the step before it."""

    def weights(x: Tensor) -> list[tuple[StepWeight, tuple[int, ...]]]:
        return [(StepWeight("w", x, x.flatten(), gradient), RANKS)]

    old = StepPrints(step - 1, forwards, weights(weight if before is None else before), None)
    prints = StepPrints(step, forwards, weights(weight), old)
    return Side(1, [(rank, "host")], prints.values[RANKS], prints.more[RANKS])


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (GRADIENT, None),
        (GRADIENT * 1.001, None),
        (GRADIENT + 0.005 * GRADIENT.flip(0), None),
        (GRADIENT * 2, ["norm", -1]),
        (GRADIENT.flip(0), ["direction", -1]),
        (-GRADIENT, ["direction", -1]),
        (GRADIENT * 0, ["zero", 2]),
        (None, ["zero", 2]),
        (GRADIENT * torch.nan, None),
    ],
)
def test_unequal_gradients_of_equal_weights_are_told_apart(
    other: Tensor | None, found: list[object] | None
) -> None:
    """By zero, by norm and by direction. What kernels round otherwise is equal."""
    verdict = judge_steps([side(0, GRADIENT), side(1, GRADIENT), side(2, other)])
    assert verdict["weights"] == []
    assert [list(what) for what in verdict["gradients"].values()] == ([] if found is None else [found])


def test_ranks_that_count_their_steps_differently_are_not_compared() -> None:
    """By their numbers, or as one has a weight that it moved to what another had a step before."""
    assert judge_steps([side(0, GRADIENT), side(1, GRADIENT, step=3)])["is_over"]
    behind = side(1, GRADIENT, WEIGHT, before=WEIGHT - 1)
    assert judge_steps([side(0, GRADIENT, WEIGHT + 1, before=WEIGHT), behind])["is_over"]
    unmoved = side(1, GRADIENT, WEIGHT)
    assert not judge_steps([side(0, GRADIENT, WEIGHT + 1, before=WEIGHT), unmoved])["is_over"]


def test_a_check_after_more_forwards_on_a_rank_says_nothing() -> None:
    """As when it left out a step: neither its weights nor its gradients are those of the others."""
    assert judge_steps([side(0, GRADIENT), side(1, GRADIENT.flip(0), forwards=2)]) == {"names": []}
