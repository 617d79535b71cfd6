"""Observation of one rank in a form that ranks can compare, and the origin, chosen from those of all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ..util import reading
from ..util.visible import module_name, visible
from .finding import Finding, Value
from .finding import Origin as Kind

# Names of modules are rarely longer. With this limit, a store holds less than a kilobyte for each rank.
_MOST_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class RankObservation:
    """A finding and when it came.

    `clock` counts alike on all ranks: the batch number where each rank makes the same calls. `sequence` is the place of
    the non-finite frame within its batch, from 0. `part` names the part of the model that the rank holds, such as a
    pipeline stage. Sequences of different parts are not comparable. `kind` is the finding's origin on its own rank.
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
    kind: Kind

    @classmethod
    def of(
        cls, finding: Finding, rank: int, sequence: int, clock: Sequence[int] | None, part: str
    ) -> RankObservation:
        """Return the observation of a finding; without a `clock` its batch is the clock. Long names lose their
        beginning.
        """
        return cls(
            rank=rank,
            clock=tuple(map(int, clock)) if clock is not None else (finding.batch,),
            sequence=sequence,
            part=part[-_MOST_CHARACTERS:],
            batch=finding.batch,
            module=finding.module[-_MOST_CHARACTERS:],
            class_name=finding.class_name[-_MOST_CHARACTERS:],
            label=finding.label[-_MOST_CHARACTERS:],
            value=finding.value,
            kind=finding.origin,
        )

    @property
    def order(self) -> tuple[tuple[int, ...], int, bool, int]:
        """Return a key that sorts observations of one part, the earliest first; of equal ones the lowest rank.

        The arguments of a call were there before its output, which tensor parallel ranks add up.
        """
        return self.clock, self.sequence, self.kind == "produced", self.rank

    @property
    def place(self) -> str:
        """Return a key that observations at the same time, at the same place in the same part and of the same kind
        share.
        """
        return f"{'.'.join(map(str, self.clock))}/{self.sequence}/{self.kind}/{self.part}"

    @property
    def came_with_the_data(self) -> bool:
        """Return whether the batch was called with the value: from a data loader, or from the rank before this one."""
        return self.kind == "data"

    def to_json(self) -> str:
        """Return one line of less than a kilobyte."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, document: str | bytes) -> RankObservation:
        """Read what `to_json` wrote. Raise ValueError with the place for anything else."""
        return _OBSERVATION(json.loads(document), "sighting")


_OBSERVATION = reading.of(RankObservation)


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of the job's first non-finite value.

    `first` is the earliest observation, and `num_alike` the number of ranks that made theirs at the same place and
    time. Of `world_size` ranks, `num_reported` have answered, `num_failed` of them with an observation.
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
    def is_shared(self) -> bool:
        """Return whether more than one rank observed it at once, so that no single one of them is its source."""
        return self.num_alike > 1

    @property
    def is_complete(self) -> bool:
        """Return whether every rank has answered; one that has not may have observed something earlier."""
        return self.num_reported >= self.world_size

    def __str__(self) -> str:
        first = self.first
        where = f"`{first.label}` of {module_name(first.module)} ({first.class_name}) in batch {first.batch}"
        if self.is_shared:
            who = (
                f"all {self.world_size} ranks"
                if self.num_alike == self.world_size
                else f"{self.num_alike} ranks"
            )
            text = (
                f"{first.value} first seen in {where} on {who} at once: it came to them by a collective, or they hold"
                f" the same (rank {first.rank} has the lowest number of them)"
            )
        else:
            text = f"{first.value} first seen in {where} on rank {first.rank}, {_KINDS[first.kind]}"
        if others := self.num_failed - self.num_alike:
            text += f"; {others} other {'rank' if others == 1 else 'ranks'} saw it later"
        if not self.is_complete:
            text += (
                f"; {self.world_size - self.num_reported} of {self.world_size} ranks did not answer in time"
            )
        return visible(text)


_KINDS: dict[Kind, str] = {
    "produced": "which produced it",
    "received": "from code of its caller that is no module",
    "weight": "already in the weight",
    "buffer": "already in the buffer",
    "data": "already in the data of the batch",
}


def earliest(inside: RankObservation | None, data: RankObservation | None) -> RankObservation | None:
    """Return the first of the earliest observation inside a model and the earliest in data.

    Of one part of the model, the earlier of both is the first. Data of another part at the same time may be what the
    part with the inside observation sent on, whatever the sequences, so that data is not the first.
    """
    if inside is None or data is None:
        return inside or data
    if inside.clock != data.clock or inside.part == data.part:
        return min(inside, data, key=lambda one: one.order)
    return inside
