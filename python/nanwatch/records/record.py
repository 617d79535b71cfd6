"""Records of tensors and frames of calls.

A record has its notes, and the placement of a sharded tensor in words that can be read back:

`Shard(0) at dp=1 of 4, Replicate at tp=0 of 2, from [8, 0]`: a clause for each dimension of the device mesh, with the
coordinate of this process and the size of that dimension, then the index in the whole tensor at which the part begins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple, TypeAlias

from ..numerics.formats import Limits, Statistics, TensorHealth, limits
from .fields import Cell

_CLAUSE = r"(\w+(?:\([^()]*\))?) at ([^=,]*)=(\d+) of (\d+)"
_PLACEMENT = re.compile(rf"(?P<places>{_CLAUSE}(?:, {_CLAUSE})*)(?:, from \[(?P<index>\d+(?:, \d+)*)\])?")


class MeshPlace(NamedTuple):
    """One dimension of a device mesh: what it does to the tensor, its name, this process's coordinate, its size."""

    kind: str
    dim: str
    coordinate: int
    size: int

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}"

    @property
    def where(self) -> str:
        """Return `dp=1 of 4`."""
        return f"{self.dim}={self.coordinate} of {self.size}"


class Placement(NamedTuple):
    """The part of a tensor that a process holds.

    `start` is the index in the whole tensor of the first element of the part; None where the part is no block of it,
    or where no dimension is sharded, so that the part has the whole's indices.
    """

    places: tuple[MeshPlace, ...]
    start: tuple[int, ...] | None

    def __str__(self) -> str:
        start = [] if self.start is None else [f"from {list(self.start)}"]
        return ", ".join([*map(str, self.places), *start])

    def in_whole(self, index: Sequence[int]) -> tuple[int, ...] | None:
        """Return the index in the whole tensor of an element of the part; None where it is not known."""
        if self.start is None or len(self.start) != len(index):
            return None
        return tuple(begin + i for begin, i in zip(self.start, index, strict=True))


def read_placement(words: str) -> Placement | None:
    """Return the placement that is spelt so; None for other words."""
    found = _PLACEMENT.fullmatch(words)
    if found is None:
        return None
    clauses = re.findall(_CLAUSE, found["places"])
    places = [MeshPlace(kind, dim, int(coordinate), int(size)) for kind, dim, coordinate, size in clauses]
    start = None if found["index"] is None else tuple(map(int, found["index"].split(", ")))
    return Placement(tuple(places), start)


def is_same_part(note: str, other: str) -> bool:
    """Return whether two ranks hold the same part of a tensor, by the notes of its records."""
    if LOCAL_SHARD in (note, other):  # nothing says which one
        return False
    parts = [read_placement(one.removeprefix(f"{LOCAL_SHARD}: ")) for one in (note, other)]
    shards = [[one for one in part.places if one.kind != "Replicate"] if part else [] for part in parts]
    return shards[0] == shards[1]


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
# Notes of rows that have no range but say what was reported in a batch begin so.
SPIKE, FORECAST = "spike in batch ", "forecast: "

_EXCUSES = (MASK, ALLOWED_INF, NOT_TAKEN)


def is_excused(note: str) -> bool:
    """Return whether the note says that a non-finite value is meant."""
    return note in _EXCUSES or note.startswith(SKIPPED_STEP)


def is_event(note: str) -> bool:
    """Return whether the note says what was reported, of a record that `event_frame` made."""
    return note.startswith((SPIKE, FORECAST))


