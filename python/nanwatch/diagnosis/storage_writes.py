"""Log of writes to storages: for each storage the non-finite writes whose traces may still be in it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..numerics import _reference
from ..numerics.readable import is_plain, local_shard

T = TypeVar("T")

# An entry holds no tensor, only that its storage's address is not given away; those of dead storages go in between.
_MANY = 4096
# Who wrote an element last is found with three bools for each byte.
_MOST_BYTES = 1 << 31


@dataclass(slots=True)
class _Region:
    """The elements of a storage that a tensor stands for."""

    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> _Region:
        # One index stands for all of a dimension without a stride.
        shape = tuple(
            1 if stride == 0 and size else size for size, stride in zip(x.shape, x.stride(), strict=True)
        )
        return cls(x.dtype, int(x.storage_offset()), shape, tuple(x.stride()))

    def inside(self, memory: Tensor, low: int) -> Tensor:
        """These bytes of a tensor of one element for each byte from `low` on, with the bytes of an element last."""
        size = self.dtype.itemsize
        strides = [stride * size for stride in self.stride]
        return memory.as_strided((*self.shape, size), (*strides, 1), self.offset * size - low)

    @property
    def length(self) -> int:
        """From the first element to behind the last."""
        if 0 in self.shape:
            return 0
        return sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)) + 1

    @property
    def ends(self) -> tuple[int, int]:
        """The first byte, and that behind the last."""
        size = self.dtype.itemsize
        return self.offset * size, (self.offset + self.length) * size

    def overlaps(self, other: _Region) -> bool:
        """Whether the ends do; strided regions may still have no element in common."""
        (low, high), (other_low, other_high) = self.ends, other.ends
        return low < other_high and other_low < high

    def covers(self, other: _Region) -> bool:
        """Whether all of the other is surely in this."""
        if self == other:
            return True
        (low, high), (other_low, other_high) = self.ends, other.ends
        is_dense = torch.Size(self.shape).numel() == self.length
        return is_dense and low <= other_low and other_high <= high


@dataclass(slots=True)
class _Place(Generic[T]):
    guard: Any
    writes: list[tuple[_Region, T]] = field(default_factory=list)

    @property
    def is_dead(self) -> bool:
        return self.guard.expired() if isinstance(self.guard, StorageWeakRef) else self.guard() is None


class StorageWriteLog(Generic[T]):
    """The non-finite writes, by storage; of a tensor without one that could be addressed, by the tensor itself."""

    def __init__(self) -> None:
        self._places: dict[int, _Place[T]] = {}

    def put(self, x: Tensor, write: T | None) -> None:
        """`x` was written: with something non-finite, that `write` tells of, or with finite values only (None)."""
        x, region, key, owner = _address(x)
        place = self._place(x, key)
        if place is None:
            if write is None:
                return
            self._prune()
            guard = weakref.ref(x) if owner is None else StorageWeakRef(owner)
            place = self._places[key] = _Place(guard)
        place.writes = [one for one in place.writes if not region.covers(one[0])]
        if write is not None:
            place.writes.append((region, write))
        elif not place.writes:
            del self._places[key]

    def __contains__(self, x: object) -> bool:
        """Whether there are non-finite writes to the storage of the tensor `x`; touches no data."""
        if not self._places or not isinstance(x, Tensor):
            return False
        x, _, key, _ = _address(x)
        return self._place(x, key) is not None

    def find(self, x: Tensor) -> list[T]:
        """Return the last write to each non-finite element of `x`, the oldest write first."""
        x, region, key, _ = _address(x)
        place = self._place(x, key)
        if place is None:
            return []
        writes = [one for one in place.writes if region.overlaps(one[0])]
        if len(writes) > 1:
            writes = _latest(x, region, writes) or writes
        return [write for _, write in writes]

    def _place(self, x: Tensor, key: int) -> _Place[T] | None:
        place = self._places.get(key)
        if place is not None and isinstance(place.guard, weakref.ref) and place.guard() is not x:
            # Another tensor at the address of one that is gone. Of a storage the guard keeps the address.
            del self._places[key]
            return None
        return place

    def _prune(self) -> None:
        if len(self._places) >= _MANY:
            self._places = {key: place for key, place in self._places.items() if not place.is_dead}


def _address(x: Tensor) -> tuple[Tensor, _Region, int, torch.UntypedStorage | None]:
    """The tensor, its shard of a DTensor, which elements it is, of what, and the storage if it is one.

    A tensor without addresses is a place of its own.
    """
    local = local_shard(x)
    x = x if local is None else local
    if not is_plain(x):
        return x, _Region(x.dtype, 0, (), ()), id(x), None
    storage = x.untyped_storage()
    return x, _Region.of(x), storage._cdata, storage


def _latest(x: Tensor, region: _Region, writes: list[tuple[_Region, T]]) -> list[tuple[_Region, T]]:
    """Those that were the last to write to one of the non-finite elements of `x`, the oldest first."""
    ends = [region.ends, *(where.ends for where, _ in writes)]
    low, high = min(one for one, _ in ends), max(one for _, one in ends)
    if high - low > _MOST_BYTES:
        return writes
    blank = torch.zeros(high - low, dtype=torch.bool, device=x.device)
    open_ = blank.clone()
    once = x.detach().as_strided(region.shape, region.stride)
    region.inside(open_, low).copy_(~torch.isfinite(_reference._to_arithmetic(once)).unsqueeze(-1))
    found = []
    for where, write in reversed(writes):
        mine = blank.clone()
        where.inside(mine, low).fill_(True)
        if bool((mine & open_).any()):
            found.append((where, write))
            open_ &= ~mine
    return found[::-1]
