"""Records of tensors, their notes and headroom, and frames of calls.

A note says why a value has no range, that an infinity is meant, or which part of a tensor was read. Headroom is how far
a tensor is from the end of its format. One bit is one doubling: at 3 bits the largest element may grow eightfold before
it overflows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite, log2, sqrt
from operator import itemgetter
from typing import Annotated, Literal, NamedTuple, TypeAlias, get_args

from ..numerics.formats import Limits, TensorHealth, limits
from ..util.messages import module_name
from .fields import Cell

NoteKind: TypeAlias = Literal[
    "absent", "not_a_tensor", "not_checked", "local_shard", "mask", "allowed", "absorbed", "skipped_step", "not_taken",
    "spike", "forecast",
]  # fmt: skip
NOTE_KINDS: tuple[NoteKind, ...] = get_args(NoteKind)
# These say that a non-finite value is meant.
EXCUSES: tuple[NoteKind, ...] = ("mask", "allowed", "absorbed", "skipped_step", "not_taken")
# These say what was reported in a batch, in records that `event_frame` makes.
EVENTS: tuple[NoteKind, ...] = ("spike", "forecast")

CAPTURED = "in a CUDA graph capture"  # text of "not_checked" where a CUDA graph was captured

# English of each kind, alone and with what belongs to it.
_WORDS: dict[NoteKind, tuple[str, str]] = {
    "absent": ("None", ""),
    "not_a_tensor": ("not a tensor", ""),
    "not_checked": ("not checked", "not checked: {}"),
    "local_shard": ("local shard", "local shard: {}"),
    "mask": ("mask", ""),
    "allowed": ("allowed", ""),
    "absorbed": ("nan not passed on", ""),
    "skipped_step": ("skipped step", "skipped step ({})"),
    "not_taken": ("not in the step's gradients", ""),
    "spike": ("spike", "{}"),
    "forecast": ("forecast", "forecast: {}"),
}


class Note(NamedTuple):
    """A kind of note with its text or its placement, such as `Shard(dim=0) at dp=1 of 4, Replicate() at tp=0 of 2`.

    | kind | of | with |
    |---|---|---|
    | absent | the value None | |
    | not_a_tensor | a value that is no tensor | |
    | not_checked | a tensor that was not read | the reason |
    | local_shard | a DTensor, of which this process's part was read | its placement in the device mesh, if known |
    | mask | an additive mask, whose -inf is meant | |
    | allowed | a value that is meant, as `allow` says | |
    | absorbed | data with nan, of which the outputs have nothing: an input that requires no gradient | |
    | skipped_step | a gradient that no optimizer's step took | the scale: `scale 65536 → 32768` |
    | not_taken | a gradient that never reached those of the step | |
    | spike, forecast | no tensor, but what was reported of one | its line |
    """

    kind: Annotated[NoteKind, Cell(name="note")]
    text: Annotated[str, Cell(name="note_text", is_null_if_empty=True)] = ""
    placement: str | None = None

    def __str__(self) -> str:
        alone, more = _WORDS[self.kind]
        words = self.placement or self.text
        return more.format(words) if words else alone


# The note of a tensor that is a mask wherever it goes. CallRecorder knows it by its identity.
PLAIN_MASK = Note("mask")

Role: TypeAlias = Literal["weight", "buffer", "input", "output", "gradient"]
ROLES: tuple[Role, ...] = get_args(Role)


class Record(NamedTuple):
    """One value of a module call.

    `shape` is None and `dtype` is "" for a value that is no tensor. `abs_min`, `abs_max` (floats, in the
    units of the tensor) and `isfinite` are None where nothing was read; then `note` says why. `health` is
    filled when the tensor held a non-finite value. `note` is None, or the kind of a note and what belongs to it;
    `str(note)` is English. `fingerprint` is that of `nanwatch.fingerprint`, None without
    `Trace(fingerprints=True)`.

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
    note: Note | None = None
    fingerprint: Annotated[int | None, Cell(kind="uint64")] = None

    @property
    def is_shard(self) -> bool:
        """Return True for a record of this process's part of a DTensor; `shape` is that of the whole."""
        return self.note is not None and self.note.kind == "local_shard"

    @property
    def ends(self) -> Limits | None:
        """Return the largest finite, the smallest normal and the smallest number of the dtype; None for integers."""
        return limits(self.dtype)

    @property
    def is_excused(self) -> bool:
        """Return True when the note says that a non-finite value in the tensor is meant."""
        return self.note is not None and self.note.kind in EXCUSES

    @property
    def is_fault(self) -> bool:
        """Return True when the tensor held a nan or an inf that is not meant."""
        return self.isfinite is False and not self.is_excused


Phase: TypeAlias = Literal["forward", "backward", "step", "save"]


