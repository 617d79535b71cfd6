"""The comparison of steps over ranks: its judgement here; real ranks are in tests/programs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanwatch.ranks.exchange import Side
from nanwatch.ranks.replicas import WeightPrint, judge_steps, sketch_of

GRADIENT = torch.randn(24, generator=torch.Generator().manual_seed(3))


def side(
    rank: int, now: int, gradient: Tensor = GRADIENT, before: int = 1, step: int = 2, **more: Any
) -> Side:
    """One rank whose weight w has a hash, and had another one before it stepped with a gradient."""
    known = {"step": 1, "forwards": 1, "declared": ["w"], "matrices": ["w"], "directed": ["w"]}
    known |= {"are_groups_small": False, "is_mixed": False}
    prints = {"w": WeightPrint(before, False, sketch_of(gradient))}
    return Side(1, [(rank, "host")], {"step ": step, "w": now}, known | {"before": prints} | more)


@pytest.mark.parametrize(
    ("gradient", "fault"),
    [
        (GRADIENT, None),
        (GRADIENT * 1.001, None),
        (GRADIENT + 0.005 * GRADIENT.flip(0), None),
        (GRADIENT * 2, ("clipping:one-rank", "w", 1, -1)),
        (GRADIENT.flip(0), ("not-reduced", "w", 1, -1)),
        (-GRADIENT, ("not-reduced", "w", 1, -1)),
        (GRADIENT * 0, ("rank-lost", "w", 1, 2)),
        (GRADIENT[:0], ("rank-lost", "w", 1, 2)),
        (GRADIENT * torch.nan, None),
    ],
)
def test_unequal_gradients_before_a_weight_parted_are_told_apart(gradient: Tensor, fault: object) -> None:
    """By zero, by norm and by direction. What kernels round otherwise is equal."""
    verdict = judge_steps([side(0, 5), side(1, 5), side(2, 6, gradient)])
    assert verdict == {"names": ["w"], "faults": [] if fault is None else [fault], "is_over": False}


def test_ranks_that_count_their_steps_differently_are_not_compared() -> None:
    """By their numbers, or as one has a weight that it moved to what another had a step before."""
    assert judge_steps([side(0, 5), side(1, 5, step=3)])["is_over"]
    assert judge_steps([side(0, 5, before=1), side(1, 1, before=0)])["is_over"]
    assert not judge_steps([side(0, 5, before=1), side(1, 1, before=1)])["is_over"]
    # A rank that left out a step, or made a forward of its own, is not compared in this check.
    verdict = judge_steps([side(0, 5), side(1, 6, GRADIENT.flip(0), forwards=2)])
    assert verdict == {"names": [], "faults": [], "is_over": False}


def test_a_weight_of_which_nobody_says_who_holds_it_needs_evidence() -> None:
    """Shards and experts that begin alike part without a fault; groups of fewer ranks and a step alike are evidence."""

    def faults(name: str = "w", *kept: str, has_moved: bool = False, **more: Any) -> int:
        sides = []
        for rank, gradient in enumerate((GRADIENT, -GRADIENT)):
            prints = dict.fromkeys((name, *kept), WeightPrint(1, has_moved, sketch_of(gradient)))
            known = side(rank, 0, declared=[], matrices=kept, **more).more | {"before": prints}
            values = {"step ": 2, name: rank + 5} | dict.fromkeys(kept, 9)
            sides.append(Side(1, [(rank, "host")], values, known))
        return len(judge_steps(sides)["faults"])

    assert (faults(), faults(are_groups_small=True), faults(has_moved=True)) == (0, 1, 1)
    # A norm beside matrices that stay equal, but not the bias of one.
    assert (faults("norm.weight", "up.weight"), faults("up.bias", "up.weight")) == (1, 0)
