"""The fingerprint of a tensor in plain torch, for every device; csrc/numerics/ranges.h describes the hash."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_BLOCK = 1024  # bytes
_LANES = 8
_WORDS = _BLOCK // 8
_CHUNK = 1 << 22  # bytes at a time: the temporaries stay below 40 MiB
_ONES = (1 << 64) - 1

# A dtype's place is the number that its fingerprints have. Fingerprints are kept in files: append only.
DTYPES = [
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("complex32", "complex64", "complex128"),
]


def _signed(x: int) -> int:
    """Return the 64-bit pattern as torch.int64 holds it."""
    return x - (1 << 64) if x >> 63 else x


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _ONES
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _ONES
    return x ^ (x >> 31)


def _split_mix(i: int) -> int:
    return _mix((i + 1) * 0x9E3779B97F4A7C15 & _ONES)


@cache
def _keys() -> list[int]:
    return [_signed(_split_mix(i)) for i in range(_WORDS + _LANES)]


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _sum_of_blocks(data: Tensor, first: int) -> Tensor:
    """Return the sum over the blocks of these bytes, the first of which has number `first`."""
    keys = torch.tensor(_keys(), dtype=torch.int64, device=data.device)
    data = torch.nn.functional.pad(data, (0, -len(data) % _BLOCK))
    words = data.view(torch.int64).reshape(-1, _WORDS)
    keyed = words ^ keys[:_WORDS]
    products = (keyed & 0xFFFFFFFF) * _shifted(keyed, 32)
    lanes = products.reshape(-1, _WORDS // _LANES, _LANES).sum(1)
    # A lane takes its neighbour's words as they are.
    lanes += words.reshape(-1, _WORDS // _LANES, _LANES // 2, 2).sum(1).flip(-1).reshape(-1, _LANES)
    digests = _mixed(lanes ^ keys[_WORDS:]).sum(1)
    numbers = torch.arange(first, first + len(digests), device=data.device)
    return _mixed(digests ^ _mixed((numbers + 1) * _signed(0x9E3779B97F4A7C15))).sum()


def fingerprint(x: Tensor) -> Tensor:
    """Return the fingerprint of `x`, int64 of shape (), on its device.

    Copies a tensor that is not contiguous. Raises TypeError for a dtype whose elements are no whole bytes, and for a
    tensor that is not strided.
    """
    name = str(x.dtype).removeprefix("torch.")
    if name not in DTYPES or x.layout is not torch.strided:
        raise TypeError(
            f"nanwatch.fingerprint got a tensor of dtype {name} and layout {x.layout}; it takes strided tensors of"
            f" {', '.join(DTYPES)}. Convert it, or take the fingerprint of the tensors that it is made of."
        )
    with torch.no_grad():
        values = x.resolve_conj().resolve_neg().contiguous()
        # The stride of a dimension of one element may be anything, also in a contiguous tensor.
        data = values.as_strided((values.numel(),), (1,)).view(torch.uint8)
        total = torch.zeros((), dtype=torch.int64, device=x.device)
        for start in range(0, len(data), _CHUNK):
            total += _sum_of_blocks(data[start : start + _CHUNK], start // _BLOCK)
        state = _split_mix(DTYPES.index(name) ^ x.ndim << 32)
        for size in x.shape:
            state = _split_mix(state + size & _ONES)
        return _mixed(total ^ _signed(state))
