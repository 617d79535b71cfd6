"""docs/architecture.md and where-to-start.md: rows lead to what they name, rooms and order are those of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.cli.commands import COMMANDS
from nanwatch.recording.events import RecorderEvents
from nanwatch.session.dispatch import EventDispatch
from nanwatch.session.failure_handler import FailureHandler
from nanwatch.sinks.sink import SinkStream
from nanwatch.trace.tracer import Tracer
from support.paths import ROOT

TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "where-to-start.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "python" / "nanwatch"
CODE = {".py", ".h", ".cpp", ".cu"}
OTHERS = {".md", ".yml", ".jinja", ".js"}
SPAN = re.compile(r"`([^`]+)`(?: \(((?:`[^`]+`[,;]? ?)+))?")


def table(heading: str, text: str = TEXT) -> list[list[str]]:
    """The rows of the first table below a heading, without its head."""
    lines = text.partition(f"{heading}\n")[2].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    last = next((i for i in range(first, len(lines)) if not lines[i].startswith("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[first + 2 : last]]


def named(words: str) -> Iterator[tuple[str, Path | None, list[str]]]:
    """Yield each path of a row as it is written, where it is, and what to look for in it."""
    folder = PACKAGE
    for path, names in SPAN.findall(words):
        if "/" not in path and Path(path).suffix not in CODE | OTHERS:
            continue
        places = [base / path for base in (folder, PACKAGE, ROOT)]
        place = next((place for place in places if place.exists()), None)
        yield path, place, re.findall(r"`([^`]+)`", names)
        if place is not None:
            folder = place if place.is_dir() else place.parent


def defined(file: Path) -> set[str]:
    """The names that a file defines; of C++, all of its words."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return set(re.findall(r"\w+", re.sub(r"//.*", "", text)))
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@pytest.mark.parametrize("row", table("# Where to start", START), ids=lambda row: row[0].replace("`", ""))
def test_where_to_start_leads_there(row: list[str]) -> None:
    """Each file exists, and a file of code defines what the row says to look for in it."""
    _, words = row
    paths = list(named(words))
    assert paths
    assert not [path for path, place, _ in paths if place is None]
    for path, place, names in paths:
        if place is not None and place.suffix in CODE:
            assert names, f"{path}: say in brackets what to look for"
            assert set(names) <= defined(place), path


def test_the_rooms_are_those_that_the_linter_holds() -> None:
    """In the order in which imports point down."""
    rooms = [re.findall(r"`(\w+)`", row[0]) for row in table("# Architecture")]
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = settings.partition("\nlayers = [")[2].partition("\n]")[0].split(",")
    layered = [re.findall(r"\w+", layer) for layer in layers if layer.strip()]
    assert rooms == [[room for room in layer if (PACKAGE / room).is_dir()] for layer in layered]
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {room for line in rooms for room in line} == folders


def test_the_commands_are_all_named() -> None:
    """In the purpose of `cli`."""
    purpose = next(row[1] for row in table("# Architecture") if row[0] == "`cli`")
    assert sorted(purpose.removeprefix("the commands: ").split(", ")) == sorted(COMMANDS)


def test_the_folders_of_csrc_are_all_there() -> None:
    """Each has its line."""
    rows = table("`numerics`, `cpu`, `cuda` and `blackbox` include neither PyTorch nor Python.")
    folders = {folder for row in rows for folder in re.findall(r"`(\w+)`", row[0])}
    assert folders == {
        path.name for path in (ROOT / "csrc").iterdir() if path.is_dir() and path.name != "__pycache__"
    }


def test_the_end_of_a_batch_goes_in_the_order_of_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The handler's `forward_left` first, the batch limit last."""
    called: list[str] = []

    def note(kind: type, name: str) -> None:
        before = getattr(kind, name)

        def noted(self: Any, *args: Any) -> Any:
            called.append(f"{kind.__name__}.{name}")
            return before(self, *args)

        monkeypatch.setattr(kind, name, noted)

    for kind, name in (
        (FailureHandler, "batch_ended"),
        (FailureHandler, "conclude"),
        (Tracer, "batch_ended"),
        (SinkStream, "settle"),
        (FailureHandler, "forward_left"),
    ):
        note(kind, name)
    model = nn.Identity()
    with (
        pytest.raises(nanwatch.BatchLimitError),
        nanwatch.watch(model, trace=tmp_path / "run.parquet", abort_after_batch=0),
    ):
        model(torch.ones(1))
    assert called == [
        "FailureHandler.forward_left",
        "Tracer.batch_ended",
        "FailureHandler.conclude",
        "SinkStream.settle",
        "FailureHandler.batch_ended",
    ]
    sentence = " ".join(TEXT.partition("At the end of a batch")[2].partition("limit comes last")[0].split())
    assert re.findall(r"`(\w+)`", sentence) == [one.partition(".")[2] for one in called]


def test_a_watch_has_only_what_a_user_calls() -> None:
    """The recorder's callbacks are the dispatch's."""
    callbacks = {name for name in vars(RecorderEvents) if name.startswith("on_")}
    assert callbacks <= set(dir(EventDispatch))
    assert not [name for name in dir(nanwatch.Watch) if name.startswith("on_")]
