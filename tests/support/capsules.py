"""Capsules of made-up calls, and their values compared to the last bit."""

from __future__ import annotations

import struct
import tempfile
from collections import namedtuple
from typing import Any

import torch
from torch import Tensor, nn

from nanwatch import Capsule, write_capsule

Pair = namedtuple("Pair", ["first", "second"])


def bits(x: Tensor) -> bytes:
    """The bytes of the elements in C order."""
    plain = x.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def same(got: Any, want: Any) -> bool:
    """Equal to the last bit, by type too."""
    if isinstance(want, Tensor):
        return (
            isinstance(got, Tensor)
            and (got.dtype, got.shape, got.requires_grad) == (want.dtype, want.shape, want.requires_grad)
            and bits(got) == bits(want)
        )
    if isinstance(want, dict):
        return (
            type(got) is dict and list(got) == list(want) and all(same(got[key], want[key]) for key in want)
        )
    if type(want) in (list, tuple):
        pairs = zip(got, want, strict=True) if type(got) is type(want) and len(got) == len(want) else [(0, 1)]
        return all(same(a, b) for a, b in pairs)
    if isinstance(want, float):
        return type(got) is float and struct.pack("d", got) == struct.pack("d", want)
    return type(got) is type(want) and got == want


def round_trip(*args: Any, **kwargs: Any) -> Capsule:
    """The capsule of a call of a module without weights."""
    with tempfile.TemporaryDirectory() as folder:
        return Capsule.open(write_capsule(f"{folder}/c", nn.Identity(), "block.0", args, kwargs))
