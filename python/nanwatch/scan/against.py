"""Comparison of two checkpoints: which tensors changed, how far, and whether a conversion was faithful."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt
from typing import TypeAlias

from torch import Tensor

from ..util.progress import Tell
from ..util.visible import spell, without_wrappers
from .files import Stored
from .result import Change, CheckpointComparison, TensorScan

# Relative, of a tensor: rounding to float8_e5m2 takes at most this. A cast that makes everything zero takes more.
_MOST_ROUNDED = 0.125
_STEP = 1 << 18  # elements: the temporaries stay in the caches, and every block of GGUF is whole

_Side: TypeAlias = tuple[Sequence[Stored], Sequence[TensorScan]]
_Member: TypeAlias = tuple[Stored, TensorScan]


def compare(a: _Side, b: _Side, problems: Sequence[str], tell: Tell) -> CheckpointComparison:
    """Return how the tensors of `b` differ from those of `a`: of one name, or of one fingerprint where names differ."""
    there = {without_wrappers(member[1].name): member for member in zip(*b, strict=True)}
    pairs: list[tuple[_Member, _Member]] = []
    alone: list[_Member] = []
    for member in zip(*a, strict=True):
        match = there.pop(without_wrappers(member[1].name), None)
        if match is None:
            alone.append(member)
        else:
            pairs.append((member, match))
    by_value = {match[1].fingerprint: name for name, match in there.items() if _is_distinct(match[1])}
    only = []
    for member in alone:
        name = by_value.pop(member[1].fingerprint, None) if _is_distinct(member[1]) else None
        if name is None:
            only.append(member[1].name)
        else:
            pairs.append((member, there.pop(name)))
    changes = []
    for number, pair in enumerate(pairs):
        tell("comparing", number, len(pairs), "tensors")
        changes.append(_change(*pair))
    only_there = tuple(scanned.name for _, scanned in there.values())
    return CheckpointComparison(tuple(changes), tuple(only), only_there, tuple(problems))


def _is_distinct(tensor: TensorScan) -> bool:
    """Return whether the values tell the tensor from others, unlike those of a new norm or bias."""
    health = tensor.health
    return tensor.fingerprint is not None and health is not None and health.abs_min != health.abs_max


def _change(left: _Member, right: _Member) -> Change:
    (stored, a), (stored_there, b) = left, right
    if a.fingerprint == b.fingerprint is not None:
        return Change(a.name, b.name, "equal")
    why = a.lost or a.unread or b.lost or b.unread
    if not why and a.shape != b.shape:
        why = f"{list(a.shape)} is no {list(b.shape)}"
    if not why and not (a.is_float and b.is_float) and a.dtype != b.dtype:
        why = f"{a.dtype} is no {b.dtype}"
    if not why:
        try:
            distance = _Distance(stored, stored_there)
        except Exception as error:  # cut off since
            why = spell(error)
    if why:
        return Change(a.name, b.name, "not compared", why)
    remarks = [f"{a.dtype} to {b.dtype}"] if a.dtype != b.dtype else []
    if distance.num_lost:
        remarks.append(f"{distance.num_lost:,} finite elements become nan or inf")
    kind = "changed"
    if distance.noise == 0 and a.dtype == b.dtype:
        kind = "equal"
    elif distance.is_rounded and not (a.is_encoded or b.is_encoded):
        kind = "converted"
    return Change(a.name, b.name, kind, ", ".join(remarks), distance.relative, distance.largest, distance.at)


class _Distance:
    """Distance of two stored tensors of one shape, over all elements."""

    def __init__(self, first: Stored, second: Stored) -> None:
        self.noise = self._square = self.largest = 0.0
        self.at = -1
        self.num_lost = 0  # finite elements that are nan or inf there
        self._unrounded = [
            0,
            0,
        ]  # elements that are not the nearest in the second's format, and in the first's
        assert first.load is not None
        assert second.load is not None
        parts = zip(first.parts(first.load(), _STEP), second.parts(second.load(), _STEP), strict=True)
        for (start, _, a), (_, _, b) in parts:
            self._add(a, b, start)
        self.relative = sqrt(self.noise / self._square) if self._square else (inf if self.noise else 0.0)
        self.is_rounded = 0 in self._unrounded and self.relative <= _MOST_ROUNDED

    def _add(self, a: Tensor, b: Tensor, start: int) -> None:
        self._unrounded[0] += _unrounded(a, b)
        self._unrounded[1] += _unrounded(b, a)
        x, y = a.double(), b.double()
        difference = y - x
        if not bool(difference.isfinite().all()):
            self.num_lost += int((x.isfinite() & ~y.isfinite()).sum())
            difference[(x == y) | (x.isnan() & y.isnan())] = 0.0
            x, difference = x.nan_to_num(0.0, 0.0, 0.0), difference.nan_to_num(inf, inf, -inf)
        self.noise += float(difference.square().sum())
        self._square += float(x.square().sum())
        largest = float(difference.abs().max())
        if largest > self.largest:
            self.largest, self.at = largest, start + int(difference.abs().argmax())


def _unrounded(a: Tensor, b: Tensor) -> int:
    """Return the number of elements of `b` that are not the nearest to those of `a`."""
    # PyTorch does not compare numbers of 8 bits.
    nearest, actual = (x.float() if x.element_size() == 1 else x for x in (a.to(b.dtype), b))
    return int(((nearest != actual) & ~(nearest.isnan() & actual.isnan())).sum())
