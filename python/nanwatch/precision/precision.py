"""Modules that compute in float32 though all around them is narrower: `run_in_fp32`.

A wrapper takes the slot of the module's `forward`. Hooks would see an exception only with always_call, do not see
direct calls of `forward`, and cannot lend the module other weights. The slot is an instance attribute, so copies and
pickles take it with them, and the wrapper pickles by its class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..instrumentation.wrapped_names import find_module, named_modules
from ..recording.walk import MAX_DEPTH
from ..util.messages import close_names, suppressed

NARROW = (torch.float16, torch.bfloat16)
# The kinds of device that autocast knows and that need no package of their own to be asked about.
_KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla")
_SCALARS = (int, float, str, bytes, type(None))
_SLOT = "forward"


def run_in_fp32(
    module: nn.Module | str, model: nn.Module | None = None, *, cast_output: bool = True
) -> Fp32Handle:
    """Run `module` in float32 from now on, with everything inside it.

    In each of its calls autocast is off, float16 and bfloat16 tensors among its arguments come as float32, and half
    precision weights and buffers are used as float32 copies through which gradients reach the weights themselves.
    `state_dict` and optimizers see no change, and copies and pickles of the module run in float32 too.

    Args:
        module: the module, or its name in `model`.
        model: needed for a name only.
        cast_output: cast float32 results to the half precision of the first floating-point argument (without one: of
            the weights, if autocast is off). A result too large for that becomes inf. False leaves float32, for a
            caller that can take it, as under autocast.

    Returns a handle: `remove()`, or the end of its `with` block, undoes it. A second call for the same module does no
    harm; the latest decides about the output.

    Raises ValueError for a name that `model` does not have and for a module that is never called, such as a ModuleList;
    TypeError for an object that is no module, a name without a model, and a ScriptModule.

    Examples:
        >>> import nanwatch, torch
        >>> layer = torch.nn.Linear(2, 2).half()
        >>> with nanwatch.run_in_fp32(layer, cast_output=False):
        ...     layer(torch.ones(1, 2, dtype=torch.float16)).dtype
        torch.float32
    """
    module = _resolve(module, model)
    wrappers = [_ForwardWrapper(module, cast_output=cast_output)]
    if any(p.dtype in NARROW for p in module.parameters()):
        inner = (x for x in module.modules() if x is not module and is_called(x) and not _is_script(x))
        wrappers += [_ForwardWrapper(x, cast_output=False, is_inner=True) for x in inner]
    return Fp32Handle(wrappers)


class Fp32Handle:
    """Handle of `run_in_fp32`: `remove()` or the end of a `with` block undoes it.

    It covers the modules it was made for: a copy of the model stays as it was copied.
    """

    def __init__(self, wrappers: list[_ForwardWrapper]) -> None:
        self._wrappers = wrappers

    def remove(self) -> None:
        """Let the modules compute as before, unless another handle holds them. A second time does nothing."""
        for wrapper in reversed(self._wrappers):
            wrapper.remove()
        self._wrappers = []

    def __enter__(self) -> Fp32Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _ForwardWrapper:
    """Wrapper in a module's `forward`. It calls what was found there (`before`, None for the forward of the class).

    The latest of several gets a call first: those behind it meet float32 and leave it. `is_inner`: made for a module
    inside the one that was asked for. Its weights are lent already, by the call around it, except where activation
    checkpointing calls it again in the backward, with no such call around it.
    """

    def __init__(self, module: nn.Module, *, cast_output: bool, is_inner: bool = False) -> None:
        self.module = module
        self.cast_output, self.is_inner, self.is_on = cast_output, is_inner, True
        self.before: Callable[..., Any] | None = module.__dict__.get(_SLOT)
        self.kinds = autocast_kinds()
        # Not by setattr: a class with a __setattr__ of its own would make something else of it.
        module.__dict__[_SLOT] = self

    def remove(self) -> None:
        """Pass calls on from now. Leave the module once nobody has a wrapper above this one."""
        self.is_on = False
        slots = self.module.__dict__
        while isinstance(top := slots.get(_SLOT), _ForwardWrapper) and not top.is_on:
            if top.before is None:
                del slots[_SLOT]
            else:
                slots[_SLOT] = top.before

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Return the forward behind this; through it `inspect.signature` reads the arguments."""
        return MethodType(type(self.module).forward, self.module) if self.before is None else self.before

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        given = _first_float((args, kwargs))
        # An inner module that gets no float32 is called from outside, as one that two models share.
        if not self.is_on or (self.is_inner and (given is None or given in NARROW)):
            return self._behind(args, kwargs)
        enabled = [kind for kind in self.kinds if torch.is_autocast_enabled(kind)]
        back = self._given_back(given, bool(enabled)) if self.cast_output else None
        lent = _lend(self.module)
        # A weight that was parametrized before, as parametrize.cached() keeps it, has another dtype.
        cache = swap_parametrizations({}) if parametrize._cache_enabled > 0 else None
        try:
            args, kwargs = cast(args, NARROW, torch.float32), cast(kwargs, NARROW, torch.float32)
            output = _without_autocast(enabled, self._behind, args, kwargs)
        finally:
            if cache is not None:
                swap_parametrizations(cache)
            _take_back(lent)
        return output if back is None else cast(output, (torch.float32,), back, scalars=False)

    def _behind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Not through a bound method made here, which torch.compile does not follow.
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def _given_back(self, given: torch.dtype | None, autocast: bool) -> torch.dtype | None:
        """Return the dtype that float32 results take for the code around, or None to leave them."""
        if isinstance(self.module, _WIDE_RESULT) and autocast:
            return None
        if given is None and not autocast:
            return next((p.dtype for p in self.module.parameters() if p.dtype in NARROW), None)
        return given if given in NARROW else None


