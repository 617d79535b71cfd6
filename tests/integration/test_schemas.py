"""docs/schemas: the files are what their script writes, and a schema accepts what the reader accepts."""

from __future__ import annotations

import copy
import json
import runpy
from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.cli import files
from nanwatch.report.spike import Curve, Departure, SpikeReport, read_saved
from support.black_boxes import black_box, needs_box
from support.paths import GOLDEN, ROOT

X = torch.ones(3, 4)
LOSS = Departure("", "loss", 9.1, 2.4, nan)
SPIKE = SpikeReport(
    410,
    0,
    (LOSS, Departure("", "gradients", inf, 0.0, inf)),
    "learning rate",
    first=LOSS,
    forward=(LOSS,),
    rates=(1e-3, 1e-2),
    shares=((3, 0.9),),
    curves=(Curve("", "loss", (2.4, None, 9.1)),),
)
REPORTS = sorted(path.stem for path in GOLDEN.glob("*.json") if path.stem != "ranks")  # of several reports


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
        ("repetition", lambda: nanwatch.twice(lambda: torch.rand(2))),
        ("spike", lambda: SPIKE),
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


def changed(
    value: Any, place: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Callable[[Any], Any]]]:
    """Yield the places of a document, the items of a list as one, each with a function that leads to its holder."""
    children = (
        value.items()
        if isinstance(value, dict)
        else [("0", value[0])]
        if isinstance(value, list) and value
        else []
    )
    for key, child in children:
        yield (*place, key), lambda document: step(document, place)
        yield from changed(child, (*place, key))


def step(document: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        document = document[int(key) if isinstance(document, list) else key]
    return document


def broken(document: Any) -> Iterator[tuple[str, Any]]:
    """Yield the document with a member left out, one too many, or one of another type."""
    for place, holder in changed(document):
        if "explanation" in place:  # no reader reads it
            continue
        key: Any = place[-1]
        for what in ("gone", "wrong", "more"):
            one = copy.deepcopy(document)
            parent = holder(one)
            if isinstance(parent, list):
                parent[0] = {"surprise": 1}
            elif what == "gone":
                del parent[key]
            elif what == "wrong":
                parent[key] = {"surprise": 1}
            else:
                parent["surprise"] = 1
            yield f"{'.'.join(place)} {what}", one


def is_read(document: Any) -> bool:
    try:
        read_saved(json.dumps(document))
    except ValueError:
        return False
    return True


def saved(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


def test_every_report_is_valid() -> None:
    """Of each kind of finding, and without one."""
    validator = schema("report")
    for name in REPORTS:
        validator.validate(saved(name))


@pytest.mark.parametrize("name", ["backward_nan", "with_spreads_and_cures", "spike"])
def test_schema_and_reader_agree(name: str) -> None:
    """About a document, and about each of its members that is missing, unknown or of another type."""
    document = json.loads(SPIKE.to_json()) if name == "spike" else saved(name)
    validator = schema("spike" if name == "spike" else "report")
    assert validator.is_valid(document)
    apart = [what for what, one in broken(document) if validator.is_valid(one) != is_read(one)]
    assert apart == []
