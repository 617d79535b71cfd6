"""State of the program around a re-run: Python values, buffers, tensors of the call."""

from __future__ import annotations

import random
import types
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, jit, nn

from ..numerics.readable import only_our_dispatch
from ..recording.walk import call_leaves
from ..util.modules import each_module
from ..util.visible import suppressed
from .kept_values import NOW, Clones, Kept, Limits, keep_tensor, keep_value, spared
from .outside import in_child
from .places import Fixed, Root
from .reachable import Plan, plan_of, reached_by_other_threads

# Bytes of weights that are copied, as a forward may write to them.
_MOST_OF_WEIGHTS = 1 << 28
# The limits of what is put back whatever its size: buffers, and tensors that the call was given.
_WHOLE = replace(NOW, nbytes=1 << 62)


@dataclass(slots=True)
class ProgramState:
    """State of the program at one moment."""

    places: list[tuple[Root, Kept]]

    def restore(self) -> None:
        """Put the state back."""
        with only_our_dispatch(), spared(reached_by_other_threads()):
            for root, kept in self.places:
                try:
                    present = root.get()
                    value = kept(present)
                    if value is not present:
                        root.set(value)
                except Exception:
                    suppressed("a value of the program could not be put back")


def present_state(
    root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: types.FrameType | None
) -> ProgramState:
    """Return what a re-run of a call must put back: the buffers of the tree and the tensors of the call.

    Their version counters too: the user's own call may still be under way, and have saved them for its backward. In the
    program's own process it is all that code below `frame` can change.
    """
    with only_our_dispatch():
        state = ProgramState([]) if in_child() else _program_state(root, frame)
        modules = [module for _, module in each_module(root)]
        given = [x for _, x in call_leaves(args, kwargs) if isinstance(x, Tensor)]
        state.places += [*_buffers(modules, _WHOLE), *_tensors(given, _WHOLE)]
        return state


def _program_state(root: nn.Module, frame: types.FrameType | None) -> ProgramState:
    names: dict[str, Any] = getattr(root, "names", {})  # that the statements of a loss read
    plan = plan_of(root, frame, names.values(), strong=True)
    state = keep(plan, NOW, {})
    modules = [one for one in plan.objects if isinstance(one, nn.Module)]
    weights = {id(x): x for one in (root, *modules) for x in one.parameters()}
    left = _MOST_OF_WEIGHTS
    copied = [x for x in weights.values() if (left := left - x.numel() * x.element_size()) >= 0]
    state.places += [*_buffers(modules, NOW), *_tensors(copied, NOW)]
    state.places += [(Fixed(x), keep_value(x, NOW, {})) for x in names.values()]
    return state


def _tensors(tensors: Sequence[Tensor], limits: Limits) -> list[tuple[Root, Kept]]:
    return [(Fixed(x), keep_tensor(x, limits, {})) for x in tensors]


def _buffers(modules: list[nn.Module], limits: Limits) -> list[tuple[Root, Kept]]:
    found: list[tuple[Root, Kept]] = []
    for module in modules:
        for name, x in module._buffers.items():
            is_script = isinstance(module, jit.ScriptModule)
            root = Fixed(x) if is_script else Root(weakref.ref(module), name, is_buffer=True)
            found.append((root, keep_value(x, limits, {})))
    return found


def keep(plan: Plan, limits: Limits, tensors: Clones) -> ProgramState:
    """Return the state at the places of the plan."""
    places = [(root, keep_value(root.get(), limits, tensors)) for root in plan.roots]
    if plan.draws:
        own: list[Any] = [random._inst, np.random.mtrand._rand]
        places += [(Fixed(x), keep_value(x, limits, tensors)) for x in own]
    return ProgramState(places)