class Record(NamedTuple):
    """One value of a module call.

    `shape` is None and `dtype` is "" for a value that is no tensor. `abs_min`, `abs_max` (floats, in the
    units of the tensor) and `isfinite` are None where nothing was read; then `note` says why. `health` is
    filled when the tensor held a non-finite value. `note` is "", "None", "not a tensor", "local shard" (of a
    DTensor: all that was read), "local shard: Shard(0) at dp=1 of 4, from [8, 0]" (and which one: `placement`), "mask"
    (an additive mask, whose -inf is meant), "allowed inf" (as `allow_inf` says),
    "skipped step (scale 65536 → 32768)" (a gradient that no step took), "not in the step's gradients" (one that never
    reached them), "spike in batch 60: <spike>" and "forecast: <forecast>" (no tensor, but what was reported of one) or
    "not checked: <reason>". `fingerprint` is that of `nanwatch.fingerprint`, None without
    `watch(fingerprints=True)`. `statistics` are those of `nanwatch.statistics`, None without `watch(statistics=True)`
    and for a tensor that is complex, empty or not finite.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.ReLU()
        >>> with nanwatch.watch(model) as watch:
        ...     output = model(torch.tensor([-1.0, 2.0]))
        >>> record = watch.frames[0].records[-1]
        >>> record.label, record.dtype, record.abs_min, record.abs_max, record.is_fault
        ('output', 'float32', 0.0, 2.0, False)
    """

    label: str
    role: Role
    shape: tuple[int, ...] | None
    dtype: Annotated[str, Cell(is_null_if_empty=True)]
    abs_min: float | None
    abs_max: float | None
    isfinite: bool | None
    health: TensorHealth | None
    note: str = ""
    fingerprint: Annotated[int | None, Cell(kind="uint64")] = None
    statistics: Statistics | None = None

    @property
    def is_shard(self) -> bool:
        """Return True for a record of this process's part of a DTensor; `shape` is that of the whole."""
        return self.note.startswith(LOCAL_SHARD)

    @property
    def ends(self) -> Limits | None:
        """Return the largest finite, the smallest normal and the smallest number of its format; None for integers."""
        return limits(self.dtype)

    @property
    def placement(self) -> Placement | None:
        """Return the part of a DTensor that was read, as the note has it; None for other tensors."""
        return read_placement(self.note.removeprefix(f"{LOCAL_SHARD}: ")) if self.is_shard else None

    @property
    def is_excused(self) -> bool:
        """Return True when the note says that a non-finite value in the tensor is meant."""
        return is_excused(self.note)

    @property
    def is_fault(self) -> bool:
        """Return True when the tensor held a nan or an inf that is not meant."""
        return self.isfinite is False and not self.is_excused


Phase: TypeAlias = Literal["forward", "backward", "step"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "step")


class Frame(NamedTuple):
    """One call of one module.

    `batch` counts from 0. `name` is the qualified name in the watched model, "" for the root. `records` are
    in the order weights, buffers, inputs, outputs. `recomputed` is True for a forward that ran again during
    the backward, as activation checkpointing does. A frame of the phase "backward" has the gradients of one call in one
    backward, in the order in which they came; one of the phase "step" has the state that a step left in the optimizer.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.LayerNorm(2, eps=0.0)
        >>> with nanwatch.watch(model, on_nonfinite="record") as watch:
        ...     output = model(torch.zeros(1, 2))
        >>> frame = watch.frames[0]
        >>> [record.label for record in frame.records], frame.fault.label
        (['weight', 'bias', 'input[0]', 'output'], 'output')
    """

    batch: int
    name: Annotated[str, Cell(name="module")]
    class_name: Annotated[str, Cell(name="class")]
    records: tuple[Record, ...]
    phase: Phase = "forward"
    recomputed: bool = False

    @property
    def fault(self) -> Record | None:
        """Return the first record with an unintended nan or inf, or None."""
        return next((record for record in self.records if record.is_fault), None)


def event_frame(batch: int, module: str, label: str, kind: str, note: str) -> Frame:
    """Return a frame without a range that says what was reported in a batch about `label` of a module."""
    name = label.partition("[")[0].partition(".")[0]  # "output" of "output.logits" and of "output[0]"
    role: Role = "weight"
    if label.endswith(".grad") or label == "gradients":
        role = "gradient"
    elif name == "input":
        role = "input"
    elif name in ("output", "loss") or name.startswith("attention logits"):
        role = "output"
    record = Record(label, role, None, "", None, None, None, None, note)
    return Frame(batch, module, kind, (record,), "step")
