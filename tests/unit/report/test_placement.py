"""The words for a shard say which one it is, and are read back as they were meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanwatch.records.record import MeshPlace, Placement, Record, read_placement

_kinds = st.one_of(
    st.builds("Shard({})".format, st.integers(0, 9)),
    st.builds("StridedShard({}, {})".format, st.integers(0, 9), st.integers(1, 9)),
    st.sampled_from(["Replicate", "Partial(sum)", "Partial(avg)"]),
)
_dims = st.one_of(st.from_regex(r"\A[a-z_]{0,8}\Z"), st.builds("mesh[{}]".format, st.integers(0, 9)))
_places = st.builds(MeshPlace, _kinds, _dims, st.integers(0, 2**20), st.integers(1, 2**20))
_starts = st.one_of(st.none(), st.lists(st.integers(0, 2**40), min_size=1, max_size=5).map(tuple))


@given(places=st.lists(_places, min_size=1, max_size=4).map(tuple), start=_starts)
def test_what_is_spelt_is_read_back(places: tuple[MeshPlace, ...], start: tuple[int, ...] | None) -> None:
    """Any placement, with and without a start."""
    placement = Placement(places, start)
    assert read_placement(str(placement)) == placement


@given(
    words=st.one_of(st.text(max_size=60), st.from_regex(r"Shard\(0\) at dp=1 of 4.{0,12}", fullmatch=True))
)
def test_other_words_are_none_or_mean_what_they_say(words: str) -> None:
    """Nothing raises, and what is read is spelt the same again."""
    found = read_placement(words)
    assert found is None or read_placement(str(found)) == found


def test_the_words() -> None:
    """The words of a placement are those of reports and traces."""
    places = (MeshPlace("Shard(0)", "dp", 1, 4), MeshPlace("Replicate", "tp", 0, 2))
    assert str(Placement(places, (8, 0))) == "Shard(0) at dp=1 of 4, Replicate at tp=0 of 2, from [8, 0]"
    assert str(Placement(places[1:], None)) == "Replicate at tp=0 of 2"


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
        ("local shard: Shard(0) at dp=1 of 4, from [8]", True, True),
        ("local shard", True, False),
        ("local shard: none on this rank", True, False),
        ("mask", False, False),
        ("", False, False),
    ],
)
def test_a_record_knows_its_placement(note: str, is_shard: bool, has_placement: bool) -> None:
    """By its note, also of reports that were written before placements were."""
    record = Record("weight", "weight", (32,), "float32", 0.0, 1.0, True, None, note)
    assert (record.is_shard, record.placement is not None) == (is_shard, has_placement)
