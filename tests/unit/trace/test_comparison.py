"""Differences between traces: the module that was changed is the module that is named."""

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.trace.comparison import diff
from nanwatch.trace.trace_file import Trace
from support.toys import mlp
from support.watching import watch
from support.written_traces import write_rows


def run(path: Path, model: nn.Module, x: torch.Tensor, **options: Any) -> Trace:
    """The trace of one call."""
    with watch(model, trace=path, on_nonfinite="record", **options), torch.no_grad():
        model(x)
    return Trace.open(path)


def written(path: Path, *rows: dict[str, Any]) -> Trace:
    """A trace of one module, with one call in each batch."""
    usual = {"batch": 0, "call": 0, "module": "m", "dtype": "float32", "abs_max": 1.0}
    return Trace.open(write_rows(path, [usual | row for row in rows]))


def test_an_inserted_module_is_no_difference_and_is_listed(tmp_path: Path) -> None:
    """An Identity in the middle of a Sequential renames what follows; all ranges agree."""
    model = mlp()
    x = torch.randn(3, 3)
    before = run(tmp_path / "a.parquet", model, x)
    longer = nn.Sequential(model[0], nn.Identity(), model[1], model[2])
    difference = diff(before, run(tmp_path / "b.parquet", longer, x))
    assert difference.equal
    assert (difference.words("Only in A"), difference.words("Only in B")) == ([], ["1 (2 records)"])
    records = before.table(["batch"]).num_rows
    assert difference.compared.startswith(f"{records} records of 1 batch")


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
    first = diff(a, b).first
    assert (first.module_a, first.label, first.kind) == ("2", "weight", "bits")
    by_range = diff(a, b, ignore=["bits"])
    assert by_range.first is None or by_range.first.label != "weight"


INF = {"abs_max": inf, "isfinite": False}
NAN = {"abs_min": nan, "abs_max": nan, "isfinite": False}
SMALL = {"abs_min": 1e-8, "abs_max": 1e-7}
INTEGERS = {"dtype": "int64", "abs_min": 7.0, "abs_max": 9.0}
UNREAD = dict.fromkeys(("abs_min", "abs_max", "isfinite"))


@pytest.mark.parametrize(
    ("a", "b", "what"),
    [
        ({}, {"abs_max": 1.0005}, None),
        ({}, {"abs_max": 1.002}, "abs_max 1 against 1.002"),
        ({"abs_min": 1e-8}, {"abs_min": 3e-8}, None),  # rounding of what was near 1
        (SMALL, SMALL | {"abs_min": 3e-8}, "abs_min 1e-08 against 3e-08"),
        ({}, INF, "finite against inf"),
        (NAN, INF, "nan against inf"),
        (NAN, NAN, None),
        ({}, {"shape": "[3]"}, "shape [2] against [3]"),
        ({}, {"dtype": "float16"}, "dtype float32 against float16"),
        (UNREAD, {}, None),
        ({"abs_min": inf, "abs_max": 0.0}, {"abs_min": inf, "abs_max": 0.0}, None),  # an empty tensor
        (INTEGERS, INTEGERS | {"abs_min": 8.0}, "abs_min 7 against 8"),
    ],
)
def test_two_records(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], what: str | None) -> None:
    difference = diff(written(tmp_path / "a.parquet", a), written(tmp_path / "b.parquet", b))
    words = difference.words("First")
    assert (not words) if what is None else (f": {what}" in words[0])


def test_what_grew_is_sorted_and_leaves_out_inputs_zeros_and_nan(tmp_path: Path) -> None:
    """By the factor, each record once, in the batch where it is largest."""

    def trace(name: str, *factors: float) -> Trace:
        rows = []
        for batch, factor in enumerate(factors):
            sizes = {"input[0]": 9 * factor, "output": factor, "weight": 1 + factor / 10}
            sizes |= {"output[1]": float(factor > 1), "output[2]": nan if factor > 1 else 1.0}
            for label, abs_max in sizes.items():
                place = {"batch": batch, "label": label, "role": label.partition("[")[0]}
                rows.append({**place, "abs_max": abs_max, "isfinite": abs_max == abs_max})
        return written(tmp_path / name, *rows)

    a, b = trace("a.parquet", 1, 1, 1), trace("b.parquet", 2, 8, 4)
    difference = diff(a, b)
    assert difference.words("Grew") == [
        "x 8.00, 1.00e+00 -> 8.00e+00, output of m in batch 1",
        "x 1.64, 1.10e+00 -> 1.80e+00, weight of m in batch 1",
    ]
    assert diff(b, a).words("Grew") == []
    document = json.loads(difference.to_json())
    assert not document["equal"]
    assert (document["first"]["label"], document["first"]["kind"]) == ("input[0]", "range")
