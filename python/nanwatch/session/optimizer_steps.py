"""Hooks of a Watch around the steps of optimizers.

Before a step: wait for rows that a device still holds, stop non-finite gradients. After it: read the optimizer's state.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.compiler import is_compiling
from torch.optim.optimizer import Optimizer

from ..instrumentation.global_hooks import Handles, after_steps, before_steps
from ..instrumentation.wrapped_names import parameter_names
from ..recording.events import Recorder
from ..recording.job import rank
from ..recording.observe import observe
from ..report.finding import find
from ..report.record import Row, is_fault
from ..util.modules import each_parameter
from .reports import Reports

if TYPE_CHECKING:
    from .backward_watch import BackwardWatch
    from .failure_handler import FailureHandler
    from .options import Options

# Name of the frames of an optimizer's state.
_OPTIMIZER = "(optimizer)"


class OptimizerSteps:
    """Checks before every step of an optimizer, and the state of one optimizer after its steps.

    What `failures` raises, the step raises, and no weight has changed. A step waits for pending rows of forwards with
    check="async" and of gradients, if it may change the model: the step of an optimizer with one of its parameters, of
    the optimizer in the options, and of any optimizer where gradients are watched or parameters are shards, which an
    optimizer may hold in another form. A step's closure is followed by the same checks, because the weights change
    next.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        options: Options,
        reports: Reports,
        failures: FailureHandler,
        backward: BackwardWatch | None,
    ) -> None:
        self._model = weakref.ref(model)
        self._recorder = recorder
        self._options = options
        self._reports = reports
        self._failures = failures
        self._backward = backward
        self._waits = recorder.has_devices and (options.check == "async" or options.gradients)
        self._given = None if options.optimizer is None else weakref.ref(options.optimizer)
        # One search for each optimizer, unless it gets a group: 0.5 ms for the parameters of 400 modules.
        self._own: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()
        self._has_read_state = options.optimizer is None
        this = weakref.ref(self)

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            own = this()
            if own is None:
                return None
            if is_compiling():
                return own._before_compiled_step(optimizer, args, kwargs)
            return own._before_step(optimizer, args, kwargs)

        def after(optimizer: Optimizer, *_: Any) -> None:
            if (own := this()) is not None and own._steps_given(optimizer):
                own._read_state(optimizer)

        hooks = [before_steps.add(before)]
        if options.optimizer is not None:
            self._node = recorder.add_node(_OPTIMIZER, options.optimizer, False, False)
            hooks.append(after_steps.add(after))
        self._hooks = Handles(self, hooks)

    def remove(self) -> None:
        """Look at no more steps."""
        self._hooks.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._failures.raise_postponed()
        changed = None
        self._take_pending(optimizer)
        if self._waits and self._is_own(optimizer):
            changed = _with_check_after_closure(optimizer, args, kwargs, lambda: self._check(optimizer))
        if self._backward is not None:
            self._backward.before_step(optimizer)
        if not self._has_read_state and self._steps_given(optimizer):
            self._has_read_state = True
            if optimizer.state:  # from a checkpoint
                self._read_state(optimizer)
        return changed

    # Otherwise torch.compile compiles this with the step, function by function.
    _before_compiled_step = _disable_dynamo(_before_step)

    def _check(self, optimizer: Optimizer) -> None:
        self._take_pending(optimizer)
        if self._backward is not None:
            self._backward.before_step(optimizer)

    def _take_pending(self, optimizer: Optimizer) -> None:
        if not (self._waits or self._recorder.may_be_pending):  # a few µs less, as on a CPU
            return
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
            # What feeds the model gets its gradients from it, and another optimizer may have that.
            self._options.gradients
            or self._recorder.gathers_weights
            or self._steps_given(optimizer)
            or (model is not None and any(id(x) in held for x in each_parameter(model)))
        )
        self._own[optimizer] = count, is_own
        return is_own

    def _steps_given(self, stepping: Optimizer) -> bool:
        """Return whether `stepping` is the optimizer in the options, or is inside it.

        The step of a wrapper, such as Accelerate's, calls no hooks itself.
        """
        given = None if self._given is None else self._given()
        if given is None or stepping is given:
            return given is not None
        return stepping.param_groups is given.param_groups and not getattr(type(given).step, "hooked", False)

    def _read_state(self, optimizer: Optimizer) -> None:
        batch = self._recorder.latest_batch
        if self._recorder.paused or batch < 0 or batch % self._options.every:
            return
        model = self._model()
        rows = state_rows(optimizer, {} if model is None else parameter_names(model))
        self._recorder.add_frame(batch, self._node, rows)
        if not any(map(is_fault, rows)):
            return
        report = self._reports.latest(None, batch)
        num_frames = self._recorder.frames_of_batch(batch)
        finding = find(report.frames[-1:], rank=rank(), num_frames=num_frames)
        self._failures.step_follows(replace(report, finding=finding))


def state_rows(optimizer: Optimizer, names: dict[int, str]) -> list[Row]:
    """Return the rows of an optimizer's state: `exp_avg[0.weight]`, with the name of its parameter.

    `names` are those of the model's parameters, by id. Another parameter, such as a float32 copy of a weight, is called
    by its place, `[group][position]`, and has a row of its own: `param[0][3]`. Step counts are left out.
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


def _with_check_after_closure(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of the step, with `check` after its closure; None for a step without a closure.

    Lightning makes forward and backward in a closure, also for optimizers that call it once.
    """
    if len(args) < 2 and not kwargs:
        return None
    names = list(inspect.signature(type(optimizer).step).parameters)
    place = names.index("closure") if "closure" in names else len(args)
    closure = args[place] if place < len(args) else kwargs.get("closure")
    if not callable(closure):
        return None

    @functools.wraps(closure)
    def checked(*own: Any, **named: Any) -> Any:
        loss = closure(*own, **named)
        check()
        return loss

    if place < len(args):
        return (*args[:place], checked, *args[place + 1 :]), kwargs
    return args, {**kwargs, "closure": checked}