class Frame(NamedTuple):
    """One call of one module.

    `batch` counts from 0. `name` is the qualified name in the watched model, "" for the root. `records` are
    in the order weights, buffers, inputs, outputs. `recomputed` is True for a forward that ran again during
    the backward, as activation checkpointing does. A frame of the phase "backward" has the gradients of one call in one
    backward, in the order in which they came; one of the phase "step" has the state that a step left in the optimizer,
    and one of the phase "save" what is not finite in a checkpoint.

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
        """Return the first record with an unintended nan or inf, or None.

        An input comes before a buffer: running statistics take in what the call is given.
        """
        faults = [record for record in self.records if record.is_fault]
        first = faults[0] if faults else None
        if first is None or first.role != "buffer":
            return first
        return next((record for record in faults if record.role == "input"), first)


def event_frame(batch: int, module: str, label: str, kind: str, note: Note) -> Frame:
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


# 8 bits. From the root of the end on a value may leave it by its own square; for float16 the two are the same.
NEAR_FACTOR = 256
# Bits. Less than a factor of two is what GELU, dropout and a residual sum do in healthy models.
_RECOVERY = 1.0


def is_near_end(largest: float, end: float) -> bool:
    """Return whether a value may leave a format that ends at `end` by a sum, a usual factor or its own square."""
    return largest >= min(end / NEAR_FACTOR, sqrt(end))


def has_vanished(record: Record) -> bool:
    """Return whether every element is zero or subnormal: the value is lost, or soon will be."""
    ends = record.ends
    if ends is None or record.abs_max is None or not record.isfinite or 0 in (record.shape or ()):
        return False
    return record.abs_max < ends.smallest_normal


def headroom_bits(record: Record) -> float | None:
    """Return log2(largest finite that the tensor can hold / abs_max): how often the largest element may still double.

    0.0 at the end of the format. -inf when the tensor holds a nan or an inf, for which no room is left. inf when it is
    empty or all zero, for which any factor is harmless. None where the number means nothing: integers and bools,
    tensors that were not read, and extremes that are meant (masks, `allow`). May fall to -0.5 for a complex tensor,
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
    bits = map(headroom_bits, records)
    return min((number for number in bits if number is not None and isfinite(number)), default=None)


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


def by_module(frames: Iterable[Frame]) -> dict[str, Least]:
    """Return the least headroom of each module, worst first; modules without any are left out.

    An input counts only when it is non-finite. Otherwise one large output would put its module and all its readers at
    the head of the list.
    """
    least: dict[str, Least] = {}
    for frame in frames:
        for record in frame.records:
            bits = headroom_bits(record) if record.role != "input" or record.is_fault else None
            if bits is not None and (frame.name not in least or bits < least[frame.name].bits):
                least[frame.name] = Least(bits, frame.name, record.label, record.dtype)
    return dict(sorted(least.items(), key=lambda item: item[1].bits))


def shrinking(frames: Sequence[Frame]) -> str:
    """Return one sentence on the outputs whose headroom fell before the first non-finite record, "" where none did.

    `frames` are the oldest first. The headroom has to fall by more than a bit, until a sum or a square could leave the
    format. A frame counts by the output with the least headroom, and is passed over without one. On the way down the
    headroom may recover by up to one bit, as behind an activation or a dropout. The run starts where the headroom was
    highest. It does not reach over the start of the batch, a change of dtype or an output that is all zero.
    """
    fault = next((frame for frame in frames if frame.fault is not None), None)
    if fault is None:
        return ""
    run = list[tuple[float, Record, str]]()  # bits, record and module, from its end backwards
    for frame in reversed(frames[: frames.index(fault)]):
        if (frame.batch, frame.phase) != (fault.batch, fault.phase):
            break
        role = "output" if frame.phase == "forward" else "gradient"
        outputs = [(record, headroom_bits(record)) for record in frame.records if record.role == role]
        headrooms = [(bits, record) for record, bits in outputs if bits is not None]
        if not headrooms:
            continue
        bits, record = min(headrooms, key=itemgetter(0))
        highest = max((earlier for earlier, *_ in run), default=bits)
        if bits == inf or bits < highest - _RECOVERY or (run and record.dtype != run[0][1].dtype):
            break
        run.append((bits, record, frame.name))
    if not run or (ends := run[0][1].ends) is None:
        return ""
    (last, record, last_name), (first, _, first_name) = run[0], max(run, key=itemgetter(0))
    if first - last <= _RECOVERY or not is_near_end(ends.largest * 2.0**-last, ends.largest):
        return ""
    place = [bits for bits, *_ in run].index(first)
    fell = f"fell from {first:.1f} bits at {module_name(first_name)} to {last:.1f} bits at {module_name(last_name)}"
    return f"headroom in {record.dtype} {fell} over {place + 1} frames."
