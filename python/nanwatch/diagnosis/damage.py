"""The shape of the damage: which elements of a tensor are not finite, in a few words.

What is said is exact. Where no words fit, it says "scattered".
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..numerics import _reference
from ..numerics.ranges import local_shard, only_our_dispatch, unreadable

# Beyond this a bool for every element, of which there are three at the worst, asks too much of a device that is full.
MAX_ELEMENTS = 1 << 31
# isfinite makes temporaries of the size of what it is given: 4 Mi elements at a time keep them below 64 MiB.
_CHUNK = 1 << 22


def describe(x: Tensor, *, max_elements: int = MAX_ELEMENTS) -> str:
    """Where the nan and inf of `x` are: one of the phrases below, or "" when it cannot be told.

    ====================================================  ==========================================================
    "none", "all", "one element"
    "1 of 4096 rows, row 7", "1 of 64 rows, [3, 12, :]"   a row is all positions of the last dimension
    "rows 2 to 5", "column 7", "the last column",         of a matrix
    "every second column", "3 of 8 columns"
    "index 17 of dimension 1, everywhere"                 likewise, of a tensor that is no matrix; "index 3" of a vector
    "the block [3, :, 4:7]"                               all that x[3, :, 4:7] selects
    "2 of 8 indices of dimension 0, index 3 of …"         all elements at the crossings
    "7 of 4096 rows"                                      whole rows
    "3 of 256 slices over the last 2 dimensions"          likewise, of more dimensions
    "above the diagonal"                                  of the last two dimensions, everywhere; also "on", "below"
    "scattered over 5 of 4096 rows"                       parts of 5 rows
    "scattered in the block [:, 3:8]"                     parts of it, nothing outside
    "scattered"
    ====================================================  ==========================================================

    Any dtype and strides; of a DTensor the local shard. Takes up to three bytes an element for a while. "" stands for
    tensors of more than `max_elements` elements, for those without values and for other layouts than strided.
    """
    with only_our_dispatch(), torch.no_grad():
        plain = _plain(x)
        if plain is None or plain.numel() > max_elements:
            return ""
        bad = torch.empty(plain.shape, dtype=torch.bool, device=plain.device)
        _mark(plain.detach(), bad)
        return _words(bad)


def _plain(x: Tensor) -> Tensor | None:
    if unreadable(x):
        return None
    local = local_shard(x)
    x = x if local is None else local
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        return None
    return x


def _mark(x: Tensor, bad: Tensor) -> None:
    """Set `bad` where `x` is not finite."""
    if x.numel() <= _CHUNK:
        bad.copy_(~torch.isfinite(_reference._to_arithmetic(x)))
        return
    longest = max(range(x.ndim), key=lambda dim: x.shape[dim])
    half = x.shape[longest] // 2
    for start, length in ((0, half), (half, x.shape[longest] - half)):
        _mark(x.narrow(longest, start, length), bad.narrow(longest, start, length))


def _words(bad: Tensor) -> str:
    count = int(bad.sum())
    if count == 0:
        return "none"
    if count == bad.numel():
        return "all"
    if count == 1:
        return "one element"
    indices = [_bad_indices(bad, dim) for dim in range(bad.ndim)]
    if prod(map(len, indices)) == count:
        return _crossing(bad.shape, indices)
    return _whole_slices(bad) or _diagonal(bad) or _scattered(bad, indices)


def _bad_indices(bad: Tensor, dim: int) -> list[int]:
    others = [other for other in range(bad.ndim) if other != dim]
    hit = bad.any(dim=others) if others else bad
    found: list[int] = hit.nonzero().flatten().tolist()
    return found


def _crossing(shape: torch.Size, indices: list[list[int]]) -> str:
    """The words for all the elements whose index is, in every dimension, one of those given."""
    restricted = [dim for dim, one in enumerate(indices) if len(one) < shape[dim]]
    *leading, last = indices
    if leading and len(last) == shape[-1] and all(len(one) == 1 for one in leading):
        return f"1 of {prod(shape[:-1])} rows, {_row(shape, indices)}"
    if len(restricted) == 1:
        (dim,) = restricted
        kind = ("row", "column")[dim] if len(shape) == 2 else "index"
        words = _of_one_dimension(indices[dim], shape[dim], kind)
        if kind != "index" or len(shape) == 1:
            return words
        return f"{words} of dimension {dim}, everywhere"
    spelt = [_slice(one, size) for one, size in zip(indices, shape, strict=True)]
    if None not in spelt:
        return f"the block [{', '.join(map(str, spelt))}]"
    return ", ".join(
        f"{_of_one_dimension(indices[dim], shape[dim], 'index')} of dimension {dim}" for dim in restricted
    )


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
    if len(indices) > 2 and indices == list(range(indices[0] % 2, size, 2)):
        start = f", from {indices[0]}" if indices[0] else ""
        return f"every second {kind}{start}"
    return f"{len(indices)} of {size} {many}"


def _slice(indices: list[int], size: int) -> str | None:
    """As it stands between brackets: `3`, `:`, `4:7`, `::2`; None when these indices are not evenly spaced."""
    if len(indices) == size:
        return ":"
    if len(indices) == 1:
        return str(indices[0])
    step = indices[1] - indices[0]
    if indices != list(range(indices[0], indices[-1] + 1, step)):
        return None
    start = str(indices[0]) if indices[0] else ""
    stop = str(indices[-1] + 1) if indices[-1] + step < size else ""
    return f"{start}:{stop}" + (f":{step}" if step > 1 else "")


def _whole_slices(bad: Tensor) -> str:
    """The words when the damage is whole rows, or whole slices over more of the last dimensions; else ""."""
    words = ""
    for over in range(1, bad.ndim):
        last = list(range(bad.ndim - over, bad.ndim))
        hit = bad.any(dim=last)
        if not torch.equal(hit, bad.all(dim=last)):
            break
        of = f"{int(hit.sum())} of {hit.numel()}"
        words = f"{of} rows" if over == 1 else f"{of} slices over the last {over} dimensions"
    return words


def _diagonal(bad: Tensor) -> str:
    """The words when every matrix over the last two dimensions is bad on one side of its diagonal; else ""."""
    if bad.ndim < 2:
        return ""
    last = bad.shape[-2:]
    every = bad.reshape(-1, *last)
    one = every[0]
    if not bool((every == one).all()):
        return ""
    ones = torch.ones(last, dtype=torch.bool, device=bad.device)
    sides = {
        "above the diagonal": ones.triu(1),
        "on and above the diagonal": ones.triu(),
        "below the diagonal": ones.tril(-1),
        "on and below the diagonal": ones.tril(),
        "on the diagonal": ones.triu().logical_and(ones.tril()),
    }
    return next((words for words, side in sides.items() if torch.equal(one, side)), "")


def _scattered(bad: Tensor, indices: list[list[int]]) -> str:
    spans = [list(range(one[0], one[-1] + 1)) for one in indices]
    # A block that is most of the tensor tells nothing.
    if 2 * prod(map(len, spans)) <= bad.numel():
        spelt = [_slice(span, size) for span, size in zip(spans, bad.shape, strict=True)]
        return f"scattered in the block [{', '.join(map(str, spelt))}]"
    if bad.ndim > 1:
        rows = bad.any(dim=-1)
        hit = int(rows.sum())
        if hit < rows.numel():
            return f"scattered over {hit} of {rows.numel()} rows"
    return "scattered"
