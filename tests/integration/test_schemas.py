"""docs/schemas: the files are what their script writes, and each document is valid."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.cli import files
from nanwatch.report.events import Departure, SpikeReport
from support.black_boxes import black_box, needs_box
from support.paths import ROOT

X = torch.ones(3, 4)
LOSS = Departure("", "loss", 9.1, 2.4, nan)
CAUSES = (LOSS, Departure("", "gradients", inf, 0.0, inf))
FACTS: Any = {"first": LOSS, "forward": (LOSS,), "rates": (1e-3, 1e-2), "shares": ((3, 0.9),)}
SPIKE = SpikeReport(410, 0, CAUSES, "learning rate", **FACTS)


def failed() -> nanwatch.Report:
    """The report of a call that divides by zero, with what the re-run found."""
    model = nn.LayerNorm(2, eps=0.0)
    with nanwatch.watch(model, on_nonfinite="record", rerun=True) as watch:
        model(torch.zeros(1, 2))
    return watch.report()


def schema(name: str) -> Any:
    """A validator of the schema of a document."""
    text = (ROOT / "docs" / "schemas" / f"{name}.json").read_text(encoding="utf-8")
    jsonschema.Draft202012Validator.check_schema(json.loads(text))
    return jsonschema.Draft202012Validator(json.loads(text))


def test_the_files_are_what_the_script_writes() -> None:
    """The classes have changed, or a document is new."""
    script = runpy.run_path(str(ROOT / "docs" / "make_schemas.py"))
    written = {path.stem: path.read_text(encoding="utf-8") for path in script["PLACE"].iterdir()}
    assert written == {name: script["schema"](name) for name in script["DOCUMENTS"]}, (
        "run python docs/make_schemas.py"
    )


@pytest.mark.parametrize(
    ("name", "document"),
    [
        ("comparison", lambda: nanwatch.compare(nn.Linear(4, 4), nn.Linear(4, 4), X)),
        ("spike", lambda: SPIKE),
        ("report", failed),
    ],
)
def test_a_result_is_valid(name: str, document: Callable[[], Any]) -> None:
    """As its command prints it with --json."""
    schema(name).validate(json.loads(document().to_json()))


@needs_box
def test_a_black_box_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As its command prints it with --json, with calls, batches, frames and a note."""
    model = nn.Linear(4, 4)
    with black_box(tmp_path) as box, nanwatch.watch(model, black_box=True):
        model(X)
        box.note("stall", seconds=301, stacks={"MainThread": ["train.py:3 in main"]})
        assert files.show_main([str(box.path), "--json"]) == 0
    schema("blackbox").validate(json.loads(capsys.readouterr().out))
