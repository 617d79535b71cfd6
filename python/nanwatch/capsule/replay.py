"""A capsule's call made again: its module, arguments and modes. The watch over it is the caller's."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..instrumentation.calls import check_model
from ..instrumentation.execution_context import RngState
from ..report.report import Report
from ..util.messages import close_names, first_few, spell, suppressing, visible, without_wrappers
from .capsule import MARK, Capsule

_BUILT = "build the model as the recorded one was built"
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)

Model: TypeAlias = "nn.Module | Callable[[], nn.Module]"


class Replayed(NamedTuple):
    """Result of a replay: the report, and remarks on the differences from the recorded call."""

    report: Report
    remarks: tuple[str, ...]
    device: torch.device


def call_again(
    capsule: Capsule,
    model: Model,
    watch: Callable[[nn.Module], Any],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> Replayed:
    """Make a capsule's call again, inside `watch(module)`: see `nanwatch.replay`, whose Watch it is."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype should be one of floating point, such as torch.float32, got {dtype!r}")
    call = _Call(capsule, dtype, device)
    before = RngState.capture(others=True)
    try:
        module = _module(capsule, model)
        check_model(module)
        call.load(module)
        args, kwargs = call.arguments(module)
        with ExitStack() as modes:
            modes.enter_context(torch.no_grad())
            if "torch._dynamo" in sys.modules:  # run compiled modules eagerly, so that each is seen
                modes.enter_context(torch.compiler.set_stance("force_eager"))
            call.enter_autocast(modes)
            whole = _whole(module, capsule.module)  # which a watch does not hold
            watched = modes.enter_context(watch(whole))
            call.restore_rng()
            module(*args, **kwargs)
        report = watched.report()
    finally:
        before.restore()
    remarks, finding = tuple(call.remarks), report.finding
    batch = 0 if capsule.finding is None else capsule.finding.batch
    frames = tuple(frame._replace(batch=batch) for frame in report.frames)
    if finding is not None:
        finding = replace(finding, batch=batch, remarks=(*finding.remarks, *remarks))
    return Replayed(replace(report, frames=frames, batch=batch, finding=finding), remarks, call.target)


# The module.


def _module(capsule: Capsule, model: Model) -> nn.Module:
    """Return the module of the capsule: a copy from the caller's model, or the original from a callable's."""
    made = model() if callable(model) and not isinstance(model, nn.Module) else model
    if not isinstance(made, nn.Module):
        kind = type(made).__name__
        raise TypeError(f"replay needs a torch.nn.Module or a callable that makes one, got one of {kind}")
    modules = dict(made.named_modules(remove_duplicate=False))
    plain = {without_wrappers(name): module for name, module in modules.items()}
    named = modules.get(capsule.module) or plain.get(without_wrappers(capsule.module))
    fitting = [x for x in (named, made) if x is not None and type(x).__name__ == capsule.class_name]
    if not fitting:
        fault = f"has no such module and is none; {close_names(capsule.module, modules)}"
        if named is not None:
            fault = f"has a {type(named).__name__} of that name"
        name, kind = capsule.module or "the root module", visible(capsule.class_name)
        raise ValueError(f"the capsule is of {name!r}, a {kind}; this model ({type(made).__name__}) {fault}")
    try:
        return copy.deepcopy(fitting[0]) if made is model else fitting[0]
    except Exception as error:
        why, hint = spell(error), "pass a callable that makes the model, and that one is used"
        raise ValueError(f"the module {capsule.module!r} cannot be copied ({why}); {hint}") from error


def _whole(module: nn.Module, name: str) -> nn.Module:
    """Return a module that holds the given one by its name in the whole model, so that a report has that name too."""
    for part in reversed([part for part in name.split(".") if part]):
        around = nn.ModuleList() if part.isdecimal() else nn.Module()
        around._modules[part] = module
        module = around
    return module


# The call.


