"""One operation as PyTorch's dispatcher sees it: its schema, what it was given, and the storages that it wrote to.

A step is an operation of a re-run that left non-finite values, with its place in the program.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from ..numerics import _reference
from ..numerics.readable import is_plain, local_shard
from ..recording.events import Settings
from ..recording.observe import observe
from ..recording.walk import leaves
from ..records.record import Record
from ..report.finding import Place, Value
from .batch_snapshot import BatchSnapshot

# In-place operations that do not look at what was there before.
_OVERWRITING = frozenset(
    {"copy_", "fill_", "zero_", "set_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
) | {"log_normal_", "cauchy_", "geometric_", "_foreach_copy_", "_foreach_zero_"}
_VALUE = re.compile("number|float|Tensor")
# They give -inf for zero.
_LOGARITHMS = frozenset({"log", "log_", "log2", "log2_", "log10", "log10_"})
# A division or a logarithm does not forgive zeros and subnormals, which are usual among integers.
_COUNTS = Settings(), Settings(counts=True)


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

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Return `(name, value)` of the arguments that were given."""
        yield from zip(self.arguments, args, strict=False)
        yield from kwargs.items()

    def targets(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Tensor]:
        """Return the tensors that a call has written: its own arguments, and results that are new."""
        values = [value for name, value in self.given(args, kwargs) if name in self.written]
        results = (result,) if self.num_results == 1 else result
        values += [results[i] for i in self.fresh]
        return [x for value in values for x in tensors_in(value)]


@functools.cache
def schema_of(func: Any) -> Operation:
    """Return the Operation of an overload."""
    schema = func._schema
    base = schema.name.split("::")[-1]
    written = tuple(x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write)
    overwritten = [x.name for x in schema.arguments if x.kwarg_only and x.name in written]
    # Its result is its argument, by the schema: memory that Python data was written to, unseen.
    is_lifted = base == "lift_fresh"
    return Operation(
        name=str(func),
        base=base,
        arguments=tuple(x.name for x in schema.arguments),
        # A Python number is also given where the schema has a tensor, as in x * 2.
        values=frozenset(x.name for x in schema.arguments if _VALUE.search(str(x.type))),
        written=written,
        overwritten=frozenset(written[:1] if base in _OVERWRITING else overwritten),
        fresh=tuple(i for i, x in enumerate(schema.returns) if is_lifted or x.alias_info is None),
        num_results=len(schema.returns),
        allocates=base.startswith(("empty", "new_empty", "_empty")),
        pointwise=torch.Tag.pointwise in func.tags,
    )


class Operands(NamedTuple):
    """The operands of a call: its tensors, a record with counts for each, and its numbers by name.

    `zero_one`: a logarithm was given zeros and ones, and nothing else.
    """

    tensors: list[Tensor]
    records: list[Record]
    numbers: list[tuple[str, float]]
    zero_one: bool


