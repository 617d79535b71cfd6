"""The range and the health of a tensor in plain torch: the fallback of every device and layout.

No bit tricks here: `abs`, `amin`, `amax`, `isfinite` and comparisons, so that a reader can see that it is right
and so that it runs wherever torch does. The native kernels must give the same rows, value for value.

Memory: a few temporaries of a chunk at a time. Only `health`, which finds the first bad element in C order, copies a
tensor that does not flatten without (strided, overlapping). A dimension that only repeats what is there, as `expand`
makes them, is read once. Nothing here waits for a device.

On a CPU in flush-denormal mode torch itself reads fp32, bf16 and fp64 subnormals as zero, and so does this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .formats import NUMBER_FORMATS, NumberFormat

# Columns of the rows below; the same order in the native kernels.
RANGE_WIDTH = 3  # abs_min, abs_max, isfinite
HEALTH_WIDTH = 11  # those, then the columns that the docstring of `health` names

# 1 Mi elements: the temporaries of 8 bytes stay below 64 MiB while a 16 GiB tensor takes only 4000 to 8000 steps.
_CHUNK = 1 << 20
# Of a CPU, for each thread: its share of the temporaries lies in the second cache then.
_CHUNK_OF_A_THREAD = 1 << 14
_DEVICES_WITHOUT_FLOAT64 = frozenset({"mps"})
_INF = float("inf")


def _arithmetic_of(form: NumberFormat) -> torch.dtype:
    """Return a dtype that holds the values exactly, and whose `abs`, `amin` and comparisons torch has.

    Only 64-bit integers above 2^53 (2^24 for 32- and 64-bit ones without float64) are rounded: rounding is monotone,
    so the ends of the range are the rounded ends.
    """
    if form.kind == "complex":
        return torch.complex128 if form.bits == 128 else torch.complex64
    if form.is_float and form.bits >= 16:
        return dtype_of(form)
    return torch.float32 if form.bits <= 16 else torch.float64


def dtype_of(form: NumberFormat) -> torch.dtype:
    """Return PyTorch's dtype of a format."""
    return cast(torch.dtype, getattr(torch, form.name))


FORMATS = {dtype_of(form): form for form in NUMBER_FORMATS if hasattr(torch, form.name)}
"""The formats that this PyTorch has."""
_ARITHMETIC = {dtype: _arithmetic_of(form) for dtype, form in FORMATS.items()}

READABLE_NAMES = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in FORMATS))


