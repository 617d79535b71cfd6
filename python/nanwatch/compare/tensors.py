"""Tensors kept on the CPU for comparison, and how far two of them are apart.

A tensor is kept whole while there is room, else as a sketch of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..numerics._fingerprint import WIDTH, sketch
from ..util.modules import WeakIdentityDict

# By precision.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Rows with less than this share of the mean norm are compared by that share: padding may be all but zero.
_LEAST_ROW = 0.1
# Masks hold -inf or the least number of a dtype, whose squares have no norm.
_LARGEST = 1e30


class KeptTensor(NamedTuple):
    """Copy of a tensor as rows (its last dimension), as the sketches of its rows, or with `is_range` as its range."""

    shape: tuple[int, ...]
    rows: Tensor
    is_sketch: bool = False
    is_range: bool = False

    @property
    def identity(self) -> object:
        """A key that two copies share when they are of one tensor, as far as is known."""
        return tuple(self.rows.flatten().tolist()) if self.is_range else id(self.rows)

    @property
    def may_be_part_of_sum(self) -> bool:
        """Whether it may be the hidden state or the residual, which another model passes on as their sum."""
        return not self.is_range and self.rows.is_floating_point()


class Errors(NamedTuple):
    """Distance of two tensors: relative error of all and of each row, cosine, and largest difference of an element."""

    total: float
    rows: Tensor
    cosine: float
    largest_difference: float

    @property
    def worst_row(self) -> float:
        """The relative error of the worst row."""
        return float(self.rows.max()) if len(self.rows) else 0.0


def sketches(rows: Tensor) -> Tensor:
    """Return the sketches of all rows, as exact as they can be."""
    return sketch(rows, max_rows=None, wide=True)


class Store:
    """Copies of tensors, at most `most_bytes` of them whole."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._known: WeakIdentityDict[tuple[int, KeptTensor]] = WeakIdentityDict()

    def keep(self, x: Tensor) -> KeptTensor:
        """Return a copy; that of the same tensor, unchanged since, is one object."""
        version = -1 if x.is_inference() else x._version
        known = self._known.get(x)
        if known is not None and known[0] == version != -1:
            return known[1]
        flat = torch.view_as_real(x.detach()).flatten(-2) if x.is_complex() else x.detach()
        rows = flat.reshape(-1, flat.shape[-1] if flat.ndim else 1)
        size = rows.numel() * rows.element_size()
        is_sketch = size > self._left and rows.shape[-1] > WIDTH
        self._left -= 0 if is_sketch else size
        copy = sketches(rows).cpu() if is_sketch else rows.to("cpu", copy=True)
        kept = KeptTensor(tuple(flat.shape), copy, is_sketch)
        self._known[x] = (version, kept)
        return kept


class Tokens:
    """Which tokens count: a mask of shape (batch, length), or None for all."""

    def __init__(self, mask: Tensor | None) -> None:
        self._mask = None if mask is None else mask.detach().to("cpu", torch.bool)

    def rows(self, kept: KeptTensor) -> Tensor:
        """Return the rows of the tokens that count. A tensor without padding has no others."""
        mask, lead = self._mask, kept.shape[:-1]
        if mask is None:
            return kept.rows
        if lead[:2] == mask.shape:
            chosen = mask.reshape(*mask.shape, *(1,) * (len(lead) - 2)).expand(lead)
        elif len(lead) == 3 and (lead[0], lead[2]) == mask.shape:
            chosen = mask[:, None, :].expand(lead)
        elif lead == (mask.numel(),):
            chosen = mask
        else:
            return kept.rows
        return kept.rows[chosen.reshape(-1)]

    def size(self, kept: KeptTensor) -> int:
        """Return how many numbers count. Two values of which this differs are not the same."""
        return len(self.rows(kept)) * (kept.shape or (1,))[-1]

    def pair(self, a: KeptTensor, b: KeptTensor) -> tuple[Tensor, Tensor] | None:
        """Return the rows of both in the same layout, or None where the shapes do not go together."""
        is_whole = not (a.is_sketch or b.is_sketch)
        if is_whole and len(a.shape) == len(b.shape) == 4 and a.shape != b.shape:
            turned = b.rows.reshape(b.shape).transpose(1, 2)
            if turned.shape == a.shape:  # heads before tokens on one side, after them on the other
                b = KeptTensor(a.shape, turned.reshape(-1, a.shape[-1]))
        rows_a, rows_b = self.rows(a), self.rows(b)
        if not is_whole:
            if a.shape[-1:] != b.shape[-1:]:
                return None
            rows_a, rows_b = (x if kept.is_sketch else sketches(x) for x, kept in ((rows_a, a), (rows_b, b)))
        if rows_a.numel() != rows_b.numel() or not rows_a.numel():
            return None
        if rows_a.shape != rows_b.shape:
            width = max(rows_a.shape[-1], rows_b.shape[-1])
            if rows_a.numel() % width:
                return None
            rows_a, rows_b = rows_a.reshape(-1, width), rows_b.reshape(-1, width)
        return rows_a.to(torch.float64), rows_b.to(torch.float64)


def total(values: Sequence[KeptTensor]) -> KeptTensor:
    """Return the sum of tensors of one shape: `hidden + residual`."""
    if len(values) == 1:
        return values[0]
    is_sketch = any(kept.is_sketch for kept in values)
    rows = [sketches(kept.rows) if is_sketch and not kept.is_sketch else kept.rows for kept in values]
    return values[0]._replace(rows=torch.stack(rows).sum(0), is_sketch=is_sketch)


def side_by_side(values: Sequence[KeptTensor]) -> KeptTensor | None:
    """Return tensors next to each other in their last dimension, as one fused projection has them."""
    if values[0].is_sketch or len({(kept.shape[:-1], kept.is_sketch) for kept in values}) > 1:
        return None
    rows = torch.cat([kept.rows for kept in values], -1)
    width = sum(kept.shape[-1] for kept in values)
    return values[0]._replace(shape=(*values[0].shape[:-1], width), rows=rows)


def errors_between(a: Tensor, b: Tensor) -> Errors:
    """Return how far the rows of `b` are from those of `a`. The same non-finite number on both sides is no error."""
    same = ~a.isfinite() & ((a == b) | (a.isnan() & b.isnan()))
    apart = (~a.isfinite() | ~b.isfinite()) & ~same
    a, b = (x.masked_fill(same, 0).nan_to_num(0.0).clamp(-_LARGEST, _LARGEST) for x in (a, b))
    difference = a - b
    norms = a.norm(dim=-1)
    distances = difference.norm(dim=-1).masked_fill(apart.any(-1), float("inf"))
    whole, overall = float(norms.norm()), float(distances.norm())
    least = max(_LEAST_ROW * whole / max(len(norms), 1) ** 0.5, 1e-300)
    both = whole * float(b.norm())
    return Errors(
        overall / whole if whole else (0.0 if overall == 0 else float("inf")),
        distances / norms.clamp(min=least),
        float((a * b).sum()) / both if both else 1.0,
        float("inf") if bool(apart.any()) else float(difference.abs().max()) if difference.numel() else 0.0,
    )
