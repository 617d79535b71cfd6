"""The range and the health of a tensor as plain Python values: `abs_range`, `abs_ranges`, `tensor_health`.

Each call waits for the device once, to bring the numbers over; `torch.ops.nanwatch.abs_range` does not wait.
What cannot be read raises TypeError and says why: a tensor that nobody looked at is never called finite.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import _extension, _ops, _reference
from .health import AbsRange, TensorHealth

_Read = Callable[[Tensor], Tensor]
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})


def _abs_range(x: Tensor) -> AbsRange:
    """`abs_range` without the compiled part, and for every tensor that the compiled part does not read itself."""
    with only_our_dispatch():
        return _to_range(_range_row(_readable(x, "abs_range")).tolist())


def abs_ranges(tensors: Iterable[Tensor]) -> list[AbsRange]:
    """The `abs_range` of each tensor, in their order: one launch per device and one sync per device.

    An empty iterable gives `[]`. Raises TypeError, naming the position, as `abs_range` does.
    """
    _extension.explain_once()
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(
            f"abs_ranges takes an iterable of tensors, got {_type_name(tensors)}. "
            "Pass [x, y, …], or use abs_range for one tensor."
        )
    # The caller's own code makes the tensors of a generator: before the caller's modes are put aside.
    given = list(tensors)
    with only_our_dispatch():
        readable = [_readable(x, f"abs_ranges, tensor {i},") for i, x in enumerate(given)]
        together: dict[torch.device, list[int]] = {}
        alone: list[int] = []
        for i, x in enumerate(readable):
            if _is_plain(x):
                together.setdefault(x.device, []).append(i)
            else:
                alone.append(i)
        ranges: list[AbsRange | None] = [None] * len(readable)
        # Every launch is made before the first wait, so that devices work at the same time.
        tables = [(group, _ops.abs_ranges([readable[i] for i in group])) for group in together.values()]
        tables += [([i], _range_row(readable[i]).reshape(1, -1)) for i in alone]
        for group, table in tables:
            for i, row in zip(group, table.tolist(), strict=True):
                ranges[i] = _to_range(row)
    return cast("list[AbsRange]", ranges)


def _tensor_health(x: Tensor) -> TensorHealth:
    """`tensor_health` without the compiled part, and for every tensor that the compiled part does not read itself."""
    with only_our_dispatch():
        x = _readable(x, "tensor_health")
        return _to_health(x, _health_row(x).tolist())


if TYPE_CHECKING or _extension.C is None:

    def abs_range(x: Tensor) -> AbsRange:
        """`(abs_min, abs_max, isfinite)` of |x| over all elements of `x`, in one pass and with one sync.

        Equal to `x.abs().min()`, `x.abs().max()` and `torch.isfinite(x).all()`, as a float, a float and a bool:
        one nan makes both ends nan. Any shape and layout; floating point down to float8, integers (unsigned
        magnitude), bool (0 and 1) and complex (modulus). An empty tensor gives `(inf, 0.0, True)`, a DTensor the
        range of its local shard.

        Raises TypeError when `x` is not a tensor or has no values to read (meta, FakeTensor, inside functorch
        transforms, freed storage, packed dtypes).
        """
        _extension.explain_once()
        return _abs_range(x)

    def tensor_health(x: Tensor) -> TensorHealth:
        """The range of `x`, its ends over the finite elements, its counts and where the first bad element is.

        One pass and one sync. A complex element is finite when its parts are; the rest is judged by its modulus, an
        infinite one counts in `num_posinf`. Raises TypeError as `abs_range` does.
        """
        _extension.explain_once()
        return _tensor_health(x)

else:
    _extension.C.bind(AbsRange, _abs_range, TensorHealth, _tensor_health)
    abs_range = _extension.C.abs_range
    tensor_health = _extension.C.tensor_health


def unreadable(x: Tensor) -> str:
    """Why `x` has no values that can be read, in a few words; "" when they can.

    Costs about a microsecond and touches no data. A tensor subclass with its own dispatch can still refuse when it
    is read: that is a TypeError of the functions above.
    """
    if type(x) in _PLAIN_TYPES:
        return _unreadable(x)
    with torch._C.DisableTorchFunction():
        return _unreadable_subclass(x) or _unreadable(x)


def _unreadable(x: Tensor) -> str:
    if is_functorch_wrapped_tensor(x):
        return "inside a functorch transform"
    if torch._is_functional_tensor(x):
        return "functionalized tensor, being traced"
    if x.device.type == "meta":
        return "meta tensor, no data"
    if x.dtype not in _reference.READABLE_DTYPES and not x.is_quantized:
        return f"dtype {_dtype_name(x.dtype)} has no value per element"
    if _is_plain(x) and not x._is_zerotensor() and not _has_storage_for(x):
        return "storage freed"
    return ""


_IF_DTYPE = f"Accepted dtypes: {_reference.READABLE_NAMES}. Convert it first, or look at x.view(torch.uint8)."
_IF_NO_VALUES = (
    "It reads tensors that hold their values. Call it outside tracing, torch.func transforms and deferred "
    "initialisation; in traced code use torch.ops.nanwatch.abs_range(x)."
)


def _unreadable_subclass(x: Tensor) -> str:
    name = type(x).__name__
    if name in ("FakeTensor", "FunctionalTensor"):
        return f"{name}, no data"
    if name == "MaskedTensor":
        return "MaskedTensor, some elements have no value"
    if torch.nn.parameter.is_lazy(x):
        return "uninitialized, no shape yet"
    if (local := local_shard(x)) is not None:
        return unreadable(local)
    return ""


def _readable(x: Tensor, caller: str) -> Tensor:
    """`x`, or its local shard; TypeError for what is not a tensor or cannot be read."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{caller} takes a torch.Tensor, got {_type_name(x)}. "
            "Convert it first, for example with torch.as_tensor(x)."
        )
    if reason := unreadable(x):
        raise TypeError(
            f"{caller} cannot read a {_type_name(x)} of dtype {_dtype_name(x.dtype)} on device {x.device}: {reason}. "
            + (_IF_DTYPE if x.dtype not in _reference.READABLE_DTYPES else _IF_NO_VALUES)
        )
    local = local_shard(x)
    return x if local is None else local


