"""`nanwatch show` of black boxes, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from nanwatch import watch
from nanwatch.cli.files import show_main
from support.black_boxes import black_box, needs_box

pytestmark = needs_box


def test_a_process_that_runs_is_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As text and JSON; of a folder with black boxes alone the same."""
    model = nn.Sequential(nn.Linear(2, 2))
    with black_box(tmp_path), watch(model, black_box=True):
        model(torch.ones(1, 2))
        assert show_main([str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert show_main(["--box", str(tmp_path), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
    assert "it runs" in text
    assert "0 (Linear)" in text
    assert (document["schema"], document["version"]) == ("nanwatch.blackbox", 2)
    assert (document["end"], document["num_calls"]) == ("runs", 2)
    assert [call["module"] for call in document["calls"]] == ["0", ""]


def test_what_is_no_black_box_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit status 2, for a file and for a folder."""
    file = tmp_path / "x.blackbox"
    file.write_text("text")
    assert [show_main(["--box", str(path)]) for path in (file, tmp_path)] == [2, 2]
    assert f"nanwatch show: {file} is no black box of this version" in capsys.readouterr().err
