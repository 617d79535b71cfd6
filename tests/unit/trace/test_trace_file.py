"""A trace: frames to a table and back, what nanwatch, pandas and polars read, and what is no trace."""

import importlib
import json
import re
from collections import Counter
from math import inf, isnan
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from nanwatch.numerics.formats import TensorHealth
from nanwatch.records.record import NOTE_KINDS, ROLES, Frame, Note, Record
from nanwatch.session.api import watch
from nanwatch.trace import trace_file
from nanwatch.trace.trace_file import COLUMNS, Trace, TraceError
from nanwatch.trace.trace_writer import Tabulator
from support.toys import Scale
from support.written_traces import FACTS

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def made(path: Path) -> Path:
    """A trace of three batches, of which the last is not finite."""
    model = nn.Sequential(nn.Linear(3, 2), Scale())
    with watch(model, trace=path, on_nonfinite="record") as w:
        for factor in (1.0, 2.0, inf):
            model[1].factor = factor
            model(torch.ones(2, 3))
    return w.trace_path


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_other_libraries_read_it(tmp_path: Path, library: str) -> None:
    try:
        read: Any = importlib.import_module(library).read_parquet
    except ImportError:
        pytest.skip(f"{library} is not installed")
    table = read(made(tmp_path / "run.parquet"))
    assert list(table.columns) == [column for column, _, _ in COLUMNS]
    rows = table.to_dict("records") if library == "pandas" else table.to_dicts()
    assert {row["batch"] for row in rows} == {0, 1, 2}
    (last,) = [row for row in rows if (row["batch"], row["module"], row["role"]) == (2, "1", "output")]
    assert (last["abs_max"], last["isfinite"], last["num_posinf"] + last["num_neginf"]) == (inf, False, 4)
    (weight,) = [row for row in rows if row["batch"] == 0 and row["label"] == "weight"]
    assert (weight["shape"], weight["dtype"], weight["class"]) == ("[2, 3]", "float32", "Linear")
    assert weight["num_nan"] is None or isnan(weight["num_nan"])


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no trace at .*nothing"):
        Trace.open(tmp_path / "nothing")
    with pytest.raises(TraceError, match=r"folder without parts .*nothing was written to it yet"):
        Trace.open(tmp_path)
    whole = made(tmp_path / "run.parquet")
    (tmp_path / "half.parquet").write_bytes(whole.read_bytes()[:-200])
    (tmp_path / "report.json").write_text("{}" + 12 * " ")
    parquet.write_table(pa.table({"batch": [1]}), tmp_path / "other.parquet")
    for name, words in (
        ("half.parquet", "no Parquet file"),
        ("report.json", "no Parquet file .*magic bytes.*; nanwatch show reads a report$"),
        ("other.parquet", "no trace of nanwatch"),
    ):
        with pytest.raises(TraceError, match=rf"{name} is .*{words}"):
            Trace.open(tmp_path / name)


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
    table = Tabulator(3).table(made)
    assert table.schema.equals(trace_file.schema())
    assert list(trace_file.frames_of(table)) == made
    # The calls of a batch are counted from 0, in the order in which they come.
    counts: Counter[int] = Counter()
    expected = []
    for frame in made:
        expected += [counts[frame.batch]] * len(frame.records)
        counts[frame.batch] += 1
    assert table["call"].to_pylist() == expected
    assert set(table["rank"].to_pylist()) == {3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "no trace that can be read"),
        (json.dumps({**FACTS, "version": 5}), "its version is 5, this nanwatch reads version 10"),
    ],
)
def test_metadata_that_is_none_of_a_trace_is_refused(text: str, words: str) -> None:
    schema = trace_file.schema().with_metadata({trace_file.METADATA_KEY: text})
    with pytest.raises(TraceError, match=f"^a.parquet.*{re.escape(words)}"):
        trace_file.facts_of(schema, "a.parquet")
