"""The batch in another format: weights, operations and random numbers of a trial."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

# A tensor of 512 MiB in float64.
MOST_ELEMENTS = 1 << 26
# Operations that do nothing but draw random numbers.
_DRAWS = {
    "rand", "rand_like", "randn", "randn_like", "normal", "normal_", "uniform_", "exponential_", "log_normal_",
    "cauchy_", "geometric_", "bernoulli", "bernoulli_", "multinomial", "poisson", "native_dropout",
}  # fmt: skip
# Methods of a tensor that make it narrower.
_CASTS = frozenset({"float", "half", "bfloat16", "double"})


def cast_to(to: torch.dtype, x: Any) -> Any:
    """Return a tensor or a dtype of floating-point or complex numbers in the given format, and all else as it is."""
    kind = x.dtype if isinstance(x, Tensor) else x
    if not isinstance(kind, torch.dtype) or not (kind.is_floating_point or kind.is_complex):
        return x
    new = to.to_complex() if kind.is_complex else to
    if isinstance(x, torch.dtype):
        return new
    if kind != new and x.numel() > MOST_ELEMENTS:
        raise MemoryError(f"a tensor of {x.numel():,} elements")
    return x.to(new)


class Draws(TorchDispatchMode):
    """Draws random numbers in the formats in which the batch drew them, as a generator gives others in another format.

    Under it a trial in bfloat16 and the run in float64 drop out the elements that the batch did, also on a GPU.
    `formats` are those of the batch's draws, in order. The first run that comes to a draw adds its own. A run that
    `is_alone` refuses what would wait for the other ranks: all collectives of torch.distributed are operators.
    """

    supports_higher_order_operators = True

    def __init__(self, formats: list[tuple[str, torch.dtype]], *, is_alone: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._formats, self._number, self._is_alone = formats, 0, is_alone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, in the format of the batch if it draws random numbers."""
        kwargs = kwargs or {}
        namespace, _, base = func._schema.name.partition("::") if hasattr(func, "_schema") else ("", "", "")
        if self._is_alone and "c10d" in namespace:
            raise RuntimeError(f"{func} would wait for the other ranks, which do not run this batch again")
        if base not in _DRAWS:
            return func(*args, **kwargs)
        tensors = [x for x in _pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        kinds = (x.dtype for x in tensors if x.is_floating_point() or x.is_complex())
        kind = kwargs.get("dtype") or next(kinds, torch.get_default_dtype())
        # Half precision has the numbers of float32, rounded. Only the dropout of a GPU has others.
        is_dropout = base == "native_dropout"
        source = kind if is_dropout else torch.promote_types(kind.to_real(), torch.float32)
        if self._number == len(self._formats):
            self._formats.append((base, source))
        name, drawn = self._formats[self._number]
        self._number += 1
        if name != base or drawn == source:
            return func(*args, **kwargs)
        if is_dropout:
            _, mask = func(torch.ones_like(args[0], dtype=drawn), *args[1:])
            scale = 1 if args[1] == 1 or args[2] is False else 1 / (1 - args[1])
            return args[0] * mask * scale, mask
        operands, options = _pytree.tree_map(partial(cast_to, drawn), (args, kwargs))
        result = func(*operands, **options)
        target = args[0] if base.endswith("_") else kwargs.get("out")
        return _pytree.tree_map(partial(cast_to, kind), result) if target is None else target.copy_(result)


@contextmanager
def loaded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give `model` for the block the weights and buffers of `model.to(dtype)`, and cast nothing else."""
    modules = (module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule))
    tables: list[dict[str, Any]] = [table for x in modules for table in (x._parameters, x._buffers)]
    copies: dict[Tensor, Tensor] = {}  # so that tied weights stay tied
    with ExitStack() as stack:
        for table in tables:
            stack.callback(table.update, dict(table))
            for name, x in table.items():
                if x is not None and x.is_floating_point() and x.dtype != dtype:
                    copies[x] = copies.get(x, x.detach().to(dtype).requires_grad_(x.requires_grad))
                    table[name] = copies[x]
        yield


_wide = partial(_pytree.tree_map, partial(cast_to, torch.float64), is_leaf=lambda x: type(x) is torch.Size)


class Float64(TorchFunctionMode):
    """Runs each operation on float64 copies of its operands; a cast to a narrower format does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation in float64."""
        name = getattr(func, "__name__", "")
        if name == "__get__":  # of an attribute: x.dtype is the user's
            return _wide(func(*args))
        if name in _CASTS:
            return args[0].to(torch.float64)
        wide, options = _wide((args, kwargs or {}))
        return _wide(func(*wide, **options))
