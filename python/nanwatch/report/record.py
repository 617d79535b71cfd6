"""Records of tensors, frames of calls, and their headroom.

A record has its notes, and the placement of a sharded tensor in words that can be read back:

`Shard(0) at dp=1 of 4, Replicate at tp=0 of 2, from [8, 0]`: a clause for each dimension of the device mesh, with the
coordinate of this process and the size of that dimension, then the index in the whole tensor at which the part begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, log2, sqrt
from typing import Literal, NamedTuple, TypeAlias

from ..numerics.formats import Limits, Statistics, TensorHealth, limits

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
    """Return whether the note says what was reported, of a row that `event_rows` made."""
    return note.startswith((SPIKE, FORECAST))


@dataclass(frozen=True, slots=True)
class Record:
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
    dtype: str
    abs_min: float | None
    abs_max: float | None
    isfinite: bool | None
    health: TensorHealth | None = None
    note: str = ""
    fingerprint: int | None = field(default=None, metadata={"left out": True})
    statistics: Statistics | None = field(default=None, metadata={"left out": True})

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


class Row(NamedTuple):
    """A record before it is asked for: the fields of Record in their order. The compiled recorder makes these too.

    Building the frozen dataclass takes 1.2 µs and the tuple 0.1 µs. Only the last few frames of a long run are ever
    read.
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
    fingerprint: int | None = None
    statistics: Statistics | None = None


def is_fault(row: Row) -> bool:
    """Return `Record.is_fault` of a row."""
    return row.isfinite is False and not is_excused(row.note)


def to_record(row: Row) -> Record:
    """Return the record of a row, its shape a plain tuple."""
    shape = None if row.shape is None else tuple(row.shape)
    return Record(*row._replace(shape=shape))


Phase: TypeAlias = Literal["forward", "backward", "step"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "step")


@dataclass(frozen=True, slots=True)
class Frame:
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


def event_rows(batch: int, module: str, label: str, kind: str, note: str) -> FrameRows:
    """Return a frame without a range that says what was reported in a batch about `label` of a module."""
    name = label.partition("[")[0].partition(".")[0]  # "output" of "output.logits" and of "output[0]"
    role: Role = "weight"
    if label.endswith(".grad") or label == "gradients":
        role = "gradient"
    elif name == "input":
        role = "input"
    elif name in ("output", "loss") or name.startswith("attention logits"):
        role = "output"
    row = Row(label, role, None, "", None, None, None, None, note)
    return FrameRows(batch, module, kind, [row], False, "step")


# Headroom: how far a tensor is from the end of its format. One bit is one doubling: at 3 bits the largest element may
# grow eightfold before it overflows.

# 8 bits. From the root of the end on a value may leave it by its own square; for float16 the two are the same.
NEAR_FACTOR = 256

# Bits. Less than a factor of two is what GELU, dropout and a residual sum do in healthy models.
_RECOVERY = 1.0


def is_near_end(largest: float, end: float) -> bool:
    """Return whether a value may leave a format that ends at `end` by a sum, a usual factor or its own square."""
    return largest >= min(end / NEAR_FACTOR, sqrt(end))


def is_normal(smallest: float | None, ends: Limits) -> bool:
    """Return whether no element is zero or subnormal, where `smallest` is the abs_min."""
    return smallest is None or smallest >= ends.smallest_normal


def has_vanished(record: Record) -> bool:
    """Return whether every element is zero or subnormal: the value is lost, or soon will be."""
    ends = record.ends
    if ends is None or record.abs_max is None or not record.isfinite or 0 in (record.shape or ()):
        return False
    return record.abs_max < ends.smallest_normal


def headroom_bits(record: Record) -> float | None:
    """Return log2(largest finite of the record's dtype / abs_max): how often the largest element may still double.

    0.0 at the end of the format. -inf when the tensor holds a nan or an inf, for which no room is left. inf when it is
    empty or all zero, for which any factor is harmless. None where the number means nothing: integers and bools,
    tensors that were not read, and extremes that are meant (masks, `allow_inf`). May fall to -0.5 for a complex tensor,
    whose modulus may pass what one part can hold.
    """
    ends = record.ends
    if ends is None or record.abs_max is None or record.is_excused:
        return None
    if record.isfinite is False or not isfinite(record.abs_max):
        return -inf
    if record.abs_max <= 0:
        return inf
    # Two logarithms, as the quotient of float64's largest and smallest number is no float64.
    return log2(ends.largest) - log2(record.abs_max)


def least_bits(records: Iterable[Record]) -> float | None:
    """Return the least headroom of the records that is a number, in bits; None without one."""
    found = (bits for one in records if (bits := headroom_bits(one)) is not None and isfinite(bits))
    return min(found, default=None)


def by_module(frames: Iterable[Frame]) -> dict[str, float]:
    """Return the least headroom of each module in bits, worst first; modules without any are left out.

    An input counts only when it is non-finite. Otherwise one large output would put its module and all its readers at
    the head of the list.
    """
    least: dict[str, float] = {}
    for frame in frames:
        for record in frame.records:
            bits = headroom_bits(record)
            if bits is not None and (record.role != "input" or record.is_fault):
                least[frame.name] = min(bits, least.get(frame.name, inf))
    return dict(sorted(least.items(), key=lambda item: item[1]))


@dataclass(frozen=True, slots=True)
class Shrinking:
    """A run of outputs whose headroom falls: from `from_bits` at `from_module` to `to_bits` at `to_module`,
    both included in `num_frames`, all of one `dtype`."""

    from_module: str
    from_bits: float
    to_module: str
    to_bits: float
    num_frames: int
    dtype: str

    def __str__(self) -> str:
        start, end = self.from_module or "the root module", self.to_module or "the root module"
        return (
            f"from {self.from_bits:.1f} bits at {start} to {self.to_bits:.1f} bits at {end}"
            f" over {self.num_frames} frames"
        )


def shrinking(frames: Sequence[Frame]) -> Shrinking | None:
    """Return the longest run of outputs with falling headroom that ends just before the first non-finite record.

    `frames` are the oldest first. The headroom has to fall by more than a bit. None without such a run, or when all is
    finite. A frame counts by the output with the least headroom. One without (integers, unread) is passed over. On its
    way down the headroom may recover by up to one bit, as behind an activation or a dropout. The run starts where the
    headroom was highest. It does not reach over the start of the batch, over a change of dtype, whose bits are no
    measure for these, or over an output that is all zero.
    """
    end = next((i for i, frame in enumerate(frames) if frame.fault is not None), None)
    if end is None:
        return None
    run: list[tuple[Frame, Record, float]] = []
    start = 0
    for frame in reversed(frames[:end]):
        if (frame.batch, frame.phase) != (frames[end].batch, frames[end].phase):
            break
        tightest = _tightest_output(frame)
        if tightest is None:
            continue
        record, bits = tightest
        if bits == inf or (run and (bits < run[start][2] - _RECOVERY or record.dtype != run[0][1].dtype)):
            break
        run.append((frame, record, bits))
        if bits > run[start][2]:
            start = len(run) - 1
    if not run or run[start][2] - run[0][2] <= _RECOVERY:
        return None
    (first, record, most), (last, _, least) = run[start], run[0]
    return Shrinking(first.name, most, last.name, least, start + 1, record.dtype)


def _tightest_output(frame: Frame) -> tuple[Record, float] | None:
    made = "output" if frame.phase == "forward" else "gradient"
    outputs = [(r, bits) for r in frame.records if r.role == made and (bits := headroom_bits(r)) is not None]
    return min(outputs, key=lambda pair: pair[1], default=None)
