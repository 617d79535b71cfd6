"""One operation as PyTorch's dispatcher sees it: its schema, what it was given, and the storages that it wrote to."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..numerics import _reference
from ..numerics.ranges import tensor_health
from ..numerics.readable import is_plain, local_shard
from ..recording.observe import histogram_of, observe, read
from ..recording.walk import leaves
from ..records.headroom import is_normal
from ..records.record import Record
from ..report.histogram import StoredHistogram

# In-place operations that do not look at what was there before.
_OVERWRITING = frozenset(
    {"copy_", "fill_", "zero_", "set_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
) | {"log_normal_", "cauchy_", "geometric_", "_foreach_copy_", "_foreach_zero_"}
# Elementwise operations that never make a finite element of one that is not.
_CARRYING = frozenset({"add", "sub", "rsub", "mul", "neg", "abs", "clone", "_to_copy"})
_VALUE = re.compile("number|float|Tensor")
# Each takes one pass over its tensor; more pictures than these nobody looks at.
_MOST_HISTOGRAMS = 4
# They give -inf for zero.
_LOGARITHMS = frozenset({"log", "log_", "log2", "log2_", "log10", "log10_"})


class Operation(NamedTuple):
    """The schema of an operation, as far as a re-run needs it.

    `values` are the arguments that take part in the arithmetic (an `int` is a dimension or a size), `written` those
    that it writes to, `overwritten` those of them that it does not read before; `fresh` are the positions of the
    results that are memory of their own. `allocates`: it leaves that memory unwritten.
    """

    name: str
    base: str
    arguments: tuple[str, ...]
    values: frozenset[str]
    written: tuple[str, ...]
    overwritten: frozenset[str]
    fresh: tuple[int, ...]
    num_results: int
    allocates: bool
    pointwise: bool

    @property
    def carries(self) -> bool:
        """True if an element that is not finite makes one that is not."""
        return self.base in _CARRYING

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Return `(name, value)` of the arguments that were given."""
        yield from zip(self.arguments, args, strict=False)
        yield from kwargs.items()

    def targets(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Tensor]:
        """Return the tensors that a call has written: its own arguments, and results that are new."""
        found = [value for name, value in self.given(args, kwargs) if name in self.written]
        results = (result,) if self.num_results == 1 else result
        found += [results[i] for i in self.fresh]
        return [x for value in found for x in tensors_in(value)]


@functools.cache
def operation_of(func: torch._ops.OpOverload) -> Operation:
    """Return the Operation of an overload."""
    schema = func._schema
    base = schema.name.split("::")[-1]
    written = tuple(one.name for one in schema.arguments if one.alias_info and one.alias_info.is_write)
    overwritten = [one.name for one in schema.arguments if one.kwarg_only and one.name in written]
    # Its result is its argument, by the schema: memory that Python data was written to, unseen.
    is_lifted = base == "lift_fresh"
    return Operation(
        name=str(func),
        base=base,
        arguments=tuple(one.name for one in schema.arguments),
        # A Python number is also given where the schema has a tensor, as in x * 2.
        values=frozenset(one.name for one in schema.arguments if _VALUE.search(str(one.type))),
        written=written,
        overwritten=frozenset(written[:1] if base in _OVERWRITING else overwritten),
        fresh=tuple(i for i, one in enumerate(schema.returns) if is_lifted or one.alias_info is None),
        num_results=len(schema.returns),
        allocates=base.startswith(("empty", "new_empty", "_empty")),
        pointwise=torch.Tag.pointwise in func.tags,
    )


