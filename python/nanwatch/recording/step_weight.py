"""Weights at one step of an optimizer, as ranks compare them, and the faults that the comparison finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class StepWeight(NamedTuple):
    """Weight of a model before a step: its full name, itself, samples of it and of its gradient.

    `group_size` is the number of ranks over which torch.distributed.all_reduce reduced the gradient, as far as seen.
    """

    name: str
    tensor: Tensor
    values: Tensor
    gradient: Tensor | None
    group_size: int | None = None


class RankFault(NamedTuple):
    """Kind of a fault across ranks, the weight that has it, the step; a rank that lost its gradient, or -1."""

    kind: str
    name: str
    step: int
    rank: int


class StepComparison(Protocol):
    """Comparison of steps over the ranks. No method but `remove` waits for another rank."""

    def check(self, step: int, num_forwards: int, weights: Sequence[StepWeight]) -> None:
        """Compare these weights, those of step `step` of their optimizer, after so many forwards in grad mode.

        Ranks make the same checks in one order.
        """

    def faults(self) -> list[RankFault]:
        """Return the faults that became certain since the last call."""

    def remove(self) -> None:
        """End the comparison, after what is under way."""
