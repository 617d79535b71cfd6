"""The audited steps of this rank, for a comparison with other ranks, and the faults that it finds."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from ...recording.step_weight import StepComparison, StepWeight
from ...util.place import Place
from . import blame
from .samples import StepSamples, each_weight
from .suspicions import Fault, gathered
from .view import Suspect
from .window import Window


class RankSteps:
    """Hands steps to a comparison, and its faults back as those of modules."""

    def __init__(self, comparison: StepComparison) -> None:
        self._comparison = comparison
        self._group: weakref.ref[Any] | None = None  # the latest over which a gradient was reduced by hand
        self.remove = comparison.remove

    def check(self, samples: StepSamples, window: Window, num_forwards: int) -> None:
        """Compare a step."""
        self._comparison.check(samples.step, num_forwards, list(self._weights(samples, window)))

    def _weights(self, samples: StepSamples, window: Window) -> Iterator[StepWeight]:
        groups = window.groups()
        for one in samples.of_optimizer():
            x = one.tensor()
            if x is not None and one.before is not None and one.is_trained:
                group = None if x.grad is None else groups.get(id(x.grad))
                self._group = self._group if group is None else weakref.ref(group)
                size = None if group is None else group.size()
                yield StepWeight(".".join(filter(None, one.key)), x, one.before, one.gradient, size)

    def faults(self, model: nn.Module) -> Iterator[tuple[int, Fault]]:
        """Yield the faults that became certain since the last call, each with its step."""
        found = self._comparison.faults()
        if found:
            keys = [(one.name.rpartition(".")[0], one.name.rpartition(".")[2]) for one in found]
            suspects = [
                Suspect(one.kind, *key, {"rank": one.rank}) for one, key in zip(found, keys, strict=True)
            ]
            trained = {(name, label): x.numel() for name, label, x in each_weight(model) if x.requires_grad}
            for fault in gathered(suspects, trained):
                yield min(one.step for one in found), fault

    def place(self) -> Place | None:
        """Return the line that made the group over which gradients were reduced."""
        group = None if self._group is None else self._group()
        return None if group is None else blame.where_made(group)
