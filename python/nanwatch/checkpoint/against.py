"""Comparison of two checkpoints: which tensors changed, how far, and whether a conversion was faithful."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import TypeAlias

import torch
from torch import Tensor

from ..util.progress import Tell
from .encodings import ENCODINGS
from .pairing import Pair, Pairing, tolerance_of
from .result import Change, CheckpointComparison, TensorScan
from .stored import DamagedError, OpenFiles, StoredTensor, joined, transposed
from .streaming import Streamer, in_threads

_ELEMENTS = 1 << 17  # of a step, so that its temporaries stay in the caches
_LEAST_ROWS = 32  # of a transposed matrix
# Relative, of a tensor: what rounding to float8_e5m2 takes at most. More is no rounding, as where all becomes zero.
_MOST_ROUNDED = 0.125
# Norm of a block's error by its norm, at most: each of 32 elements off by half a 127th of the largest, or by an eighth.
_BLOCK = 32
_BLOCK_ERRORS = {"q8_0": 0.03, "q4_0": 0.72}
_TINY = 2.2e-5  # a scale below the normal numbers of float16 is off by up to 2^-25

Side: TypeAlias = tuple[Sequence[StoredTensor], Sequence[TensorScan]]


def compare(a: Side, b: Side, problems: Sequence[str], threads: int, tell: Tell) -> CheckpointComparison:
    """Return how the tensors of `b` differ from those of `a`. Each side has them with their scans."""
    tell("matching tensors")
    scans = {id(stored): scanned for side in (a, b) for stored, scanned in zip(*side, strict=True)}
    readable = [[one for one in side[0] if not _why_not(one, scans[id(one)])] for side in (a, b)]
    with OpenFiles() as files:
        pairs = Pairing(readable[0], readable[1], files).match()
    changes: list[Change] = []
    for done, change in enumerate(in_threads(lambda pair: _change(pair, scans), pairs, threads)):
        tell("comparing", done, len(pairs), "tensors")
        changes.append(change)
    matched = {id(one) for pair in pairs for one in (*pair.a, *pair.b)}
    alone = [{one.name: one for one in side[0] if id(one) not in matched} for side in (a, b)]
    both = [name for name in alone[0] if name in alone[1]]
    for name in both:
        one, other = (side.pop(name) for side in alone)
        why = _why_not(one, scans[id(one)]) or _why_not(other, scans[id(other)])
        text = why or f"{list(one.shape)} is no {list(other.shape)}"
        changes.append(Change((name,), (name,), "not compared", text))
    return CheckpointComparison(tuple(changes), tuple(alone[0]), tuple(alone[1]), tuple(problems))


def _why_not(one: StoredTensor, scanned: TensorScan) -> str:
    if scanned.dtype in ENCODINGS and scanned.dtype not in _BLOCK_ERRORS:
        return f"the error of {scanned.dtype} blocks is not known"
    return scanned.lost or scanned.unread


@dataclass(slots=True)
class _Distance:
    noise: float = 0.0
    square: float = 0.0
    largest: float = 0.0
    at: int = -1
    unrounded: int = 0  # elements that are not the nearest in the other's format
    unrounded_back: int = 0  # the same of the other's elements in the first's
    num_lost: int = 0  # finite elements that are nan or inf there
    worst: float = 0.0  # error of a block by its norm

    def add(self, a: Tensor, b: Tensor, start: int, *, is_exact: bool) -> None:
        """Add elements; `start` is the number of the first one."""
        if is_exact:
            self.unrounded += _unrounded(a, b)
            self.unrounded_back += _unrounded(b, a)
        wide = torch.float32 if max(a.element_size(), b.element_size()) < 4 else torch.float64
        x, y = a.to(wide), b.to(wide)
        apart = y - x
        if not bool(apart.isfinite().all()):
            self.num_lost += int((x.isfinite() & ~y.isfinite()).sum())
            apart[(x == y) | (x.isnan() & y.isnan())] = 0.0
            x, apart = x.nan_to_num(0.0, 0.0, 0.0), apart.nan_to_num(inf, inf, -inf)
        if not is_exact:
            far, near = (one.view(-1, _BLOCK).norm(dim=1) for one in (apart, x))
            self.worst = max(self.worst, float(((far - _TINY).clamp_(min=0) / near).nan_to_num(0.0).max()))
        self.noise += float(apart.square().sum(dtype=torch.float64))
        self.square += float(x.square().sum(dtype=torch.float64))
        largest = float(apart.abs().max()) if len(apart) else 0.0
        if largest > self.largest:
            self.largest, self.at = largest, start + int(apart.abs().argmax())


def _unrounded(a: Tensor, b: Tensor) -> int:
    """Return the number of elements of `b` that are not the nearest to those of `a`."""
    # PyTorch does not compare numbers of 8 bits.
    nearest, given = (one.float() if b.element_size() == 1 else one for one in (a.to(b.dtype), b))
    return int(((nearest != given) & ~(nearest.isnan() & given.isnan())).sum())


def _change(pair: Pair, scans: dict[int, TensorScan]) -> Change:
    names, others = tuple(one.name for one in pair.a), tuple(one.name for one in pair.b)
    one, other = joined(pair.a), joined(pair.b)
    is_fused = len(pair.a) + len(pair.b) > 2
    if not is_fused and (one.dtype, one.shape) == (other.dtype, other.shape):
        mine, its = scans[id(one)].fingerprint, scans[id(other)].fingerprint
        if mine == its is not None:
            return Change(names, others, "equal")
    found = _Distance()
    is_exact = not {one.dtype, other.dtype} & set(ENCODINGS)
    try:
        if pair.turned and not (is_exact and len(one.shape) == 2):
            raise DamagedError("transposed, it is only compared as a matrix that is not encoded")
        _add(one, other, pair.turned, found, is_exact=is_exact)
    except (DamagedError, OSError) as error:
        return Change(names, others, "not compared", str(error)[:200])
    relative = sqrt(found.noise / found.square) if found.square else (inf if found.noise else 0.0)
    said = {
        "transposed": pair.turned,
        "fused": is_fused,
        f"{one.dtype} to {other.dtype}": one.dtype != other.dtype,
    }
    if found.num_lost:
        said[f"{found.num_lost:,} finite elements become nan or inf"] = True
    text = ", ".join(word for word, is_so in said.items() if is_so)
    is_near = found.worst <= max(_BLOCK_ERRORS.get(x.dtype, 0.0) for x in (one, other))
    if found.noise == 0 and (one.dtype == other.dtype or not is_exact):
        kind = "equal"
    elif is_exact and 0 in (found.unrounded, found.unrounded_back) and relative <= _MOST_ROUNDED:
        kind = "converted"
    elif not is_exact and is_near and relative <= tolerance_of(one, other):
        kind = "quantized"
    else:
        kind = "changed"
    return Change(names, others, kind, text, relative, found.largest, found.at, sqrt(found.square))


def _add(one: StoredTensor, other: StoredTensor, turned: bool, found: _Distance, *, is_exact: bool) -> None:
    """Compare the elements in the order of the first."""
    step = _ELEMENTS
    if turned:  # a part of each of its columns is read
        other, width = transposed(other), other.lying[0]
        step = max(_ELEMENTS // width, _LEAST_ROWS) * width
    with OpenFiles() as files:
        # A streamer each, as values are valid until the next ones.
        mine, its = Streamer(files, 1 << 10), Streamer(files, 1 << 10)
        for at in range(0, one.numel, step):
            count = min(step, one.numel - at)
            found.add(mine.values(one, at, count), its.values(other, at, count), at, is_exact=is_exact)
