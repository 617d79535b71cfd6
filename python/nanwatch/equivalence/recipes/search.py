"""The search for the cheapest formats of layers whose loss stays within a budget. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

# The format of each layer that has another than its own.
Formats = dict[str, str]


class Move(NamedTuple):
    """One step to a cheaper format: what it adds to the damage that the layer does alone, and what it saves."""

    layer: str
    target: str
    damage: float
    saved: float


def path(changes: Mapping[str, Mapping[str, float]], costs: Mapping[str, Mapping[str, float]]) -> list[Move]:
    """Return moves in the order of their damage for each saved cost, from all layers as they are to the cheapest.

    Args:
        changes: the relative change of the loss that each format of each layer makes alone.
        costs: the cost of each format of each layer, and of the layer as it is by the name "".

    The moves of one layer lie on the lower convex hull of damage over cost, so each of them is worse than the last.
    """
    moves = []
    for layer, by_target in changes.items():
        damages = {"": 0.0, **{target: abs(change) for target, change in by_target.items()}}
        present = ""
        while True:
            steps = [
                Move(layer, target, damage - damages[present], costs[layer][present] - costs[layer][target])
                for target, damage in damages.items()
                if costs[layer][target] < costs[layer][present]
            ]
            if not steps:
                break
            best = min(steps, key=lambda step: (step.damage / step.saved, -step.saved))
            moves.append(best)
            present = best.target
    return sorted(moves, key=lambda move: move.damage / move.saved)


def beside(
    damages: Mapping[str, Mapping[str, float]],
    kept: Formats,
    costs: Mapping[str, Mapping[str, float]],
    measured: Callable[[Formats], float],
) -> dict[str, float]:
    """Return a factor for each layer: how much more its cheapest format damages beside the others' than alone.

    Args:
        damages: what each format of each layer does alone.
        kept: the formats of the others.
        costs: those of each format.
        measured: return the damage of these formats together.

    Errors of two layers may cancel or add. The factor is the mean of 1 and of the measured ratio, because the layers
    that are added to `kept` or taken from it meet fewer or more of the others.
    """
    factors = {}
    for layer, alone in damages.items():
        target = min(alone, key=costs[layer].__getitem__, default="")
        others = {name: one for name, one in kept.items() if name != layer}
        if alone.get(target) and others:
            added = measured({**others, layer: target}) - measured(others)
            factors[layer] = max(1 + added / alone[target], 0.0) / 2
    return factors


def cheapest(
    moves: Sequence[Move],
    changes: Mapping[str, Mapping[str, float]],
    measured: Callable[[Formats], float],
    budget: float,
    may_measure: Callable[[], bool],
) -> Formats:
    """Return the formats after as many moves as the budget allows.

    Args:
        moves: from `path`.
        changes: those that each format of each layer makes alone.
        measured: return the relative change of the loss with these formats together.
        budget: the largest change, in either direction.
        may_measure: return whether one more measurement is allowed.

    Halving finds a number of moves with which the measured change is within the budget. Then each later move is tried
    on top, where the sum of what is measured and of what it did alone is within the budget.
    """
    low, high = 0, len(moves) + 1
    kept: Formats = {}
    present = 0.0
    while high - low > 1 and may_measure():
        # The first look is at all moves: most models allow them or nearly so.
        middle = len(moves) if high > len(moves) else (low + high) // 2
        formats = {move.layer: move.target for move in moves[:middle]}
        change = measured(formats)
        if abs(change) <= budget:
            low, kept, present = middle, formats, change
        else:
            high = middle
    for move in moves[low:]:
        alone = changes[move.layer]
        before = alone[kept[move.layer]] if move.layer in kept else 0.0
        if abs(present + alone[move.target] - before) > budget or not may_measure():
            continue
        formats = {**kept, move.layer: move.target}
        change = measured(formats)
        if abs(change) <= budget:
            kept, present = formats, change
    return kept
