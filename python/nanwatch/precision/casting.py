"""Casts of the tensors inside nested Python values, and the cache of parametrized weights during such a call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ..recording.walk import MAX_DEPTH
from ..util.visible import suppressed

NARROW = (torch.float16, torch.bfloat16)
# The kinds of device that autocast knows and that need no package of their own to be asked about.
_KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla")
_SCALARS = (int, float, str, bytes, type(None))


def autocast_kinds() -> tuple[str, ...]:
    """Return the kinds of device for which autocast can be on."""
    own = torch._C._get_privateuse1_backend_name()
    names = _KINDS if own == "privateuseone" else (*_KINDS, own)
    return tuple(name for name in names if torch.amp.is_autocast_available(name))


def first_float(value: Any) -> torch.dtype | None:
    """Return the dtype of the first floating-point tensor in tuples, lists, mappings and dataclasses, or None."""
    found: list[torch.dtype] = []

    def note(x: Tensor) -> Tensor | None:
        if x.dtype.is_floating_point:
            found.append(x.dtype)
        return None

    replaced(value, note)
    return found[0] if found else None


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
        items = [_replaced(item, change, depth + 1) for item in value]
        if not any(changed for _, changed in items):
            return value, False
        return _rebuilt(value, [item for item, _ in items]), True
    if isinstance(value, Mapping):
        named = [(key, value[key]) for key in value]
    elif is_dataclass(value) and not isinstance(value, type):
        named = [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    else:
        return value, False
    new = {}
    for name, item in named:
        one, changed = _replaced(item, change, depth + 1)
        if changed:
            new[name] = one
    if not new:
        return value, False
    if type(value) is dict:
        return {**value, **new}, True
    return _updated(value, new) if isinstance(value, Mapping) else _with_fields(value, new), True


def _rebuilt(value: Any, items: list[Any]) -> Any:
    kind = type(value)
    if kind is tuple:
        return tuple(items)
    if kind is list:
        return items
    try:
        # A named tuple takes its fields, one by one; torch's own result types and other sequences take the whole.
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    except Exception:
        suppressed("a sequence of the user's could not be made anew for a cast")
        return value


def _updated(value: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    try:
        new = copy.copy(value)
        if not isinstance(new, MutableMapping):
            return type(value)({**value, **changed})  # type: ignore[call-arg]
        for key, one in changed.items():
            new[key] = one
    except Exception:
        suppressed("a mapping of the user's could not be made anew for a cast")
        return value
    return new


def _with_fields(value: Any, changed: dict[str, Any]) -> Any:
    # No dataclasses.replace: it would run __post_init__ again, and refuses fields that are no arguments.
    try:
        new = copy.copy(value)
        for name, one in changed.items():
            object.__setattr__(new, name, one)
    except Exception:
        suppressed("an object of the user's could not be made anew for a cast")
        return value
    return new


# torch.nn.utils.parametrize.cached() computes parametrized weights once in its block. Its cache belongs to the process.
# A call of ours computes them without a graph or in another dtype, so it gets a cache of its own.

ParametrizationCache = dict[
    tuple[int, str], Tensor | None
]  # by the id of the module and the name of the weight


def caches_parametrizations() -> bool:
    """Return whether this is inside a block of parametrize.cached()."""
    return parametrize._cache_enabled > 0


def cached_parametrizations() -> ParametrizationCache:
    """Return a copy of the cache, empty outside a block."""
    return dict(parametrize._cache) if caches_parametrizations() else {}


def swap_parametrizations(cache: ParametrizationCache) -> ParametrizationCache:
    """Put `cache` in place of the current one, and return that."""
    before: ParametrizationCache = parametrize._cache
    parametrize._cache = cache
    return before
