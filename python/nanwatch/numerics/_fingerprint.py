"""Fingerprints, which tell whether the tensors of two runs are the same.

A fingerprint is a hash in integer arithmetic, the same on every device. The elements in C order are cut into blocks
of 8 KiB, the last filled up with zeros. A block becomes the sum of its 64-bit words modulo 2^64, each of which is
multiplied by an odd number, folded, and multiplied by the odd key of its place. The sums of the blocks are hashed in
the same way, until one number is left, which is sealed with dtype and shape.

Folding xors higher bits into lower ones, as a product carries none down. Each step is invertible, so tensors that
differ in one word always differ. Any others are alike with a chance of 2^-48 or less, which is that of two float64 with
other signs. Without the first product the signs of all float32 in a row would cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

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


def _split_mix(i: int) -> int:
    x = (i + 1) * _STEP & _ONES
    x = (x ^ (x >> 30)) * _FACTORS[0] & _ONES
    x = (x ^ (x >> 27)) * _FACTORS[1] & _ONES
    return x ^ (x >> 31)


def _split_mixes(count: int, device: torch.device) -> Tensor:
    """Return the numbers of the generator for the first places, as torch.int64."""
    x = torch.arange(1, count + 1, device=device) * _signed(_STEP)
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@cache
def _keys(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return _split_mixes(_WORDS, device) | 1


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
    """Return the fingerprint of `x`, int64 of shape (), on its device. Does not wait for it.

    Copies a tensor that is not contiguous. Raises TypeError for a dtype whose elements are no whole bytes, and for a
    tensor that is not strided.
    """
    name = str(x.dtype).removeprefix("torch.")
    if name not in BY_NAME or x.layout is not torch.strided:
        raise TypeError(
            f"nanwatch.fingerprint got a tensor of dtype {name} and layout {x.layout}; it takes strided tensors of"
            f" {', '.join(BY_NAME)}. Convert it, or take the fingerprint of the tensors that it is made of."
        )
    return _root(block_sums(x)) ^ _signed(_seal(name, x.shape))


def sealed(sums: Tensor, name: str, shape: Sequence[int]) -> int:
    """Return the fingerprint, 0 to 2**64 - 1, of a tensor of this dtype and shape by the sums of its blocks."""
    return (int(_root(sums)) & _ONES) ^ _seal(name, shape)


def _seal(name: str, shape: Sequence[int]) -> int:
    # Each step hashes the one before, so that format 1 with size 2 differs from format 2 with size 1.
    state = _split_mix(BY_NAME[name].number ^ len(shape) << 32)
    for size in shape:
        state = _split_mix(state + size & _ONES)
    return state
