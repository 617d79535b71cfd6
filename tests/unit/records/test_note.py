"""Notes: which excuse a value, and the placement of a shard."""

from __future__ import annotations

import pytest

from nanwatch.records.note import (
    EVENTS,
    EXCUSES,
    NOTE_KINDS,
    MeshPlace,
    Note,
    NoteKind,
    Placement,
    is_same_part,
)
from nanwatch.records.record import Record

PLACES = (MeshPlace("Shard(0)", "dp", 1, 4), MeshPlace("Replicate", "tp", 0, 2))


@pytest.mark.parametrize("kind", NOTE_KINDS)
def test_only_an_excuse_makes_a_nonfinite_value_no_fault(kind: NoteKind) -> None:
    """An event has no range, so that it is none."""
    record = Record("weight", "weight", (32,), "float32", 0.0, 1.0, False, None, Note(kind))
    assert record.is_fault == (kind not in EXCUSES)
    assert not set(EXCUSES) & set(EVENTS)


@pytest.mark.parametrize(
    ("start", "index", "expected"),
    [((8, 0), (1, 2), (9, 2)), (None, (1, 2), None), ((8,), (1, 2), None), ((0,), (5,), (5,))],
)
def test_an_index_in_the_whole(
    start: tuple[int, ...] | None, index: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    """The start and the index in the part, where both are of the same dimensions."""
    assert Placement((), start).in_whole(index) == expected


def test_replicas_of_one_shard_are_the_same_part() -> None:
    """What a replicated dimension says is left out; where no placement is known, nothing is the same."""
    here = Note("local_shard", placement=Placement(PLACES, (8,)))
    there = Note("local_shard", placement=Placement((PLACES[0], PLACES[1]._replace(coordinate=1)), (8,)))
    other = Note("local_shard", placement=Placement((PLACES[0]._replace(coordinate=0),), (0,)))
    assert is_same_part(here, there)
    assert is_same_part(None, None)
    assert not is_same_part(here, other)
    assert not is_same_part(Note("local_shard"), Note("local_shard"))
