"""Python state of the program, kept at the start of a batch and put back before a re-run and after it."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..numerics.readable import only_our_dispatch
from ..util.visible import suppressed
from .kept_values import NOW, START, Clones, Kept, Limits, keep_tensor, keep_value, spared
from .outside import repeatable
from .places import Root
from .reachable import Plan, plan_of, reached_by_other_threads

# Bytes of weights that are copied, as a forward may write to them.
_MOST_OF_WEIGHTS = 1 << 28


class StateKeeper:
    """Keeps the start of each batch of one model: what its code can change, as far as START allows."""

    def __init__(self, root: Callable[[], nn.Module | None]) -> None:
        self._root = root
        self._plan = Plan()
        self._num_kept = 0
        # Clones of small tensors, by id: only those whose version has changed are cloned again.
        self._tensors: Clones = {}

    def capture(self, frame: types.FrameType | None) -> ProgramState:
        """Return the present state. `frame` is the innermost frame that may be the program's."""
        with only_our_dispatch():  # looking is no business of the user's modes
            return self._captured(frame)

    def _captured(self, frame: types.FrameType | None) -> ProgramState:
        self._num_kept += 1
        # Objects that came later are found at batches 1, 2, 4, 8 and so on.
        if self._num_kept & (self._num_kept - 1) == 0 and (model := self._root()) is not None:
            self._plan = plan_of(model, frame)
            self._plan.objects = []
            self._tensors.clear()
        return keep(self._plan, START, self._tensors)


@dataclass(slots=True)
class ProgramState:
    """State of the program at one moment."""

    places: list[tuple[Root, Kept]] = field(default_factory=list)
    drawn: tuple[Any, ...] = ()

    def restore(self, *, stands_in: bool = False) -> None:
        """Put the state back. With `stands_in`, what gives each value once is replaced by a GivesOnce."""
        with only_our_dispatch(), spared(reached_by_other_threads()):
            self._restore(stands_in)

    def _restore(self, stands_in: bool) -> None:
        for root, kept in self.places:
            try:
                present = root.get()
                value = kept(present)
                if stands_in:
                    value = repeatable(value)
                if value is not present:
                    root.set(value)
            except Exception:
                suppressed("a value of the program could not be put back")
        if self.drawn:
            random.setstate(self.drawn[0])
            np.random.set_state(self.drawn[1])


def present_state(model: nn.Module, frame: types.FrameType | None, names: dict[str, Any]) -> ProgramState:
    """Return all that can be put back after a re-run in this process, `names` and the buffers of modules included."""
    with only_our_dispatch():
        return _present_state(model, frame, names)


def _present_state(model: nn.Module, frame: types.FrameType | None, names: dict[str, Any]) -> ProgramState:
    plan = plan_of(model, frame, names.values(), strong=True)
    plan.draws = True
    found = keep(plan, NOW, {})
    tensors = [x for x in names.values() if isinstance(x, Tensor)]
    modules = [one for one in plan.objects if isinstance(one, nn.Module)]
    weights = {id(x): x for one in (model, *modules) for x in one.parameters()}
    left = _MOST_OF_WEIGHTS
    for x in weights.values():
        if (left := left - x.numel() * x.element_size()) < 0:
            break
        tensors.append(x)
    tensors += [x for one in modules for x in one._buffers.values() if x is not None]
    tensors_kept = [(x, keep_tensor(x, NOW, {})) for x in tensors]
    containers = [(x, keep_value(x, NOW, {}, 0)) for x in names.values() if not isinstance(x, Tensor)]
    found.places += [(_Fixed(x), kept) for x, kept in (*tensors_kept, *containers)]
    return found


class _Fixed(Root):
    """A value itself, which is refilled and not exchanged."""

    def __init__(self, value: Any) -> None:
        object.__setattr__(self, "owner", value)
        object.__setattr__(self, "name", "")
        object.__setattr__(self, "is_buffer", False)

    def get(self) -> Any:
        return self.owner

    def set(self, value: Any) -> None:
        """Leave it: nobody holds it at a place that is known."""


def keep(plan: Plan, limits: Limits, tensors: Clones) -> ProgramState:
    """Return the state at the places of the plan."""
    places = [(root, keep_value(root.get(), limits, tensors, 0)) for root in plan.roots]
    return ProgramState(places, (random.getstate(), np.random.get_state()) if plan.draws else ())