class Operands(NamedTuple):
    """The operands of a call: its tensors and a row for each, and its numbers by name."""

    tensors: list[Tensor]
    rows: list[Record]
    numbers: list[tuple[str, float]]
    zero_one: bool
    """Whether a logarithm was given zeros and ones, and nothing else."""

    @classmethod
    def of(
        cls,
        operation: Operation,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        is_known: Callable[[Tensor], bool],
    ) -> Operands:
        """Return the operands of a call that is about to be made, or has been made and wrote to none of them.

        Of those that are known the range is enough: what is non-finite in them need not be counted once more.
        """
        tensors: list[Tensor] = []
        numbers: list[tuple[str, float]] = []
        for name, value in operation.given(args, kwargs):
            if isinstance(value, int | float) and not isinstance(value, bool):
                if name in operation.values:
                    numbers.append((name, value))
            elif operation.base != "lift_fresh" and name not in operation.overwritten:
                tensors += tensors_in(value)
        rows = [
            (read if is_known(x) else observe)(x, f"operand[{i}]", "input") for i, x in enumerate(tensors)
        ]
        zero_one = operation.base in _LOGARITHMS and all(map(_is_choice, tensors))
        return cls(tensors, rows, numbers, zero_one)

    def records(self, *, written: Sequence[Tensor] = ()) -> tuple[Record, ...]:
        """Return the records of the tensors. They have a health where elements are zero or subnormal, which a division
        or a logarithm does not forgive; but not of those that share memory with what was `written` since.
        """
        gone = _memory(written)
        found = []
        for x, record in zip(self.tensors, self.rows, strict=True):
            ends = record.ends
            is_small = ends is not None and record.isfinite is True and not is_normal(record.abs_min, ends)
            if is_small and is_plain(x) and x.untyped_storage()._cdata not in gone:
                record = record._replace(health=tensor_health(x))
            found.append(record)
        return tuple(found)

    def counts(self, *, written: Sequence[Tensor] = ()) -> frozenset[int]:
        """Return the positions of the tensors that hold whole numbers from 0 on only, not all of them zero, and
        were not `written`.
        """
        gone = _memory(written)
        return frozenset(
            i
            for i, x in enumerate(self.tensors)
            if is_plain(x) and x.untyped_storage()._cdata not in gone and _is_count(x)
        )

    def spreads(self, *, written: Sequence[Tensor] = ()) -> tuple[StoredHistogram, ...]:
        """Return the spreads of the first tensors that have one and share no memory with what was `written` since."""
        gone = _memory(written)
        there = [
            (x, row.label)
            for x, row in zip(self.tensors, self.rows, strict=True)
            if not (is_plain(x) and x.untyped_storage()._cdata in gone)
        ]
        found = (histogram_of(x, label) for x, label in there)
        return tuple(islice((one for one in found if one is not None), _MOST_HISTOGRAMS))


def _memory(tensors: Sequence[Tensor]) -> set[int]:
    return {x.untyped_storage()._cdata for x in tensors if is_plain(x)}


def _is_choice(x: Tensor) -> bool:
    # Zeros alone choose nothing: a value that has vanished looks so.
    return bool(((x == 0) | (x == 1)).all()) and bool((x == 1).any())


def _is_count(x: Tensor) -> bool:
    if not x.dtype.is_floating_point:
        return not x.dtype.is_complex
    return bool(((x == x.round()) & (x >= 0)).all()) and bool(x.any())


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an argument or a result. The attributes of an object are no part of it."""
    if isinstance(value, Tensor):
        return [value]
    return [x for _, x in leaves(value, "", objects=False) if isinstance(x, Tensor)]


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
        """Return these bytes of a tensor, from `low` on, with the bytes of one element in the last dimension."""
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
        """Return whether the ends overlap; strided regions may still have no element in common."""
        (low, high), (other_low, other_high) = self.ends, other.ends
        return low < other_high and other_low < high

    def covers(self, other: _Region) -> bool:
        """Return whether this region surely contains the other."""
        if self == other:
            return True
        (low, high), (other_low, other_high) = self.ends, other.ends
        is_dense = torch.Size(self.shape).numel() == self.length
        return is_dense and low <= other_low and other_high <= high


@dataclass(slots=True)
class _WrittenStorage(Generic[T]):
    guard: Any
    writes: list[tuple[_Region, T]] = field(default_factory=list)

    @property
    def is_dead(self) -> bool:
        return self.guard.expired() if isinstance(self.guard, StorageWeakRef) else self.guard() is None


class StorageWriteLog(Generic[T]):
    """Log of writes to storages: for each the non-finite ones whose traces may still be in it.

    A tensor without a storage that could be addressed is a place of its own.
    """

    def __init__(self) -> None:
        self._places: dict[int, _WrittenStorage[T]] = {}

    def put(self, x: Tensor, write: T | None) -> None:
        """Note that `x` was written, by the non-finite `write`, or with finite values only (None)."""
        x, region, key, owner = _address(x)
        place = self._place(x, key)
        if place is None:
            if write is None:
                return
            self._prune()
            guard = weakref.ref(x) if owner is None else StorageWeakRef(owner)
            place = self._places[key] = _WrittenStorage(guard)
        place.writes = [one for one in place.writes if not region.covers(one[0])]
        if write is not None:
            place.writes.append((region, write))
        elif not place.writes:
            del self._places[key]

    def __contains__(self, x: object) -> bool:
        """Return whether there are non-finite writes to the storage of the tensor `x`; touches no data."""
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

    def _place(self, x: Tensor, key: int) -> _WrittenStorage[T] | None:
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
    """Return the tensor (of a DTensor its shard), the elements it covers, of which memory, and the storage, if any.

    A tensor without addresses is a place of its own.
    """
    local = local_shard(x)
    x = x if local is None else local
    if not is_plain(x):
        return x, _Region(x.dtype, 0, (), ()), id(x), None
    storage = x.untyped_storage()
    return x, _Region.of(x), storage._cdata, storage


def _latest(x: Tensor, region: _Region, writes: list[tuple[_Region, T]]) -> list[tuple[_Region, T]]:
    """Return the last writes to any non-finite element of `x`, the oldest first."""
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
