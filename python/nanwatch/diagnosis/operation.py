"""One operation as PyTorch's dispatcher sees it: what its schema says, and what it was given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..numerics.formats import limits
from ..numerics.ranges import _is_plain, tensor_health
from ..recording.observe import observe, read
from ..recording.walk import leaves
from ..report.headroom import is_normal
from ..report.record import Record, Row, to_record
from ..report.stored_histogram import StoredHistogram

# In-place operations that do not look at what was there before.
_OVERWRITING = frozenset(
    {"copy_", "fill_", "zero_", "set_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
) | {"log_normal_", "cauchy_", "geometric_", "_foreach_copy_", "_foreach_zero_"}
# Elementwise operations that never make a finite element of one that is not.
_CARRYING = frozenset({"add", "sub", "rsub", "mul", "neg", "abs", "clone", "_to_copy"})
# Each takes one pass over its tensor; more pictures than these nobody looks at.
_MOST_HISTOGRAMS = 4
_LOGARITHMS = frozenset({"log", "log_", "log2", "log2_", "log10", "log10_"})


class Operation(NamedTuple):
    """What the schema of an operation says.

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
        """Whether an element that is not finite makes one that is not."""
        return self.base in _CARRYING

    @property
    def is_logarithm(self) -> bool:
        """Whether it gives -inf for zero."""
        return self.base in _LOGARITHMS

    def given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """`(name, value)` of the arguments that were given."""
        yield from zip(self.arguments, args, strict=False)
        yield from kwargs.items()

    def targets(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Tensor]:
        """The tensors that a call has written: its own arguments, and results that are new."""
        found = [value for name, value in self.given(args, kwargs) if name in self.written]
        results = (result,) if self.num_results == 1 else result
        found += [results[i] for i in self.fresh]
        return [x for value in found for x in tensors_in(value)]


@functools.cache
def operation_of(func: torch._ops.OpOverload) -> Operation:
    """The Operation of an overload."""
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
        values=frozenset(one.name for one in schema.arguments if _is_value(str(one.type))),
        written=written,
        overwritten=frozenset(written[:1] if base in _OVERWRITING else overwritten),
        fresh=tuple(i for i, one in enumerate(schema.returns) if is_lifted or one.alias_info is None),
        num_results=len(schema.returns),
        allocates=base.startswith(("empty", "new_empty", "_empty")),
        pointwise=torch.Tag.pointwise in func.tags,
    )


class Operands(NamedTuple):
    """What an operation was given: its tensors and a row for each, and its numbers by name."""

    tensors: list[Tensor]
    rows: list[Row]
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
        """The operands of a call that is about to be made, or has been made and wrote to none of them.

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
        zero_one = operation.is_logarithm and all(map(_is_choice, tensors))
        return cls(tensors, rows, numbers, zero_one)

    def records(self, *, written: Sequence[Tensor] = ()) -> tuple[Record, ...]:
        """The records of the tensors. With a health where some elements are zero or subnormal, which a division or a
        logarithm does not forgive; but not of those that share memory with what was `written` since."""
        gone = _memory(written)
        found = []
        for x, row in zip(self.tensors, self.rows, strict=True):
            record = to_record(row)
            ends = limits(record.dtype)
            is_small = ends is not None and record.isfinite is True and not is_normal(record.abs_min, ends)
            if is_small and _is_plain(x) and x.untyped_storage()._cdata not in gone:
                record = replace(record, health=tensor_health(x))
            found.append(record)
        return tuple(found)

    def counts(self, *, written: Sequence[Tensor] = ()) -> frozenset[int]:
        """The positions of the tensors that hold whole numbers only, not all of them zero, and were not `written`."""
        gone = _memory(written)
        return frozenset(
            i
            for i, x in enumerate(self.tensors)
            if _is_plain(x) and x.untyped_storage()._cdata not in gone and _is_count(x)
        )

    def spreads(self, *, written: Sequence[Tensor] = ()) -> tuple[StoredHistogram, ...]:
        """The spreads of the first tensors that have one and share no memory with what was `written` since."""
        gone = _memory(written)
        there = [
            (x, row.label)
            for x, row in zip(self.tensors, self.rows, strict=True)
            if not (_is_plain(x) and x.untyped_storage()._cdata in gone)
        ]
        found = (StoredHistogram.of(x, label) for x, label in there)
        return tuple(islice((one for one in found if one is not None), _MOST_HISTOGRAMS))


def _memory(tensors: Sequence[Tensor]) -> set[int]:
    return {x.untyped_storage()._cdata for x in tensors if _is_plain(x)}


def _is_choice(x: Tensor) -> bool:
    # Zeros alone choose nothing: a value that has vanished looks so.
    return bool(((x == 0) | (x == 1)).all()) and bool((x == 1).any())


def _is_count(x: Tensor) -> bool:
    if not x.dtype.is_floating_point:
        return not x.dtype.is_complex
    return bool((x == x.round()).all()) and bool(x.any())


def _is_value(kind: str) -> bool:
    # A Python number is also given where the schema has a tensor, as in x * 2.
    return any(word in kind for word in ("number", "float", "Tensor"))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument or a result."""
    if isinstance(value, Tensor):
        return [value]
    return [x for _, x in leaves(value, "") if isinstance(x, Tensor)]
