"""Reading a trace: with nanwatch, with pandas, with polars; and what is no trace."""

import importlib
from math import inf, isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.session.api import watch
from nanwatch.trace.columns import COLUMNS, TraceError
from nanwatch.trace.trace_file import Trace
from support.toys import Scale

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
