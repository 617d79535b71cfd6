"""`python -m nanwatch fits`: verdicts, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nanwatch.session.api import watch
from support.commands import run
from support.toys import mlp

pytest.importorskip("pyarrow")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a trace of two batches, as the current one."""
    monkeypatch.chdir(tmp_path)
    model = mlp()
    with watch(model, trace="a.parquet"):
        for batch in (1.0, 2.0):
            model(torch.full((2, 3), batch))
    return tmp_path


def test_it_for_people_and_programs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a module and part; as JSON the same."""
    status, out, _ = run(capsys, "fits", "a.parquet", "--json")
    found = json.loads(out)
    assert (status, found["margin_bits"]) == (0, 1.0)
    parts = [(one["module"], one["part"]) for one in found["modules"]]
    weights = [("0", "weights"), ("2", "weights")]
    assert sorted(parts) == sorted(weights + [(name, "outputs") for name in ("0", "1", "2", "")])
    status, out, _ = run(capsys, "fits", "a.parquet")
    assert status == 0
    assert len([line for line in out.splitlines() if ", float32)" in line]) == 6


def test_it_answers_whether_one_fits(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A verdict first, the status with it; where it does not fit, the modules; as JSON the same."""
    status, out, _ = run(capsys, "fits", "a.parquet", "--for", "float16")
    assert (status, out.splitlines()[0]) == (
        0, "float16: fits all 6 outputs and weights of modules. Nothing overflows, even 2 times as large."
    )  # fmt: skip
    status, out, _ = run(capsys, "fits", "a.parquet", "--for", "float16", "--margin-bits", "40")
    assert status == 1
    assert out.startswith("float16: does not fit 6 of 6 outputs and weights of modules.")
    assert len([line for line in out.splitlines() if " no room " in line and ", float32)" in line]) == 6
    status, out, _ = run(capsys, "fits", "a.parquet", "--for", "float16", "--json")
    found = json.loads(out)
    assert (status, found["format"], found["fits"]) == (0, "float16", True)
    assert {need["verdicts"]["float16"] for need in found["modules"]} == {"fits"}
    with pytest.raises(SystemExit):
        run(capsys, "fits", "a.parquet", "--for", "mxfp8")
    assert "invalid choice: 'mxfp8'" in capsys.readouterr().err
