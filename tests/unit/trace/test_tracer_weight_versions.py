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
from nanwatch.trace import trace
from nanwatch.trace.trace import WeightVersions
from nanwatch.trace.trace_file import Trace
from support.toys import mlp

pa = pytest.importorskip("pyarrow")
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


def test_frames_may_come_long_after_the_steps() -> None:
    """Frames that come once a second have the steps before their own batch, and no other weight's."""
    versions = WeightVersions()
    for batch in range(5):
        versions.step(batch, [("m", "w")])
    rows = [weight_row(1.0), weight_row(1.0, label="frozen"), weight_row(1.0, "output", "output")]
    found = [versions.column(Frame(batch, "m", "M", tuple(rows))) for batch in (0, 0, 3, 9)]
    assert found == [[0, 0, None], [0, 0, None], [3, 0, None], [5, 0, None]]
    backward = Frame(9, "m", "M", (weight_row(1.0, "gradient"),), phase="backward")
    assert versions.column(backward) == [None]


def test_a_run_without_frames_keeps_no_list_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond some the oldest are counted at once, and none is lost."""
    monkeypatch.setattr(trace, "_MOST_WAITING", 10)
    versions = WeightVersions()
    for batch in range(1000):
        versions.step(batch, [("m", "w")])
    assert len(versions._steps) == 10
    assert versions.column(Frame(1000, "m", "M", (weight_row(1.0),))) == [1000]


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


def test_accumulation_and_two_optimizers(tmp_path: Path) -> None:
    """Batches between steps share a number; a weight that two optimizers hold counts both."""
    model = mlp()
    both = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[0].parameters(), lr=0.1)]
    with nanwatch.watch(model, trace=tmp_path / "run.parquet", forecast=False):
        for _ in range(2):
            for _ in range(2):
                model(ONE).square().sum().backward()
            for optimizer in both:
                optimizer.step()
        model(ONE)
    found = column(tmp_path / "run.parquet")
    assert found["0", "weight"] == [0, 0, 2, 2, 4]
    assert found["2", "weight"] == [0, 0, 1, 1, 2]


def test_other_writes_are_seen_by_what_they_leave(tmp_path: Path) -> None:
    """load_state_dict, a write to .data, another dtype, a new Parameter; running statistics by their rows."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1, bias=False))
    with nanwatch.watch(model, trace=tmp_path / "run.parquet", reread_weights=1):
        model(ONE)
        model[1].load_state_dict({"weight": torch.full((1, 3), 5.0)})
        model(ONE * 2)
        model[1].weight.data.mul_(2)
        model.eval()
        model(ONE)
        model[1].weight = nn.Parameter(torch.ones(1, 3))
        model(ONE)
        model.double()
        model(ONE.double())
    found = column(tmp_path / "run.parquet")
    assert found["1", "weight"] == [0, 1, 2, 3, 4]
    assert found["0", "running_mean"] == [0, 1, 1, 1, 2]


def test_a_tied_weight_counts_under_both_names(tmp_path: Path) -> None:
    """And a module that stands in two places under the one name that its frames have."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model.append(model[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanwatch.watch(model, trace=tmp_path / "run.parquet"):
        train(model, optimizer, 2)
    assert column(tmp_path / "run.parquet") == {("0", "weight"): [0, 0, 1, 1], ("1", "weight"): [0, 1]}


def test_parameters_that_an_optimizer_gets_later_count(tmp_path: Path) -> None:
    """add_param_group makes the list anew."""
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with nanwatch.watch(model, trace=tmp_path / "run.parquet"):
        train(model, optimizer, 2)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        train(model, optimizer, 2)
    found = column(tmp_path / "run.parquet")
    assert (found["0", "weight"], found["2", "weight"]) == ([0, 1, 2, 3], [0, 0, 0, 1])


def test_no_hook_stays_behind(tmp_path: Path) -> None:
    """After stop() the steps of a process are what they were."""
    before = len(after_steps)
    with nanwatch.watch(mlp(), trace=tmp_path / "run.parquet", forecast=False):
        assert len(after_steps) > before
    assert len(after_steps) == before
