"""The rows of a trace: frames to a table and back, and what a reader refuses."""

import json
import re
from collections import Counter
from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from nanwatch.numerics.formats import TensorHealth
from nanwatch.records.record import NOTE_KINDS, ROLES, Frame, Note, Record
from nanwatch.trace import columns
from nanwatch.trace.columns import TraceError
from support.paths import ROOT
from support.written_traces import FACTS

sizes = st.lists(st.integers(0, 2**40), max_size=4).map(tuple)
magnitudes = st.floats(min_value=0, allow_nan=False)
counts = st.integers(0, 2**60)
healths = st.builds(
    TensorHealth,
    magnitudes, magnitudes, st.just(False), magnitudes, magnitudes, counts, counts, counts, counts, counts, counts,
    st.none() | sizes,
)  # fmt: skip
# Only what UTF-8 has: no lone surrogates.
names = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
notes = st.none() | st.builds(Note, st.sampled_from(NOTE_KINDS), names, st.none() | names)


@st.composite
def rows(draw: st.DrawFn) -> Record:
    """A row as a recorder may make it."""
    label, role, shape = draw(names), draw(st.sampled_from(ROLES)), draw(st.none() | sizes)
    dtype = draw(st.sampled_from(["", "float16", "int64"]))
    if draw(st.booleans()):
        return Record(label, role, shape, dtype, None, None, None, None, draw(notes))
    health = draw(st.none() | healths)
    low, high = draw(magnitudes), draw(magnitudes | st.just(inf))
    if health is not None:
        # A health repeats the range of its row, and is stored once.
        health = health._replace(abs_min=low, abs_max=high, isfinite=False)
    return Record(label, role, shape, dtype, low, high, health is None, health, draw(notes))


records = st.lists(rows(), min_size=1, max_size=4).map(tuple)
frames = st.builds(Frame, st.integers(0, 3), names, names, records, recomputed=st.booleans())


@settings(max_examples=50)
@given(st.lists(frames, min_size=1, max_size=6))
def test_frames_come_back_as_they_were(made: list[Frame]) -> None:
    table = columns.Tabulator(3).table(made)
    assert table.schema.equals(columns.schema())
    assert list(columns.frames_of(table)) == made
    # The calls of a batch are counted from 0, in the order in which they come.
    counts: Counter[int] = Counter()
    expected = []
    for frame in made:
        expected += [counts[frame.batch]] * len(frame.records)
        counts[frame.batch] += 1
    assert table["call"].to_pylist() == expected
    assert set(table["rank"].to_pylist()) == {3}


def test_the_docs_have_every_column_in_order() -> None:
    """The table of the format in docs/traces.md names the columns and types of the schema, and its version."""
    text = (ROOT / "docs" / "traces.md").read_text()
    rows_of_table = re.findall(r"^\| `(\w+)` \| (\w+)(, null)? \|", text, re.MULTILINE)
    assert [(name, kind, bool(null)) for name, kind, null in rows_of_table] == list(columns.COLUMNS)
    assert f"version {columns.VERSION}" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "no trace that can be read"),
        (json.dumps({**FACTS, "version": 5}), "its version is 5, this nanwatch reads version 10"),
    ],
)
def test_metadata_that_is_none_of_a_trace_is_refused(text: str, words: str) -> None:
    schema = columns.schema().with_metadata({columns.METADATA_KEY: text})
    with pytest.raises(TraceError, match=f"^a.parquet.*{re.escape(words)}"):
        columns.facts_of(schema, "a.parquet")
