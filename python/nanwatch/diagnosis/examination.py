"""What a closer look at a finding found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..instrumentation.execution_context import Autocast, RngState
from ..report.finding import Cure, Finding, Value, working_first
from ..report.record import Record
from ..report.spread import Spread


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
class Examination:
    """What a closer look at a finding found.

    `operation` (as "aten.exp.default"), `source` ("/path/file.py:123", the innermost line that is not PyTorch's) and
    `operands` (records of its tensors, before it ran) are of the operation that made the bad value; `made` is the value
    as the operation made it. They are None and empty when no operation was seen. `transient` is True when the second
    run did not make the value again, False when it did, None when that says nothing. `extent` and `index` are of the
    bad tensor. `call` is the call in which the value was made; it holds the call's tensors, so drop it when done.
    `remarks` are sentences, `cures` what was tried on the way, `spreads` of the operands, as far as they were there,
    and of the bad tensor.
    """

    operation: str | None = None
    source: str | None = None
    operands: tuple[Record, ...] = ()
    transient: bool | None = None
    extent: str = ""
    index: tuple[int, ...] | None = None
    remarks: tuple[str, ...] = ()
    call: Call | None = None
    spreads: tuple[Spread, ...] = ()
    cures: tuple[Cure, ...] = ()
    made: Value | None = None


def enrich(finding: Finding, examination: Examination) -> Finding:
    """The finding with what the examination found."""
    return replace(
        finding,
        operation=examination.operation,
        source=examination.source,
        operands=examination.operands,
        transient=examination.transient,
        extent=examination.extent,
        spreads=examination.spreads,
        index=examination.index if finding.index is None else finding.index,
        made=examination.made,
        cures=working_first((*finding.cures, *examination.cures)),
        remarks=(*finding.remarks, *examination.remarks),
    )
