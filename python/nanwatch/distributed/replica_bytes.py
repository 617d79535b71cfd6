"""Two ranks compare their bits of one tensor: hashes of its blocks first, then only the blocks that differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import blake2b
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

    @property
    def bytes(self) -> Tensor:
        """The elements as bytes, in their order."""
        return self.tensor.contiguous().reshape(-1).view(torch.uint8)


def compare(copy: Copy, exchange: Exchange) -> tuple[Distance | None, int | None]:
    """Return how far apart both sides are, and the first batch whose kept fingerprints differ, as far as known."""
    mine = copy.bytes
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
    distance = measure(own, theirs_too, copy.tensor.dtype)
    whole = distance._replace(numel=copy.tensor.numel(), is_all=sent == differing)
    return Distance(copy.step, *whole), began


def _hash(block: Tensor) -> bytes:
    data: Any = block.numpy()  # which numpy does not say to be a buffer
    return blake2b(data, digest_size=8).digest()


class _Measured(NamedTuple):
    num_differing: int
    numel: int
    largest: float | None
    bits: tuple[int, ...]
    num_bits: int
    is_all: bool = True


def measure(a: Tensor, b: Tensor, dtype: torch.dtype) -> _Measured:
    """Compare the bytes of elements of this dtype."""
    width = dtype.itemsize
    flipped = (a ^ b).reshape(-1, width)
    is_other = (flipped != 0).any(1)
    flipped = flipped[is_other]
    bits = [
        (8 * byte + bit, count)
        for byte in range(width)
        for bit in range(8)
        if (count := int(((flipped[:, byte] >> bit) & 1).sum()))
    ]
    wide: list[Tensor] = [
        one.reshape(-1, width)[is_other].contiguous().view(-1).view(dtype).to(torch.float64)
        for one in (a, b)
        if not dtype.is_complex
    ]
    gap = (wide[0] - wide[1]).abs().max() if wide and len(wide[0]) else torch.tensor(torch.nan)
    largest = float(gap) if gap.isfinite() else None
    return _Measured(
        len(flipped), len(is_other), largest, tuple(bit for bit, _ in bits), sum(n for _, n in bits)
    )


def write(folder: Path, rank: int, name: str, tensor: Tensor) -> str:
    """Write one side's tensor, and return the file's path. `torch.load` reads it, and runs no code."""
    folder.mkdir(parents=True, exist_ok=True)
    spelt = "".join(one if one.isalnum() or one in "._-" else "_" for one in name)[:100]
    path = folder / f"rank-{rank}-{spelt}.pt"
    torch.save({"name": name, "rank": rank, "tensor": tensor}, path)
    return str(path)


def to_document(distance: Distance | None, began: int | None, files: list[str]) -> dict[str, Any]:
    """Return what the pair tells the other ranks."""
    fields = None
    if distance is not None:
        fields = {name: getattr(distance, name) for name in Distance.__dataclass_fields__}
    return {"distance": fields, "began": began, "files": files}
