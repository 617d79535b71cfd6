"""Check before an optimizer's step of what the step is about to take, whose rows a device may still hold."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo
from torch.compiler import is_compiling
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import Handles, before_steps
from ..recording.events import Recorder
from ..util.modules import each_parameter
from .backward_watch import steps_for
from .options import Options


class PreStepCheck:
    """Looks before every step of an optimizer at what has come, and waits for what has not: forwards with
    check="async", and gradients.

    What the recorder's listener raises then, and what `raise_postponed()` raises, the step raises, and no weight has
    changed. Only a step that may change the model is waited for: that of an optimizer with one of its parameters, of
    the one that the options name, and of any where the parameters are shards, which an optimizer may hold in another
    form, or where gradients are watched. A closure is looked at when it has run, as the step changes the weights next:
    `step_follows(optimizer)` is called then.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        options: Options,
        raise_postponed: Callable[[], None],
        step_follows: Callable[[Optimizer], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._waits = recorder.has_devices and (options.check == "async" or options.gradients)
        # What feeds the model gets its gradients from it, and another optimizer may have that.
        self._looks_at_all = options.gradients
        self._given = None if options.optimizer is None else weakref.ref(options.optimizer)
        self._raise_postponed = raise_postponed
        self._step_follows = step_follows
        # Found once each, unless a group was added: to go through the parameters of 400 modules takes 0.5 ms.
        self._own: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        this = weakref.ref(self)

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            own = this()
            if own is None:
                return None
            # Where nothing can be late, as on a CPU, a few µs are saved.
            if is_compiling() or own._waits or own._recorder.may_be_pending:
                return own._before_step(optimizer, args, kwargs)
            return own._raise_postponed()

        self._hooks = Handles(self, [before_steps.add(before)] if options.enabled else [])

    def remove(self) -> None:
        """Look at no more steps."""
        self._hooks.remove()

    @_disable_dynamo  # else a compiled step has this compiled too, function by function
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._raise_postponed()
        self._look(optimizer)
        if not self._waits or not self._is_own(optimizer):
            return None
        return _with_look_after_closure(optimizer, args, kwargs, lambda: self._after_closure(optimizer))

    def _after_closure(self, optimizer: Optimizer) -> None:
        self._look(optimizer)
        self._step_follows(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        self._recorder.poll(False)
        if self._waits and self._recorder.may_be_pending and self._is_own(optimizer):
            self._recorder.await_before_step()

    def _is_own(self, optimizer: Optimizer) -> bool:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._own.get(optimizer)
        if known is not None and (known[1] or known[0] == count):
            return known[1]
        model = self._model()
        held = {id(x) for group in optimizer.param_groups for x in group["params"]}
        is_own = (
            self._looks_at_all
            or self._recorder.gathers_weights
            or (self._given is not None and steps_for(optimizer, self._given()))
            or (model is not None and any(id(x) in held for x in each_parameter(model)))
        )
        self._own[optimizer] = count, is_own
        return is_own


def _with_look_after_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], look: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of the step, with `look` after its closure; None where it has none.

    Lightning makes forward and backward in one, also for optimizers that call it once.
    """
    if len(args) < 2 and not kwargs:
        return None
    names = list(inspect.signature(type(optimizer).step).parameters)
    place = names.index("closure") if "closure" in names else len(args)
    closure = args[place] if place < len(args) else kwargs.get("closure")
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def looked_at(*own: Any, **named: Any) -> Any:
        loss = closure(*own, **named)
        look()
        return loss

    if place < len(args):
        return (*args[:place], looked_at, *args[place + 1 :]), kwargs
    return args, {**kwargs, "closure": looked_at}
