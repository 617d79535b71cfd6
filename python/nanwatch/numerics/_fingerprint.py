"""Small values that tell whether the tensors of two runs are the same, or how far apart: fingerprints and sketches.

The fingerprint is a hash in integer arithmetic, the same on every device. The elements in C order are cut into blocks
of 8 KiB, the last filled up with zeros. A block becomes the sum of its 64-bit words modulo 2^64, each of which is
multiplied by an odd number, folded, and multiplied by the odd key of its place. The sums of the blocks are hashed in
the same way, until one number is left, which is sealed with dtype and shape.

Folding xors higher bits into lower ones, as a product carries none down. Each step is invertible, so tensors that
differ in one word always differ. Any others are alike with a chance of 2^-48 or less, which is that of two float64 with
other signs. Without the first product the signs of all float32 in a row would cancel.

A sketch has 32 numbers for each row of a tensor, from which the distance of two tensors can be estimated. A row is all
elements along the last dimension, such as a token's hidden state. Its sketch is the row times a matrix of random signs
that depends on nothing but the place in the row. So sketches from two runs, machines or devices belong together, and
they add up as the rows do: the sketch of `a + b` is that of `a` plus that of `b`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ._reference import row_dtype
from .formats import BY_NAME

_WORDS = 1024
BLOCK = 8 * _WORDS  # bytes
_CHUNK = 64 * BLOCK  # bytes at a time: the copy lies in the second cache
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
    words = data.new_zeros(-(-len(data) // BLOCK) * BLOCK)
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


def fingerprint(x: Tensor) -> Tensor:
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


# Sketches.

WIDTH = 32  # numbers for a row
MAX_ROWS = 4096  # of one tensor: 512 KiB
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
            bits = (x[:, None] >> torch.arange(WIDTH, device=device)) & 1
            known = _known[device] = (1 - 2 * bits).to(row_dtype(device))
    return known[:width]


def sketch(x: Tensor, *, max_rows: int | None = MAX_ROWS, wide: bool = False) -> Tensor:
    """Return the sketches of the first `max_rows` rows of `x`, of shape (rows, 32), on its device.

    They are float32, or with `wide` float64, where the device has it.

    Linear in `x`. A row's sketch has the squared norm of the row on average over all matrices, with a standard error
    of 25 %: 12.5 % of the norm. A row with a nan or an inf has non-finite numbers alone. Needs a strided tensor of real
    numbers.
    """
    with torch.no_grad():
        x = x.detach()
        width = x.shape[-1] if x.ndim else 1
        if x.ndim > 1:
            # Without the other rows: making rows of a tensor with other strides copies it.
            per_entry = max(1, x.shape[1:-1].numel())
            x = x[: None if max_rows is None else -(-max_rows // per_entry)]
        rows = x.reshape(-1, width)[:max_rows]
        signs = _signs(width, x.device)
        sketches = torch.empty(
            len(rows), WIDTH, dtype=signs.dtype if wide else torch.float32, device=x.device
        )
        step = max(1, _SKETCH_CHUNK // max(1, width))
        for at in range(0, len(rows), step):
            products = rows[at : at + step].to(signs.dtype) @ signs
            sketches[at : at + step] = products * WIDTH**-0.5
        return sketches
