"""Patches of the source: `git apply` turns the file into the edited one, whatever its bytes and its layout."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nanwatch import NonFiniteError, watch
from nanwatch.diagnosis.patching.source import Edit, SourceFile, Span

LINES = [f"line{i} = {i}" for i in range(12)]


@pytest.mark.parametrize("where", ["", "package/inner"])
@pytest.mark.parametrize("endings", [["\n"], ["\r\n"], ["\r\n", "\n", "\n"]], ids=["unix", "dos", "mixed"])
@pytest.mark.parametrize("last", [True, False], ids=["ended", "no newline at the end"])
@pytest.mark.parametrize("line", [0, 6, 11])
def test_git_applies_it(tmp_path: Path, where: str, endings: list[str], last: bool, line: int) -> None:
    """In a folder of the work tree, at both ends of the file, and with characters of several bytes before it."""
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    path = tmp_path / where / "program.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [*LINES[:line], f"größe = 'ä' + {line} * 1", *LINES[line + 1 :]]
    text = "".join(one + endings[i % len(endings)] for i, one in enumerate(lines))
    raw = (text if last else text.rstrip("\r\n")).encode()
    path.write_bytes(raw)
    file = SourceFile.load(str(path))
    assert file is not None
    start = len(file.text[: file.text.index(f"{line} * 1")].encode())
    edit = Edit(Span(start, start + len(f"{line} * 1")), "(ü := 7)")
    patch = file.patch(file.edited([edit]))
    (tmp_path / "cure.patch").write_bytes(patch.encode())
    subprocess.run(["git", "apply", "cure.patch"], cwd=tmp_path, check=True)
    assert path.read_bytes() == raw.replace(f"{line} * 1".encode(), "(ü := 7)".encode())


MODEL = """\
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
"""
STATEMENTS = f"{MODEL}        y = self.weight * x; return torch.log(1 + torch.exp(y))\n"
LAMBDAS = f"""\
{MODEL}        inner, outer = (lambda t: t.tanh() * self.weight), (lambda t: (1 - torch.sigmoid(t)).log())
        return outer(inner(x) * 1e4)
"""


def imported(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "new"),
    [
        (STATEMENTS, "y = self.weight * x; return F.softplus(y)"),
        (LAMBDAS, "inner, outer = (lambda t: t.tanh() * self.weight), (lambda t: F.logsigmoid(-t))"),
        (
            STATEMENTS.replace("\n", "\r\n", 4),
            "y = self.weight * x; return F.softplus(y)",
        ),
    ],
    ids=["two statements on a line", "two lambdas on a line", "mixed line ends"],
)
def test_a_cure_of_an_odd_line_applies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, new: str
) -> None:
    """The patch ends the failure, and leaves every other byte; where Python has no columns, the reason is given."""
    monkeypatch.setitem(sys.modules, "odd_program", None)  # taken out at the end
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    path = tmp_path / "program.py"
    path.write_bytes(source.encode())
    model = imported(path, "odd_program").Model()
    x = torch.tensor([200.0, 0.5])
    with watch(model), pytest.raises(NonFiniteError) as error:
        model(x)
    finding = error.value.report.finding
    assert finding is not None
    if source is LAMBDAS and sys.version_info < (3, 11):
        assert any("several functions begin on line 12" in one for one in finding.remarks)
        return
    (patch,) = (one.patch for one in finding.cures if one.works)
    (tmp_path / "cure.patch").write_bytes(patch.encode())
    subprocess.run(["git", "apply", "cure.patch"], cwd=tmp_path, check=True)
    before, after = source.splitlines(keepends=True), path.read_bytes().decode().splitlines(keepends=True)
    ((old, now),) = ((a, b) for a, b in zip(before, after, strict=True) if a != b)
    assert (now.strip(), now[len(now.rstrip()) :]) == (new, old[len(old.rstrip()) :])
    assert imported(path, "odd_program").Model()(x).isfinite().all()
