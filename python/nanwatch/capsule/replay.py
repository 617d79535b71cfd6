"""A capsule's call made again: its module, arguments and modes. The watch over it is the caller's."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..instrumentation.calls import check_model
from ..instrumentation.execution_context import RngState
from ..report.report import Report
from ..util.visible import close_names, suppressed, visible, without_wrappers
from .capsule import Capsule
from .values import LeftOut, Structure

# Parts of a module's name. A capsule may hold any text, and a walk over modules recurses.
_DEEPEST = 64

Model: TypeAlias = "nn.Module | Callable[[], nn.Module]"


@dataclass(frozen=True, slots=True)
class Replayed:
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
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype should be one of floating point, such as torch.float32, got {dtype}")
    remarks: list[str] = []
    target = _target(capsule, device, remarks)
    before = RngState.capture(others=True)
    try:
        module = _module(capsule, model)
        check_model(module)
        call = _Restored(capsule, target, dtype, remarks)
        call.load(module)
        args, kwargs = call.arguments(module)
        with ExitStack() as modes:
            modes.enter_context(torch.no_grad())
            if "torch._dynamo" in sys.modules:
                # Run compiled modules eagerly, so that each is seen.
                modes.enter_context(torch.compiler.set_stance("force_eager"))
            _enter_autocast(capsule, target, dtype, modes)
            whole = _whole(module, capsule.module)  # which a watch does not hold
            watched = modes.enter_context(watch(whole))
            _restore_rng(capsule.rng, torch.device(capsule.device), target)
            module(*args, **kwargs)
        report = watched.report()
    finally:
        before.restore()
    if report.finding is not None:
        finding = replace(report.finding, remarks=(*report.finding.remarks, *remarks))
        report = replace(report, finding=finding)
    return Replayed(report, tuple(remarks), target)


def _target(capsule: Capsule, device: torch.device | str | None, remarks: list[str]) -> torch.device:
    """Return the device of the run: the recorded one, else one of its kind, else the CPU."""
    recorded = torch.device(capsule.device)
    nearest = [recorded, torch.device(recorded.type)] if recorded.type != "meta" else []
    target = (
        next(filter(_is_usable, nearest), torch.device("cpu")) if device is None else torch.device(device)
    )
    if target.type != recorded.type:
        remarks.append(
            f"the recorded call ran on {recorded}, this one on {target}: other kernels, other random numbers"
        )
    here = str(torch.__version__)
    if capsule.versions.get("torch") != here:
        remarks.append(f"the recorded call ran in torch {capsule.versions.get('torch')}, this one in {here}")
    return target


def _is_usable(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    try:
        torch.empty(1, device=device)
    except Exception:
        suppressed("a device cannot be used here")
        return False
    return True


def _module(capsule: Capsule, model: Model) -> nn.Module:
    """Return the module of the capsule: a copy from the caller's model, or the original from a callable's."""
    if isinstance(model, nn.Module):
        module = _find(capsule, model)
        try:
            return copy.deepcopy(module)
        except Exception as error:
            raise ValueError(
                f"the module {capsule.module!r} cannot be copied ({type(error).__name__}: {error});"
                " pass a callable that makes the model, and that one is used"
            ) from error
    made = model()
    if not isinstance(made, nn.Module):
        raise TypeError(
            f"replay needs a torch.nn.Module or a callable that makes one, got one of {type(made).__name__}"
        )
    return _find(capsule, made)


def _whole(module: nn.Module, name: str) -> nn.Module:
    """Return a module that holds the given one by its name in the whole model, so that a report has that name too."""
    for part in reversed([part for part in name.split(".", _DEEPEST) if part]):
        around = nn.ModuleList() if part.isdecimal() else nn.Module()
        around._modules[part] = module
        module = around
    return module


def _find(capsule: Capsule, model: nn.Module) -> nn.Module:
    modules = dict(model.named_modules(remove_duplicate=False))
    plain = {without_wrappers(name): module for name, module in modules.items()}
    same = plain.get(without_wrappers(capsule.module))
    named = modules.get(capsule.module) or same
    for candidate in (named, same, model):
        if candidate is not None and type(candidate).__name__ == capsule.class_name:
            return candidate
    name, kind = capsule.module or "the root module", visible(capsule.class_name)
    if named is not None:
        raise ValueError(
            f"the capsule is of a {kind}, {name!r}; in this model {name!r} is a {type(named).__name__}"
        )
    raise ValueError(
        f"the capsule is of {name!r}, a {kind}; this model ({type(model).__name__}) has no such"
        f" module and is none; {close_names(capsule.module, modules)}"
    )


@dataclass
class _Restored:
    """The call of a capsule on the device and in the dtype of the run."""

    capsule: Capsule
    target: torch.device
    dtype: torch.dtype | None
    remarks: list[str]

    def __post_init__(self) -> None:
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def _move(self, x: Tensor) -> Tensor:
        """Return the tensor of the run. A tensor that occurs twice stays one."""
        if id(x) not in self._moved:
            dtype = self.dtype if self.dtype is not None and x.is_floating_point() else x.dtype
            moved = x.detach().to(self.target, dtype, copy=True).requires_grad_(x.requires_grad)
            self._moved[id(x)] = x, moved  # keep `x`: its id is unique only while it lives
        return self._moved[id(x)][1]

    def load(self, module: nn.Module) -> None:
        """Give the module the weights, buffers and training flags."""
        flags = self.capsule.training
        for path, submodule in module.named_modules():
            submodule.training = flags.get(path, flags[""])
        places = {}
        for path, submodule in module.named_modules(remove_duplicate=False):
            for name, x in [*submodule._parameters.items(), *submodule._buffers.items()]:
                if x is not None:
                    places[f"{path}.{name}" if path else name] = (submodule, name, x)
        if unknown := sorted(self.capsule.state.keys() - places.keys()):
            raise ValueError(
                f"this {visible(self.capsule.class_name)} has no weight or buffer {unknown[0]!r}, which the capsule has"
                + (f", nor {len(unknown) - 1} more" if unknown[1:] else "")
                + "; build the model as the recorded one was built"
            )
        done: dict[int, Tensor] = {}
        for path, (submodule, name, x) in places.items():
            if id(x) not in done:
                done[id(x)] = _put(submodule, name, x, self._value(path, x))
            elif submodule._parameters.get(name, submodule._buffers.get(name)) is not done[id(x)]:
                setattr(submodule, name, done[id(x)])

    def _value(self, path: str, x: Tensor) -> Tensor:
        recorded = self.capsule.state.get(path)
        if isinstance(recorded, Tensor):
            if recorded.shape != x.shape and not nn.parameter.is_lazy(x):
                raise ValueError(
                    f"{path!r} has the shape {list(recorded.shape)} in the capsule and {list(x.shape)} in this model;"
                    " build the model as the recorded one was built"
                )
            return self._move(recorded)
        if x.is_meta or nn.parameter.is_lazy(x):
            raise ValueError(
                f"{path!r} has no values, neither in the capsule nor in this model; load a checkpoint first"
            )
        why = f"was left out: {recorded.why}" if isinstance(recorded, LeftOut) else "is not in the capsule"
        self.remarks.append(f"{path} {why}; the model's own values were used")
        return self._move(x)

    def arguments(self, module: nn.Module) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the keyword arguments."""
        try:
            parameters = dict(signature(module.forward).parameters)
        except (TypeError, ValueError):
            parameters = {}
        by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        positional = [each for each in parameters.values() if each.kind in by_position]
        args = [
            self._argument(x, f"input[{i}]", positional[i] if i < len(positional) else None)
            for i, x in enumerate(self.capsule.args)
        ]
        kwargs = {
            name: self._argument(x, f"input[{name}]", parameters.get(name))
            for name, x in self.capsule.kwargs.items()
        }
        return args, kwargs

    def _argument(self, value: Any, label: str, parameter: Parameter | None) -> Any:
        if isinstance(value, LeftOut) and parameter is not None and parameter.default is not Parameter.empty:
            # Mostly the call does not need it: a cache that is empty in training, a dictionary of options.
            self.remarks.append(f"without {value}; its default, {parameter.default!r:.40}, was used")
            return parameter.default
        return self._place(value, label)

    def _place(self, value: Any, label: str) -> Any:
        if isinstance(value, Tensor):
            return self._move(value)
        if isinstance(value, LeftOut):
            raise ValueError(f"the call cannot be made again without {value}")
        if isinstance(value, torch.device):
            return self.target if value == torch.device(self.capsule.device) else value
        if isinstance(value, Structure):
            content = {name: self._place(x, f"{label}[{name}]") for name, x in value.fields.items()}
            try:
                return replace(value, fields=content).build()
            except LookupError as error:
                self.remarks.append(f"{label} is a plain object with the same fields: {error.args[0]}")
                return SimpleNamespace(**content)
        if isinstance(value, dict):
            return {key: self._place(x, f"{label}[{key}]") for key, x in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._place(x, f"{label}[{i}]") for i, x in enumerate(value))
        return value


