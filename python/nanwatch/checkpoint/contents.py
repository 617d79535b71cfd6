"""Tensors inside nested containers, modules and optimizers, with the keys that lead to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..util.modules import each_module

Keys: TypeAlias = tuple[str, ...]
_SCALARS = (int, float, complex, str, bytes, type(None), type, ModuleType, FunctionType)
# A pickle of an object with one of these does not hold its attributes.
_PICKLED_OTHERWISE = ("__getstate__", "__reduce__", "__reduce_ex__")
_FRACTIONS = "efdFD"  # NumPy's codes of the floating-point dtypes that PyTorch has


def tensors_in(content: Any) -> Iterator[tuple[Keys, Tensor]]:
    """Yield each tensor that a pickle of `content` would hold, once for each place, with the keys that lead there.

    The keys into a module are the names of its state_dict. A NumPy array of a floating-point dtype comes as a tensor.
    """
    seen: set[int] = set()
    pending: list[tuple[Keys, Any]] = [((), content)]
    while pending:
        keys, value = pending.pop()
        if isinstance(value, Tensor):
            yield keys, value
        elif isinstance(value, np.ndarray | np.generic) and not isinstance(value, _SCALARS[:3]):
            if value.dtype.char in _FRACTIONS:
                yield keys, torch.from_numpy(np.array(value, value.dtype.newbyteorder("=")))
        elif id(value) not in seen:
            seen.add(id(value))
            children = [(key, child) for key, child in _children(value) if not isinstance(child, _SCALARS)]
            pending += [((*keys, key), child) for key, child in reversed(children)]


def _children(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        return [
            (f"{path}.{key}" if path else key, x)
            for path, module in each_module(value)
            for tensors in (module._parameters, module._buffers)
            for key, x in tensors.items()
        ]
    if isinstance(value, Mapping):
        return [(str(key) if isinstance(key, str | int) else type(key).__name__, value[key]) for key in value]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [(str(position), item) for position, item in enumerate(value)]
    if isinstance(value, Optimizer):
        return [("state", value.state), ("param_groups", value.param_groups)]
    if any(name in vars(kind) for kind in type(value).__mro__[:-1] for name in _PICKLED_OTHERWISE):
        return ()
    return list(getattr(value, "__dict__", {}).items())
