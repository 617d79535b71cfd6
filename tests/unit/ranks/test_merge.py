"""`python -m nanwatch show --ranks`: reports of several ranks, made by real watches, as one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import nanwatch
from nanwatch import Report
from nanwatch import __main__ as doctor
from nanwatch.records.record import by_module


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))


def ran(
    rank: int, batches: int = 1, spoilt: str = "", at: int = 0, factor: float = 1.0, kept: int = 100
) -> Report:
    """The report of a rank that ran so many batches; in batch `at` a nan in the "data" or in a "weight"."""
    net, x = model(), torch.linspace(-1, 1, 8).reshape(2, 4)
    with torch.no_grad():
        net[2].weight *= factor
    with nanwatch.watch(net, on_nonfinite="record", rerun=False, max_frames=kept) as watch:
        for batch in range(batches):
            given = x.clone()
            if spoilt and batch == at:
                with torch.no_grad():
                    (given if spoilt == "data" else net[2].weight)[0, 0] = float("nan")
            net(given)
        return replace(watch.report(), rank=rank)


def written(folder: Path, *reports: Report) -> Path:
    """Return the files that `watch(output_dir=...)` writes."""
    for report in reports:
        place = folder / (f"batch-{report.batch}" + (f"-rank-{report.rank}" if report.rank else ""))
        place.mkdir(parents=True, exist_ok=True)
        (place / "report.json").write_text(report.to_json())
    return folder


def test_the_earliest_batch_is_the_origin(tmp_path, capsys):
    """Rank 2 was first, though rank 0 leads the folder. JSON is one document that has every finding whole."""
    reports = [ran(0, 4, "data", 3), ran(1, 3, factor=1024.0), ran(2, 3, "weight", 1), ran(3, 3)]
    written(tmp_path, *reports)
    assert doctor.main(["show", str(tmp_path), "--ranks"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["4 ranks: 0-3", "First: nan first seen in `weight` of 2 (Linear) in batch 1, rank 2"]
    rows = [line.split() for line in lines[-4:]]
    assert [row[0] for row in rows] == ["2", "0", "1", "3"]
    assert rows[0][1:3] == ["nan", "in"]
    for row in rows[2:]:
        bits, name, *_ = min(by_module(reports[int(row[0])].frames).values())
        assert row[1:3] == [f"{bits:.1f}", name]
    assert doctor.main(["show", str(tmp_path), "--json", "--ranks"]) == 1
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["origin_ranks"] == [2]
    shown = {row["rank"]: row for row in document["ranks"]}
    assert [rank for rank, row in shown.items() if row["headroom_bits"] == "-inf"] == [0, 2]
    assert shown[0]["finding"]["origin"] == "data"
