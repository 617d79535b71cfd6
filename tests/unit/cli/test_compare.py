"""`python -m nanwatch compare`: exit status, output, bad use."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch

from nanwatch import __main__ as command
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
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
