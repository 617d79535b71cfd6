"""Diagnosis of a finding: what a re-run of its batch shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ..instrumentation.execution_context import Autocast, RngState
from ..report.finding import Cure, Finding, Value, working_first
from ..report.histogram import StoredHistogram
from ..report.record import Record
from .extent import BadRows

if TYPE_CHECKING:
    from .backward_pass import BackwardStart


@dataclass(frozen=True, slots=True)
class Call:
    """A module call as it was handed in: `module(*args, **kwargs)`, in the model by the name of `name`.

    `rng` and `autocast` are as the call found them, or None and empty where nobody looked.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rng: RngState | None = None
    autocast: tuple[Autocast, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """The source of an operation: file, line, and the expression, as `code.co_positions()` has it, where it is known.

    `counts` are the positions of the operands that hold whole numbers only, not all of them zero.
    """

    filename: str
    line: int
    positions: tuple[int | None, int | None, int | None, int | None] | None = None
    counts: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return f"{self.filename}:{self.line}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Facts about a finding that a re-run of its batch showed.

    `operation` (as "aten.exp.default"), `place` (the innermost line that is not PyTorch's) and `operands` (records of
    its tensors, before it ran) are of the operation that made the non-finite value; `made` is the value as the
    operation made it. They are None and empty when no operation was seen. `transient` is True when the second run did
    not make the value again, False when it did, None when that says nothing. `extent` and `index` are of the non-finite
    tensor. `call` is the call in which the value was made; it holds the call's tensors, so drop it when done. `remarks`
    are sentences, `cures` what was tried on the way, `spreads` of the operands, as far as they were there, and of the
    non-finite tensor. `rows` are the bad rows of the non-finite tensor and of what the operation made. `start` is where
    a failed backward began.
    """

    operation: str | None = None
    place: Place | None = None
    operands: tuple[Record, ...] = ()
    transient: bool | None = None
    extent: str = ""
    index: tuple[int, ...] | None = None
    remarks: tuple[str, ...] = ()
    call: Call | None = None
    spreads: tuple[StoredHistogram, ...] = ()
    cures: tuple[Cure, ...] = ()
    made: Value | None = None
    rows: tuple[BadRows, ...] = ()
    start: BackwardStart | None = None

    @property
    def source(self) -> str | None:
        """The place as "/path/file.py:123"."""
        return None if self.place is None else str(self.place)


def enrich(finding: Finding, diagnosis: Diagnosis) -> Finding:
    """Return the finding with the facts of the diagnosis."""
    return replace(
        finding,
        operation=diagnosis.operation,
        source=diagnosis.source,
        operands=diagnosis.operands,
        transient=diagnosis.transient,
        extent=diagnosis.extent,
        spreads=diagnosis.spreads,
        index=diagnosis.index if finding.index is None else finding.index,
        made=diagnosis.made,
        cures=working_first((*finding.cures, *diagnosis.cures)),
        remarks=(*finding.remarks, *diagnosis.remarks),
    )
