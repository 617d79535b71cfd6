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
from ..util.messages import suppressed

NARROW = (torch.float16, torch.bfloat16)
# The kinds of device that autocast knows and that need no package of their own to be asked about.
_KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla")
_SCALARS = (int, float, str, bytes, type(None))


def autocast_kinds() -> tuple[str, ...]:
    """Return the kinds of device for which autocast can be on."""
    device = torch.accelerator.current_accelerator()  # perhaps of a package that brings its own kind
    names = _KINDS if device is None else dict.fromkeys((*_KINDS, device.type))
    return tuple(name for name in names if torch.amp.is_autocast_available(name))


def first_float(value: Any) -> torch.dtype | None:
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
    kind = type(value)
    if kind is tuple:
        return tuple(members.values())
    if kind is list:
        return list(members.values())
    if kind is dict:
        return members
    try:
        if isinstance(value, tuple | list):
            # A named tuple takes its fields, one by one; torch's own result types and other sequences take the whole.
            items = list(members.values())
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


def caches_parametrizations() -> bool:
    """Return whether this is inside a block of parametrize.cached()."""
    return parametrize._cache_enabled > 0


def swap_parametrizations(cache: dict[Any, Any]) -> dict[Any, Any]:
    """Put `cache`, by module and name of the weight, in place of the current one, and return that."""
    before: dict[Any, Any] = parametrize._cache
    parametrize._cache = cache
    return before
