"""`nanwatch show` of black boxes, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from nanwatch import watch
from nanwatch.blackbox.box_file import BoxFile
from nanwatch.cli.files import show_main
from support.black_boxes import NO_PROCESS, black_box, needs_box, other

pytestmark = needs_box


def main(arguments: list[str]) -> int:
    return show_main(["--box", *arguments])


def test_a_process_that_runs_is_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As text, JSON and page; of a folder with one the same."""
    model = nn.Sequential(nn.Linear(2, 2))
    page = tmp_path / "page.html"
    with black_box(tmp_path) as box, watch(model, black_box=True):
        model(torch.ones(1, 2))
        assert main([str(box.path)]) == 0
        text = capsys.readouterr().out
        assert main([str(tmp_path), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert main([str(tmp_path), "--html", str(page)]) == 0
    assert "it runs" in text
    assert "0 (Linear)" in text
    assert (document["schema"], document["version"]) == ("nanwatch.blackbox", 1)
    assert (document["end"], document["num_calls"]) == ("runs", 2)
    assert [call["module"] for call in document["calls"]] == ["0", ""]
    assert "it runs" in page.read_text(encoding="utf-8")


def test_ranks_are_told_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exit status 1 when one died."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "job"
    folder.mkdir()
    with black_box(tmp_path) as box, watch(nn.Linear(2, 2), black_box=True):
        for rank in "01":
            other(box.path, folder / f"{rank}.blackbox", rank=rank)
    section = BoxFile(box.path)._sections["state"]
    with (folder / "1.blackbox").open("r+b") as file:
        file.seek(section.at + (section.item.fields or {})["pid"][1])
        file.write(NO_PROCESS.to_bytes(8, "little"))
    assert main([str(folder)]) == 1
    assert "Rank 1 ended first" in capsys.readouterr().out
    assert main([str(folder), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["first"]) == ("nanwatch.blackbox.job", 1)
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]


def test_what_is_no_black_box_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit status 2."""
    file = tmp_path / "x.blackbox"
    file.write_text("text")
    for path in (file, tmp_path, tmp_path / "none"):
        assert main([str(path)]) == 2
    assert f"nanwatch show: {file} is no black box of this version" in capsys.readouterr().err
