"""The finding: the first non-finite record, and whether its module produced or received it; and the findings of ranks.

A RankObservation is a finding in a form that ranks can compare. The Origin is chosen from those of all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import isnan, prod
from typing import Literal, NamedTuple, TypeAlias

from ..records.fields import read
from ..records.record import Frame, Phase, Record
from ..util.messages import module_name, visible

LOSS, OPTIMIZER = "(loss)", "(optimizer)"  # in place of the names of modules
# A loss that grows in so many backwards one after the other, in all by so much, diverges.
_RISES, _GROWTH = 3, 1e3
Value: TypeAlias = Literal["nan", "inf", "-inf", "nan+inf"]
OriginKind: TypeAlias = Literal["produced", "received", "weight", "buffer", "data"]


class Place(NamedTuple):
    """Line of a source file, and the columns of an expression in it: the first, and that behind the last.

    Columns are bytes from 0, as `code.co_positions()` has them, or None where they are not known.
    """

    file: str
    line: int
    columns: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def short(self) -> str:
        """The place as a person knows it: without the folder of a package that is installed."""
        return str(self).rpartition("site-packages/")[2]


@dataclass(frozen=True, slots=True)
class Cure:
    """Change that was tried on the failing batch, whether it works, and the bits of headroom that it left.

    `patch` is the change as a unified diff that `git apply` takes, "" where it is no change of a source file. Its paths
    begin with a/ and b/ and are relative to the top of the git work tree that holds the file, else to the folder that
    was current. `code` is the new statement, without indentation, "" where `what` has it. `effect` says how
    near the results are to those of float64, such as "agrees with float64, to 3.2e-08 of the largest value".

    Examples:
        >>> import nanwatch
        >>> print(Cure("run `decoder` in float32", works=True, headroom_bits=112.0))
        works: run `decoder` in float32, 112.0 bits of room left
        >>> Cure("run `decoder` in float32", works=False).verdict
        'does not help'
    """

    what: str
    works: bool
    headroom_bits: float | None = None
    patch: str = ""
    effect: str = ""
    code: str = ""

    @property
    def verdict(self) -> str:
        """`works`, `not enough` where all became finite but too little room is left, or `does not help`."""
        if self.works:
            return "works"
        return "does not help" if self.headroom_bits is None else "not enough"

    def __str__(self) -> str:
        room = "" if self.headroom_bits is None else f", {self.headroom_bits:.1f} bits of room left"
        effect = f"; {self.effect}" if self.effect else ""
        return f"{self.verdict}: {self.what}{room}{effect}"


def working_first(cures: Iterable[Cure]) -> tuple[Cure, ...]:
    """Return the cures: those that work, then those that do not."""
    return tuple(sorted(cures, key=lambda cure: not cure.works))


@dataclass(frozen=True, slots=True)
class Finding:
    """The first non-finite record of a batch.

    `origin` says how the value came there:

    - "produced": by the module, from finite weights, buffers and inputs;
    - "received": from `source_module`, None where no watched module made it;
    - "weight" or "buffer": it was there before the call;
    - "data": the batch was called with it. The data is judged when the non-finite call has ended, so data that the
      model itself has spoiled in place looks the same.

    In the `phase` "backward" the module's backward "produced" it from finite gradients of its outputs, or "received"
    it: from code of `source_module` between the calls of its submodules, or, with None, from outside the model, such as
    the loss. With "data" the loss was given it, as in labels.

    `num_nonfinite` and `index` (of the first non-finite element, a number per dimension) are None where they could not
    be counted. `sequence` is the place of the frame among all frames of its batch, from 0, dropped ones included, or
    None where they were not counted. `num_steps` is the number of steps that optimizers of the model's weights had
    taken by then, as far as they were watched. `losses` are those of the latest backwards, the oldest first, if each
    was larger than the one before and the training so diverged; else it is empty.

    The re-run fills `extent`, `operation`, `place` (the line of the operation), `made` (the value that the operation
    made, from which the finding's may have come), `transient`, `cures` and `operands`. `samples` are the samples of the
    batch, by their index in the first dimension, without which it is finite and which alone fail again. All are empty
    without a re-run.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.LayerNorm(2, eps=0.0))
        >>> with nanwatch.watch(model, on_nonfinite="record") as watch:
        ...     output = model(torch.zeros(1, 2))
        >>> finding = watch.report().finding
        >>> finding.module, finding.class_name, finding.label, finding.value, finding.origin
        ('1', 'LayerNorm', 'output', 'nan', 'produced')
    """

    module: str
    class_name: str
    label: str
    batch: int
    rank: int
    value: Value
    origin: OriginKind
    source_module: str | None
    num_nonfinite: int | None
    numel: int
    index: tuple[int, ...] | None
    extent: str = ""
    operation: str | None = None
    place: Place | None = None
    transient: bool | None = None
    cures: tuple[Cure, ...] = ()
    operands: tuple[Record, ...] = ()
    remarks: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    phase: Phase = "forward"
    sequence: int | None = None
    made: Value | None = None
    samples: tuple[int, ...] = ()
    num_steps: int = 0
    losses: tuple[float, ...] = ()

    @property
    def source(self) -> str | None:
        """The place of the operation as "/path/file.py:123"."""
        return None if self.place is None else str(self.place)

    @property
    def is_of_loss(self) -> bool:
        """Return whether the value came into a backward from outside the model, as from the loss."""
        return (self.phase, self.source_module) == ("backward", None) and self.origin in ("received", "data")


def with_earlier(frames: Iterable[Frame], earlier: Frame) -> list[Frame]:
    """Insert the frame of a call under way, or of a module that is never called, before its batch's first fault.

    Where that is a frame of the same call, put the records that it lacks before its own.
    """
    frames = list(frames)
    faults = (i for i, frame in enumerate(frames) if frame.batch == earlier.batch and frame.fault is not None)
    place = next(faults, len(frames))
    if place == len(frames) or frames[place].name != earlier.name:
        frames.insert(place, earlier)
        return frames
    known_labels = {record.label for record in frames[place].records}
    more = [record for record in earlier.records if record.label not in known_labels]
    frames[place] = frames[place]._replace(records=(*more, *frames[place].records))
    return frames


def find(
    frames: Sequence[Frame],
    *,
    batch_inputs: Sequence[Record] = (),
    caller: str | None = None,
    rank: int = 0,
    num_frames: int | None = None,
) -> Finding | None:
    """Return the finding for `frames` (oldest first), or None when all that was read is finite.

    `batch_inputs` are records of what the whole batch was called with, `caller` the module whose forward made
    the first non-finite call; both only sharpen the origin of a value that was received. `num_frames` is how many
    frames the batch has had, of which `frames` are the last; without it the finding has no sequence.
    """
    for place, frame in enumerate(frames):
        if (record := frame.fault) is not None:
            origin, source_module = _origin(record, frames[:place], batch_inputs, caller)
            sequence = None if num_frames is None else num_frames - len(frames) + place
            return finding_of(frame, record, origin, source_module, rank, sequence)
    return None


def finding_of(
    frame: Frame,
    record: Record,
    origin: OriginKind,
    source_module: str | None,
    rank: int,
    sequence: int | None = None,
) -> Finding:
    """Return the finding for this record of this frame, which has this place in its batch."""
    health = record.health
    return Finding(
        module=frame.name,
        class_name=frame.class_name,
        label=record.label,
        batch=frame.batch,
        rank=rank,
        value=value_of(record),
        origin=origin,
        source_module=source_module,
        num_nonfinite=None if health is None else health.num_nan + health.num_posinf + health.num_neginf,
        # The shape of a sharded tensor is that of the whole, and the counts are those of the shard.
        numel=prod(record.shape or ()) if health is None else health.numel,
        index=None if health is None else health.first_nonfinite,
        phase=frame.phase,
        sequence=sequence,
    )


def growing(losses: Iterable[float]) -> tuple[float, ...]:
    """Return the last of these losses, as far as each is larger than the one before, if they show a divergence.

    Examples:
        >>> growing([5.0, 3.0, 40.0, 700.0, 2e4, float("inf")])
        (3.0, 40.0, 700.0, 20000.0, inf)
        >>> growing([3.0, 5.0, 9.0, 2.0])
        ()
    """
    rise = list[float]()
    for loss in (x for x in losses if not isnan(x)):
        rise = [*rise, loss] if rise and abs(loss) > abs(rise[-1]) else [loss]
    return tuple(rise) if len(rise) > _RISES and abs(rise[-1]) > _GROWTH * abs(rise[0]) else ()


def value_of(record: Record) -> Value:
    """Return which non-finite values the record holds; without a health, those that its range proves."""
    if record.health is not None:
        has_inf = record.health.num_posinf + record.health.num_neginf > 0
        if record.health.num_nan:
            return "nan+inf" if has_inf else "nan"
        return "inf" if record.health.num_posinf else "-inf"
    return "nan" if record.abs_max is None or isnan(record.abs_max) else "inf"


def _origin(
    record: Record, earlier: Sequence[Frame], batch_inputs: Sequence[Record], caller: str | None
) -> tuple[OriginKind, str | None]:
    if record.role == "weight" or record.role == "buffer":
        return record.role, None
    if record.role != "input":
        return "produced", None
    if any(argument.is_fault for argument in batch_inputs):
        return "data", None
    # The output of an earlier module is no fault where its values are meant.
    for frame in reversed(earlier):
        meant = (x for x in frame.records if x.role == "output" and x.is_excused)
        if any((x.shape, x.health) == (record.shape, record.health) for x in meant):
            return "received", frame.name
    # Else code of the caller made it that is no module: a matrix product or a residual sum between two calls.
    return "received", caller


# Names of modules are rarely longer. With this limit, a store holds less than a kilobyte for each rank.
_MOST_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class RankObservation:
    """A finding and when it came.

    `clock` counts alike on all ranks: the batch number where each rank makes the same calls. `sequence` is the place of
    the non-finite frame within its batch, from 0. `part` names the part of the model that the rank holds, such as a
    pipeline stage. Sequences of different parts are not comparable. `kind` is the finding's origin on its own rank, and
    `phase` the finding's.
    """

    rank: int
    clock: tuple[int, ...]
    sequence: int
    part: str
    batch: int
    module: str
    class_name: str
    label: str
    value: Value
    kind: OriginKind
    phase: Phase = "forward"

    @classmethod
    def of(
        cls, finding: Finding, rank: int, sequence: int, clock: Sequence[int] | None, part: str
    ) -> RankObservation:
        """Return the observation of a finding. Its batch is the default of `clock`. Long names lose their beginning."""
        texts = (part, finding.module, finding.class_name, finding.label)
        part, module, class_name, label = (text[-_MOST_CHARACTERS:] for text in texts)
        when = (finding.batch,) if clock is None else tuple(map(int, clock))
        facts = finding.value, finding.origin, finding.phase
        return cls(rank, when, sequence, part, finding.batch, module, class_name, label, *facts)

    @property
    def order(self) -> tuple[tuple[int, ...], int, bool, int]:
        """Return a key that sorts observations of one part, the earliest first; of equal ones the lowest rank.

        The arguments of a call were there before its output, which tensor parallel ranks add up.
        """
        return self.clock, self.sequence, self.kind == "produced", self.rank

    @property
    def place(self) -> str:
        """Return a key that observations at the same time, place and phase, in the same part and of one kind share."""
        return f"{'.'.join(map(str, self.clock))}/{self.sequence}/{self.phase}/{self.kind}/{self.part}"

    def to_json(self) -> str:
        """Return one line of less than a kilobyte."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, document: str | bytes) -> RankObservation:
        """Read what `to_json` wrote. Raise ValueError with the place for anything else."""
        observation: RankObservation = read(cls, json.loads(document), "observation")
        return observation


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of the job's first non-finite value.

    `first` is the earliest observation, and `num_alike` the number of ranks that made theirs at the same place and
    time. `num_reported` of `world_size` ranks have answered, `num_failed` of them with an observation.
    """

    first: RankObservation
    num_alike: int
    num_failed: int
    num_reported: int
    world_size: int

    @property
    def rank(self) -> int:
        """Return the rank of the earliest observation, the lowest of those alike."""
        return self.first.rank

    @property
    def is_complete(self) -> bool:
        """Return whether every rank has answered; one that has not may have observed something earlier."""
        return self.num_reported >= self.world_size

    def __str__(self) -> str:
        first, text = self.first, first_seen(self.first)
        if self.num_alike > 1:  # no single one of them is the source
            is_all = self.num_alike == self.world_size
            who = f"all {self.world_size} ranks" if is_all else f"{self.num_alike} ranks"
            why = "it came to them by a collective, or they hold the same"
            text += f" on {who} at once: {why} (rank {first.rank} has the lowest number of them)"
        else:
            text += f" on rank {first.rank}"
            if first.phase == "forward" or first.kind != "received":
                text += f", {_KINDS[first.kind]}"
        if others := self.num_failed - self.num_alike:
            text += f"; {others} other {'rank' if others == 1 else 'ranks'} saw it later"
        if not self.is_complete:
            num_silent = self.world_size - self.num_reported
            text += f"; {num_silent} of {self.world_size} ranks did not answer in time"
        return visible(text)


def first_seen(seen: Finding | RankObservation) -> str:
    """Return the words for what was seen first, in which tensor of which module, in which phase of which batch."""
    where = f"`{seen.label}` of {module_name(seen.module)} ({seen.class_name})"
    if seen.module in (LOSS, OPTIMIZER):
        of_what = "the loss" if seen.module == LOSS else f"`{seen.label}` of the optimizer"
        where = f"{of_what} ({seen.class_name})"
    return f"{seen.value} first seen in {where} in {_PHASES[seen.phase]}batch {seen.batch}"


_PHASES: dict[Phase, str] = {
    "forward": "",
    "backward": "the backward of ",
    "step": "the optimizer's step after ",
    "save": "a checkpoint after ",
}
_KINDS: dict[OriginKind, str] = {
    "produced": "which produced it",
    "received": "made between the calls of watched modules",
    "weight": "already in the weight",
    "buffer": "already in the buffer",
    "data": "already in the data of the batch",
}


def earliest(first: RankObservation, *more: RankObservation) -> RankObservation:
    """Return the first of several observations, by their `order`.

    Data of another part at the same time may be what the part with an observation inside the model sent on, whatever
    the sequences, so that data is not the first.
    """
    for observation in more:
        pair = sorted((first, observation), key=lambda each: each.order)
        if first.clock == observation.clock and first.part != observation.part:
            pair.sort(key=lambda each: each.kind == "data")
        first = pair[0]
    return first
