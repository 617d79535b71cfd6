"""`python -m nanwatch bisect`: exit status, output, bad use."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nanwatch import __main__ as command

MODULE = """
import torch
print("noise")
model = torch.nn.Linear(8, 8)
def batch():
    return torch.randn(4, 8)
def fails():
    raise KeyError("mine")
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module to import, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "bisected", raising=False)
    (tmp_path / "bisected.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize(("switch", "status"), [("autocast", 1), ("fastpath", 0)])
def test_the_status_says_whether_numbers_change(
    switch: str, status: int, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """stdout has the one document, not what the user's code prints."""
    assert (
        command.main(["bisect", "bisected:model", "bisected:batch", "--switch", switch, "--json"]) == status
    )
    shown = capsys.readouterr()
    assert json.loads(shown.out)["equal"] is (status == 0)
    assert shown.err == "noise\n"


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        ("bisected", "bisected:batch", "MODEL should be PKG.MOD:NAME or FILE.py:NAME"),
        ("bisected:model", "bisected:missing", "INPUTS bisected:missing: AttributeError"),
        ("bisected:batch", "bisected:batch", "should be a torch.nn.Module, got Tensor"),
        ("bisected:fails", "bisected:batch", "KeyError: 'mine'"),
    ],
)
def test_bad_use(
    model: str, inputs: str, words: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2, nothing on stdout, and at the end of stderr what came and what is accepted."""
    assert command.main(["bisect", model, inputs]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err.splitlines()[-1]
