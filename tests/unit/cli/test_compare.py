"""`python -m nanwatch compare` and `replay`: verdicts, exit status, output, bad use."""

import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanwatch import __main__ as command
from nanwatch import write_capsule
from support.commands import run
from support.html_page import Page
from support.watching import watch

MODEL = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
MODULE = """
import copy
import torch
print("noise")
one = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
other = copy.deepcopy(one)
other[1].eps = 0.1
small = torch.nn.Linear(8, 3)
def batch():
    return torch.randn(4, 8)
"""


@pytest.fixture(autouse=True)
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a module to import, as the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "compared", raising=False)
    (tmp_path / "compared.py").write_text(MODULE)


@pytest.mark.parametrize(
    ("other", "status", "equal"), [("one", 0, True), ("other", 1, False), ("small", 2, None)]
)
def test_the_status_says_whether_the_models_differ(other, status, equal, capsys):
    """stdout has the one document, not what the user's code prints."""
    arguments = ["compared:one", f"compared:{other}", "compared:batch", "--json"]
    assert command.main(["compare", *arguments]) == status
    assert json.loads(capsys.readouterr().out)["equal"] is equal


def test_the_page_has_the_errors_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    models = ["compared:one", "compared:other", "compared:batch"]
    assert command.main(["compare", *models, "--json", "--html", "compare.html"]) == 1
    document = json.loads(capsys.readouterr().out)
    page = Page(Path("compare.html").read_text(encoding="utf-8"))
    assert (page.unbalanced, page.headline) == ([], ["Differ first in 1 (LayerNorm)"])
    errors = [title.rpartition(" ")[2] for title in page.titles if title.startswith("error, ")]
    assert errors == [f"{module['error']:.4g}" for module in document["modules"] if module["error"]]
    assert [title for title in page.titles if title.startswith("first, 1")]
    assert "eps is 1e-05 in A and 0.1 in B" in page.text


def test_two_traces_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Without inputs; a third is that of A in float64."""
    pytest.importorskip("pyarrow")
    other = copy.deepcopy(MODEL)
    other[1].eps = 0.1
    for name, model in (("a", MODEL), ("b", other), ("c", copy.deepcopy(MODEL).double())):
        with watch(model, trace=f"{name}.parquet", sketches=1):
            model(torch.ones(4, 8, dtype=model[0].weight.dtype))
    assert command.main(["compare", "a.parquet", "a.parquet"]) == 0
    assert capsys.readouterr().out.startswith("Equal within the noise floor (batch 0).")
    three = ["a.parquet", "b.parquet", "c.parquet", "--batches", "0", "0", "--json"]
    assert command.main(["compare", *three]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["first"]["module_a"] == "1"
    assert dict(document["facts"])["Noise"] == "rounding error of A, against c.parquet"
    assert command.main(["compare", "a.parquet", "missing.parquet"]) == 2
    assert "should be two traces that exist, or two models with INPUTS" in capsys.readouterr().err


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
