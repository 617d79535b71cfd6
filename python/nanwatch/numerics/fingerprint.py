"""Fingerprints: 64 bits that tell whether two tensors have the same elements, bit for bit, in the same places."""

from __future__ import annotations

from torch import Tensor

from . import _extension, _ops
from .readable import is_plain, only_our_dispatch, readable, type_name


def fingerprint(x: Tensor) -> int:
    """Return a 64-bit hash of the elements of `x` in C order, with its dtype and shape: from 0 to 2**64 - 1.

    Two tensors of the same dtype, shape and bits have the same fingerprint, on any device, with any strides and any
    number of threads, now and in later versions. Tensors that differ have different ones but for one chance in 2**64.
    -0.0 and 0.0 differ, and so do two nans of different bits. A DTensor gives that of its local shard. It is no
    cryptographic hash: who wants to can construct two tensors of one fingerprint.

    The lanes are those of XXH3 (https://github.com/Cyan4973/xxHash), the finaliser is that of SplitMix64.

    >>> import torch
    >>> x = torch.arange(6.0).reshape(2, 3)
    >>> fingerprint(x) == fingerprint(x.T.contiguous().T)
    True
    >>> fingerprint(x) == fingerprint(x.flip(0))
    False

    Raises TypeError where `abs_range` does, and for a tensor that is not strided (sparse, nested, quantized).
    """
    _extension.explain_once()
    with only_our_dispatch():
        x = readable(x, "fingerprint")
        if not is_plain(x):
            raise TypeError(
                f"fingerprint cannot read a {type_name(x)} of layout {x.layout}. It takes strided tensors of plain"
                " dtypes. Pass the tensors that it is made of, or a dense copy."
            )
        return int(_ops.fingerprint(x)) % 2**64
