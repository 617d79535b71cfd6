"""Notes: their English, and the placement of a shard."""

from __future__ import annotations

import json

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
from nanwatch.util import reading

PLACES = (MeshPlace("Shard(0)", "dp", 1, 4), MeshPlace("Replicate", "tp", 0, 2))


@pytest.mark.parametrize(
    ("note", "words"),
    [
        (Note("absent"), "None"),
        (Note("not_a_tensor"), "not a tensor"),
        (Note("not_checked", "meta tensor"), "not checked: meta tensor"),
        (Note("local_shard"), "local shard"),
        (Note("local_shard", placement=Placement((), None)), "local shard: none on this rank"),
        (
            Note("local_shard", placement=Placement(PLACES, (8, 0))),
            "local shard: Shard(0) at dp=1 of 4, Replicate at tp=0 of 2, from [8, 0]",
        ),
        (Note("mask"), "mask"),
        (Note("allowed"), "allowed"),
        (Note("skipped_step"), "skipped step"),
        (Note("skipped_step", "scale 4 → 2"), "skipped step (scale 4 → 2)"),
        (Note("not_taken"), "not in the step's gradients"),
        (Note("spike", "spike in batch 3: loss 9"), "spike in batch 3: loss 9"),
        (Note("forecast", "{batch}"), "forecast: {batch}"),
    ],
)
def test_words_and_json(note: Note, words: str) -> None:
    """The words of each kind are those of reports; a document has the kind and what belongs to it."""
    assert str(note) == words
    assert reading.of(Note)(json.loads(json.dumps(reading.plain(note))), "note") == note


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


@pytest.mark.parametrize(
    ("note", "is_shard", "has_placement"),
    [
        (Note("local_shard", placement=Placement(PLACES, (8,))), True, True),
        (Note("local_shard"), True, False),
        (Note("mask"), False, False),
        (None, False, False),
    ],
)
def test_a_record_knows_its_placement(note: Note | None, is_shard: bool, has_placement: bool) -> None:
    """By its note."""
    record = Record("weight", "weight", (32,), "float32", 0.0, 1.0, True, None, note)
    assert (record.is_shard, record.placement is not None) == (is_shard, has_placement)


def test_replicas_of_one_shard_are_the_same_part() -> None:
    """What a replicated dimension says is left out; where no placement is known, nothing is the same."""
    here = Note("local_shard", placement=Placement(PLACES, (8,)))
    there = Note("local_shard", placement=Placement((PLACES[0], PLACES[1]._replace(coordinate=1)), (8,)))
    other = Note("local_shard", placement=Placement((PLACES[0]._replace(coordinate=0),), (0,)))
    assert is_same_part(here, there)
    assert is_same_part(None, None)
    assert not is_same_part(here, other)
    assert not is_same_part(Note("local_shard"), Note("local_shard"))
