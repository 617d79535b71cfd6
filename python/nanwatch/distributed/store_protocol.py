"""The few keys of a job's key-value store through which ranks agree where the first non-finite value was.

No key exists while all is well, and a rank that looks asks for one. A rank that fails sends eleven short messages, and
eleven more to settle; one that only settles sends twelve (benchmarks/count_verdict.py). Nothing grows with the number
of ranks: the earliest observation is kept in the store by compare-and-set, and of ranks that saw theirs at one place
only the number is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..report.rank_observation import Origin, RankObservation, earliest

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_FAILED, _INSIDE, _DATA, _NUM_FAILED, _NUM_REPORTED, _COMPLETE, _NUM_LEFT = (
    "failed",
    "inside",
    "data",
    "num_failed",
    "num_reported",
    "complete",
    "num_left",
)


class StoreProtocol:
    """The keys, read and written through one store; every method is a few round trips, and none waits for a rank."""

    def __init__(self, store: Store, world_size: int) -> None:
        self._store = store
        self._world_size = world_size

    def has_news(self) -> bool:
        """Whether a rank has failed."""
        found: bool = self._store.check([_FAILED])
        return found

    def publish(self, observation: RankObservation) -> None:
        """Tell what this rank saw."""
        self._store.add(_at(observation), 1)
        self._store.add(_NUM_FAILED, 1)
        self._lower(_DATA if observation.came_with_the_data else _INSIDE, observation)
        self._store.set(_FAILED, "")  # after the observation: who reads this finds one

    def _lower(self, key: str, observation: RankObservation) -> None:
        """Leave the earlier one of `observation` and what is under the key, whoever else does the same."""
        mine, expected = observation.to_json(), ""
        while True:
            held: bytes = self._store.compare_set(key, expected, mine)
            if held == mine.encode() or RankObservation.from_json(held).order <= observation.order:
                return
            expected = held.decode()

    def report(self) -> None:
        """Tell that this rank has had its say, with or without an observation; once a rank."""
        if self._store.add(_NUM_REPORTED, 1) == self._world_size:
            self._store.set(_COMPLETE, "")

    def is_complete(self) -> bool:
        """Whether all ranks have had their say."""
        found: bool = self._store.check([_COMPLETE])
        return found

    def leave(self) -> None:
        """Tell that this rank has the consensus and needs the store, and the other ranks, no longer; once a rank."""
        self._store.add(_NUM_LEFT, 1)

    def all_left(self) -> bool:
        """Whether all ranks have."""
        return self._store.add(_NUM_LEFT, 0) >= self._world_size

    def origin(self) -> Origin | None:
        """The origin as far as it is known now, None when no rank has failed."""
        first = earliest(self._read(_INSIDE), self._read(_DATA))
        if first is None:
            return None
        return Origin(
            first=first,
            num_alike=self._store.add(_at(first), 0),
            num_failed=self._store.add(_NUM_FAILED, 0),
            num_reported=self._store.add(_NUM_REPORTED, 0),
            world_size=self._world_size,
        )

    def _read(self, key: str) -> RankObservation | None:
        return RankObservation.from_json(self._store.get(key)) if self._store.check([key]) else None


def _at(observation: RankObservation) -> str:
    return f"at/{observation.place}"