class _Call:
    """The call of a capsule on the device and in the dtype of the run."""

    def __init__(
        self, capsule: Capsule, dtype: torch.dtype | None, device: torch.device | str | None
    ) -> None:
        self.capsule, self.dtype = capsule, dtype
        self.remarks: list[str] = []
        self.recorded = torch.device(capsule.device)
        self.target = torch.device("cpu" if device is None else device)
        if device is None:
            with suppressing("a device cannot be used here"):
                self.target = torch.device(torch.empty(1, device=self.recorded.type).device.type)
        if self.target.type != self.recorded.type:
            devices = f"the recorded call ran on {self.recorded}, this one on {self.target}"
            self.remarks.append(f"{devices}: other kernels, other random numbers")
        version, here = capsule.versions.get("torch"), str(torch.__version__)
        if version != here:
            self.remarks.append(f"the recorded call ran in torch {version}, this one in {here}")
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def _move(self, x: Tensor) -> Tensor:
        """Return the tensor of the run. A tensor that occurs twice stays one."""
        if id(x) not in self._moved:
            dtype = self.dtype if self.dtype is not None and x.is_floating_point() else x.dtype
            moved = x.detach().to(self.target, dtype, copy=True).requires_grad_(x.requires_grad)
            self._moved[id(x)] = x, moved  # keep `x`: its id is unique only while it lives
        return self._moved[id(x)][1]

    def load(self, module: nn.Module) -> None:
        flags = self.capsule.training
        places = {}
        for path, submodule in module.named_modules(remove_duplicate=False):
            submodule.training = flags.get(path, flags[""])
            for tensors in (submodule._parameters, submodule._buffers):
                for name, x in tensors.items():
                    if x is not None:
                        places[f"{path}.{name}".removeprefix(".")] = (tensors, name, x)
        if unknown := sorted(self.capsule.state.keys() - places.keys()):
            kind, names = visible(self.capsule.class_name), visible(first_few(unknown, 1))
            raise ValueError(f"this {kind} has no weight or buffer {names}, which the capsule has; {_BUILT}")
        loaded: dict[int, Tensor] = {}  # a tied weight stays one
        for path, (tensors, name, x) in places.items():
            if id(x) not in loaded:
                loaded[id(x)] = _loaded(x, self._value(path, x).detach())
            tensors[name] = loaded[id(x)]

    def _value(self, path: str, x: Tensor) -> Tensor:
        recorded = self.capsule.state.get(path)
        if isinstance(recorded, Tensor):
            if recorded.shape != x.shape and not nn.parameter.is_lazy(x):
                shapes = f"{list(recorded.shape)} in the capsule and {list(x.shape)} in this model"
                raise ValueError(f"{path!r} has the shape {shapes}; {_BUILT}")
            return self._move(recorded)
        if x.is_meta or nn.parameter.is_lazy(x):
            where = "neither in the capsule nor in this model; load a checkpoint first"
            raise ValueError(f"{path!r} has no values, {where}")
        why = f"without {_left_out(recorded)}" if _left_out(recorded) else f"{path} is not in the capsule"
        self.remarks.append(f"{why}; the model's own values were used")
        return self._move(x)

    def arguments(self, module: nn.Module) -> tuple[list[Any], dict[str, Any]]:
        parameters: Mapping[str, Parameter] = {}
        with suppress(TypeError, ValueError):  # of a forward without one, as of C
            parameters = signature(module.forward).parameters
        positional = [parameter for parameter in parameters.values() if parameter.kind in _BY_POSITION]
        by_key: dict[Any, Parameter] = {**dict(enumerate(positional)), **parameters}
        args = [self._argument(x, by_key.get(number)) for number, x in enumerate(self.capsule.args)]
        kwargs = {name: self._argument(x, by_key.get(name)) for name, x in self.capsule.kwargs.items()}
        return args, kwargs

    def _argument(self, value: Any, parameter: Parameter | None) -> Any:
        why = _left_out(value)
        if why and parameter is not None and parameter.default is not Parameter.empty:
            # Most calls do not need it: a cache that is empty in training, a dictionary of options.
            self.remarks.append(f"without {why}; its default, {parameter.default!r:.40}, was used")
            return parameter.default
        return self._placed(value)

    def _placed(self, value: Any) -> Any:
        """Return a value of the capsule as the call gets it."""
        if isinstance(value, Tensor):
            return self._move(value)
        if isinstance(value, torch.device):
            return self.target if value == self.recorded else value
        if why := _left_out(value):
            raise ValueError(f"the call cannot be made again without {why}")
        if isinstance(value, dict):
            return {key: self._placed(x) for key, x in value.items()}
        return type(value)(map(self._placed, value)) if type(value) in (list, tuple) else value

    def enter_autocast(self, modes: ExitStack) -> None:
        """Enter the recorded device's autocast for the device of the run, or none with another dtype."""
        recorded = {state.device_type: state for state in self.capsule.autocast}
        for kind in dict.fromkeys(("cpu", self.target.type)):
            state = recorded.get(self.recorded.type if kind == self.target.type else kind)
            if state is None or self.dtype is not None or not state.enabled:
                modes.enter_context(torch.autocast(kind, enabled=False))
            else:
                modes.enter_context(replace(state, device_type=kind).context())

    def restore_rng(self) -> None:
        """Restore the states of the CPU and of the device that ran the call, wherever it runs now."""
        rng, number = self.capsule.rng, self.recorded.index or 0
        torch.set_rng_state(rng.torch)
        if self.recorded.type == self.target.type == "cuda" and number < len(rng.cuda):
            torch.cuda.set_rng_state(rng.cuda[number], self.target)


def _left_out(value: Any) -> str:
    """Return what was left out, and why; "" for a value of the call."""
    is_marked = isinstance(value, dict) and value.get(MARK) == "left out"
    return str(value.get("why")) if is_marked else ""


def _loaded(old: Tensor, value: Tensor) -> Tensor:
    """Return a weight or buffer with this value: the same object if possible, because others may hold it."""
    if not nn.parameter.is_lazy(old) and (value.is_floating_point() or not old.requires_grad):
        with suppress(RuntimeError):  # another kind of tensor, such as a sparse one
            old.data = value
            return old
    if isinstance(old, nn.Parameter):
        return nn.Parameter(value, old.requires_grad and (value.is_floating_point() or value.is_complex()))
    return value
