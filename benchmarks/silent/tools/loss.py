"""A plain loss curve, with one rule.

A run is wrong if a loss is not finite, or if the mean of its last four losses is above LIMIT of the mean of its
first four.
Four batches are an epoch in most of the trainings.
LIMIT is the highest share that a healthy twin reached, rounded up to two digits: `run.py --calibrate-loss` prints it.
It knows no cause, no module and no line. It speaks after the last step, as the rule needs the whole curve.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from silent.tools.protocol import Finding

LIMIT = 1.01


def share(losses: list[float]) -> float:
    """Return the sum of the last four losses over the sum of the first four."""
    return sum(losses[-4:]) / sum(losses[:4])


class Tool:
    def __init__(self) -> None:
        self.losses: list[float] = []

    @contextlib.contextmanager
    def watching(self, model, **intent) -> Iterator[None]:
        yield

    def after_step(self, step: int, loss: float) -> None:
        self.losses.append(loss)

    def findings(self) -> list[Finding]:
        for step, loss in enumerate(self.losses, 1):
            if not math.isfinite(loss):
                return [Finding(step, text=f"loss {loss}")]
        reached = share(self.losses)
        if reached > LIMIT:
            return [Finding(len(self.losses), text=f"the loss ends at {reached:.2f} of its start")]
        return []
