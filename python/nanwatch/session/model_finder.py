"""Finding the models that a program calls, without a change of it.

A training calls many modules that are not its model: losses, metrics, transforms, a frozen teacher. The model is the
module that is called from outside any other one and has parameters that require a gradient, if it is in training mode
or an optimizer holds some of them. Until such a one is called, the modules with weights or buffers stand in for it, as
in a program that trains nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer

from ..instrumentation.calls import leave_torch
from ..instrumentation.global_hooks import Handles, after_steps
from ..instrumentation.slot import default_call, set_default_call
from ..numerics._extension import instances_of
from ..util.modules import has_parameters
from ..util.visible import spell, warn_user
from .watch import Watch, watch_starts

_T = TypeVar("_T")

# Code by which a call of a module is recognised on the stack.
_CALL = nn.Module.__call__.__code__
_OWN = f"{__name__.partition('.')[0]}."
# Limit for a program that makes its model again and again, as a search for hyperparameters does.
MAX_MODELS = 8
# Calls of modules without weights, such as losses and transforms, after which a program without a model is told so.
_PATIENCE = 16


def may_be_trained(module: nn.Module, optimized: Callable[[], Collection[int]]) -> bool:
    """Return whether parameters of the module require a gradient, and it is in training mode or some are optimized.

    `optimized()` gives the ids of the parameters that optimizers hold; it is asked only where that decides.
    """
    free = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not free or module.training:
        return bool(free)
    # An optimizer alone knows a model that is evaluated before it is trained, or trained in evaluation mode.
    held = optimized()
    return any(id(parameter) in held for parameter in free)


def topmost(module: nn.Module, alive: Iterable[nn.Module]) -> nn.Module:
    """Return the outermost living module that holds `module` at any depth, or `module` if there are several or none.

    A LightningModule is never called itself: its `training_step` is called, and calls its parts.
    """
    holders: dict[int, list[nn.Module]] = {}
    for one in alive:
        for child in one._modules.values():
            if child is not None:
                holders.setdefault(id(child), []).append(one)
    tops: list[nn.Module] = []
    seen: set[int] = set()
    above = [module]
    while above:
        one = above.pop()
        if id(one) not in seen:
            seen.add(id(one))
            upper = holders.get(id(one), [])
            above += upper
            tops += [] if upper else [one]
    return tops[0] if len(tops) == 1 else module


def made(kind: type[_T]) -> list[_T]:
    """Return all living objects of a class or its subclasses that are fully made."""
    # An object before its __init__, or a copy under way, has no parts.
    return [one for one in instances_of(kind) if getattr(one, "__dict__", None)]


def is_inside_a_call(frame: FrameType | None) -> bool:
    """Return whether a call of a module is under way in `frame` or in one that led to it."""
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame is not None


class ModelFinder:
    """Context that calls `found(model)` for each model before its first call.

    The finder makes the calls of all modules without a wrapper; see instrumentation/slot.py. A call of a module that
    `found` watches takes no longer. Others take 1 µs more, and 3 µs when they are made from outside any other module.
    With `class_name`, a glob pattern, each module of such a class is a model, trained or not, also inside another one.
    If there is none when the first module with parameters is called, `unmatched(class names)` is called once, with the
    classes of the modules that no other holds. Without it a module that is called from outside any other one is a model
    if `accepts(module, optimized)` says so, as may_be_trained does. The search ends after `most` models. Until one is
    found, `untrained(model)` is called for each other module with weights or buffers, and `none()`, once, when modules
    without were called 16 times.

    The finder leaves a model alone that the script watches itself, and notes its class in `watched_already`. The
    drop-in for DebugUnderflowOverflow does not count: its Watch, of a subclass, acts on fewer values.

    `passed_over` has classes of modules that were called and are no model; modules inside another one only with
    `class_name`. `trouble` is the error that ended the search. `is_full` says that `most` models were found.
    """

    def __init__(
        self,
        found: Callable[[nn.Module], object],
        class_name: str | None = None,
        unmatched: Callable[[list[str]], object] = lambda names: None,
        *,
        accepts: Callable[[nn.Module, Callable[[], Collection[int]]], bool] = may_be_trained,
        most: int = MAX_MODELS,
        untrained: Callable[[nn.Module], object] | None = None,
        none: Callable[[], object] = lambda: None,
    ) -> None:
        self._found = found
        self._class_name = class_name
        self._unmatched = unmatched
        self._awaits_candidate = class_name is not None
        self._accepts = accepts
        self._left = most
        self._untrained = None if class_name is not None else untrained  # None as soon as a model is known
        self._untrained_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._none = none
        self._num_passed_over = 0
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Modules for which optimizers were looked for: without gradients, and with them.
        self._searched: tuple[weakref.WeakSet[nn.Module], ...] = (weakref.WeakSet(), weakref.WeakSet())
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._handles: Handles | None = None
        self.passed_over: dict[str, None] = {}
        self.watched_already: dict[str, None] = {}
        self.trouble = ""

    @property
    def is_full(self) -> bool:
        """True once `most` models were found and the search has ended."""
        return self._left <= 0

    def __enter__(self) -> ModelFinder:
        if default_call() is not None:
            raise RuntimeError("another ModelFinder looks for models already; end that first")

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # A compiler reads this function too; to it the module is itself.
            if is_compiling() or module in self._known or not self._try_to_look(module, sys._getframe(2)):
                return module._call_impl(*args, **kwargs)
            return nn.Module.__call__(module, *args, **kwargs)

        set_default_call(call)
        steps = after_steps.add(lambda optimizer, *_: self._optimizers.add(optimizer))
        self._handles = Handles(self, [steps, watch_starts.add(self._watch_started)])
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Look no more. A second time does nothing."""
        if self._handles is not None:
            self._handles.remove()
            self._handles = None
            set_default_call(None)
            leave_torch()

    def _watch_started(self, watch: Watch, model: nn.Module) -> None:
        if model in self._known:  # by `found`
            return
        name = type(model).__name__
        if type(watch) is Watch:
            if has_parameters(model):  # a callback checks its options on a module without
                self.watched_already[name] = None
                self._untrained = None
        elif self._class_name is None or fnmatchcase(name, self._class_name):
            self._take(model, model)

    def _try_to_look(self, module: nn.Module, caller: FrameType | None) -> bool:
        try:
            return self._look(module, caller)
        except Exception as error:  # an unwatched program is better than one that ends here
            self.stop()
            self.trouble = spell(error)
            warn_user(f"nanwatch looks for no more models: {self.trouble}")
            return False

    def _look(self, module: nn.Module, caller: FrameType | None) -> bool:
        """Return whether the module was found to be a model. `caller` is the frame of whoever calls it."""
        if type(module).__module__.startswith(
            _OWN
        ):  # the loss outside a model, which a re-run computes again
            return False
        if self._class_name is not None:
            is_candidate = True
            is_model = fnmatchcase(type(module).__name__, self._class_name)
            if is_model:
                self._awaits_candidate = False
            elif self._awaits_candidate and has_parameters(module):
                self._awaits_candidate = False
                self._check_class_name(self._class_name)
        else:
            is_candidate = not is_inside_a_call(caller)
            is_model = is_candidate and self.may_be_trained(module)
        if not (is_model or (is_candidate and self._stands_in(module))):
            if is_candidate:
                self._pass_over(module)
            return False
        model = module if self._class_name is not None else topmost(module, made(nn.Module))
        if is_model:
            self._take(module, model)
        elif self._untrained is not None:
            self._known.update((module, model))
            self._untrained_models.add(model)
            self._untrained(model)
        return True

    def may_be_trained(self, module: nn.Module) -> bool:
        """Return whether a module that is called from outside any other one is a model that may be trained by now."""
        return self._accepts(module, lambda: self._optimized(module))

    def _stands_in(self, module: nn.Module) -> bool:
        """Return whether the module is a model as long as none that is trained was called."""
        if self._untrained is None or not (has_parameters(module) or any(True for _ in module.buffers())):
            return False
        # One that was evaluated first may be in training since.
        if len(self._untrained_models) == MAX_MODELS or any(map(self.may_be_trained, self._untrained_models)):
            self._untrained = None
        return self._untrained is not None

    def _pass_over(self, module: nn.Module) -> None:
        if len(self.passed_over) < 5:
            self.passed_over[type(module).__name__] = None
        self._num_passed_over += 1
        if self._num_passed_over == _PATIENCE and not (self._known or self.watched_already):
            self._none()

    def _take(self, module: nn.Module, model: nn.Module) -> None:
        self._known.update((module, model))
        self._untrained = None
        self._left -= 1
        if self.is_full:
            self.stop()
        self._found(model)

    def _check_class_name(self, class_name: str) -> None:
        alive = made(nn.Module)
        if any(fnmatchcase(type(one).__name__, class_name) for one in alive):
            return
        held = {id(child) for one in alive for child in one._modules.values()}
        whole = (one for one in alive if id(one) not in held and has_parameters(one))
        self._unmatched(sorted({type(one).__name__ for one in whole}))

    def _optimized(self, module: nn.Module) -> set[int]:
        # A search for optimizers takes 0.1 s among 400,000 objects. It runs once for the module's evaluation, which may
        # come before there is an optimizer, and once for its training. Later optimizers are noticed by their step.
        searched = self._searched[torch.is_grad_enabled()]
        if module not in searched:
            searched.add(module)
            self._optimizers.update(made(Optimizer))
        return {
            id(parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
