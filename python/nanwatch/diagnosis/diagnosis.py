"""Diagnosis of a finding: what a re-run of its batch shows, and where in a tensor its bad elements are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isnan
from types import CodeType

import torch
from torch import Tensor

from ..numerics import _reference
from ..numerics.readable import is_plain, local_shard, only_our_dispatch, unreadable
from ..records.record import Frame, Record
from ..report.finding import Finding, OriginKind, Place, Value, finding_of
from .batch_snapshot import BatchSnapshot


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


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Facts about a finding that a re-run of its batch showed.

    `step` is the operation that made the non-finite value, None when none was seen. `transient` is True when the re-run
    did not make the value again, False when it did, None when that says nothing. `extent` and `index` are of the
    non-finite tensor. `call` is the call in which the value was made; it holds the call's tensors, so drop it when
    done. `remarks` are sentences. `made_in` is the module whose own code made the operation, where that is another than
    the finding's and not inside it. `holder` is a frame with the weight or buffer that the operation was given
    non-finite.
    """

    step: Step | None = None
    transient: bool | None = None
    extent: str = ""
    index: tuple[int, ...] | None = None
    remarks: tuple[str, ...] = ()
    call: BatchSnapshot | None = None
    made_in: str | None = None
    holder: Frame | None = None


def enrich(finding: Finding, diagnosis: Diagnosis) -> Finding:
    """Return the finding with the facts of the diagnosis, and those of its own that the diagnosis has not."""
    if (holder := diagnosis.holder) is not None and (record := holder.fault) is not None:
        origin: OriginKind = "weight" if record.role == "weight" else "buffer"
        state = finding_of(holder, record, origin, None, finding.rank, finding.sequence)
        finding = replace(state, remarks=finding.remarks)
    made_in = diagnosis.made_in
    if made_in == finding.module:  # which wrote it into what it was given
        finding = replace(finding, origin="produced", source_module=None)
    elif made_in is not None:
        finding = replace(finding, origin="received", source_module=made_in)
    if (step := diagnosis.step) is not None:
        place = finding.place if step.place is None else step.place.at
        operands = step.operands or finding.operands
        finding = replace(finding, operation=step.operation, place=place, operands=operands, made=step.made)
    return replace(
        finding,
        transient=diagnosis.transient,
        extent=diagnosis.extent,
        index=diagnosis.index if finding.index is None else finding.index,
        remarks=(*finding.remarks, *diagnosis.remarks),
    )


# Beyond this a bool for every element asks too much of a device that is full.
_MAX_ELEMENTS = 1 << 31


def describe(x: Tensor) -> str:
    """Return where the nan and inf of `x` are; "" when it cannot be told.

    One of "none", "all", "one element", "1 of 4096 rows, row 7" or "7 of 4096 rows" (whole rows: all positions of the
    last dimension), "column 5" or "3 of 8 columns" (whole columns of a matrix), "scattered over 5 of 4096 rows" (parts
    of 5 rows), "scattered". Reads any dtype and strides; of a DTensor the local shard. Returns "" for tensors of more
    than 2**31 elements, without values, and of other layouts than strided.
    """
    with only_our_dispatch(), torch.no_grad():
        shard = local_shard(x)
        x = x if shard is None else shard
        if unreadable(x) or not is_plain(x) or x.numel() > _MAX_ELEMENTS:
            return ""
        bad = ~torch.isfinite(_reference._to_arithmetic(x.detach()))
        count = int(bad.sum())
        if count in (0, bad.numel()):
            return "all" if count else "none"
        if count == 1 or bad.ndim < 2:
            return "one element" if count == 1 else "scattered"
        rows, num_columns = _nonzero(bad.any(dim=-1).flatten()), bad.shape[-1]
        num_rows = bad.numel() // num_columns
        if count == len(rows) * num_columns:
            which = f", row {rows[0]}" if len(rows) == 1 and bad.ndim == 2 else ""
            return f"{len(rows)} of {num_rows} rows{which}"
        columns = _nonzero(bad.any(dim=0)) if bad.ndim == 2 else []
        if columns and count == len(columns) * num_rows:
            return f"column {columns[0]}" if len(columns) == 1 else f"{len(columns)} of {num_columns} columns"
        return f"scattered over {len(rows)} of {num_rows} rows" if len(rows) < num_rows else "scattered"


def _nonzero(flags: Tensor) -> list[int]:
    return [int(i) for i in flags.nonzero().flatten()]
