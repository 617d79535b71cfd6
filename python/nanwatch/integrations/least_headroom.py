"""Least headroom that a Watch saw since the last question: one number to log, and its module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..report.headroom import headroom_bits
from ..report.record import is_fault, to_record
from ..util.visible import module_name

if TYPE_CHECKING:
    from ..session.watch import Watch


@dataclass(frozen=True, slots=True)
class Least:
    """Tensor with the least headroom: its `bits` as in headroom_bits, -inf when it was not finite."""

    bits: float
    module: str
    label: str
    dtype: str

    @property
    def place(self) -> str:
        """Module, label and format in words: "encoder.wo output, float16"."""
        return f"{module_name(self.module)} {self.label}, {self.dtype}"


class LeastHeadroom:
    """Reader of the frames of a Watch, which should have room for those of a batch.

    Call `look` after every batch, and `take` to get the number. As in headroom.by_module an input counts only when it
    is a fault.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._frames_seen = watch._recorder.frames_kept
        self._least: Least | None = None
        # The largest magnitude so far by dtype. Only a larger one can have less headroom, which skips nearly all rows.
        self._largest: dict[str, float] = {}

    def look(self) -> None:
        """Read the frames that were recorded since the last look."""
        self._frames_seen, fresh = self._watch._recorder.frames_since(self._frames_seen)
        # Read rows: 2 µs per frame without a Frame.
        for frame in fresh:
            for row in frame.rows:
                dtype, abs_max = row.dtype, row.abs_max
                nonfinite = is_fault(row)
                if abs_max is None or not (
                    nonfinite or (row.role != "input" and abs_max > self._largest.get(dtype, 0.0))
                ):
                    continue
                bits = headroom_bits(to_record(row))
                if bits is None:
                    continue
                if not nonfinite:
                    self._largest[dtype] = abs_max
                if self._least is None or bits < self._least.bits:
                    self._least = Least(bits, frame.name, row.label, dtype)

    def take(self) -> Least | None:
        """Return the least since the last `take`, or None when there was none; then begin anew."""
        self.look()
        least, self._least = self._least, None
        self._largest.clear()
        return least
