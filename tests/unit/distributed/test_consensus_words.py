"""Sightings, the rule that chooses the earliest, and the words of the verdict."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanwatch import NonFiniteError, Report
from nanwatch.distributed.consensus import PeerNonFiniteError
from nanwatch.report.finding import Origin, RankObservation, earliest
from support.sightings import finding

SIGHTINGS = st.builds(
    RankObservation,
    rank=st.integers(0, 20_000),
    clock=st.tuples(st.integers(0, 3)),
    sequence=st.integers(0, 3),
    part=st.sampled_from(["", "a"]),
    batch=st.integers(0, 10),
    module=st.text(max_size=20),
    class_name=st.text(max_size=20),
    label=st.text(max_size=20),
    value=st.sampled_from(["nan", "inf", "nan+inf"]),
    kind=st.sampled_from(["produced", "received", "weight", "buffer", "data"]),
)


@given(SIGHTINGS)
def test_a_sighting_comes_back_from_its_json(sighting):
    """Also with names from all of Unicode."""
    assert RankObservation.from_json(sighting.to_json()) == sighting


@pytest.mark.parametrize("document", ["{}", "[]", "1", '{"rank": "x"}'])
def test_what_is_no_sighting_is_refused(document):
    """The store is written by programs that may be of another version."""
    with pytest.raises(ValueError, match="sighting"):
        RankObservation.from_json(document)


def test_a_long_name_keeps_its_end_and_the_message_small():
    """The end of a module's name tells modules apart; a store is no place for a novel."""
    sighting = RankObservation.of(finding(module="m." * 5000 + "last"), 1, 2, None, "p" * 9999)
    assert sighting.module.endswith(".last")
    assert len(sighting.to_json()) < 1024


@given(SIGHTINGS, SIGHTINGS)
def test_data_yields_only_to_another_part_at_the_same_time(inside, data):
    """The rule, said the other way round."""
    inside, data = replace(inside, kind="produced"), replace(data, kind="data")
    chosen = earliest(inside, data)
    if inside.clock != data.clock:
        assert chosen is (inside if inside.clock < data.clock else data)
    elif inside.part != data.part:
        assert chosen is inside
    else:
        # The input of a call existed before its output.
        assert chosen is (data if data.sequence <= inside.sequence else inside)
    assert earliest(inside, None) is inside
    assert earliest(None, data) is data
    assert earliest(None, None) is None


def test_the_error_of_a_peer_names_the_origin_and_survives_a_pickle():
    """A peer's error is a NonFiniteError of this rank, about another one."""
    origin = Origin(RankObservation.of(finding(batch=7), 3, 5, None, ""), 1, 2, 4, 4)
    error = PeerNonFiniteError(Report((), None, 7, 1), origin)
    assert isinstance(error, NonFiniteError)
    assert str(error).splitlines()[0] == (
        "nan first seen in `output` of layer (Linear) in batch 7 on rank 3, which produced it;"
        " 1 other rank saw it later"
    )
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (again.origin, again.report, str(again)) == (error.origin, error.report, str(error))


def test_a_value_that_all_saw_at_once_is_nobodys():
    """The text says so, and does not accuse the lowest rank."""
    origin = Origin(RankObservation.of(finding("weight", 8, label="weight"), 0, 0, None, ""), 8, 8, 8, 8)
    assert origin.is_shared
    assert "on all 8 ranks at once: it came to them by a collective" in str(origin)


def test_json_of_a_sighting_is_one_document():
    """For whoever reads the store by hand."""
    assert json.loads(RankObservation.of(finding(), 1, 2, (5, 1), "stage 1").to_json())["clock"] == [5, 1]
