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


class Operation:
    """The schema of an overload, as far as a re-run needs it.

    `values` are the arguments that take part in the arithmetic (an `int` is a dimension or a size), `written` those
    that it writes to, `overwritten` those of them that it does not read before; `fresh` are the positions of the
    results that are memory of their own. `allocates`: it leaves that memory unwritten.
    """

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name, self.base = str(func), schema.name.split("::")[-1]
        self.arguments = [x.name for x in schema.arguments]
        # A Python number is also given where the schema has a tensor, as in x * 2.
        self.values = {x.name for x in schema.arguments if _VALUE.search(str(x.type))}
        self.written = [x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write]
        results = [x.name for x in schema.arguments if x.kwarg_only and x.name in self.written]
        self.overwritten = self.written[:1] if self.base in _OVERWRITING else results
        # Its result is its argument, by the schema: memory that Python data was written to, unseen.
        is_lifted = self.base == "lift_fresh"
        self.fresh = [i for i, x in enumerate(schema.returns) if is_lifted or x.alias_info is None]
        self.num_results = len(schema.returns)
        self.allocates = self.base.startswith(("empty", "new_empty", "_empty"))
        self.pointwise = torch.Tag.pointwise in func.tags

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


operation_of = functools.cache(Operation)


class Operands(NamedTuple):
    """The operands of a call of `operation`: its tensors, a record with counts for each, and its numbers by name.

    `zero_one`: a logarithm was given zeros and ones, and nothing else.
    """

    operation: Operation
    tensors: list[Tensor]
    records: list[Record]
    numbers: list[tuple[str, float]]
    zero_one: bool


def operands_of(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Operands:
    """Return the operands of a call that is about to be made, or has been made and wrote to none of them."""
    tensors, numbers = list[Tensor](), list[tuple[str, float]]()
    for name, value in operation.given(args, kwargs):
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers += [(name, value)] if name in operation.values else []
        elif operation.base != "lift_fresh" and name not in operation.overwritten:
            tensors += tensors_in(value)
    labelled = ((f"operand[{i}]", x, _COUNTS[x.dtype.is_floating_point]) for i, x in enumerate(tensors))
    records = [observe(x, label, "input", wanted=wanted) for label, x, wanted in labelled]
    # Zeros alone choose nothing: a value that has vanished looks so.
    is_zero_one = operation.base in _LOGARITHMS and all(
        is_plain(x) and bool(((x == 0) | (x == 1)).all()) and bool((x == 1).any()) for x in tensors
    )
    return Operands(operation, tensors, records, numbers, is_zero_one)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an argument or a result. The attributes of an object are no part of it."""
    if isinstance(value, Tensor):
        return [value]
    return [x for _, x in leaves(value, "", objects=False) if isinstance(x, Tensor)]


# Who wrote an element last is found with an int32 for each byte of a storage that several operations wrote to.
_MOST_BYTES = 1 << 28


class WriteLog:
    """Log of non-finite writes: which one wrote each element that is in memory.

    By storage it has the writes, the oldest first, and for each byte the number of its latest write, from 1 (0: one of
    finite values), unless the last stands for all. A sparse or nested tensor is a place of its own. The shard of a
    DTensor takes its place.
    """

    def __init__(self) -> None:
        self._places: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def put(self, x: Tensor, write: Any) -> None:
        """Note that `x` was written, by the non-finite `write`, or with finite values only (None)."""
        x, place = _place_of(x)
        size = place.nbytes() if is_plain(x) else 0
        is_whole = not size or x.numel() * x.itemsize == size
        writes, latest = ([], None) if is_whole else self._places.get(place, ([], None))
        if write is None and not writes:
            self._places.pop(place, None)
            return
        if latest is None and not is_whole and size <= _MOST_BYTES:
            latest = torch.full((size,), len(writes), dtype=torch.int32, device=x.device)
        writes += [] if write is None else [write]
        if latest is not None:
            _bytes_of(x, latest).fill_(0 if write is None else len(writes))
        self._places[place] = writes, latest

    def find(self, x: Tensor) -> list[Any]:
        """Return the last write to each non-finite element of `x`, the oldest write first."""
        x, place = _place_of(x)
        writes, latest = self._places.get(place, ([], None))
        if latest is None:
            return writes[-1:]  # type: ignore[no-any-return]
        latest, once = _bytes_of(x, latest), x.detach().as_strided(*_once(x), x.storage_offset())
        nonfinite = ~torch.isfinite(_reference._to_arithmetic(once))
        numbers = latest[nonfinite].unique().tolist() if bool(nonfinite.any()) else latest.unique().tolist()
        return [writes[number - 1] for number in numbers if number]


def _place_of(x: Tensor) -> tuple[Tensor, Any]:
    x = addressable(x)
    return x, x.untyped_storage() if is_plain(x) else x


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
        is_known = line == last == self.line and start is not None
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
