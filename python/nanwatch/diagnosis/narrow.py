"""Formats narrower than float32: whether one takes part in a batch."""

from __future__ import annotations

from torch import Tensor

from ..precision.casting import NARROW
from ..recording.walk import call_leaves
from ..report.finding import Finding
from .batch_snapshot import BatchSnapshot


def is_narrow(dtype: str) -> bool:
    """Whether the format has fewer bits than float32."""
    name = dtype.removeprefix("torch.")
    return name in ("float16", "bfloat16") or name.startswith("float8")


def may_be_narrow(snapshot: BatchSnapshot, finding: Finding) -> bool:
    """Whether a format narrower than float32 may take part, as far as can be told before any run."""
    root = snapshot.module
    tensors = [*root.parameters(), *root.buffers()]
    tensors += [x for _, x in call_leaves(snapshot.args, snapshot.kwargs) if isinstance(x, Tensor)]
    return (
        any(one.enabled and one.dtype in NARROW for one in snapshot.autocast)
        or any(is_narrow(str(x.dtype)) for x in tensors)
        or any(is_narrow(record.dtype) for record in finding.operands)
    )