# CUDA's autocast computes these in float32 and gives float32: narrower than before would be no help.
_WIDE_RESULT = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmin,
    nn.Softplus,
    nn.CosineSimilarity,
    *nn.L1Loss.__bases__,  # the class of all losses
)


def is_called(module: nn.Module) -> bool:
    """Return whether the module has a forward at all; a ModuleList has none."""
    return _SLOT in module.__dict__ or type(module).forward is not nn.Module.forward


# Module, its table, name in it, the tensor that was there, its wide copy, and the version of that.
_Loan = tuple[nn.Module, str, str, Tensor, Tensor, int | None]


def _lend(module: nn.Module) -> list[_Loan]:
    """Put float32 copies in the place of the half precision weights and buffers, and say where and for what."""
    copies: dict[Tensor, Tensor] = {}
    lent = []
    for part in module.modules():
        if _is_script(part):
            continue
        for table in ("_parameters", "_buffers"):
            for name, half in getattr(part, table).items():
                if half is not None and half.dtype in NARROW:
                    # Tied weights stay tied.
                    if half not in copies:
                        copies[half] = half.to(torch.float32)
                    lent.append((part, table, name, half, copies[half], _version(copies[half])))
    # Only now: when memory ends above, nothing has happened yet.
    for part, table, name, _, wide, _ in lent:
        getattr(part, table)[name] = wide
    return lent


def _take_back(lent: list[_Loan]) -> None:
    """Put the module's own tensors back, with what the call wrote into the copies."""
    for part, table, name, half, wide, version in lent:
        tensors = getattr(part, table)
        if tensors[name] is not wide:
            continue  # The call has put another tensor there: that one stays.
        tensors[name] = half
        # Running statistics are written past the version counter.
        unsure = version is None or part.training
        if (unsure and table == "_buffers") or _version(wide) != version:
            is_inference = not torch.compiler.is_compiling() and half.is_inference()
            with torch.inference_mode() if is_inference else torch.no_grad():
                half.copy_(wide)


def _version(x: Tensor) -> int | None:
    """Return the version counter, where it can be read: not in inference mode, nor while torch.compile traces."""
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version


