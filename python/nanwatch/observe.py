"""One value of a module call to one row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._reference import without_repeats
from .ranges import (
    TensorHealth,
    abs_range,
    health_of,
    local_shard,
    only_our_dispatch,
    tensor_health,
    unreadable,
)
from .record import ALLOWED_INF, MASK, NONE, NOT_A_TENSOR, NOT_CHECKED, Role, Row
from .shard import shard_note
from .walk import Unwalked

# Any wait for the device ends the user's capture with an error.
_CAPTURING = f"{NOT_CHECKED}: in a CUDA graph capture"
_DTYPE_NAMES: dict[torch.dtype, str] = {}


def observe(value: Any, label: str, role: Role, allow_inf: bool = False, *, counts: bool = False) -> Row:
    """The row of `value`: its range when it is a tensor that can be read, else the note that says why not.

    Never raises and never builds a graph. A tensor that is not finite, or that looks like an additive mask, is looked
    at a second time, for the counts and the index, while it is at hand; with `counts` every tensor is. `allow_inf`:
    infinities in it are meant.
    """
    row = read(value, label, role)
    if row[6] is False or (row[4] == 0 and _may_be_finite_mask(value, row)):
        row = _examine(value, row, allow_inf)
    return _counted(value, row) if counts and row[6] else row


def _counted(x: Tensor, row: Row) -> Row:
    try:
        return (*row[:7], tensor_health(x), row[8])
    except Exception:
        return row


def read(value: Any, label: str, role: Role) -> Row:
    """As `observe`, without the second look."""
    if not isinstance(value, Tensor):
        note = NONE if value is None else NOT_A_TENSOR
        if isinstance(value, Unwalked):
            note = f"{NOT_CHECKED}: {value}"
        return label, role, None, "", None, None, None, None, note
    if torch._C._get_tracing_state() is not None:
        # torch.jit.trace makes tensors of sizes, and nodes of its graph.
        with only_our_dispatch():
            return _read(value, label, role)
    return _read(value, label, role)


def _read(value: Tensor, label: str, role: Role) -> Row:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing() and _is_cuda(value):
        return label, role, _shape(value), dtype_name(value), None, None, None, None, _CAPTURING
    try:
        abs_min, abs_max, isfinite = abs_range(value)
    except Exception as error:
        return _unread(value, label, role, error)
    if type(value) is Tensor or type(value) is nn.Parameter:
        return label, role, value.shape, dtype_name(value), abs_min, abs_max, isfinite, None, ""
    # By name: importing DTensor where nobody uses it costs 0.3 s.
    note = shard_note(value) if type(value).__name__ == "DTensor" else ""
    return label, role, _shape(value), dtype_name(value), abs_min, abs_max, isfinite, None, note


def dtype_name(x: Tensor) -> str:
    """`float16` for torch.float16; kept, as making it anew costs as much as reading a small tensor."""
    dtype = x.dtype
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        name = _DTYPE_NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name


def _unread(x: Tensor, label: str, role: Role, error: Exception) -> Row:
    try:
        reason = unreadable(x)
    except Exception:
        reason = ""
    if not reason:
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
    return label, role, _shape(x), dtype_name(x), None, None, None, None, f"{NOT_CHECKED}: {reason}"


def _is_cuda(x: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return x.is_cuda


def _shape(x: Tensor) -> tuple[int, ...] | None:
    try:
        # A size that is known only as a symbol, or a nested tensor's ragged one, is no number.
        return tuple(int(size) for size in x.shape)
    except Exception:
        return None


def _may_be_finite_mask(x: Tensor, row: Row) -> bool:
    """Whether the range is that of an additive mask made with the dtype's minimum in place of -inf."""
    return row[1] in ("input", "buffer") and _masks_with_lowest(x.dtype) and row[5] == _largest(x.dtype)


def _masks_with_lowest(dtype: torch.dtype) -> bool:
    """Not in 8 bits, where finite tensors are full of the largest number by saturation."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def _examine(x: Tensor, row: Row, allow_inf: bool) -> Row:
    try:
        health = tensor_health(x)
        is_mask = row[1] in ("input", "buffer") and _is_mask(x, health)
    except Exception:
        # The range already says what matters; the counts are an extra.
        return row
    return _with_health(row, health, is_mask, allow_inf)


def _with_health(row: Row, health: TensorHealth, is_mask: bool, allow_inf: bool) -> Row:
    label, role, shape, dtype, abs_min, abs_max, isfinite, _, note = row
    if is_mask:
        note = MASK
    elif allow_inf and health.num_nan == 0 and not isfinite:
        note = ALLOWED_INF
    if isfinite:
        # A finite mask: its range says nothing about the model, and its counts nothing that the note does not.
        return label, role, shape, dtype, abs_min, abs_max, isfinite, None, note
    return label, role, shape, dtype, abs_min, abs_max, isfinite, health, note


def arrived(
    label: str,
    role: Role,
    shape: tuple[int, ...],
    dtype: str,
    values: list[float] | str,
    allow_inf: bool,
) -> Row:
    """The row of a tensor that a device has looked at, as `observe` would have made it.

    `values` are those of NanwatchRow (csrc/range_cuda.h): the range alone, or the health and what tells a mask; or,
    in words, why there are none.
    """
    if isinstance(values, str):
        return label, role, shape, dtype, None, None, None, None, f"{NOT_CHECKED}: {values}"
    row: Row = label, role, shape, dtype, values[0], values[1], values[2] != 0, None, ""
    if len(values) == 3:
        return row
    health = health_of(values[:11], shape)
    is_mask = role in ("input", "buffer") and len(shape) > 0 and values[11] != 0
    return _with_health(row, health, is_mask, allow_inf)


def _is_mask(x: Tensor, health: TensorHealth) -> bool:
    """An additive attention mask holds zeros and -inf, or zeros and the dtype's minimum, and nothing else; every row
    has a zero, or softmax would make nan of it. It comes as an argument or waits in a buffer; the same values in an
    output are the log of a zero probability. Of a DTensor the shard at hand decides: asking the others is a
    communication, which ranks that see no -inf would not take part in.
    """
    if not _may_be_mask(health, x.dtype, x.ndim):
        return False
    with only_our_dispatch(), torch.no_grad():
        local = local_shard(x)
        values, repeats = without_repeats((x if local is None else local).detach())
        is_zero = values == 0
        num_masked = health.num_neginf
        if num_masked == 0 and _masks_with_lowest(x.dtype):
            num_masked = repeats * int((values == -_largest(x.dtype)).sum())
        if num_masked == 0 or health.num_zero + num_masked != health.numel:
            return False
        return bool(is_zero.any(dim=-1).all())


def _may_be_mask(health: TensorHealth, dtype: torch.dtype, dims: int) -> bool:
    return (
        not health.num_nan
        and not health.num_posinf
        and bool(health.num_zero)
        and dtype.is_floating_point
        and dims > 0
    )
