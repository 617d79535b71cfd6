"""One tensor of a frame: its label, what it was, and its range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from .placement import Placement, read_placement

if TYPE_CHECKING:
    from ..numerics.ranges import TensorHealth

Role: TypeAlias = Literal["weight", "buffer", "input", "output", "gradient"]
ROLES: tuple[Role, ...] = ("weight", "buffer", "input", "output", "gradient")

# The notes with a meaning of their own; every other note begins with NOT_CHECKED and ends with the reason.
NONE = "None"
NOT_A_TENSOR = "not a tensor"
MASK = "mask"
ALLOWED_INF = "allowed inf"
LOCAL_SHARD = "local shard"
NOT_CHECKED = "not checked"

SKIPPED_STEP = "skipped step"  # a gradient that no optimizer's step took; more may follow, such as the scale
NOT_TAKEN = "not in the step's gradients"

_EXCUSES = (MASK, ALLOWED_INF, NOT_TAKEN)


def is_excused(note: str) -> bool:
    """Whether the note says that a value which is not finite is no fault."""
    return note in _EXCUSES or note.startswith(SKIPPED_STEP)


@dataclass(frozen=True, slots=True)
class Record:
    """What was seen of one value of a module call.

    `shape` is None and `dtype` is "" for a value that is no tensor. `abs_min`, `abs_max` (floats, in the
    units of the tensor) and `isfinite` are None where nothing was read; then `note` says why. `health` is
    filled when the tensor held a non-finite value. `note` is "", "None", "not a tensor", "local shard" (of a
    DTensor: all that was read), "local shard: Shard(0) at dp=1 of 4, from [8, 0]" (and which one: `placement`), "mask"
    (an additive mask, whose -inf is meant), "allowed inf" (as `allow_inf` says),
    "skipped step (scale 65536 → 32768)" (a gradient that no step took), "not in the step's gradients" (one that never
    reached them) or "not checked: <reason>".
    """

    label: str
    role: Role
    shape: tuple[int, ...] | None
    dtype: str
    abs_min: float | None
    abs_max: float | None
    isfinite: bool | None
    health: TensorHealth | None = None
    note: str = ""

    @property
    def is_shard(self) -> bool:
        """True when what was read is this process's part of a DTensor; `shape` is that of the whole."""
        return self.note.startswith(LOCAL_SHARD)

    @property
    def placement(self) -> Placement | None:
        """Which part of a DTensor was read, as its note has it; None for other tensors."""
        return read_placement(self.note.removeprefix(f"{LOCAL_SHARD}: ")) if self.is_shard else None

    @property
    def is_fault(self) -> bool:
        """True when the tensor held a nan or an inf that nobody put there on purpose."""
        return self.isfinite is False and not is_excused(self.note)


class Row(NamedTuple):
    """A record before anybody asked for it: the fields of Record in their order. The compiled recorder makes these too.

    Building the frozen dataclass costs 1.2 µs and the tuple 0.1, and of the frames of a long run only the last few are
    ever looked at.
    """

    label: str
    role: Role
    shape: tuple[int, ...] | None
    dtype: str
    abs_min: float | None
    abs_max: float | None
    isfinite: bool | None
    health: TensorHealth | None
    note: str


def is_fault(row: Row) -> bool:
    """Record.is_fault of a row."""
    return row.isfinite is False and not is_excused(row.note)


def to_record(row: Row) -> Record:
    """The record of a row, its shape a plain tuple."""
    label, role, shape, dtype, abs_min, abs_max, isfinite, health, note = row
    plain = None if shape is None else tuple(shape)
    return Record(label, role, plain, dtype, abs_min, abs_max, isfinite, health, note)
