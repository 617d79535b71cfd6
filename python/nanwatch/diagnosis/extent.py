"""Extent of the non-finite elements of a tensor, in a few words.

The words are exact. Where none fit, they say "scattered".
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..numerics import _reference
from ..numerics.readable import local_shard, only_our_dispatch, unreadable

# Beyond this a bool for every element, of which there are three at the worst, asks too much of a device that is full.
MAX_ELEMENTS = 1 << 31
# isfinite makes temporaries of the size of what it is given: 4 Mi elements at a time keep them below 64 MiB.
_CHUNK = 1 << 22


def describe(x: Tensor, *, max_elements: int = MAX_ELEMENTS) -> str:
    """Return where the nan and inf of `x` are, as one of the phrases below, or "" when it cannot be told.

    ====================================================  ==========================================================
    "none", "all", "one element"
    "1 of 4096 rows, row 7", "1 of 64 rows, [3, 12, :]"   a row is all positions of the last dimension
    "rows 2 to 5", "the last column", "3 of 8 columns"    of a matrix
    "index 17 of dimension 1, everywhere"                 likewise, of a tensor that is no matrix; "index 3" of a vector
    "the block [3, :, 4:7]"                               all that x[3, :, 4:7] selects
    "7 of 4096 rows"                                      whole rows
    "above the diagonal"                                  of the last two dimensions, everywhere
    "scattered over 5 of 4096 rows"                       parts of 5 rows
    "scattered in the block [:, 3:8]"                     parts of it, nothing outside
    "scattered"
    ====================================================  ==========================================================

    Reads any dtype and strides; of a DTensor the local shard. Takes up to three bytes an element for a while. Returns
    "" for tensors of more than `max_elements` elements, without values, and of other layouts than strided.
    """
    with only_our_dispatch(), torch.no_grad():
        plain = _plain(x)
        if plain is None or plain.numel() > max_elements:
            return ""
        nonfinite = torch.empty(plain.shape, dtype=torch.bool, device=plain.device)
        _mark(plain.detach(), nonfinite)
        return _words(nonfinite)


def _plain(x: Tensor) -> Tensor | None:
    if unreadable(x):
        return None
    local = local_shard(x)
    x = x if local is None else local
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        return None
    return x


def _mark(x: Tensor, nonfinite: Tensor) -> None:
    """Set `non-finite` where `x` is not finite."""
    if x.numel() <= _CHUNK:
        nonfinite.copy_(~torch.isfinite(_reference._to_arithmetic(x)))
        return
    longest = max(range(x.ndim), key=lambda dim: x.shape[dim])
    half = x.shape[longest] // 2
    for start, length in ((0, half), (half, x.shape[longest] - half)):
        _mark(x.narrow(longest, start, length), nonfinite.narrow(longest, start, length))


def _words(nonfinite: Tensor) -> str:
    count = int(nonfinite.sum())
    if count == 0:
        return "none"
    if count == nonfinite.numel():
        return "all"
    if count == 1:
        return "one element"
    indices = [_nonfinite_indices(nonfinite, dim) for dim in range(nonfinite.ndim)]
    words = _crossing(nonfinite.shape, indices) if prod(map(len, indices)) == count else ""
    return words or _whole_rows(nonfinite) or _above_diagonal(nonfinite) or _scattered(nonfinite, indices)


def _nonfinite_indices(nonfinite: Tensor, dim: int) -> list[int]:
    others = [other for other in range(nonfinite.ndim) if other != dim]
    hit = nonfinite.any(dim=others) if others else nonfinite
    found: list[int] = hit.nonzero().flatten().tolist()
    return found


def _crossing(shape: torch.Size, indices: list[list[int]]) -> str:
    """Return the words for all elements whose index is, in every dimension, one of those given; "" without any."""
    restricted = [dim for dim, one in enumerate(indices) if len(one) < shape[dim]]
    *leading, last = indices
    if leading and len(last) == shape[-1] and all(len(one) == 1 for one in leading):
        return f"1 of {prod(shape[:-1])} rows, {_row(shape, indices)}"
    if len(restricted) == 1:
        (dim,) = restricted
        kind = ("row", "column")[dim] if len(shape) == 2 else "index"
        words = _of_one_dimension(indices[dim], shape[dim], kind)
        return words if kind != "index" or len(shape) == 1 else f"{words} of dimension {dim}, everywhere"
    if any(one[-1] - one[0] >= len(one) for one in indices):
        return ""
    return f"the block {_block(indices, shape)}"


def _row(shape: torch.Size, indices: list[list[int]]) -> str:
    if len(shape) > 2:
        return f"[{', '.join(str(one[0]) for one in indices[:-1])}, :]"
    return "the last" if indices[0][0] == shape[0] - 1 else f"row {indices[0][0]}"


def _of_one_dimension(indices: list[int], size: int, kind: str) -> str:
    many = "indices" if kind == "index" else f"{kind}s"
    if len(indices) == 1:
        return f"the last {kind}" if indices[0] == size - 1 and kind != "index" else f"{kind} {indices[0]}"
    if indices[-1] - indices[0] == len(indices) - 1:
        return f"{many} {indices[0]} to {indices[-1]}"
    return f"{len(indices)} of {size} {many}"


def _block(indices: list[list[int]], shape: torch.Size) -> str:
    """Return the smallest index in brackets that selects all of these: `[3, :, 4:7]`."""
    spelt = []
    for one, size in zip(indices, shape, strict=True):
        start, stop = one[0], one[-1] + 1
        if stop - start == 1 < size:
            spelt.append(str(start))
        else:
            spelt.append(f"{start or ''}:{stop if stop < size else ''}")
    return f"[{', '.join(spelt)}]"


def _whole_rows(nonfinite: Tensor) -> str:
    hit = nonfinite.any(dim=-1)
    if nonfinite.ndim < 2 or not torch.equal(hit, nonfinite.all(dim=-1)):
        return ""
    return f"{int(hit.sum())} of {hit.numel()} rows"


def _above_diagonal(nonfinite: Tensor) -> str:
    if nonfinite.ndim < 2:
        return ""
    ones = torch.ones(nonfinite.shape[-2:], dtype=torch.bool, device=nonfinite.device)
    return "above the diagonal" if bool((nonfinite == ones.triu(1)).all()) else ""


def _scattered(nonfinite: Tensor, indices: list[list[int]]) -> str:
    # A block that is most of the tensor tells nothing.
    if 2 * prod(one[-1] - one[0] + 1 for one in indices) <= nonfinite.numel():
        return f"scattered in the block {_block(indices, nonfinite.shape)}"
    if nonfinite.ndim > 1:
        rows = nonfinite.any(dim=-1)
        hit = int(rows.sum())
        if hit < rows.numel():
            return f"scattered over {hit} of {rows.numel()} rows"
    return "scattered"
