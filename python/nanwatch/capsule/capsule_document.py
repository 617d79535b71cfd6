"""`capsule.json` read and checked, before and without the tensors.

Every function takes a value and the place of it, so that an error names the place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..instrumentation.execution_context import Autocast, RngState
from ..report.errors import CapsuleError
from ..report.finding import Finding
from ..report.report import SCHEMA as REPORT_SCHEMA
from ..report.report import VERSION as REPORT_VERSION
from ..report.report import Report
from ..util import reading
from . import tensor_file, tree
from .tensor_file import Entry
from .tree import Json, LeftOut

SCHEMA = "nanwatch.capsule"
VERSION = 1
DOCUMENT = "capsule.json"
TENSORS = "tensors.safetensors"
# In bytes; Python's objects for it take some twenty times as much.
MAX_DOCUMENT = 1 << 26

_T = TypeVar("_T")


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Whatever is wrong inside is wrong with this file."""
    try:
        yield
    except RecursionError:
        raise CapsuleError(f"{path}: nested too deeply for a capsule") from None
    except (ValueError, OSError) as error:
        reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise CapsuleError(
            f"{path}: {reason}; a capsule is a folder with {DOCUMENT} and {TENSORS}, as nanwatch wrote them"
        ) from error


def check_file(path: Path) -> None:
    """ValueError for what is no file of its own: a pipe would wait for ever, a link lead anywhere."""
    reading.check_regular(path, follows_links=False)


def _load(path: Path) -> Json:
    document = json.loads(
        reading.file_text(path, MAX_DOCUMENT, follows_links=False),
        parse_constant=reading.refuse_constant,
        object_pairs_hook=_no_doubles,
    )
    if isinstance(document, dict) and document.get("schema") == SCHEMA and document.get("version") != VERSION:
        version = reading.shorten(document.get("version"))
        raise ValueError(f"its version is {version}, this nanwatch reads version {VERSION}")
    return document


def _no_doubles(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has one key twice")
    return found


def _later(value: Json, where: str) -> Json:
    return value


def _left_out(value: Json, where: str) -> LeftOut:
    found = reading.members(
        value,
        where,
        {
            "what": reading.text,
            "type": reading.text,
            "bytes": reading.optional(reading.count),
            "why": reading.text,
        },
    )
    return LeftOut(found["what"], found["type"], found["bytes"], found["why"])


def _autocast(value: Json, where: str) -> Autocast:
    found = reading.members(
        value, where, {"device_type": tree.device, "dtype": tree.dtype, "enabled": reading.flag}
    )
    return Autocast(found["device_type"].type, found["dtype"], found["enabled"])


def _finding(value: Json, where: str) -> Finding | None:
    report = {"schema": REPORT_SCHEMA, "version": REPORT_VERSION, "frames": [], "batch": None, "rank": 0}
    try:
        return Report.from_json(json.dumps({**report, "finding": value})).finding
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def to_json(finding: Finding | None) -> Json:
    """A finding as a report has it."""
    return json.loads(Report((), finding, None).to_json())["finding"]


_MODULE = {
    "name": reading.text,
    "class": reading.text,
    "device": lambda value, where: str(tree.device(value, where)),
}

_MEMBERS: dict[str, Callable[[Json, str], Any]] = {
    "schema": reading.one_of((SCHEMA,)),
    "version": reading.one_of((VERSION,)),
    "label": reading.text,
    "versions": reading.mapping_of(reading.optional(reading.text)),
    "module": lambda value, where: reading.members(value, where, _MODULE),
    # Three that need the tensors.
    "args": reading.list_of(_later),
    "kwargs": reading.mapping_of(_later),
    "state": reading.mapping_of(reading.text),
    "training": reading.mapping_of(reading.flag),
    "rng": reading.mapping_of(reading.text),
    "autocast": reading.list_of(_autocast),
    "finding": _finding,
    "rank": reading.count,
    "tensors": reading.mapping_of(tensor_file.read_entry),
    "left_out": reading.mapping_of(_left_out),
}


class Document:
    """The document, read as far as that goes without the tensors. Raises ValueError or OSError."""

    def __init__(self, path: Path) -> None:
        self._found = reading.members(_load(path), "capsule", _MEMBERS)
        self.label: str = self._found["label"]
        self.entries: dict[str, Entry] = self._found["tensors"]
        if "" not in self._found["training"]:
            raise ValueError('capsule.training has no "", the flag of the module itself')
        if doubled := sorted(self.entries.keys() & self._found["left_out"].keys()):
            raise ValueError(
                f"{reading.shorten(doubled[0])} is among both capsule.tensors and capsule.left_out"
            )

    def fields(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The fields of a Capsule but for its folder, with the tensors of the other file in their places."""
        found = self._found
        known: dict[str, Any] = {**found["left_out"], **tensors}

        def value(given: Json, where: str) -> Any:
            return tree.read(given, where, known.__getitem__)

        def tensor(name: str, where: str) -> Any:
            return value({"tensor": name}, where)

        return {
            "module": found["module"]["name"],
            "class_name": found["module"]["class"],
            "device": found["module"]["device"],
            "args": tuple(value(x, f"capsule.args[{i}]") for i, x in enumerate(found["args"])),
            "kwargs": {key: value(x, f"capsule.kwargs[{key!r}]") for key, x in found["kwargs"].items()},
            "state": {name: tensor(x, f"capsule.state[{name!r}]") for name, x in found["state"].items()},
            "training": found["training"],
            "rng": _rng({kind: tensor(x, f"capsule.rng[{kind!r}]") for kind, x in found["rng"].items()}),
            "autocast": tuple(found["autocast"]),
            "finding": found["finding"],
            "rank": found["rank"],
            "versions": found["versions"],
            "left_out": tuple(found["left_out"].values()),
        }


def _rng(states: Mapping[str, Any]) -> RngState:
    cuda = [f"cuda:{i}" for i in range(len(states) - 1)]
    if set(states) != {"cpu", *cuda}:
        raise ValueError(
            f"capsule.rng should have cpu and cuda:0 and so on, got {reading.shorten(list(states))}"
        )
    for kind, state in states.items():
        if not isinstance(state, Tensor) or state.dtype is not torch.uint8 or state.dim() != 1:
            raise ValueError(f"capsule.rng[{kind!r}] should be a tensor of bytes")
    try:
        # In a generator of its own: torch checks that such a state can be.
        torch.Generator().set_state(states["cpu"])
    except RuntimeError as error:
        raise ValueError(f"capsule.rng['cpu'] is no random state of this torch: {error}") from None
    return RngState(states["cpu"], tuple(states[kind] for kind in cuda))
