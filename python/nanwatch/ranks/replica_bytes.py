"""Two ranks compare their bits of one tensor: hashes of its blocks first, then only the blocks that differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..report.replica import Distance

# A larger tensor is not copied, because the copy would stop the run for as long as it takes.
MOST_BYTES = 1 << 30
_BLOCK = 4096  # bytes at least: a message then has at most 16,384 hashes of 8 bytes
_MOST_BLOCKS, _MOST_SENT = 1 << 14, 1 << 20

# Sends a named value, and returns the other rank's; None where it does not come in time.
Exchange = Callable[[str, bytes], "bytes | None"]


class Copy(NamedTuple):
    """Copy of one rank's tensor on the host, made at optimizer step `step`. `prints` are kept fingerprints by batch."""

    step: int
    tensor: Tensor
    prints: dict[int, int]


def compare(copy: Copy, exchange: Exchange) -> tuple[Distance | None, int | None]:
    """Return how far apart both sides are, and the first batch whose kept fingerprints differ, as far as known."""
    mine = bytes_of(copy.tensor)
    size = max(_BLOCK, -(-len(mine) // _MOST_BLOCKS))
    size += -size % _BLOCK
    hashes = [_hash(mine[at : at + size]) for at in range(0, len(mine), size)]
    outline = {"step": copy.step, "bytes": len(mine), "prints": copy.prints}
    theirs = exchange("outline", json.dumps(outline).encode())
    if theirs is None:
        return None, None
    other = json.loads(theirs)
    prints = {int(batch): value for batch, value in other["prints"].items()}
    began = min((b for b, value in copy.prints.items() if prints.get(b, value) != value), default=None)
    if (other["step"], other["bytes"]) != (copy.step, len(mine)):
        return None, began
    packed = exchange("hashes", b"".join(hashes))
    if packed is None or len(packed) != 8 * len(hashes):
        return None, began
    differing = [at for at, own in enumerate(hashes) if packed[8 * at : 8 * at + 8] != own]
    sent = differing[: max(1, _MOST_SENT // size)]
    own = mine[:0] if not sent else torch.cat([mine[at * size : (at + 1) * size] for at in sent])
    found = exchange("blocks", own.numpy().tobytes())
    if found is None or len(found) != len(own):
        return None, began
    theirs_too = torch.frombuffer(bytearray(found), dtype=torch.uint8) if sent else own
    distance = measure(own, theirs_too, copy.tensor.dtype, copy.step)
    return replace(distance, numel=copy.tensor.numel(), is_all=sent == differing), began


def _hash(block: Tensor) -> bytes:
    data: Any = block.numpy()  # which numpy does not say to be a buffer
    return blake2b(data, digest_size=8).digest()


def bytes_of(x: Tensor) -> Tensor:
    """Return the elements as bytes, in their order."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def measure(a: Tensor, b: Tensor, dtype: torch.dtype, step: int) -> Distance:
    """Compare the bytes of elements of this dtype."""
    width = dtype.itemsize
    flipped = (a ^ b).reshape(-1, width)
    is_other = (flipped != 0).any(1)
    bits = [at for at in range(8 * width) if ((flipped[:, at // 8] >> at % 8) & 1).any()]
    largest = None
    if bits and not dtype.is_complex:
        x, y = (one.reshape(-1, width)[is_other].contiguous().view(-1).view(dtype).double() for one in (a, b))
        gap = float((x - y).abs().max())
        largest = gap if isfinite(gap) else None
    return Distance(step, int(is_other.sum()), len(is_other), largest, tuple(bits))


def write(folder: Path, rank: int, name: str, tensor: Tensor) -> str:
    """Write one side's tensor, and return the file's path. `torch.load` reads it, and runs no code."""
    folder.mkdir(parents=True, exist_ok=True)
    spelt = "".join(one if one.isalnum() or one in "._-" else "_" for one in name)[:100]
    path = folder / f"rank-{rank}-{spelt}.pt"
    torch.save({"name": name, "rank": rank, "tensor": tensor}, path)
    return str(path)
