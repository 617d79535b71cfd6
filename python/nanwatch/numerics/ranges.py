"""Range, health, fingerprint and sketch of a tensor, in one piece or part by part.

A call that returns plain Python values waits for the device once, to copy them; `torch.ops.nanwatch.abs_range` does
not wait. A tensor that cannot be read raises TypeError with the reason. It never counts as finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import inf, prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from . import _extension, _reference
from .formats import BY_NAME, AbsRange, TensorHealth
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
        return health_of(row, (x.numel(),) if x.is_nested else x.shape)  # a nested tensor has no shape


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
        return int(fingerprint_on_device(x)) % 2**64


_abs_range = abs_range

if not TYPE_CHECKING and _extension.C is not None:
    # The compiled function calls this one for a tensor that it cannot read, and describes itself as this does.
    _extension.C.bind(AbsRange, _abs_range)
    abs_range = _extension.C.abs_range


def range_row(x: Tensor) -> Tensor:
    """Return the columns of the range of a readable tensor, on its device."""
    return read(_extension.abs_range, _reference.abs_range, x)


def to_range(row: list[float]) -> AbsRange:
    """Return the range of its columns."""
    abs_min, abs_max, isfinite = row
    return AbsRange(abs_min, abs_max, isfinite != 0.0)


def health_of(row: Sequence[float], shape: Sequence[int]) -> TensorHealth:
    """Return the health of a tensor of this shape from the columns of `torch.ops.nanwatch.health`."""
    low, high, isfinite, finite_low, finite_high, *counts, first = row
    nans, posinfs, neginfs, zeros, subnormals = map(int, counts)
    index = None if first < 0 else tuple(map(int, np.unravel_index(int(first), tuple(shape))))
    ends = low, high, isfinite != 0.0, finite_low, finite_high
    return TensorHealth(*ends, nans, posinfs, neginfs, zeros, subnormals, prod(shape), index)


def range_and_fingerprint(x: Tensor) -> tuple[AbsRange, int | None]:
    """Return `abs_range` and `fingerprint` of `x`; None for a tensor that has no fingerprint.

    Raises TypeError as `abs_range` does.
    """
    with only_our_dispatch():
        x = readable(x, "abs_range")
        row, number = range_row(x), fingerprint_on_device(x) if is_plain(x) else None
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


# The fingerprint: a hash in integer arithmetic, the same on every device.
#
# The elements in C order are cut into blocks of 8 KiB, the last filled up with zeros. A block becomes the sum of its
# 64-bit words modulo 2^64, each of which is multiplied by an odd number, folded, and multiplied by the odd key of its
# place. The sums of the blocks are hashed in the same way, until one number is left, which is sealed with dtype and
# shape.
#
# Folding xors higher bits into lower ones, as a product carries none down. Each step is invertible, so tensors that
# differ in one word always differ. Any others are alike with a chance of 2^-48 or less, which is that of two float64
# with other signs. Without the first product the signs of all float32 in a row would cancel.

_WORDS = 1024
_BLOCK = 8 * _WORDS  # bytes
_CHUNK = 64 * _BLOCK  # bytes at a time: the copy lies in the second cache
_ONES = (1 << 64) - 1
# Of SplitMix64 (Steele, Lea, Flood 2014).
_STEP, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _signed(x: int) -> int:
    """Return the 64-bit pattern as torch.int64 holds it."""
    return x - (1 << 64) if x >> 63 else x


def _split_mix(i: int, seed: int = 0) -> int:
    """Return output `i` of the generator."""
    x = ((i + 1) * _STEP + seed) & _ONES
    x = (x ^ (x >> 30)) * _FACTORS[0] & _ONES
    x = (x ^ (x >> 27)) * _FACTORS[1] & _ONES
    return x ^ (x >> 31)


@cache
def _keys(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor([_signed(_split_mix(i) | 1) for i in range(_WORDS)], device=device)


def _hashed(data: Tensor) -> Tensor:
    """Return the sums of the blocks of these bytes."""
    words = data.new_zeros(-(-len(data) // _BLOCK) * _BLOCK)
    words[: len(data)] = data
    words.view(torch.int64).mul_(_signed(_FACTORS[0]))
    # Each half of 32 bits, then each quarter, into the one below.
    for dtype, count in ((torch.int32, 2), (torch.int16, 4)):
        parts = words.view(dtype)
        parts[0::count].bitwise_xor_(parts[1::count])
    return words.view(torch.int64).view(-1, _WORDS).mul_(_keys(data.device)).sum(1)


def block_sums(x: Tensor) -> Tensor:
    """Return the sums of the blocks of `x`, int64 on its device. Those of parts of whole blocks follow each other."""
    with torch.no_grad():
        values = x.resolve_conj().resolve_neg().contiguous()
        # The stride of a dimension of one element may be anything, also in a contiguous tensor.
        data = values.as_strided((values.numel(),), (1,)).view(torch.uint8)
        sums = [_hashed(data[start : start + _CHUNK]) for start in range(0, len(data), _CHUNK)]
        return sums[0] if len(sums) == 1 else torch.cat([data.new_zeros(0, dtype=torch.int64), *sums])


def _root(sums: Tensor) -> Tensor:
    while len(sums) > 1:
        sums = block_sums(sums)
    return sums.sum()  # 0 for no element


def fingerprint_on_device(x: Tensor) -> Tensor:
    """Return the fingerprint of `x`, int64 of shape (), on its device. Does not wait for the device.

    Copies a tensor that is not contiguous. Takes strided tensors of the dtypes of NUMBER_FORMATS.
    """
    return _root(block_sums(x)) ^ _signed(_seal(str(x.dtype).removeprefix("torch."), x.shape))


def sealed(sums: Tensor, name: str, shape: Sequence[int]) -> int:
    """Return the fingerprint, 0 to 2**64 - 1, of a tensor of this dtype and shape by the sums of its blocks."""
    return (int(_root(sums)) & _ONES) ^ _seal(name, shape)


def _seal(name: str, shape: Sequence[int]) -> int:
    # Each step hashes the one before, so that format 1 with size 2 differs from format 2 with size 1.
    state = _split_mix(BY_NAME[name].number ^ len(shape) << 32)
    for size in shape:
        state = _split_mix(state + size & _ONES)
    return state


# Sketches: 32 numbers for each row of a tensor, from which the distance of two tensors can be estimated.
#
# A row is all elements along the last dimension, such as a token's hidden state. Its sketch is the row times a matrix
# of random signs that depends on nothing but the place in the row. So sketches from two runs, machines or devices
# belong together, and they add up as the rows do: the sketch of `a + b` is that of `a` plus that of `b`.

SKETCH_WIDTH = 32  # numbers for a row
_MAX_ROWS = 4096  # of one tensor: 512 KiB
_SEED = 0x6E616E7761746368  # "nanwatch"; kept in files like the width
_SKETCH_CHUNK = 1 << 20  # elements at a time: the temporaries stay below 16 MiB

# The signs of the first places, for the longest rows so far of each device.
_known: dict[torch.device, Tensor] = {}


def _signs(width: int, device: torch.device) -> Tensor:
    """Return the signs of the first places of a row: float64 of 1 and -1, float32 where there is no float64.

    In float64 neither TF32 nor autocast change the products.
    """
    known = _known.get(device)
    if known is None or len(known) < width:
        with torch.inference_mode(False):
            x = torch.tensor([_signed(_split_mix(i, _SEED)) for i in range(width)], device=device)
            bits = (x[:, None] >> torch.arange(SKETCH_WIDTH, device=device)) & 1
            known = _known[device] = (1 - 2 * bits).to(_reference.row_dtype(device))
    return known[:width]


def sketch(x: Tensor) -> Tensor:
    """Return the sketches of the first 4096 rows of `x`, float32 of shape (rows, 32), on its device.

    Linear in `x`. A row's sketch has the squared norm of the row on average over all matrices, with a standard error
    of 25 %: 12.5 % of the norm. A row with a nan or an inf has non-finite numbers alone. Needs a strided tensor of real
    numbers.
    """
    with torch.no_grad():
        x = x.detach()
        width = x.shape[-1] if x.ndim else 1
        if x.ndim > 1:
            # Without the other rows: making rows of a tensor with other strides copies it.
            x = x[: -(-_MAX_ROWS // max(1, x.shape[1:-1].numel()))]
        rows, signs = x.reshape(-1, width)[:_MAX_ROWS], _signs(width, x.device)
        parts = rows.split(max(1, _SKETCH_CHUNK // max(1, width)))
        return torch.cat([(part.to(signs.dtype) @ signs * SKETCH_WIDTH**-0.5).float() for part in parts])
