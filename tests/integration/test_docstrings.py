"""Examples in the docstrings of public names: each name has one, and it prints what it shows."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

import nanwatch
from nanwatch.instrumentation import functions


@pytest.fixture(autouse=True)
def _no_other_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take watches away that tests before have left: the oldest has the functions."""
    monkeypatch.setattr(functions, "_running", [])


NEEDS = {"transformers": "transformers", "lightning": "lightning", "Report": "jinja2"}
NEEDS |= dict.fromkeys(("Trace", "TraceError", "diff"), "pyarrow")
NAMES = [
    *(name for name in nanwatch.__all__ if name != "__version__"),
    "integrations.transformers.NanWatchCallback",
    "integrations.lightning.NanWatchCallback",
]


def public(name: str) -> Any:
    """Return the object, or skip the test where it needs a package that is not installed."""
    room, _, last = name.rpartition(".")
    needed = NEEDS.get(room.rpartition(".")[2] or last)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    return getattr(importlib.import_module(f"nanwatch.{room}" if room else "nanwatch"), last)


@pytest.mark.parametrize("name", NAMES)
def test_examples_print_what_they_show(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A public name has an example, which imports all it needs."""
    monkeypatch.chdir(tmp_path)
    documented = public(name)
    tests = doctest.DocTestFinder(recurse=False).find(documented, name, module=False, globs={})
    assert any(test.examples for test in tests), f"{name} has no example in its docstring"
    failed = sum(doctest.DocTestRunner().run(test).failed for test in tests)
    assert failed == 0, capsys.readouterr().out
