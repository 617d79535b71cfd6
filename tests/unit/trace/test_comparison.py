"""Differences between traces: the module that was changed is the module that is named."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.records.note import Note
from nanwatch.records.record import Frame, Record
from nanwatch.trace import columns
from nanwatch.trace.comparison import diff
from nanwatch.trace.trace_file import Trace
from support.toys import mlp
from support.watching import watch

parquet = pytest.importorskip("pyarrow.parquet")

FACTS = {"version": columns.VERSION, "nanwatch": "0", "torch": "0", "rank": 0, "every": 1, "lost_frames": 0}


def run(path: Path, model: nn.Module, *inputs: Any, **options: Any) -> Trace:
    """The trace of one call for each of the inputs."""
    with watch(model, trace=path, on_nonfinite="record", **options), torch.no_grad():
        for one in inputs:
            model(**one) if isinstance(one, dict) else model(one)
    return Trace.open(path)


def row(label: str = "output", low: float | None = 0.5, high: float | None = 1.0, **changes: Any) -> Record:
    read = low is not None
    finite = None if not read else high not in (inf,) and high == high
    made = {
        "role": label.partition("[")[0],
        "shape": (2,),
        "dtype": "float32",
        "note": None if read else Note("absent"),
    }
    made |= changes
    return Record(label, made["role"], made["shape"], made["dtype"], low, high, finite, None, made["note"])


def written(path: Path, *frames: Frame) -> Trace:
    """A trace of these frames."""
    table = columns.Tabulator(0).table(frames)
    parquet.write_table(table.replace_schema_metadata(columns.schema(FACTS).metadata), path)
    return Trace.open(path)


def one(path: Path, *rows: Record, name: str = "m", kind: str = "M") -> Trace:
    """A trace of one frame."""
    return written(path, Frame(0, name, kind, tuple(rows)))


# Which module was changed


def test_an_inserted_module_is_no_difference_and_is_listed(tmp_path: Path) -> None:
    """An Identity in the middle of a Sequential renames what follows; all ranges agree."""
    model = mlp()
    x = torch.randn(3, 3)
    before = run(tmp_path / "a.parquet", model, x)
    longer = nn.Sequential(model[0], nn.Identity(), model[1], model[2])
    found = diff(before, run(tmp_path / "b.parquet", longer, x))
    assert found.equal
    assert found.words("Only in A") == []
    assert found.words("Only in B") == ["1 (2 records)"]
    assert found.compared.startswith(
        f"{Trace.open(before.path).table(['batch']).num_rows} records of 1 batch"
    )


def test_other_bits_in_the_same_range_are_named(tmp_path: Path) -> None:
    """Two elements that change places: fingerprints tell, ranges do not."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)), torch.randn(3, 4)
    a, again = (run(tmp_path / f"{name}.parquet", model, x, fingerprints=True) for name in ("a", "again"))
    flat = model[2].weight.data.view(-1)
    middle = flat.abs().argsort()[5:7]
    flat[middle] = flat[middle.flip(0)]
    b = run(tmp_path / "b.parquet", model, x, fingerprints=True)
    assert diff(a, again).equal
    with_bits = a.table(["dtype"])["dtype"].is_valid().to_numpy().sum()
    assert f"{with_bits} of them bit by bit" in diff(a, again).compared
    found = diff(a, b)
    assert found.first is not None
    assert (found.first.module_a, found.first.label, found.first.kind) == ("2", "weight", "bits")
    by_range = diff(a, b, ignore=["bits"])
    assert by_range.first is None or by_range.first.label != "weight"


# Records that differ


@pytest.mark.parametrize(
    ("a", "b", "what"),
    [
        (row(high=1.0), row(high=1.0005), None),
        (row(high=1.0), row(high=1.002), "abs_max 1 against 1.002"),
        (row(low=1e-8), row(low=3e-8), None),  # rounding of what was near 1
        (row(low=1e-8, high=1e-7), row(low=3e-8, high=1e-7), "abs_min 1e-08 against 3e-08"),
        (row(high=1.0), row(high=inf), "finite against inf"),
        (row(low=nan, high=nan), row(high=inf), "nan against inf"),
        (row(low=nan, high=nan), row(low=nan, high=nan), None),
        (row(), row(shape=(3,)), "shape [2] against [3]"),
        (row(), row(dtype="float16"), "dtype float32 against float16"),
        (row(low=None, high=None), row(), None),
        (row(low=inf, high=0.0), row(low=inf, high=0.0), None),  # an empty tensor
        (row(dtype="int64", low=7.0, high=9.0), row(dtype="int64", low=8.0, high=9.0), "abs_min 7 against 8"),
    ],
)
def test_two_records(tmp_path: Path, a: Record, b: Record, what: str | None) -> None:
    """One record on each side: equal, or apart in these words."""
    found = diff(one(tmp_path / "a.parquet", a), one(tmp_path / "b.parquet", b))
    if what is None:
        assert found.first is None
    else:
        assert f": {what}" in found.words("First")[0]


def test_what_grew_is_sorted_and_leaves_out_inputs_zeros_and_nan(tmp_path: Path) -> None:
    """By the factor, each record once, in the batch where it is largest."""

    def frames(*factors: float) -> list[Frame]:
        made = []
        for batch, factor in enumerate(factors):
            rows = [
                row("input[0]", high=factor * 9),
                row("output", high=factor),
                row("weight", high=1 + factor / 10),
                row("output[1]", low=0.0, high=0.0 if factor == 1 else 1.0),
                row("output[2]", high=1.0 if factor == 1 else nan, low=1.0 if factor == 1 else nan),
            ]
            made.append(Frame(batch, "m", "M", tuple(rows)))
        return made

    a = written(tmp_path / "a.parquet", *frames(1, 1, 1))
    b = written(tmp_path / "b.parquet", *frames(2, 8, 4))
    found = diff(a, b)
    assert found.words("Grew") == [
        "x 8.00, 1.00e+00 -> 8.00e+00, output of m in batch 1",
        "x 1.64, 1.10e+00 -> 1.80e+00, weight of m in batch 1",
    ]
    assert diff(b, a).words("Grew") == []
    document = json.loads(found.to_json())
    assert (document["equal"], document["first"]["label"], document["first"]["kind"]) == (
        False,
        "input[0]",
        "range",
    )
