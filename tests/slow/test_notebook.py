"""A notebook, executed by a kernel: `%load_ext nanwatch`, the report of a failure, and the cell of a cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.processes import PYTHONPATH

nbclient: Any = pytest.importorskip("nbclient", reason="needs a notebook: pip install nbclient ipykernel")
nbformat: Any = pytest.importorskip("nbformat")
manager: Any = pytest.importorskip("jupyter_client.manager")
pytest.importorskip("ipykernel")

MODEL = """
import nanwatch, torch
from torch import nn

class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)

model = nn.Sequential(nn.ReLU(), Log())
watch = nanwatch.watch(model)
"""
FAILS = "model(-torch.ones(3))"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))


def test_a_notebook_shows_reports_as_pages() -> None:
    """The failure's below its traceback, another where a cell ends with it; the file stays valid."""
    cells = ["%load_ext nanwatch", MODEL, FAILS, "watch.report()", "%unload_ext nanwatch", FAILS]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True).execute()
    nbformat.validate(notebook)
    load, define, failed, shown, unload, plain = (cell.outputs for cell in notebook.cells)
    assert [load, define, unload] == [[], [], []]
    error, page = failed
    assert (error.output_type, error.ename) == ("error", "NonFiniteError")
    assert page.data["text/html"].startswith('<iframe sandbox=""')
    assert "inf first seen in" in page.data["text/html"]
    (result,) = shown
    assert result.data["text/html"] == page.data["text/html"]
    assert result.data["text/plain"].startswith("Detected -inf in batch 0\n")
    assert [output.output_type for output in plain] == ["error"]


def test_the_cure_is_the_next_cell() -> None:
    """It says what it is, and is code that can be copied."""
    kernel, client = manager.start_new_kernel(kernel_name="python3")
    try:
        for cell in ("%load_ext nanwatch", MODEL):
            client.execute_interactive(cell, timeout=120, output_hook=lambda _: None)
        reply = client.execute_interactive(FAILS, timeout=120, output_hook=lambda _: None)
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    (cell,) = [output for output in reply["content"]["payload"] if output["source"] == "set_next_input"]
    head, code = cell["text"].splitlines()
    assert head.startswith("# nanwatch: keep what the logarithm is taken of away from 0")
    assert code == "return torch.log(x.clamp(min=1e-12))"
