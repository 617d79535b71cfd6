"""Which part of a sharded tensor a process holds, in words that can be read back: no torch in here.

`Shard(0) at dp=1 of 4, Replicate at tp=0 of 2, from [8, 0]`: one clause a dimension of the device mesh, with the
coordinate of this process and the size of that dimension, then the index in the whole tensor at which the part begins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_CLAUSE = re.compile(r"(?P<kind>\w+(?:\([^()]*\))?) at (?P<dim>[^=,]*)=(?P<coordinate>\d+) of (?P<size>\d+)")
_FROM = re.compile(r"from \[(?P<index>\d+(?:, \d+)*)\]")


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
        """`dp=1 of 4`."""
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
        """The index in the whole tensor of an element of the part; None where that is not known."""
        if self.start is None or len(self.start) != len(index):
            return None
        return tuple(begin + i for begin, i in zip(self.start, index, strict=True))


def read_placement(words: str) -> Placement | None:
    """The placement that was spelt so; None for other words."""
    places: list[MeshPlace] = []
    at = 0
    while (clause := _CLAUSE.match(words, at)) is not None:
        kind, dim, coordinate, size = clause.groups()
        places.append(MeshPlace(kind, dim, int(coordinate), int(size)))
        at = clause.end()
        if at == len(words):
            return Placement(tuple(places), None)
        if not words.startswith(", ", at):
            return None
        at += 2
    last = _FROM.fullmatch(words, at)
    if last is None or not places:
        return None
    return Placement(tuple(places), tuple(map(int, last["index"].split(", "))))
