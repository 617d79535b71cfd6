"""Block formats of linear layers while they train: what the operands of each product would lose in one.

While a watch asks for it, the calls of `torch.nn.functional.linear` are read (call_readers.py), as `nn.Linear` makes
them. A sample of whole rows tells enough: blocks lie along the rows, so an outlier of any feature is in it.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from math import isnan, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..numerics.block_fit import block_fits
from ..numerics.block_formats import BlockFormat, block_format
from ..numerics.readable import dtype_name, is_plain, unreadable
from ..recording.events import Recorder
from .call_readers import aside, read_calls
from .global_hooks import Handles

# Elements of an operand that are read. More take more time, and tell the SQNR no better than to 0.2 dB.
_SAMPLE = 1 << 14
# A layer has left a format where the noise has a tenth of the power of the signal.
LEAST_SQNR = 10.0
# A row of a frame holds no infinity that nobody meant.
_MOST_SQNR = 200.0
SQNR, SATURATED, FLUSHED = MEASURES = ("SQNR (dB)", "saturated", "flushed")
_LABEL = re.compile(rf"(\w+) ({'|'.join(map(re.escape, MEASURES))}) of (input|weight)")


def measure_of(label: str) -> tuple[str, str, str] | None:
    """Return format, measure and operand of a row's label, such as "mxfp8 saturated of input"; None for another row."""
    found = _LABEL.fullmatch(label)
    return None if found is None else (found[1], found[2], found[3])


class FormatLoss(NamedTuple):
    """Loss of an operand of a module's linear product in a block format, measured on a sample of its rows.

    Of several calls in the batch the worst number counts. All are nan where the operand was not read, as `reason` says.
    """

    module: str
    operand: str
    """`input` or `weight`."""
    format: str
    batch: int
    sqnr: float = nan
    """In dB; inf where the format holds every element."""
    saturated: float = nan
    """Share of the elements that are not zero."""
    flushed: float = nan
    """Share of them that become zero."""
    reason: str = ""


class LinearFormats:
    """Reader of the products of linear layers, in batches 0, `every`, 2 `every`, ... of a recorder, until `remove`."""

    def __init__(
        self, recorder: Recorder, formats: Sequence[str], every: int, observes: Callable[[str], bool]
    ) -> None:
        self.formats = tuple(formats)
        self._forms = [block_format(name, "watch") for name in formats]
        self._recorder, self._every, self._observes = recorder, every, observes
        self._latest: dict[tuple[str, str, str], FormatLoss] = {}
        this = weakref.ref(self)

        def read(operands: Callable[..., dict[str, Tensor]], args: Any, kwargs: Any) -> None:
            # Most calls end at the first comparison.
            if (own := this()) is not None and own._recorder.latest_batch % own._every == 0:
                own._read(operands(*args, **kwargs))

        self._handles = Handles(self, [read_calls(functional, "linear", _operands, read)])

    def remove(self) -> None:
        """Read no more. Does nothing the second time."""
        self._handles.remove()

    def found(self, batch: int | None = None) -> tuple[FormatLoss, ...]:
        """Return the latest losses, or those of a batch, the lowest SQNR first, and last what was not read."""
        found = (one for one in tuple(self._latest.values()) if batch in (None, one.batch))
        return tuple(sorted(found, key=lambda one: (isnan(one.sqnr), one.sqnr)))

    def _read(self, operands: dict[str, Tensor]) -> None:
        call = self._recorder.call_under_way()
        if call is None or call[0] % self._every or not self._observes(call[1]):
            return
        batch, module, _ = call
        with aside():
            for operand, x in operands.items():
                reason = _why_not(x)
                for form in self._forms:
                    loss = FormatLoss(module, operand, form.name, batch, reason=reason)
                    if not reason:
                        (fit,) = block_fits(_sample(x.detach(), form), [form], -1)
                        loss = loss._replace(sqnr=fit.sqnr, saturated=fit.saturated, flushed=fit.flushed)
                    self._add(loss)

    def _add(self, loss: FormatLoss) -> None:
        if not isnan(loss.sqnr):
            values = (min(max(loss.sqnr, 0.0), _MOST_SQNR), loss.saturated, loss.flushed)
            for measure, value in zip(MEASURES, values, strict=True):
                label = f"{loss.format} {measure} of {loss.operand}"
                self._recorder.add_output(label, torch.tensor([value]))
        key = loss[:3]
        known = self._latest.get(key)
        if known is not None and known.batch == loss.batch and not isnan(known.sqnr):
            if isnan(loss.sqnr):
                return
            loss = loss._replace(
                sqnr=min(known.sqnr, loss.sqnr),
                saturated=max(known.saturated, loss.saturated),
                flushed=max(known.flushed, loss.flushed),
            )
        self._latest[key] = loss


def _operands(input: Tensor, weight: Tensor, bias: object = None) -> dict[str, Tensor]:
    return {"input": input, "weight": weight}


def _why_not(x: Tensor) -> str:
    """Return why an operand is not read; "" where it is."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "in a CUDA graph capture"
    if reason := unreadable(x):
        return reason
    if not x.is_floating_point():
        return f"{dtype_name(x.dtype)} is no floating-point dtype"
    return "" if is_plain(x) else f"a {type(x).__name__} may compute its elements itself"


def _sample(x: Tensor, form: BlockFormat) -> Tensor:
    """Return rows of a tensor, in bands as high as the blocks of the format, evenly spaced from the first on."""
    rows = x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x[None]
    band = form.rows or 1
    number = max(1, _SAMPLE // max(1, band * rows.shape[1]))
    step = len(rows) // number
    if step <= band:
        return rows
    bands: Tensor = rows[: number * step].unflatten(0, (number, step))
    return bands[:, :band].flatten(0, 1)
