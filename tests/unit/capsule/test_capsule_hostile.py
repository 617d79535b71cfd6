"""A capsule from a stranger: opening it runs no code, reads no other file, and fails by CapsuleError alone."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from nanwatch import Capsule, replay, write_capsule
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
        ({"finding": "{}"}, "report"),
    ],
)
def test_the_error_names_file_and_place(file: Path, change: dict[str, Any], expected: str) -> None:
    torch.save(torch.load(file, weights_only=True) | change, file)
    assert expected in error_of(file)


def test_a_truncated_file_is_a_capsule_error(file: Path) -> None:
    """The error names the file, wherever it was cut."""
    whole = file.read_bytes()
    for keep in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:keep])
        error_of(file)


def test_an_error_shows_what_a_name_of_the_file_hides(file: Path) -> None:
    content = torch.load(file, weights_only=True)
    content["state"]["\x1b[31m"] = torch.ones(1)
    torch.save(content, file)
    with pytest.raises(ValueError, match=r"no weight or buffer \\x1b\[31m,"):
        replay(file.parent, mlp())
