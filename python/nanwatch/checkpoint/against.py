"""Comparison of two checkpoints: which tensors changed, how far, and whether a conversion was faithful."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import TypeAlias

import torch
from torch import Tensor

from ..util.progress import Tell
from ..util.visible import spell, without_wrappers
from .files import Stored
from .result import Change, CheckpointComparison, TensorScan

# Relative, of a tensor: rounding to float8_e5m2 takes at most this. A cast that makes everything zero takes more.
_MOST_ROUNDED = 0.125
_STEP = 1 << 18  # elements: the temporaries stay in the caches

Side: TypeAlias = tuple[Sequence[Stored], Sequence[TensorScan]]
_Member: TypeAlias = tuple[Stored, TensorScan]


def compare(a: Side, b: Side, problems: Sequence[str], tell: Tell) -> CheckpointComparison:
    """Return how the tensors of `b` differ from those of `a`: of one name, or of one fingerprint where names differ."""
    first, second = ([*zip(*side, strict=True)] for side in (a, b))
    pairs, alone, alone_there = _paired(first, second)
    changes = []
    for done, (left, right) in enumerate(pairs):
        tell("comparing", done, len(pairs), "tensors")
        changes.append(_change(left, right))
    only, only_there = (tuple(scanned.name for _, scanned in side) for side in (alone, alone_there))
    return CheckpointComparison(tuple(changes), only, only_there, tuple(problems))


def _paired(
    first: Sequence[_Member], second: Sequence[_Member]
) -> tuple[list[tuple[_Member, _Member]], list[_Member], list[_Member]]:
    by_name = {without_wrappers(scanned.name): (stored, scanned) for stored, scanned in second}
    pairs: list[tuple[_Member, _Member]] = []
    alone: list[_Member] = []
    for member in first:
        match = by_name.pop(without_wrappers(member[1].name), None)
        if match is None:
            alone.append(member)
        else:
            pairs.append((member, match))
    by_value = {member[1].fingerprint: member for member in by_name.values() if member[1].is_distinct}
    renamed = [member for member in alone if member[1].is_distinct and member[1].fingerprint in by_value]
    for member in renamed:
        if (match := by_value.pop(member[1].fingerprint, None)) is not None:
            pairs.append((member, match))
            alone.remove(member)
            del by_name[without_wrappers(match[1].name)]
    return pairs, alone, [*by_name.values()]


@dataclass(slots=True)
class _Distance:
    noise: float = 0.0
    square: float = 0.0
    largest: float = 0.0
    at: int = -1
    unrounded: int = 0  # elements that are not the nearest in the second's format
    unrounded_back: int = 0  # the same of the second's elements in the first's
    num_lost: int = 0  # finite elements that are nan or inf there

    def add(self, a: Tensor, b: Tensor, start: int) -> None:
        """Add elements. `start` is the number of the first one."""
        self.unrounded += _unrounded(a, b)
        self.unrounded_back += _unrounded(b, a)
        x, y = a.double(), b.double()
        difference = y - x
        if not bool(difference.isfinite().all()):
            self.num_lost += int((x.isfinite() & ~y.isfinite()).sum())
            difference[(x == y) | (x.isnan() & y.isnan())] = 0.0
            x, difference = x.nan_to_num(0.0, 0.0, 0.0), difference.nan_to_num(inf, inf, -inf)
        self.noise += float(difference.square().sum())
        self.square += float(x.square().sum())
        largest = float(difference.abs().max())
        if largest > self.largest:
            self.largest, self.at = largest, start + int(difference.abs().argmax())


def _unrounded(a: Tensor, b: Tensor) -> int:
    """Return the number of elements of `b` that are not the nearest to those of `a`."""
    # PyTorch does not compare numbers of 8 bits.
    nearest, actual = (x.float() if x.element_size() == 1 else x for x in (a.to(b.dtype), b))
    return int(((nearest != actual) & ~(nearest.isnan() & actual.isnan())).sum())


def _change(left: _Member, right: _Member) -> Change:
    (stored, a), (stored_there, b) = left, right
    if a.fingerprint == b.fingerprint is not None:
        return Change(a.name, b.name, "equal")
    why = a.lost or a.unread or b.lost or b.unread
    if not why and a.shape != b.shape:
        why = f"{list(a.shape)} is no {list(b.shape)}"
    if not why and not (a.is_float and b.is_float) and a.dtype != b.dtype:
        why = f"{a.dtype} is no {b.dtype}"
    distance = _Distance()
    if not why:
        try:
            _add_all(stored, stored_there, distance)
        except Exception as error:  # cut off since
            why = spell(error)
    if why:
        return Change(a.name, b.name, "not compared", why)
    relative = sqrt(distance.noise / distance.square) if distance.square else (inf if distance.noise else 0.0)
    remarks = [f"{a.dtype} to {b.dtype}"] if a.dtype != b.dtype else []
    if distance.num_lost:
        remarks.append(f"{distance.num_lost:,} finite elements become nan or inf")
    is_rounded = 0 in (distance.unrounded, distance.unrounded_back) and relative <= _MOST_ROUNDED
    kind = "changed"
    if distance.noise == 0 and a.dtype == b.dtype:
        kind = "equal"
    elif is_rounded and not (a.is_encoded or b.is_encoded):
        kind = "converted"
    return Change(
        a.name,
        b.name,
        kind,
        ", ".join(remarks),
        relative,
        distance.largest,
        distance.at,
    )


def _add_all(stored: Stored, stored_there: Stored, distance: _Distance) -> None:
    assert stored.load is not None
    assert stored_there.load is not None
    there = _Elements(stored_there)
    for start, _, values in stored.pieces(stored.load()):
        for offset in range(0, len(values), _STEP):
            part = values[offset : offset + _STEP]
            distance.add(part, there.next(len(part)), start + offset)


class _Elements:
    """Elements of a stored tensor in C order, as many at a time as are asked for."""

    def __init__(self, stored: Stored) -> None:
        assert stored.load is not None
        self._pieces = stored.pieces(stored.load())
        self._left = torch.empty(0)

    def next(self, count: int) -> Tensor:
        """Return the next elements."""
        parts = []
        while count:
            if not len(self._left):
                self._left = next(self._pieces)[2]
            parts.append(self._left[:count])
            self._left = self._left[count:]
            count -= len(parts[-1])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
