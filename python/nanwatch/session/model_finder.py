"""Finding the models that a program calls, without a change of it.

A model is a module with weights or buffers that is called from outside any other module: the model of a training, its
frozen teacher, a loss with weights of its own. It is the outermost module that holds the called one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from traceback import walk_stack
from types import FrameType, SimpleNamespace
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from ..instrumentation.calls import leave_torch
from ..instrumentation.slot import default_call, set_default_call
from ..numerics._extension import instances_of
from ..util.messages import spell, warn_user
from ..util.program import frame_values
from .watch import Watch, watch_starts

# Code by which a call of a module is recognised on the stack.
_CALL = nn.Module.__call__.__code__
_PACKAGE = f"{__name__.partition('.')[0]}."
# Limit for a program that makes its model again and again, as a search for hyperparameters does.
MAX_MODELS = 32


def topmost(module: nn.Module, alive: Iterable[nn.Module], caller: FrameType | None) -> nn.Module:
    """Return the outermost living module that holds `module` at any depth.

    A LightningModule is never called itself: its `training_step` calls its parts. Where several modules qualify, or
    none because a part holds its parent, return the one whose method has led to `caller`, else `module`.
    """
    holders: dict[int, list[nn.Module]] = {}
    for holder in alive:
        for child in list(holder._modules.values()):
            holders.setdefault(id(child), []).append(holder)
    around, ahead = {id(module): module}, [module]
    while ahead:
        new = [holder for holder in holders.get(id(ahead.pop()), []) if id(holder) not in around]
        around |= {id(holder): holder for holder in new}
        ahead += new
    tops = [holder for key, holder in around.items() if key not in holders]
    if len(tops) != 1:
        methods = (frame for frame, _ in walk_stack(caller) if frame.f_code.co_varnames[:1] == ("self",))
        # A dict that `locals()` has returned would change when its frame is read.
        callers = [id(frame_values(x).get("self")) for x in methods if "locals" not in x.f_code.co_names]
        tops = [module, *(around[key] for key in callers if key in around)]
    return tops[-1]


def has_state(module: nn.Module) -> bool:
    """Return whether the module or one inside it has a weight or a buffer."""
    return any(True for tensors in (module.parameters(), module.buffers()) for _ in tensors)


class ModelFinder:
    """Context that calls `on_model(model)` for each model before its first call, until it has found MAX_MODELS.

    The finder makes the calls of all modules without a wrapper; see instrumentation/slot.py. A call of a module that
    `on_model` watches takes no longer. Others take 1 µs more, and 3 µs from outside any other module, where
    `accepts(module)` says whether the module is a model.

    The finder leaves a model alone that the script watches itself. The drop-in for DebugUnderflowOverflow does not
    count: its Watch, of a subclass, acts on fewer values.
    """

    def __init__(
        self, on_model: Callable[[nn.Module], object], *, accepts: Callable[[nn.Module], bool] = has_state
    ) -> None:
        self._on_model, self._accepts = on_model, accepts
        self.num_left = MAX_MODELS  # models before the search ends
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._starts: SimpleNamespace | None = None

    def __enter__(self) -> ModelFinder:
        if default_call() is not None:
            raise RuntimeError("another ModelFinder looks for models already; end that first")

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # A compiler reads this function too; to it the module is itself.
            if is_compiling() or module in self._known or not self._try_to_look(module, sys._getframe(2)):
                return module._call_impl(*args, **kwargs)
            return nn.Module.__call__(module, *args, **kwargs)

        set_default_call(call)
        self._starts = watch_starts.add(self._watch_started)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Look no more. A second time does nothing."""
        starts, self._starts = self._starts, None
        if starts is not None:
            starts.remove()
            set_default_call(None)
            leave_torch()

    def _watch_started(self, watch: Watch, model: nn.Module) -> None:
        if type(watch) is not Watch and model not in self._known:
            self._take(model, model)

    def _try_to_look(self, module: nn.Module, caller: FrameType | None) -> bool:
        """Return whether the module was found to be a model. `caller` is the frame of whoever calls it."""
        is_ours = type(module).__module__.startswith(_PACKAGE)  # a loss that a re-run computes again
        try:
            is_inside = any(frame.f_code is _CALL for frame, _ in walk_stack(caller))
            if is_ours or is_inside or not self._accepts(module):
                return False
            # A module without a dict is not made yet: it is before its __init__, or a copy under way.
            alive = [module for module in instances_of(nn.Module) if getattr(module, "__dict__", None)]
            self._take(module, topmost(module, alive, caller))
            return True
        except Exception as error:  # an unwatched program is better than one that ends here
            self.stop()
            warn_user(f"nanwatch looks for no more models: {spell(error)}")
            return False

    def _take(self, module: nn.Module, model: nn.Module) -> None:
        self._known.update((module, model))
        self.num_left -= 1
        if self.num_left <= 0:
            self.stop()
        self._on_model(model)