def row_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of a row on `device`: float64, or float32 where the device has no float64.

    A float32 row holds counts and positions exactly only up to 2^24.
    """
    return torch.float32 if device.type in _DEVICES_WITHOUT_FLOAT64 else torch.float64


def abs_range(x: Tensor) -> Tensor:
    """Return `(abs_min, abs_max, isfinite)` of `x`, shape (3,), on its device; isfinite is 1.0 or 0.0.

    Empty gives `(inf, 0, 1)`. Raises TypeError for a dtype that has no value of its own (packed formats).
    """
    with torch.no_grad():
        part = stored(x)
        rows = [_range_row(chunk, x.device) for chunk in chunks(part.values)]
        if part.implicit_zeros:
            rows.append(torch.tensor([0.0, 0.0, 1.0], dtype=row_dtype(x.device), device=x.device))
        if not rows:
            return torch.tensor([_INF, 0.0, 1.0], dtype=row_dtype(x.device), device=x.device)
        if len(rows) == 1:
            return rows[0]
        table = torch.stack(rows)
        low, high = table.amin(0), table.amax(0)  # both pass a nan on, as a nan must reach both ends
        return torch.stack([low[0], high[1], low[2]])


def abs_ranges(xs: Sequence[Tensor]) -> Tensor:
    """Return an `abs_range` row per tensor, shape (n, 3). Raise ValueError for tensors on different devices."""
    if not xs:
        return torch.empty((0, RANGE_WIDTH), dtype=torch.float64)
    devices = {x.device for x in xs}
    if len(devices) > 1:
        raise ValueError(
            f"abs_ranges got tensors on {', '.join(sorted(map(str, devices)))}; one call takes tensors of one device. "
            "Group them by device, or call nanwatch.abs_ranges, which does."
        )
    return torch.stack([abs_range(x) for x in xs])


def health(x: Tensor) -> Tensor:
    """Return the range of `x` and its counts, shape (11,), on its device.

    Columns: abs_min, abs_max, isfinite, finite_abs_min, finite_abs_max, num_nan, num_posinf, num_neginf, num_zero,
    num_subnormal, first_nonfinite (flat C-order index over `x.shape`, -1 when all is finite).

    Complex elements are judged by their modulus: an infinite one, also one whose modulus overflows, counts as
    posinf whatever its direction.
    """
    with torch.no_grad():
        part = stored(x)
        wide = row_dtype(x.device)
        rows = []
        start = 0
        for chunk in chunks(part.values.reshape(-1)):
            stop = start + chunk.numel()
            rows.append(_health_row(chunk, part.positions(start, stop, device=x.device), x.device))
            start = stop
        if part.implicit_zeros:
            zeros = [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, float(part.implicit_zeros), 0.0, _INF]
            rows.append(torch.tensor(zeros, dtype=wide, device=x.device))
        if not rows:
            return torch.tensor([_INF, 0, 1, _INF, 0, 0, 0, 0, 0, 0, -1], dtype=wide, device=x.device)
        row = merged(torch.stack(rows))
        if part.repeats > 1:
            row[5:10] *= part.repeats
            row[10] = torch.where(row[10] < 0, row[10], _place_in(x.shape, x.stride(), row[10]))
        return row


def healths(xs: Sequence[Tensor]) -> Tensor:
    """Return a `health` row per tensor, shape (n, 11)."""
    return torch.stack([health(x) for x in xs])


def merged(rows: Tensor) -> Tensor:
    """Return the row of `health` of a tensor by those of its parts, in which the place of the first bad may be inf."""
    low, high = rows.amin(0), rows.amax(0)  # both pass a nan on
    first = torch.where(low[10] == _INF, -1.0, low[10])
    return torch.stack([low[0], high[1], low[2], low[3], high[4], *rows[:, 5:10].sum(0), first])


class _Stored(NamedTuple):
    """The elements that a tensor stores, whatever its layout."""

    values: Tensor  # strided, of a readable dtype
    implicit_zeros: int  # elements of the shape that are zero because nothing is stored for them
    positions: Callable[..., Tensor] = torch.arange  # flat index of each value from start to stop
    repeats: int = 1  # elements of the tensor that each value stands for


def overrides_dispatch(x: Tensor) -> bool:
    """Return whether `x` is a subclass whose values only its own `__torch_dispatch__` knows."""
    kind = type(x)
    return kind is not Tensor and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def without_repeats(x: Tensor) -> tuple[Tensor, int]:
    """Return one index of each dimension that only repeats `x`, and how often `x` has each of these elements.

    An expanded tensor may have 2^40 elements in 4 bytes of memory.
    """
    if x.layout is not torch.strided or x.is_nested or overrides_dispatch(x):
        return x, 1
    repeats = 1
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if _repeats(size, stride):
            x, repeats = x.narrow(dim, 0, 1), repeats * size
    return x, repeats


def _repeats(size: int, stride: int) -> bool:
    return stride == 0 and size > 1


def _place_in(shape: Sequence[int], strides: Sequence[int], flat: Tensor) -> Tensor:
    """Return the flat index over `shape` of the element at `flat` over the shape without its repeats."""
    left, place, order = flat.to(torch.int64), torch.zeros_like(flat, dtype=torch.int64), 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if not _repeats(size, stride):
            place += left % size * order
            left = left // size
        order *= size
    return place.to(flat.dtype)


def stored(x: Tensor) -> _Stored:
    """Return the elements that `x` stores. Raise TypeError for a dtype that has no value per element."""
    x = x.detach()
    if x.is_nested:
        parts = [stored(component).values.reshape(-1) for component in x.unbind()]
        return _Stored(torch.cat([torch.empty(0, dtype=x.dtype, device=x.device), *parts]), 0)
    x, repeats = without_repeats(x)
    if x.is_quantized:
        x = x.dequantize()
    if x.is_mkldnn:
        x = x.to_dense()
    if x.dtype not in FORMATS:
        raise TypeError(
            f"nanwatch cannot read a tensor of dtype {str(x.dtype).removeprefix('torch.')}: torch gives no values "
            f"of its elements. Accepted: {READABLE_NAMES}. Convert it first, or look at x.view(torch.uint8)."
        )
    if x.layout is not torch.strided:
        # Compressed layouts become COO: one path for the positions, at the price of one copy of the indices.
        return _stored_sparse(x if x.layout is torch.sparse_coo else x.to_sparse())
    # Of a subclass with its own dispatch no more is asked than that it reshapes.
    return _Stored(x.reshape(-1) if overrides_dispatch(x) else x, 0, repeats=repeats)


def _stored_sparse(x: Tensor) -> _Stored:
    x = x.coalesce()  # duplicates of one position are summed: only the sum is a value of the tensor
    values, indices = x.values(), x.indices()
    dense_numel = x.shape[x.sparse_dim() :].numel()

    def positions(start: int, stop: int, device: torch.device) -> Tensor:
        place = torch.arange(start, stop, device=device)
        rows, flat = indices[:, place // dense_numel], torch.zeros_like(place)
        for size, row in zip(x.shape, rows, strict=False):
            flat = flat * size + row
        return flat * dense_numel + place % dense_numel

    return _Stored(values.reshape(-1), x.numel() - values.numel(), positions)


def chunks(values: Tensor) -> Iterator[Tensor]:
    """Yield all elements in runs of a bounded size: in C order if `values` is contiguous, else in that of memory."""
    on_host = values.device.type == "cpu"
    limit = _CHUNK_OF_A_THREAD * torch.get_num_threads() if on_host else _CHUNK
    if not values.is_contiguous():
        # The largest strides first: a transposed tensor is then one run.
        values = values.permute(sorted(range(values.dim()), key=values.stride, reverse=True))
    yield from _runs(values, limit)


def _runs(values: Tensor, limit: int) -> Iterator[Tensor]:
    if values.numel() <= limit:
        yield from [values.reshape(-1)] if values.numel() else ()
    elif values.is_contiguous():
        yield from values.reshape(-1).split(limit)
    else:
        rows = limit // values[0].numel()
        for part in values.split(rows) if rows else values:
            yield from _runs(part, limit)


def _to_arithmetic(values: Tensor) -> Tensor:
    """Return the values in the dtype of `_arithmetic_of`, float32 in place of float64 where the device has none."""
    wanted = _ARITHMETIC[values.dtype]
    return values.to(row_dtype(values.device) if wanted == torch.float64 else wanted)


def _range_row(chunk: Tensor, device: torch.device) -> Tensor:
    values = _to_arithmetic(chunk)
    magnitude = values.abs()
    high = magnitude.amax()  # passes a nan on; of a complex number the parts decide
    finite = torch.isfinite(values).all() if values.is_complex() else high < _INF
    return torch.stack([end.to(row_dtype(device)) for end in (magnitude.amin(), high, finite)])


def _health_row(chunk: Tensor, positions: Tensor, device: torch.device) -> Tensor:
    """Return the columns of `health` of a chunk; first_nonfinite is inf without one, so that min merges it."""
    values = _to_arithmetic(chunk)
    magnitude = values.abs()
    wide = row_dtype(device)
    # The parts of a complex number decide: a modulus beyond the dtype's range is inf, and its number is finite.
    finite = torch.isfinite(values)
    nan = torch.isnan(magnitude)
    infinite = ~finite & ~nan
    negative = torch.zeros_like(finite) if values.is_complex() else infinite & (values < 0)
    smallest_normal = (
        torch.finfo(chunk.dtype).smallest_normal if chunk.is_floating_point() or chunk.is_complex() else 0.0
    )
    # In the row's dtype: the smallest normal of bf16 and fp32 is not a float16, and this must not round.
    size = magnitude.to(wide)
    columns = [
        size.amin(),
        size.amax(),
        finite.all(),
        torch.where(finite, size, _INF).amin(),
        torch.where(finite, size, 0.0).amax(),
        nan.sum(),
        (infinite & ~negative).sum(),
        negative.sum(),
        (size == 0).sum(),
        ((size > 0) & (size < smallest_normal)).sum(),
        torch.where(finite, _INF, positions.to(wide)).amin(),
    ]
    return torch.stack([column.to(wide) for column in columns])
