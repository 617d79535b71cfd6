"""`python -m nanwatch recipe`: names of model and batch, exit status, files, bad use."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from nanwatch import __main__ as command

MODULE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = torch.nn.Linear(32, 32), torch.nn.Linear(32, 1)

    def forward(self, x):
        return (self.fc2(self.fc1(x).relu()) - 3).square().mean()

def batch():
    print("noise")
    return torch.linspace(-1, 1, 128).reshape(4, 32)

def sized(size):
    return torch.zeros(4, size)

narrow = torch.zeros(4, 31)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module to import, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("tried", "part", "part.tried"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "tried.py").write_text(MODULE)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "tried.py").write_text(MODULE)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "budget", "status"),
    [
        (["tried.py:Model", "batch"], "5%", 0),
        (["tried:Model", "tried.py:batch"], "0.05", 0),
        (["part/tried.py:Model", "batch"], "0", 1),
    ],
)
def test_the_status_says_whether_there_is_a_recipe(
    names: list[str], budget: str, status: int, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file, or a module, and a batch of the same file. stdout has the one document, the user's prints do not."""
    options = ["--to", "mxfp8,bfloat16", "--loss-budget", budget]
    assert command.main(["recipe", *names, *options, "--json"]) == status
    shown = capsys.readouterr()
    assert set(json.loads(shown.out)["torchao"]) == (set() if status else {"fc1", "fc2"})
    assert shown.err == "noise\n"


def test_the_files(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe, and its measurements beside it."""
    use = [
        "recipe",
        "tried.py:Model",
        "batch",
        "--train",
        "--hadamard",
        "--stochastic",
        "--loss-budget",
        "9%",
    ]
    assert command.main([*use, "--output", "recipe.json"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Recipe: 2 of 2 linear layers")
    assert text.endswith("\n\nwrote recipe.json\n")
    assert json.loads((place / "recipe.json").read_text())["schema"] == "nanwatch.recipe"
    assert len((place / "recipe.measured.jsonl").read_text().splitlines()) >= 2 * 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tried.py", "batch"], "MODEL should be PKG.MOD:NAME or FILE.py:NAME"),
        (["/tried.py:Model", "batch"], "the file should lie in the current folder or below it"),
        (["tried.py:Model", "missing"], "BATCH tried.py:missing: AttributeError"),
        (["tried.py:batch", "batch"], "should be a torch.nn.Module, got Tensor"),
        (["tried.py:Model", "batch", "--to", "mxfp9"], "there is no format 'mxfp9'"),
        (["tried.py:Model", "batch", "--loss-budget", "all"], "should be a share of the loss"),
    ],
)
def test_bad_use(arguments: list[str], words: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, nothing on stdout, and at the end of stderr what came and what is accepted."""
    assert command.main(["recipe", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.strip().splitlines()[-1]
    assert last.startswith("nanwatch recipe: ")
    assert words in last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tried.py:nothing", "batch"], "MODEL tried.py:nothing: AttributeError: "),
        (["tried.py:Model", "sized"], "argument: 'size'; what makes it is called without arguments"),
        (["missing.py:Model", "batch"], "there is no file missing.py in "),
        (["tried.py:Model", "narrow"], "RuntimeError in fc1 (Linear): mat1 and mat2 shapes cannot be"),
        (
            ["tried.py:Model", "narrow", "--output", "."],
            "should be a file, got the folder .; try recipe.json",
        ),
        (
            ["tried.py:Model", "narrow", "--loss-budget", "-1%"],
            "from 0 to 1, such as 0.005 or '0.5%', got '-1%'",
        ),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], words: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a traceback, with the module at which a batch of a wrong shape failed."""
    assert command.main(["recipe", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
