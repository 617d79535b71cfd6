"""Which weights of a model each optimizer's step has taken."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import Handles, after_steps
from .weight_versions import Key


class WeightSteps:
    """Calls `took` with module and label of every weight that a step took, for each step, until `remove`.

    A step takes what has a gradient. With the fused optimizers, which write past the version counter, it is the only
    sign of a change.
    """

    def __init__(self, model: nn.Module, took: Callable[[Collection[Key]], None]) -> None:
        self._model = weakref.ref(model)
        self._took = took
        # Of each optimizer how many parameters it had, and those that are the model's with their names.
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[tuple[Tensor, list[Key]]]]] = (
            weakref.WeakKeyDictionary()
        )
        this = weakref.ref(self)

        # torch's registry outlives this: what it holds must not keep it alive.
        def after(optimizer: Optimizer, *_: Any) -> None:
            if (steps := this()) is not None:
                steps._after(optimizer)

        self._hooks = Handles(self, [after_steps.add(after)])

    def remove(self) -> None:
        """Tell of no more steps. A second time does nothing."""
        self._hooks.remove()

    def _after(self, optimizer: Optimizer) -> None:
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._known.get(optimizer)
        if known is None or known[0] != size:
            known = self._known[optimizer] = (size, self._own(optimizer))
        keys = [key for weight, names in known[1] if weight.grad is not None for key in names]
        if keys:
            self._took(keys)

    def _own(self, optimizer: Optimizer) -> list[tuple[Tensor, list[Key]]]:
        model = self._model()
        names: dict[int, list[Key]] = {}
        if model is not None:
            # A shared module has one of its names in the frames; all of them are counted.
            for module, part in model.named_modules(remove_duplicate=False):
                for label, weight in part._parameters.items():
                    if weight is not None:
                        names.setdefault(id(weight), []).append((module, label))
        return [
            (weight, names[id(weight)])
            for group in optimizer.param_groups
            for weight in group["params"]
            if id(weight) in names
        ]
