"""Range, health and fingerprint of a tensor as plain Python values, in one piece or part by part.

Each call waits for the device once, to copy the numbers; `torch.ops.nanwatch.abs_range` does not wait. A tensor that
cannot be read raises TypeError with the reason. It never counts as finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _extension, _fingerprint, _reference
from .formats import AbsRange, TensorHealth
from .readable import is_plain, only_our_dispatch, read, readable, type_name


def abs_range(x: Tensor) -> AbsRange:
    """Return `(abs_min, abs_max, isfinite)` of |x| over all elements of `x`, in one pass and with one sync.

    Equal to `x.abs().min()`, `x.abs().max()` and `torch.isfinite(x).all()`, as a float, a float and a bool:
    one nan makes both ends nan. Any shape and layout; floating point down to float8, integers (unsigned
    magnitude), bool (0 and 1) and complex (modulus). An empty tensor gives `(inf, 0.0, True)`, a DTensor the
    range of its local shard.

    Raises TypeError when `x` is not a tensor or has no values to read (meta, FakeTensor, inside functorch
    transforms, freed storage, packed dtypes).

    Examples:
        >>> import nanwatch, torch
        >>> nanwatch.abs_range(torch.tensor([-3.0, 0.5]))
        AbsRange(abs_min=0.5, abs_max=3.0, isfinite=True)
    """
    _extension.explain_once()
    with only_our_dispatch():
        x = readable(x, "abs_range")
        if x.is_cuda and torch.cuda.is_current_stream_capturing():  # waiting would end the capture
            raise RuntimeError(
                "nanwatch.abs_range waits for the device, and this stream is being captured into a CUDA graph. Inside a"
                " capture use torch.ops.nanwatch.abs_range(x), which does not wait."
            )
        return to_range(range_row(x).tolist())


def abs_ranges(tensors: Iterable[Tensor]) -> list[AbsRange]:
    """Return the `abs_range` of each tensor, in their order: one launch per device and one sync per device.

    An empty iterable gives `[]`. Raises TypeError, naming the position, as `abs_range` does.

    Examples:
        >>> import nanwatch, torch
        >>> nanwatch.abs_ranges([torch.ones(3), torch.tensor([0.0, -torch.inf])])
        [AbsRange(abs_min=1.0, abs_max=1.0, isfinite=True), AbsRange(abs_min=0.0, abs_max=inf, isfinite=False)]
    """
    _extension.explain_once()
    if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
        raise TypeError(
            f"abs_ranges takes an iterable of tensors, got {type_name(tensors)}. "
            "Pass [x, y, …], or use abs_range for a single tensor."
        )
    # The caller's own code makes the tensors of a generator: before the caller's modes are put aside.
    given = list(tensors)
    with only_our_dispatch():
        xs = [readable(x, f"abs_ranges, tensor {i},") for i, x in enumerate(given)]
        groups: dict[object, list[int]] = {}  # of a device together, and each that is not plain alone
        for i, x in enumerate(xs):
            groups.setdefault(x.device if is_plain(x) else i, []).append(i)
        # Every launch is made before the first wait, so that devices work at the same time.
        tables = [
            _extension.abs_ranges([xs[i] for i in group])
            if is_plain(xs[group[0]])
            else range_row(xs[group[0]])
            for group in groups.values()
        ]
        ranges: dict[int, AbsRange] = {}
        for group, table in zip(groups.values(), tables, strict=True):
            ranges |= zip(group, map(to_range, table.reshape(-1, 3).tolist()), strict=True)
        return [ranges[i] for i in range(len(xs))]


def tensor_health(x: Tensor) -> TensorHealth:
    """Return range, counts and the index of the first non-finite element of `x`, in one pass and with one sync.

    A complex element is finite when its parts are; the rest is judged by its modulus, an
    infinite one counts in `num_posinf`. Raises TypeError as `abs_range` does.

    Examples:
        >>> import nanwatch, torch
        >>> health = nanwatch.tensor_health(torch.tensor([[0.0, 1e-40], [torch.inf, 3.0]]))
        >>> health.abs_max, health.finite_abs_max, health.first_nonfinite
        (inf, 3.0, (1, 0))
    """
    _extension.explain_once()
    with only_our_dispatch():
        x = readable(x, "tensor_health")
        row = read(_extension.health, _reference.health, x).tolist()
        health = health_of(row, () if x.is_nested else x.shape)
        if not x.is_nested:
            return health
        return health._replace(numel=x.numel(), first_nonfinite=_nested_index(x, int(row[-1])))


_abs_range = abs_range

if not TYPE_CHECKING and _extension.C is not None:
    # The compiled function calls this one for a tensor that it cannot read, and describes itself as this does.
    _extension.C.bind(AbsRange, _abs_range)
    abs_range = _extension.C.abs_range


def range_row(x: Tensor) -> Tensor:
    """Return the columns of the range of a readable tensor, on its device."""
    return read(_extension.abs_range, _reference.abs_range, x)


def _nested_index(x: Tensor, flat: int) -> tuple[int, ...] | None:
    """Return component and index in it of the element number `flat` of a nested tensor; None for -1."""
    for i, component in enumerate(x.unbind()):
        if 0 <= flat < component.numel():
            return (i, *_index_in(component.shape, flat))
        flat -= component.numel()
    return None


def _index_in(shape: Sequence[int], flat: int) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        index.append(position)
    return tuple(reversed(index))


def to_range(row: list[float]) -> AbsRange:
    """Return the range of its columns."""
    abs_min, abs_max, isfinite = row
    return AbsRange(abs_min, abs_max, isfinite != 0.0)


def health_of(row: Sequence[float], shape: Sequence[int]) -> TensorHealth:
    """Return the health of a tensor of this shape from the columns of `torch.ops.nanwatch.health`."""
    low, high, isfinite, finite_low, finite_high, *counts, first = row
    nans, posinfs, neginfs, zeros, subnormals = map(int, counts)
    index = None if first < 0 else _index_in(shape, int(first))
    ends = low, high, isfinite != 0.0, finite_low, finite_high
    return TensorHealth(*ends, nans, posinfs, neginfs, zeros, subnormals, prod(shape), index)


def fingerprint(x: Tensor) -> int:
    """Return a 64-bit hash of the elements of `x` in C order, with its dtype and shape: from 0 to 2**64 - 1.

    Two tensors of the same dtype, shape and bits have the same fingerprint, on any device, with any strides and any
    number of threads. Two tensors that differ have the same one with a chance of at most 1 in 2**48, and never where
    they differ in one element. -0.0 and 0.0 differ, and so do two nans of different bits. A DTensor gives that of its
    local shard. It is not a cryptographic hash: one can construct two tensors with the same fingerprint.

    Raises TypeError where `abs_range` does, and for a tensor that is not strided (sparse, nested, quantized).

    Examples:
        >>> import nanwatch, torch
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> nanwatch.fingerprint(x) == nanwatch.fingerprint(x.T.contiguous().T)  # other strides, same elements
        True
        >>> nanwatch.fingerprint(x) == nanwatch.fingerprint(x.flip(0))
        False
    """
    _extension.explain_once()
    with only_our_dispatch():
        x = readable(x, "fingerprint")
        if not is_plain(x):
            raise TypeError(
                f"fingerprint cannot read a {type_name(x)} of layout {x.layout}. It takes strided tensors of plain"
                " dtypes. Pass the tensors that it is made of, or a dense copy."
            )
        return int(_fingerprint.fingerprint(x)) % 2**64


def range_and_fingerprint(x: Tensor) -> tuple[AbsRange, int | None]:
    """Return `abs_range` and `fingerprint` of `x`; None for a tensor that has no fingerprint.

    Raises TypeError as `abs_range` does.
    """
    with only_our_dispatch():
        x = readable(x, "abs_range")
        row, number = range_row(x), _fingerprint.fingerprint(x) if is_plain(x) else None
        return to_range(row.tolist()), None if number is None else int(number) % 2**64


def healths(xs: Sequence[Tensor]) -> list[list[float]]:
    """Return the columns of `torch.ops.nanwatch.health` of strided tensors of a CPU, by one call."""
    rows: list[list[float]] = _extension.healths(xs).tolist()
    return rows


def health_of_parts(rows: dict[int, list[float]], shape: Sequence[int]) -> TensorHealth:
    """Return the health of a tensor by the columns of its parts, which begin at these elements in C order."""
    if [*rows] == [0]:  # to merge one part with nothing takes as long as to read 1 MiB
        return health_of(rows[0], shape)
    firsts = [start + row[-1] if row[-1] >= 0 else inf for start, row in rows.items()]
    parts = [[*row[:-1], first] for row, first in zip(rows.values(), firsts, strict=True)]
    nothing = [inf, 0, 1, inf, *[0] * 6, inf]
    return health_of(_reference.merged(torch.tensor([nothing, *parts], dtype=torch.float64)).tolist(), shape)
