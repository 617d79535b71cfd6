"""A capsule from a stranger: opening it runs no code, reads no other file, and fails by CapsuleError alone."""

from __future__ import annotations

import builtins
import copy
import io
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nanwatch import Capsule, CapsuleError, write_capsule
from support.capsules import Batch, Pair
from support.toys import mlp

pytest.importorskip("safetensors")

JSON, TENSORS = "capsule.json", "tensors.safetensors"
WEIGHT = "state[0.weight]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_capsule(tmp_path / "c", mlp(), "", (torch.randn(2, 3),))


def error_of(folder: Path) -> str:
    with pytest.raises(CapsuleError) as caught:
        Capsule.open(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda document: document.pop("args"), "capsule has no 'args'"),
        (lambda document: document["training"].clear(), 'capsule.training has no ""'),
        (
            lambda document: document["tensors"][WEIGHT].update(dtype="float16"),
            "capsule.json says F16 [4, 3]",
        ),
        (lambda document: document["tensors"][WEIGHT].update(shape=[2**62, 2**62]), "capsule.json says"),
        (lambda document: document["tensors"][WEIGHT].update(strides=[1]), "strides should be 2 numbers"),
    ],
)
def test_the_error_names_file_place_and_what_was_expected(
    folder: Path, change: Callable[[dict[str, Any]], object], expected: str
) -> None:
    document = json.loads((folder / JSON).read_text())
    change(document)
    (folder / JSON).write_text(json.dumps(document))
    message = error_of(folder)
    assert expected in message
    assert str(folder) in message


@pytest.mark.parametrize("raw", [b"", b"[]", b"\xff\xfe", b"NaN", b"[" * 200_000])
def test_a_document_that_is_none(folder: Path, raw: bytes) -> None:
    (folder / JSON).write_bytes(raw)
    assert JSON in error_of(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_truncated_tensors(folder: Path, keep: int) -> None:
    """Cut anywhere it is no capsule; the file is named."""
    file = folder / TENSORS
    file.write_bytes(file.read_bytes()[:keep])
    assert TENSORS in error_of(folder)


def test_no_pickle_is_used_and_no_other_file_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Written and opened with every way into pickle barred; of files, only the capsule's two are opened."""

    def barred(*_: object, **__: object) -> None:
        raise AssertionError("pickle was used")

    for owner, names in (
        (pickle, ("load", "loads", "dump", "dumps", "Unpickler", "Pickler")),
        (torch, ("load", "save")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, barred)
    folder = write_capsule(tmp_path / "c", mlp(), "", (torch.randn(2, 3), Pair(1, Batch(2))))
    opened: list[str] = []
    real = io.open

    def watched(file: Any, *rest: Any, **more: Any) -> Any:
        opened.append(str(file))
        return real(file, *rest, **more)

    monkeypatch.setattr(io, "open", watched)
    monkeypatch.setattr(builtins, "open", watched)
    before = set(sys.modules)
    capsule = Capsule.open(folder)
    assert set(sys.modules) == before
    assert opened == [str(folder / JSON)]
    assert copy.copy(capsule.state).keys() == dict(mlp().named_parameters()).keys()