def _without_autocast(kinds: list[str], behind: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # Nested calls and no ExitStack, which torch.compile does not follow with autocast in it.
    if not kinds:
        return behind(args, kwargs)
    with torch.autocast(kinds[0], enabled=False):
        return _without_autocast(kinds[1:], behind, args, kwargs)


def _resolve(given: nn.Module | str, model: nn.Module | None) -> nn.Module:
    module: object = given
    if isinstance(given, str):
        if not isinstance(model, nn.Module):
            raise TypeError(f"run_in_fp32({given!r}) needs the model too: run_in_fp32({given!r}, model)")
        if (entry := find_module(model, given)) is None:
            names = [known.name for known in named_modules(model)]
            raise ValueError(f"{type(model).__name__} has no module {given!r}; {close_names(given, names)}")
        module = entry.module
    if not isinstance(module, nn.Module) or _is_script(module):
        raise TypeError(
            f"run_in_fp32 needs a torch.nn.Module, and none of torch.jit, got {type(module).__name__};"
            " pass the module itself, as it was before torch.jit"
        )
    if not is_called(module):
        raise ValueError(
            f"a {type(module).__name__} is never called, so it cannot run in float32; pass the modules in it"
        )
    return module


def _is_script(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


# Casts of the tensors inside nested Python values.


def autocast_kinds() -> tuple[str, ...]:
    """Return the kinds of device for which autocast can be on."""
    device = torch.accelerator.current_accelerator()  # perhaps of a package that brings its own kind
    names = _KINDS if device is None else dict.fromkeys((*_KINDS, device.type))
    return tuple(name for name in names if torch.amp.is_autocast_available(name))


def _first_float(value: Any) -> torch.dtype | None:
    """Return the dtype of the first floating-point tensor in tuples, lists, mappings and dataclasses, or None."""
    dtypes: list[torch.dtype] = []

    def note(x: Tensor) -> Tensor | None:
        if x.dtype.is_floating_point:
            dtypes.append(x.dtype)
        return None

    replaced(value, note)
    return dtypes[0] if dtypes else None


def cast(value: Any, sources: tuple[torch.dtype, ...], to: torch.dtype, *, scalars: bool = True) -> Any:
    """Return `value` with its tensors of the dtypes `sources` in `to`, in tuples, lists, mappings and dataclasses.

    A value that holds no such tensor is returned as the same object, so a cache that the callee fills stays the
    caller's. A value that holds one is a copy of the same type, or stays itself where its type cannot be copied.
    `scalars=False` leaves tensors of no dimension alone: they decide no dtype, and a loss is better left wide.
    """
    least_ndim = 0 if scalars else 1

    def change(x: Tensor) -> Tensor | None:
        return x.to(to) if x.dtype in sources and x.ndim >= least_ndim else None

    return replaced(value, change)


def replaced(value: Any, change: Callable[[Tensor], Tensor | None]) -> Any:
    """Return `value` with its tensors replaced by what `change` returns, where that is not None; else as `cast`."""
    return _replaced(value, change, 0)[0]


def _replaced(value: Any, change: Callable[[Tensor], Tensor | None], depth: int) -> tuple[Any, bool]:
    # The second value says whether anything changed: torch.compile does not follow `is` between containers.
    if isinstance(value, Tensor):
        changed_tensor = change(value)
        return (value, False) if changed_tensor is None else (changed_tensor, True)
    if depth == MAX_DEPTH or isinstance(value, _SCALARS):
        return value, False
    if isinstance(value, tuple | list):
        members: dict[Any, Any] = dict(enumerate(value))
    elif isinstance(value, Mapping):
        members = {key: value[key] for key in value}
    elif is_dataclass(value) and not isinstance(value, type):
        members = {field.name: getattr(value, field.name, None) for field in fields(value)}
    else:
        return value, False
    changed = {}
    for name, member in members.items():
        new, is_changed = _replaced(member, change, depth + 1)
        if is_changed:
            changed[name] = new
    return (_with_members(value, {**members, **changed}, changed), True) if changed else (value, False)


def _with_members(value: Any, members: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return a container of the same type with these members, or `value` itself where its type cannot be copied."""
    kind, items = type(value), list(members.values())
    if kind is dict:
        return members
    try:
        if isinstance(value, tuple | list):
            # A named tuple takes its fields, one by one; torch's own result types and other sequences take the whole.
            return kind(*items) if hasattr(value, "_fields") else kind(items)
        new = copy.copy(value)
        if isinstance(value, Mapping) and not isinstance(new, MutableMapping):
            return kind(members)
        for name, member in changed.items():
            if isinstance(value, Mapping):
                new[name] = member
            else:  # no dataclasses.replace: it runs __post_init__ again, and refuses fields that are no arguments
                object.__setattr__(new, name, member)
    except Exception:
        suppressed("a container of the user's could not be made anew for a cast")
        return value
    return new


# torch.nn.utils.parametrize.cached() computes parametrized weights once in its block. Its cache belongs to the process.
# A call of ours computes them without a graph or in another dtype, so it gets a cache of its own.


def swap_parametrizations(cache: dict[Any, Any]) -> dict[Any, Any]:
    """Put `cache`, by module and name of the weight, in place of the current one, and return that."""
    before: dict[Any, Any] = parametrize._cache
    parametrize._cache = cache
    return before
