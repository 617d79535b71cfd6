"""The least headroom between two logs of a trainer."""

from __future__ import annotations

from typing import NamedTuple

from ..records.headroom import headroom_bits
from ..records.record import Frame
from ..util.visible import module_name
from .sink import Sink


class Least(NamedTuple):
    """Tensor with the least headroom: its `bits` as in headroom_bits, -inf when it was not finite."""

    bits: float
    module: str
    label: str
    dtype: str

    @property
    def place(self) -> str:
        """Module, label and format in words: "encoder.wo output, float16"."""
        return f"{module_name(self.module)} {self.label}, {self.dtype}"


class LeastHeadroom(Sink):
    """Sink that keeps the least headroom until it is taken. As in `by_module` an input counts only as a fault."""

    def __init__(self) -> None:
        self._least: Least | None = None
        # The largest magnitude so far by dtype. Only a larger one can have less headroom, so most records are skipped.
        self._largest: dict[str, float] = {}

    def on_frame(self, frame: Frame) -> None:
        """Look at the records of a call."""
        for record in frame.records:
            dtype, abs_max, is_fault = record.dtype, record.abs_max, record.is_fault
            is_larger = (
                abs_max is not None and record.role != "input" and abs_max > self._largest.get(dtype, 0.0)
            )
            bits = headroom_bits(record) if is_larger or is_fault else None
            if bits is None or abs_max is None:
                continue
            if not is_fault:
                self._largest[dtype] = abs_max
            if self._least is None or bits < self._least.bits:
                self._least = Least(bits, frame.name, record.label, dtype)

    def take(self) -> Least | None:
        """Return the least since the last `take`, or None when there was none; then begin anew."""
        least, self._least = self._least, None
        self._largest.clear()
        return least
