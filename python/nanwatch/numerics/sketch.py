"""Sketches: 32 numbers for each row of a tensor, from which the distance of two tensors can be estimated.

A row is all elements along the last dimension, such as a token's hidden state. Its sketch is the row times a matrix of
random signs that depends on nothing but the place in the row. So sketches from two runs, machines or devices belong
together, and they add up as the rows do: the sketch of `a + b` is that of `a` plus that of `b`.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ._fingerprint import _mixed, _signed

WIDTH = 32  # numbers for a row
MAX_ROWS = 4096  # of one tensor: 512 KiB
_SEED = 0x6E616E7761746368  # "nanwatch"; kept in files like the width
_STEP = 0x9E3779B97F4A7C15
_CHUNK = 1 << 20  # elements at a time: the temporaries stay below 16 MiB

Array = TypeVar("Array", Tensor, "np.ndarray[tuple[int, ...], np.dtype[np.float64]]")
# The signs of the first places, for the longest rows so far of each device.
_known: dict[torch.device, Tensor] = {}


def _signs(start: int, end: int, device: torch.device) -> Tensor:
    """Return the signs of the places `start` to `end` of a row: float64 of 1 and -1, float32 where there is none."""
    known = _known.get(device)
    if known is None or len(known) < end:
        with torch.inference_mode(False):
            places = torch.arange(1, end + 1, device=device)
            bits = _mixed(places * _signed(_STEP) + _SEED)
            bits = (bits[:, None] >> torch.arange(WIDTH, device=device)) & 1
            known = _known[device] = (1 - 2 * bits).to(_wide(device))
    return known[start:end]


def _wide(device: torch.device) -> torch.dtype:
    """Return the format of the products. In float64 neither TF32 nor autocast change them."""
    return torch.float32 if device.type == "mps" else torch.float64


def sketch(x: Tensor, *, start: int = 0, max_rows: int | None = MAX_ROWS, wide: bool = False) -> Tensor:
    """Return the sketches of the first `max_rows` rows of `x`, of shape (rows, 32), on its device.

    They are float32, or with `wide` float64, where the device has it.

    Linear in `x`. A row's sketch has the squared norm of the row on average over all matrices, with a standard error
    of 25 %: 12.5 % of the norm. A row with a nan or an inf has non-finite numbers alone.
    `start` is the place of the first element in a longer row: `sketch(a) + sketch(b, start=len(a))` is the sketch of
    `torch.cat([a, b])`. Needs a strided tensor of real numbers.
    """
    with torch.no_grad():
        x = x.detach()
        width = x.shape[-1] if x.ndim else 1
        if x.ndim > 1:
            # Without the other rows: making rows of a tensor with other strides copies it.
            per_entry = max(1, x.shape[1:-1].numel())
            x = x[: None if max_rows is None else -(-max_rows // per_entry)]
        rows = x.reshape(-1, width)[:max_rows]
        signs = _signs(start, start + width, x.device)
        found = torch.empty(len(rows), WIDTH, dtype=signs.dtype if wide else torch.float32, device=x.device)
        step = max(1, _CHUNK // max(1, width))
        for at in range(0, len(rows), step):
            products = rows[at : at + step].to(signs.dtype) @ signs
            found[at : at + step] = products * WIDTH**-0.5
        return found


def norms(sketches: Array) -> Array:
    """Return the estimated norm of each row from its sketch."""
    found: Array = (sketches * sketches).sum(-1) ** 0.5
    return found


def relative_errors(a: Array, b: Array) -> Array:
    """Return the estimated norm of `b - a` over that of `a`, for each row. Takes arrays or tensors of sketches.

    Equal rows have exactly 0 where `a` is not 0. One row's estimate has a standard error of 12.5 % for each of both
    norms. That of many rows, `norms(norms(b - a)) / norms(norms(a))`, is closer, unless they differ in one direction.
    """
    return norms(b - a) / norms(a)


def cosines(a: Array, b: Array) -> Array:
    """Return the estimated cosine between each row of `a` and the same row of `b`. Takes arrays or tensors."""
    found: Array = (a * b).sum(-1) / (norms(a) * norms(b))
    return found
