"""A capsule from a stranger: opening it runs no code, reads no other file, and fails by CapsuleError alone."""

from __future__ import annotations

import os
import pickle
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nanwatch import Capsule, write_capsule
from nanwatch.capsule.capsule import CapsuleError
from support.toys import mlp


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_capsule(tmp_path / "c", mlp(), "", (torch.randn(2, 3), [{"a": 1}])) / "call.pt"


def error_of(file: Path) -> str:
    with pytest.raises(CapsuleError) as caught:
        Capsule.open(file.parent)
    assert str(file) in str(caught.value)
    return str(caught.value)


class Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


def test_no_code_of_the_file_runs(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(torch.load(file, weights_only=True) | {"module": Attack()}, file)
    error_of(file)
    file.write_bytes(pickle.dumps(Attack()))
    error_of(file)
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"args": None}, "'args'"),
        ({"version": 7}, "version is 7"),
        ({"training": {}}, "'training'"),
        ({"state": {"0.weight": 1}}, "'state'"),
        ({"args": ({"nanwatch": "pickle"},)}, "whose key 'nanwatch' has no meaning"),
        ({"rng": [torch.ones(3)]}, "'rng'"),
        ({"device": "attic"}, "RuntimeError"),
        ({"finding": "{}"}, "report"),
    ],
)
def test_the_error_names_file_and_place(file: Path, change: dict[str, Any], expected: str) -> None:
    torch.save(torch.load(file, weights_only=True) | change, file)
    assert expected in error_of(file)


def test_containers_that_hold_themselves_or_each_other(file: Path) -> None:
    """One that holds itself is refused, and thirty that hold the next one twice are read in no time."""
    endless: list[Any] = []
    endless.append(endless)
    document = torch.load(file, weights_only=True)
    torch.save(document | {"args": (endless,)}, file)
    assert "nested too deeply" in error_of(file)
    doubled: list[Any] = []
    for _ in range(30):
        doubled = [doubled, doubled]
    torch.save(document | {"args": (doubled,)}, file)
    assert len(Capsule.open(file.parent).args) == 1


def test_damaged_bytes_give_a_capsule_or_its_error(file: Path) -> None:
    """Cut or changed anywhere: nothing but CapsuleError is raised."""
    whole = file.read_bytes()
    for keep in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:keep])
        error_of(file)
    chance = random.Random(0)
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        file.write_bytes(data)
        with suppress(CapsuleError):
            Capsule.open(file.parent)


def test_only_a_regular_file_is_read(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")
    assert "no regular file" in error_of(file)
    file.unlink()
    os.mkfifo(file)
    assert "no regular file" in error_of(file)