def _put(owner: nn.Module, name: str, old: Tensor, value: Tensor) -> Tensor:
    """Replace a weight or buffer by `value`, in the same object if possible, because others may hold it."""
    fits = torch._has_compatible_shallow_copy_type(old, value) and not nn.parameter.is_lazy(old)
    if fits and not (old.requires_grad and not value.is_floating_point()):
        old.data = value.detach()
        return old
    put = value.detach()
    if isinstance(old, nn.Parameter):
        put = nn.Parameter(put, old.requires_grad and (put.is_floating_point() or put.is_complex()))
    setattr(owner, name, put)
    return put


def _enter_autocast(
    capsule: Capsule, target: torch.device, dtype: torch.dtype | None, modes: ExitStack
) -> None:
    """Enter the recorded device's autocast for the device of the run, or none with another dtype."""
    recorded = {state.device_type: state for state in capsule.autocast}
    for kind in dict.fromkeys(("cpu", target.type)):
        same = recorded.get(torch.device(capsule.device).type if kind == target.type else kind)
        if same is None or dtype is not None or not same.enabled:
            modes.enter_context(torch.autocast(kind, enabled=False))
        else:
            modes.enter_context(replace(same, device_type=kind).context())


def _restore_rng(rng: RngState, recorded: torch.device, target: torch.device) -> None:
    """Restore the states of the CPU and of the device that ran the call, wherever it runs now."""
    torch.set_rng_state(rng.torch)
    if recorded.type == target.type == "cuda" and (recorded.index or 0) < len(rng.cuda):
        torch.cuda.set_rng_state(rng.cuda[recorded.index or 0], target)


def dtype_of(capsule: Capsule) -> str:
    """Return the dtype of the recorded call in words: `float32, autocast float16`."""
    sizes: dict[torch.dtype, int] = {}
    for x in (*capsule.state.values(), *capsule.args, *capsule.kwargs.values()):
        if isinstance(x, Tensor) and x.is_floating_point():
            sizes[x.dtype] = sizes.get(x.dtype, 0) + x.numel()
    main = str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.") if sizes else "no float"
    kind = torch.device(capsule.device).type
    active = next((state for state in capsule.autocast if state.device_type == kind and state.enabled), None)
    return main if active is None else f"{main}, autocast {str(active.dtype).removeprefix('torch.')}"
