"""The column `weight_version`: equal numbers where nothing changed, another one where something did."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import nanwatch
from nanwatch.instrumentation.global_hooks import after_steps
from nanwatch.records.record import Frame, Record
from nanwatch.trace.trace import WeightVersions
from nanwatch.trace.trace_file import Trace
from support.toys import mlp

parquet = pytest.importorskip("pyarrow.parquet")

ONE = torch.ones(2, 3)


def weight_row(value: float, role: Any = "weight", label: str = "w") -> Any:
    return Record(label, role, (2,), "float32", value, value, value == value, None)


@given(
    st.lists(
        st.tuples(st.sampled_from([1.0, 2.0, nan]), st.booleans(), st.integers(1, 3)), min_size=1, max_size=20
    )
)
def test_it_rises_where_a_step_took_it_or_its_row_differs(batches: list[tuple[float, bool, int]]) -> None:
    """Over any values and steps, against a count by hand; a nan that stays nan is no change."""
    versions = WeightVersions()
    expected: list[int] = []
    count, before, stepped = 0, None, False
    for batch, (value, steps, calls) in enumerate(batches):
        shown = repr(value)
        if before is not None and shown != before and not stepped:
            count += 1
        before, stepped = shown, False
        found = [versions.column(Frame(batch, "m", "M", (weight_row(value),)))[0] for _ in range(calls)]
        expected += [count] * calls
        assert found == expected[-calls:]
        if steps:
            versions.step(batch, [("m", "w")])
            count, stepped = count + 1, True


def column(path: Path) -> dict[tuple[str, str], list[int]]:
    """Return the numbers of each weight and buffer, batch by batch."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in Trace.open(path).table().to_pylist():
        if row["role"] in ("weight", "buffer"):
            found.setdefault((row["module"], row["label"]), []).append(row["weight_version"])
        else:
            assert row["weight_version"] is None
    return found


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(ONE).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_every_kind_of_step_counts_for_the_weights_it_takes(tmp_path: Path, options: Any) -> None:
    """Also the fused ones, that write past the version counter; a frozen weight and an evaluation stay as they were."""
    model = mlp()
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    with nanwatch.watch(model, trace=tmp_path / "run.parquet"):
        train(model, optimizer, 2)
        with torch.no_grad():
            model(ONE)
            model(ONE)
        train(model, optimizer, 2)
    trained = [0, 1, 2, 2, 2, 3]
    assert column(tmp_path / "run.parquet") == {
        ("0", "weight"): trained,
        ("0", "bias"): [0] * 6,
        ("2", "weight"): trained,
        ("2", "bias"): trained,
    }


def test_a_tied_weight_counts_under_both_names(tmp_path: Path) -> None:
    """And a module that stands in two places under the one name that its frames have."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model.append(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanwatch.watch(model, trace=tmp_path / "run.parquet"):
        train(model, optimizer, 2)
    assert column(tmp_path / "run.parquet") == {("0", "weight"): [0, 0, 1, 1], ("1", "weight"): [0, 1]}


def test_no_hook_stays_behind(tmp_path: Path) -> None:
    """After stop() the steps of a process are what they were."""
    before = len(after_steps)
    with nanwatch.watch(mlp(), trace=tmp_path / "run.parquet", forecast=False):
        assert len(after_steps) > before
    assert len(after_steps) == before
