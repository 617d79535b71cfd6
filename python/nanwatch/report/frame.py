"""One call of one module: its name and the records of its weights, buffers, inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from .record import Record, Row, to_record

Phase: TypeAlias = Literal["forward", "backward", "step"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "step")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of one module.

    `batch` counts from 0. `name` is the qualified name in the watched model, "" for the root. `records` are
    in the order weights, buffers, inputs, outputs. `recomputed` is True for a forward that ran again during
    the backward, as activation checkpointing does. A frame of the phase "backward" has the gradients of one call in one
    backward, in the order in which they came; one of the phase "step" has the state that a step left in the optimizer.
    """

    batch: int
    name: str
    class_name: str
    records: tuple[Record, ...]
    phase: Phase = "forward"
    recomputed: bool = False

    @property
    def fault(self) -> Record | None:
        """Return the first record with an unintended nan or inf, or None."""
        return next((record for record in self.records if record.is_fault), None)


class FrameRows(NamedTuple):
    """A frame before it is asked for: the same fields, with rows for records."""

    batch: int
    name: str
    class_name: str
    rows: list[Row]
    recomputed: bool = False
    phase: Phase = "forward"

    def to_frame(self) -> Frame:
        """Return the frame, with its records built."""
        records = tuple(map(to_record, self.rows))
        return Frame(self.batch, self.name, self.class_name, records, self.phase, self.recomputed)
