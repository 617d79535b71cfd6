"""Comparison of two checkpoints: which tensors changed, how far, and whether a conversion was faithful."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import inf, sqrt
from typing import TypeAlias

import torch
from torch import Tensor

from ..util.progress import Tell
from ..util.visible import spell, without_wrappers
from .files import Stored
from .result import Change, TensorScan

# Relative, of a tensor: rounding to float8_e5m2 takes at most this. A cast that makes everything zero takes more.
_MOST_ROUNDED = 0.125
_STEP = 1 << 18  # elements: the temporaries stay in the caches, and every block of GGUF is whole

Member: TypeAlias = tuple[Stored, TensorScan]


def compare(first: Sequence[Member], second: Sequence[Member], tell: Tell) -> Iterator[Change]:
    """Yield how the tensors of `second` differ from those of `first`.

    They are matched by name, and by fingerprint where names differ.
    """
    by_name = dict(zip(_names(second), second, strict=True))
    matches = [by_name.pop(name, None) for name in _names(first)]
    by_value = {member[1].fingerprint: name for name, member in by_name.items() if _is_distinct(member[1])}
    for number, (member, match) in enumerate(zip(first, matches, strict=True)):
        tell("comparing", number, len(first), "tensors")
        if match is None and _is_distinct(member[1]):
            match = by_name.pop(by_value.pop(member[1].fingerprint, ("", 0)), None)
        yield Change(member[1].name, "", "missing there") if match is None else _change(member, match)
    for _, scanned in by_name.values():
        yield Change("", scanned.name, "only there")


def _names(members: Sequence[Member]) -> Iterator[tuple[str, int]]:
    """Yield each name and how often it came before, as in a folder with the random states of several ranks."""
    counts = Counter[str]()
    for _, scanned in members:
        name = without_wrappers(scanned.name)
        yield name, counts[name]
        counts[name] += 1


def _is_distinct(tensor: TensorScan) -> bool:
    """Return whether the values tell the tensor from others, unlike those of a new norm or bias."""
    health = tensor.health
    return tensor.fingerprint is not None and health is not None and health.abs_min != health.abs_max


def _change(first: Member, second: Member) -> Change:
    (_, a), (_, b) = first, second
    if a.fingerprint == b.fingerprint is not None:
        return Change(a.name, b.name, "equal")
    why = a.lost or a.unread or b.lost or b.unread
    if not why and a.shape != b.shape:
        why = f"{list(a.shape)} is no {list(b.shape)}"
    if not why and not (a.is_float and b.is_float) and a.dtype != b.dtype:
        why = f"{a.dtype} is no {b.dtype}"
    if not why:
        try:
            return _measured(first, second)
        except Exception as error:  # cut off since
            why = spell(error)
    return Change(a.name, b.name, "not compared", why)


def _measured(first: Member, second: Member) -> Change:
    """Return the distance of two tensors of one shape, over all elements."""
    (left, a), (right, b) = first, second
    # `unrounded`: elements that are not the nearest in the second's format, and in the first's. `num_lost`: finite
    # ones that are nan or inf there.
    noise = square = largest = 0.0
    unrounded = [0, 0]
    num_lost, at = 0, -1
    parts = zip(left.parts(left.load(), _STEP), right.parts(right.load(), _STEP), strict=True)
    for (start, _, x), (_, _, y) in parts:
        unrounded[0] += _unrounded(x, y)
        unrounded[1] += _unrounded(y, x)
        x, y = x.double(), y.double()
        difference = y - x
        if not bool(difference.isfinite().all()):
            num_lost += int((x.isfinite() & ~y.isfinite()).sum())
            difference[(x == y) | (x.isnan() & y.isnan())] = 0.0
            x, difference = x.nan_to_num(0.0, 0.0, 0.0), difference.nan_to_num(inf, inf, -inf)
        noise += float(difference.square().sum())
        square += float(x.square().sum())
        most, place = torch.max(difference.abs(), 0)
        if float(most) > largest:
            largest, at = float(most), start + int(place)
    relative = sqrt(noise / square) if square else (inf if noise else 0.0)
    remarks = [f"{a.dtype} to {b.dtype}"] if a.dtype != b.dtype else []
    remarks += [f"{num_lost:,} finite elements become nan or inf"] if num_lost else []
    kind = "changed"
    if noise == 0 and a.dtype == b.dtype:
        kind = "equal"
    elif 0 in unrounded and relative <= _MOST_ROUNDED and not (a.is_encoded or b.is_encoded):
        kind = "converted"
    return Change(a.name, b.name, kind, ", ".join(remarks), relative, largest, at)


def _unrounded(a: Tensor, b: Tensor) -> int:
    """Return the number of elements of `b` that are not the nearest to those of `a`."""
    # PyTorch does not compare numbers of 8 bits.
    nearest, actual = (x.float() if x.element_size() == 1 else x for x in (a.to(b.dtype), b))
    return int(((nearest != actual) & ~(nearest.isnan() & actual.isnan())).sum())