def operands_of(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operands:
    """Return the operands of a call that is about to be made, or has been made and wrote to none of them."""
    tensors: list[Tensor] = []
    numbers: list[tuple[str, float]] = []
    for name, value in operation.given(args, kwargs):
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers += [(name, value)] if name in operation.values else []
        elif operation.base != "lift_fresh" and name not in operation.overwritten:
            tensors += tensors_in(value)
    records = [
        observe(x, f"operand[{i}]", "input", wanted=_COUNTS[x.dtype.is_floating_point])
        for i, x in enumerate(tensors)
    ]
    is_zero_one = operation.base in _LOGARITHMS and all(map(_is_choice, tensors))
    return Operands(tensors, records, numbers, is_zero_one)


def _is_choice(x: Tensor) -> bool:
    # Zeros alone choose nothing: a value that has vanished looks so.
    return is_plain(x) and bool(((x == 0) | (x == 1)).all()) and bool((x == 1).any())


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an argument or a result. The attributes of an object are no part of it."""
    if isinstance(value, Tensor):
        return [value]
    return [x for _, x in leaves(value, "", objects=False) if isinstance(x, Tensor)]


# Storages of which the log knows a write. An entry keeps the address of a storage from being given away, and no memory.
_MANY = 4096
# Who wrote an element last is found with an int32 for each byte of a storage that several operations wrote to.
_MOST_BYTES = 1 << 28


@dataclass(slots=True)
class _Writes:
    """Writes to one storage, the oldest first, and for each byte the number of its latest write, from 1.

    Without `latest` the last write stands for all bytes. 0 stands for a write of finite values.
    """

    storage: StorageWeakRef
    writes: list[Any]
    latest: Tensor | None = None


class WriteLog:
    """Log of non-finite writes: which one wrote each element that is in memory.

    A sparse or nested tensor is a place of its own. The shard of a DTensor stands for it.
    """

    def __init__(self) -> None:
        self._storages: dict[int, _Writes] = {}
        self._others: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def put(self, x: Tensor, write: Any) -> None:
        """Note that `x` was written, by the non-finite `write`, or with finite values only (None)."""
        x = addressable(x)
        if not is_plain(x):
            self._others[x] = write
            return
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        is_whole = x.numel() * x.itemsize == size
        if (entry := self._storages.get(key)) is None or is_whole:
            self._storages.pop(key, None)
            if write is None:
                return
            if len(self._storages) >= _MANY:
                self._storages = {k: v for k, v in self._storages.items() if not v.storage.expired()}
            entry = self._storages[key] = _Writes(StorageWeakRef(storage), [])
        if entry.latest is None and not is_whole and size <= _MOST_BYTES:
            entry.latest = torch.full((size,), len(entry.writes), dtype=torch.int32, device=x.device)
        entry.writes += [] if write is None else [write]
        if entry.latest is not None:
            _bytes_of(x, entry.latest).fill_(0 if write is None else len(entry.writes))

    def find(self, x: Tensor) -> list[Any]:
        """Return the last write to each non-finite element of `x`, the oldest write first."""
        x = addressable(x)
        if not is_plain(x):
            return [write for write in (self._others.get(x),) if write is not None]
        if (entry := self._storages.get(x.untyped_storage()._cdata)) is None:
            return []
        if entry.latest is None:
            return entry.writes[-1:]
        latest, once = _bytes_of(x, entry.latest), x.detach().as_strided(*_once(x), x.storage_offset())
        nonfinite = ~torch.isfinite(_reference._to_arithmetic(once))
        numbers = latest[nonfinite].unique().tolist() if bool(nonfinite.any()) else latest.unique().tolist()
        return [entry.writes[number - 1] for number in numbers if number]


def addressable(x: Tensor) -> Tensor:
    """Return the tensor; of a DTensor its shard."""
    shard = local_shard(x)
    return x if shard is None else shard


def _once(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of the tensor with one index for all of a dimension without a stride."""
    pairs = zip(x.shape, x.stride(), strict=True)
    return tuple(1 if stride == 0 and size else size for size, stride in pairs), tuple(x.stride())


def _bytes_of(x: Tensor, memory: Tensor) -> Tensor:
    """Return what `memory` has for the bytes of `x`, with the bytes of one element in the last dimension."""
    size, (shape, strides) = x.itemsize, _once(x)
    strides = (*(stride * size for stride in strides), 1)
    return memory.as_strided((*shape, size), strides, int(x.storage_offset()) * size)


# A step of a re-run


@dataclass(frozen=True, slots=True)
class Expression:
    """The source of an operation: file, line, and the expression, as `code.co_positions()` has it, where it is known.

    `code` is that of the function that computes it.
    """

    filename: str
    line: int
    positions: tuple[int | None, int | None, int | None, int | None] | None = None
    code: CodeType | None = None

    @property
    def at(self) -> Place:
        """The place for a report, with columns where the expression lies in one line."""
        line, last, start, end = self.positions or (None, None, None, None)
        is_known = line == last == self.line and start is not None and end is not None
        return Place(self.filename, self.line, (start, end) if is_known else None)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return str(self.at)


@dataclass(slots=True, eq=False)
class Step:
    """One operation of a re-run that left non-finite `values`, or memory that nobody was seen to write, with no values.

    `origin` is the step that began its values, None when it began them itself; only then are `remarks`, `call` (around
    the operation) and `strangers` (the operands that were non-finite before) filled. `meant`: they are infinities that
    are there on purpose. `in_backward`: an engine of autograd ran it, in the backward of what module `module` did.
    """

    number: int
    operation: str
    values: frozenset[Value] = frozenset()
    meant: bool = False
    in_backward: bool = False
    origin: Step | None = None
    place: Expression | None = None
    module: str | None = None
    operands: tuple[Record, ...] = ()
    remarks: tuple[str, ...] = ()
    call: BatchSnapshot | None = None
    strangers: tuple[Tensor, ...] = ()

    @property
    def spelt(self) -> str:
        """The values in words: `nan`, `inf`, `-inf`, joined by `and`."""
        return " and ".join(value for value in _VALUES if value in self.values)

    @property
    def made(self) -> Value | None:
        """The value that it made, None for memory that it left as it was."""
        return next((value for value in _VALUES if value in self.values), None)


_VALUES: tuple[Value, ...] = ("nan", "inf", "-inf")


def values_of(record: Record) -> frozenset[Value]:
    """Return which of nan, inf and -inf a record holds; both infinities where nobody counted."""
    if record.isfinite is not False:
        return frozenset()
    if (health := record.health) is None:
        return frozenset(_VALUES[:1] if isnan(record.abs_max or 0.0) else _VALUES[1:])
    counts = health.num_nan, health.num_posinf, health.num_neginf
    return frozenset(value for value, count in zip(_VALUES, counts, strict=True) if count)