def local_shard(x: Tensor) -> Tensor | None:
    """What this process holds of a DTensor; None for any other tensor."""
    if type(x) is Tensor:
        return None
    # DTensor is not imported for this (0.3 s): where nobody imported it, there is none.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(x, module.DTensor):
        return None
    local: Any = x.to_local()
    return cast(Tensor, local.wait() if hasattr(local, "wait") else local)


def _has_storage_for(x: Tensor) -> bool:
    """False when the storage is smaller than the tensor's extent.

    FSDP frees a parameter by resizing its storage to nothing; torch itself then reads through a null pointer.
    """
    if x.numel() == 0:
        return True
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (x.storage_offset() + last + 1) * x.element_size() <= x.untyped_storage().nbytes()


def _is_plain(x: Tensor) -> bool:
    """Whether the sizes and strides of `x` say where in its storage the elements are."""
    return (
        x.layout is torch.strided
        and not x.is_nested
        and not x.is_quantized
        and not _reference.overrides_dispatch(x)
    )


def _range_row(x: Tensor) -> Tensor:
    return _ops.abs_range(x) if _is_plain(x) else _through_public(_ops.abs_range, _reference.abs_range, x)


def _health_row(x: Tensor) -> Tensor:
    return _ops.health(x) if _is_plain(x) else _through_public(_ops.health, _reference.health, x)


def _through_public(operator: _Read, public: _Read, x: Tensor) -> Tensor:
    """The row of a tensor on which some public torch operations may be missing; a subclass never sees ours."""
    try:
        return public(x) if _reference.overrides_dispatch(x) else operator(x)
    except Exception as error:
        raise TypeError(
            f"nanwatch cannot read a {_type_name(x)} of layout {x.layout} and dtype {_dtype_name(x.dtype)}: torch "
            f"refused with {type(error).__name__}: {error}. It reads what detach, reshape, abs, amin, amax and "
            "isfinite (sparse: coalesce and values) work on. Pass the dense tensor inside it, or convert it."
        ) from error


@contextmanager
def only_our_dispatch() -> Iterator[None]:
    """Reads the data past `__torch_function__`, active modes and torch.jit.trace: a look is no part of a program.

    Without this a user's FakeTensorMode would answer for a real tensor, a counting mode would count us, and a traced
    graph would hold our operations.
    """
    tracing = torch._C._get_tracing_state()
    if tracing is not None:
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch._C.DisableTorchFunction():
            if torch._C._len_torch_dispatch_stack() == 0:
                yield
                return
            with _disable_current_modes():
                yield
    finally:
        if tracing is not None:
            torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def _index_of(x: Tensor, flat: int) -> tuple[int, ...]:
    """The index, over the shape of `x`, of its element number `flat` in C order."""
    if x.is_nested:
        for i, component in enumerate(x.unbind()):
            if flat < component.numel():
                return (i, *_index_of(component, flat))
            flat -= component.numel()
    return _index_in(x.shape, flat)


def _index_in(shape: Sequence[int], flat: int) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        index.append(position)
    return tuple(reversed(index))


def _to_range(row: list[float]) -> AbsRange:
    abs_min, abs_max, isfinite = row
    return AbsRange(abs_min, abs_max, isfinite != 0.0)


def _to_health(x: Tensor, row: list[float]) -> TensorHealth:
    return _health(row, x.numel(), lambda flat: _index_of(x, flat))


def health_of(row: list[float], shape: Sequence[int]) -> TensorHealth:
    """The health of a tensor of this shape from the columns of `torch.ops.nanwatch.health`."""
    return _health(row, prod(shape), lambda flat: _index_in(shape, flat))


def _health(row: list[float], numel: int, index_of: Callable[[int], tuple[int, ...]]) -> TensorHealth:
    low, high, isfinite, finite_low, finite_high, nans, posinfs, neginfs, zeros, subnormals, first = row
    return TensorHealth(
        low,
        high,
        isfinite != 0.0,
        finite_low,
        finite_high,
        int(nans),
        int(posinfs),
        int(neginfs),
        int(zeros),
        int(subnormals),
        numel,
        None if first < 0 else index_of(int(first)),
    )


def _type_name(x: object) -> str:
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
