"""The search for formats: the order of moves, the budget, and how near it comes to the best of all assignments."""

from __future__ import annotations

import random
from itertools import product

import pytest

from nanwatch.equivalence.recipes.search import Formats, beside, cheapest, path

BITS = {"": 2.0, "bfloat16": 1.0, "mxfp8": 0.5, "nvfp4": 0.25}


def costs(sizes: dict[str, float]) -> dict[str, dict[str, float]]:
    return {layer: {target: size * bits for target, bits in BITS.items()} for layer, size in sizes.items()}


def test_moves_are_worse_from_one_to_the_next() -> None:
    """bfloat16 lies above the line from the layer as it is to mxfp8, so no move goes there."""
    changes = {"a": {"bfloat16": 0.1, "mxfp8": -0.03, "nvfp4": 0.3}, "b": {"nvfp4": 0.05}}
    moves = path(changes, costs({"a": 1.0, "b": 2.0}))
    assert [(move.layer, move.target) for move in moves] == [("b", "nvfp4"), ("a", "mxfp8"), ("a", "nvfp4")]
    assert [move.damage for move in moves] == pytest.approx([0.05, 0.03, 0.27])
    assert [move.saved for move in moves] == [3.5, 1.5, 0.25]


@pytest.mark.parametrize("seed", range(5))
def test_the_cost_is_near_the_best(seed: int) -> None:
    """Where changes add up, the formats are within the budget, and cost at most 10 % more than the best of all."""
    chance = random.Random(seed)
    names = [f"layer{i}" for i in range(6)]
    sizes = {name: chance.uniform(0.5, 2) for name in names}
    changes = {
        name: {target: chance.expovariate(1) * 4**i for i, target in enumerate(BITS) if target}
        for name in names
    }
    cost = costs(sizes)
    budget, runs = sum(found["mxfp8"] for found in changes.values()) / 2, [0]

    def measured(formats: Formats) -> float:
        runs[0] += 1
        return sum(changes[layer][target] for layer, target in formats.items())

    def total(formats: Formats) -> float:
        return sum(cost[name][formats.get(name, "")] for name in names)

    kept = cheapest(path(changes, cost), changes, measured, budget, lambda: True)
    everything = [dict(zip(names, targets, strict=True)) for targets in product(BITS, repeat=6)]
    every = [{name: target for name, target in formats.items() if target} for formats in everything]
    best = min(total(formats) for formats in every if measured(formats) <= budget)
    assert measured(kept) <= budget
    assert total(kept) <= best * 1.1


def test_what_is_measured_together_decides() -> None:
    """Two layers that do no harm alone and too much together are not both kept; one more measurement may be refused."""
    changes = {"a": {"mxfp8": 0.0}, "b": {"mxfp8": 0.0}}
    moves = path(changes, costs({"a": 1.0, "b": 1.0}))

    def measured(formats: Formats) -> float:
        return 1.0 if len(formats) == 2 else 0.0

    assert cheapest(moves, changes, measured, 0.5, lambda: True) == {"a": "mxfp8"}
    assert cheapest(moves, changes, measured, 0.5, lambda: False) == {}


def test_layers_whose_errors_cancel_count_less_beside_each_other() -> None:
    """The damage is the square of a sum of errors. A layer outside is tried on top, and one alone stays as it is."""
    errors = {"a": 1.0, "b": -1.0, "c": 2.0, "d": 1.0}
    alone = {name: {"mxfp8": error**2} for name, error in errors.items()}

    def measured(formats: Formats) -> float:
        return sum(errors[name] for name in formats) ** 2

    kept = dict.fromkeys("abc", "mxfp8")
    # a: 4 - 1 = 3 of 1; b: 4 - 9 < 0; c: 4 - 0 = 4 of 4; d: 9 - 4 = 5 of 1.
    assert beside(alone, kept, costs(errors), measured) == {"a": 2.0, "b": 0.0, "c": 1.0, "d": 3.0}
    assert beside(alone, {}, costs(errors), measured) == {}
