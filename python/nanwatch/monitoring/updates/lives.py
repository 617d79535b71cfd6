"""Optimizers that follow each other on the same weights, each without the state of the one before."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import Tensor
from torch.optim.optimizer import Optimizer

# The same weights may be pre-trained and fine-tuned by two. They do not often step equally often.
_ANEW = 3
_MOST = 64


@dataclass(slots=True, eq=False)
class Life:
    """The steps of one optimizer, `number`-th of its kind in a row. Its first weight stands for all."""

    kind: type[Optimizer]
    weight: weakref.ref[Tensor]
    number: int = 1
    steps_before: int = 0  # of the others
    steps: int = 0
    version: int = -1  # of the weight after the latest step
    has_state: bool = False

    @property
    def is_anew(self) -> bool:
        """Return whether optimizers are made again and again."""
        return self.number >= _ANEW

    def stepped(self, optimizer: Optimizer) -> None:
        """Take the end of a step."""
        x = self.weight()
        if x is not None and not x.is_inference():
            self.steps += 1
            self.version = x._version
            if self.steps == 1:
                self.has_state = any(isinstance(one, Tensor) and one.ndim for one in _state(optimizer, x))


def _state(optimizer: Optimizer, x: Tensor) -> list[object]:
    return list(optimizer.state.get(x, {}).values())


class Lives:
    """The latest lives of all optimizers."""

    def __init__(self) -> None:
        self._all: list[Life] = []

    def begin(self, optimizer: Optimizer) -> Life | None:
        """Take the first step of an optimizer. Weights that were written since the other's last step are others."""
        x = next((x for group in optimizer.param_groups for x in group["params"]), None)
        if x is None or x.is_inference():
            return None
        life = Life(type(optimizer), weakref.ref(x))
        before = next((one for one in self._all if one.kind is life.kind and one.weight() is x), None)
        if before is not None:
            self._all.remove(before)
            is_same = before.version == x._version and before.has_state and not _state(optimizer, x)
            # All lives are equally long, as epochs are.
            if is_same and before.steps * before.number == before.steps_before + before.steps:
                life.number = before.number + 1
                life.steps_before = before.steps_before + before.steps
        self._all = [life, *self._all[: _MOST - 1]]
        return life
