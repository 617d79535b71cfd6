"""Tensors kept on the CPU for comparison: whole while there is room, else as a sketch of each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..numerics._fingerprint import WIDTH, sketch
from ..util.modules import WeakIdentityDict

# By precision.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype with the fewest bits of precision."""
    return max(dtypes, key=FLOATS.index)


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
        elif len(lead) == 3 and (lead[0], lead[2]) == mask.shape:  # heads before tokens
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


def sum_of_two(values: Sequence[KeptTensor]) -> KeptTensor | None:
    """Return the sum of the first two, which may be `hidden` and `residual`, or None where these do not add up."""
    a, b = values[:2] if len(values) > 1 else (None, None)
    if a is None or b is None or a.shape != b.shape or a.is_range or not a.rows.is_floating_point():
        return None
    is_sketch = a.is_sketch or b.is_sketch
    rows = [x.rows if x.is_sketch or not is_sketch else sketches(x.rows) for x in (a, b)]
    return a._replace(rows=rows[0] + rows[1], is_sketch=is_sketch)


def side_by_side(values: Sequence[KeptTensor]) -> KeptTensor | None:
    """Return tensors next to each other in their last dimension, as one fused projection has them."""
    if any(kept.is_sketch for kept in values) or len({kept.shape[:-1] for kept in values}) > 1:
        return None
    width = sum(kept.shape[-1] for kept in values)
    rows = torch.cat([kept.rows for kept in values], -1)
    return values[0]._replace(shape=(*values[0].shape[:-1], width), rows=rows)
