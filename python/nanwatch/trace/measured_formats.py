"""Block formats that a run has measured in its linear layers: the worst of each operand over a trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..instrumentation.linear_formats import FLUSHED, SATURATED, SQNR, measure_of
from ..numerics.block_formats import block_format
from .trace_file import Trace, strings


class MeasuredLoss(NamedTuple):
    """Loss of an operand of a module's linear product in a block format, the worst of the batches that measured it."""

    module: str
    operand: str
    """`input` or `weight`."""
    format: str
    sqnr: float
    """The lowest in dB, 0 to 200."""
    batch: int
    """The first batch with it."""
    saturated: float
    """The largest share of the elements that are not zero, 0.0 to 1.0."""
    flushed: float
    """The largest share of them that becomes zero."""
    num_batches: int


def measured(trace: Trace | str | os.PathLike[str], formats: Sequence[str]) -> tuple[MeasuredLoss, ...]:
    """Return the loss of each operand in these block formats, the lowest SQNR first.

    The trace is of a run with `watch(formats=...)`. Raises ValueError for an unknown format, and for one that the run
    did not measure.

    Examples:
        >>> import tempfile, nanwatch, torch
        >>> from nanwatch.trace.measured_formats import measured
        >>> file = tempfile.mkdtemp() + "/run.parquet"
        >>> model = torch.nn.Linear(64, 8)
        >>> with nanwatch.watch(model, trace=file, formats="mxfp8", formats_every=1):
        ...     output = model(torch.ones(4, 64))
        >>> [(one.operand, one.format, one.num_batches) for one in measured(file, ["mxfp8"])]
        [('weight', 'mxfp8', 1), ('input', 'mxfp8', 1)]
    """
    trace = trace if isinstance(trace, Trace) else Trace.open(trace)
    wanted = [block_format(name, "formats").name for name in dict.fromkeys(formats)]
    table = trace.table(["batch", "module", "label", "abs_max"])
    module, label = strings(table["module"]), strings(table["label"])
    batch, values = table["batch"].to_numpy(), table["abs_max"].to_numpy()
    rows: dict[tuple[int, str, str], dict[str, list[int]]] = {}
    for code, part in enumerate(map(measure_of, label.values)):
        if part is None:
            continue
        name, measure, operand = part
        for i in np.flatnonzero((label.codes == code) & ~np.isnan(values)).tolist():
            key = int(module.codes[i]), operand, name
            rows.setdefault(key, {SQNR: [], SATURATED: [], FLUSHED: []})[measure].append(i)
    found = []
    for (code, operand, name), at in rows.items():
        if all(at.values()):
            least = min(at[SQNR], key=lambda i: (values[i], batch[i]))
            found.append(
                MeasuredLoss(
                    module.values[code],
                    operand,
                    name,
                    sqnr=float(values[least]),
                    batch=int(batch[least]),
                    saturated=float(values[at[SATURATED]].max()),
                    flushed=float(values[at[FLUSHED]].max()),
                    num_batches=len(np.unique(batch[at[SQNR]])),
                )
            )
    known = list(dict.fromkeys(one.format for one in found))
    if missing := [name for name in wanted if name not in known]:
        has = f"it has {', '.join(known)}" if known else "it has no measurement of a block format"
        raise ValueError(
            f"{trace.path} does not say what {', '.join(missing)} would lose; {has}. Record a run that measures it:"
            f" nanwatch run --formats {','.join(wanted)} --trace FILE SCRIPT, or watch(formats=..., trace=...)"
        )
    return tuple(sorted((one for one in found if one.format in wanted), key=lambda one: one.sqnr))
