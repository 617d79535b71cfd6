"""What an optimizer keeps between steps, as rows: moments, and weights of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import Handles, after_steps, before_steps
from ..instrumentation.wrapped_names import parameter_names
from ..recording.observe import observe
from ..report.record import Row

NAME = "(optimizer)"


class OptimizerState:
    """Hands `tell` the rows of one optimizer's state after each of its steps, and before the first one that finds any.

    What `tell` raises, the step raises.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, tell: Callable[[list[Row]], None]) -> None:
        self._model = weakref.ref(model)
        self._tell = tell
        self._has_begun = False
        this, watched = weakref.ref(self), weakref.ref(optimizer)

        def before(stepping: Optimizer, *_: Any) -> None:
            if (state := this()) is not None and steps_for(stepping, watched()) and not state._has_begun:
                state._has_begun = True
                if stepping.state:  # as loaded
                    state._look(stepping)

        def after(stepping: Optimizer, *_: Any) -> None:
            if (state := this()) is not None and steps_for(stepping, watched()):
                state._look(stepping)

        self._hooks = Handles(self, [before_steps.add(before), after_steps.add(after)])

    def remove(self) -> None:
        """Look at no more steps."""
        self._hooks.remove()

    def _look(self, optimizer: Optimizer) -> None:
        model = self._model()
        names = {} if model is None else parameter_names(model)
        self._tell(state_rows(optimizer, names))


def state_rows(optimizer: Optimizer, names: dict[int, str]) -> list[Row]:
    """The rows of an optimizer's state: `exp_avg[0.weight]`, with the name of the parameter that it is of.

    `names` are those of the model's parameters, by id. A parameter that is not among them, such as a float32 copy of a
    weight, is called by its place, `[group][position]`, and has a row of its own: `param[0][3]`. Step counts are left
    out.
    """
    rows: list[Row] = []
    for number, group in enumerate(optimizer.param_groups):
        for position, x in enumerate(group["params"]):
            name = names.get(id(x))
            where = f"[{number}][{position}]" if name is None else f"[{name}]"
            if name is None:
                rows.append(observe(x, f"param{where}", "weight"))
            for key, value in optimizer.state.get(x, {}).items():
                if isinstance(value, Tensor) and value.ndim and value.is_floating_point():
                    rows.append(observe(value, f"{key}{where}", "buffer"))
    return rows


def steps_for(stepping: Optimizer, given: Optimizer | None) -> bool:
    """Whether it is the given one, or the one inside a wrapper whose own step calls no hooks, as Accelerate's."""
    if stepping is given or given is None:
        return stepping is given
    return stepping.param_groups is given.param_groups and not getattr(type(given).step, "hooked", False)
