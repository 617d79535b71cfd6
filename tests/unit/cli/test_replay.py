"""`python -m nanwatch replay`: verdicts, exit status, bad use, and one JSON document."""

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nanwatch
from nanwatch import write_capsule
from support.commands import run
from support.processes import forked

X = torch.full((2, 4), 3.0)

FACTORY = """
import torch
from torch import nn
torch.manual_seed(0)  # of the sign of the overflow
print("from the user's own code")

class Scale(nn.Module):
    def forward(self, x):
        if x.dtype is torch.float64:
            raise RuntimeError("no float64 here")
        return x * 1e4 * 1e4

def make():
    return nn.Sequential(nn.Linear(4, 4), Scale())

def FAILS():
    return 1 / 0

model = make()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with `zoo.py`, a good capsule and a bad one, as the current directory."""
    (tmp_path / "zoo.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "zoo", raising=False)
    import zoo

    write_capsule("good", zoo.model, "", (X,))
    write_capsule("bad", copy.deepcopy(zoo.model).half(), "", (X.half(),))
    yield tmp_path
    sys.modules.pop("zoo", None)


def test_command_verdicts_and_exit_status(place, capsys):
    status, out, _ = run(capsys, "replay", "good", "--model", "zoo:make")
    head, verdict = out.splitlines()
    assert (status, verdict) == (0, "as recorded: all finite")
    assert head.startswith("good: the root module (Sequential) on cpu, torch")
    status, out, _ = run(capsys, "replay", "good", "--model", "zoo:model", "--dtype", "float16")
    lines = out.splitlines()
    assert status == 1
    assert lines[1].startswith("float16: inf first seen in `output` of 1 (Scale)")
    assert "Detected inf in batch 0" in lines[3]
    status, out, err = run(capsys, "replay", "good", "--model", "zoo:make", "--dtype", "float64")
    assert (status, out) == (2, "")
    assert "the call could not be made: RuntimeError: no float64 here" in err


def test_the_folder_of_a_failure_holds_its_capsule(place, capsys):
    """So does `output_dir`, the newest one, and `show` of a capsule names the command."""
    for capsule, folder in (("good", "batch-10"), ("bad", "batch-7")):
        (place / folder).mkdir()
        ((place / capsule).rename(place / folder / "capsule") / "call.pt").touch()
        for argument in (folder, "."):  # the newest
            out = run(capsys, "replay", argument, "--model", "zoo:make")[1]
            assert out.startswith(f"{folder}/capsule: ")
    for path in ("batch-7/capsule", "batch-7/capsule/call.pt"):
        status, _, err = run(capsys, "show", path)
        assert status == 2
        assert f"{path} is a capsule: nanwatch replay batch-7/capsule --model" in err


def test_command_bad_use(place, capsys):
    for arguments, expected in [
        (("none", "--model", "zoo:make"), "none/call.pt: FileNotFoundError"),
        (("good", "--model", "zoo"), "--model should be PKG.MOD:NAME or FILE.py:NAME"),
        (("good", "--model", "zoo_no:make"), "ModuleNotFoundError: No module named 'zoo_no'"),
        (("good", "--model", "zoo:nothing"), "has no attribute 'nothing'"),
        (("good", "--model", "zoo:torch.finfo"), "should be a torch.nn.Module or make one, got finfo"),
        (("good", "--model", "zoo:FAILS"), "ZeroDivisionError"),
    ]:
        status, out, err = run(capsys, "replay", *arguments)
        assert (status, out) == (2, "")
        assert expected in err
    for arguments in (("good",), ("good", "--model", "zoo:make", "--dtype", "int8")):
        with pytest.raises(SystemExit) as stopped:
            run(capsys, "replay", *arguments)
        assert stopped.value.code == 2


def test_command_in_a_process_of_its_own(place):
    """--json is one document on stdout whatever the user's code prints; the current directory is found."""
    arguments = ["replay", "bad", "--model", "zoo:make", "--json"]
    done = forked("-m", "nanwatch", *arguments, cwd=place)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert "from the user's own code" in done.stderr
    assert (document["dtype"], document["verdict"]) == (None, "non-finite")
    report = nanwatch.Report.from_json(json.dumps(document["report"]))
    assert report.finding.class_name == "Scale"
