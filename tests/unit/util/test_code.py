"""Modules, imports and code: each seen without a call of the user's own."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
from torch import nn

from nanwatch.util.imports import when_imported
from nanwatch.util.modules import each_module, each_parameter
from nanwatch.util.program_code import frame_values, is_library, names_of


def test_the_order_is_that_of_pytorch() -> None:
    """A module under two names comes once, under the first, and so does a tied weight."""
    shared = nn.Linear(2, 2)
    model = nn.Sequential(
        nn.Sequential(nn.ReLU(), shared), nn.ModuleDict({"x": shared, "y": nn.Linear(2, 2)})
    )
    model[1]["y"].weight = shared.weight
    model.register_module("absent", None)
    assert [(path, id(module)) for path, module in each_module(model)] == [
        (path, id(module)) for path, module in model.named_modules()
    ]
    assert [id(x) for x in each_parameter(model)] == [id(x) for x in model.parameters()]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that is not imported yet."""
    (tmp_path / "nanwatch_test_late.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "nanwatch_test_late"
    sys.modules.pop("nanwatch_test_late", None)


def test_it_waits_for_the_import(module):
    """The action comes once, after the module's own code, and the way it was found stays its own."""
    seen = []
    when_imported(module, lambda: seen.append(sys.modules[module].value))
    finders = list(sys.meta_path)
    assert seen == []
    imported = importlib.import_module(module)
    assert seen == [3]
    assert imported.__spec__.loader is not None
    assert len(sys.meta_path) == len(finders) - 1
    importlib.reload(imported)
    assert seen == [3]
    when_imported(module, lambda: seen.append("at once"))
    assert seen == [3, "at once"]


def test_it_is_called_off(module):
    """After `cancel`, also a second one, the import does nothing."""
    seen = []
    cancel = when_imported(module, lambda: seen.append(1))
    cancel()
    cancel()
    importlib.import_module(module)
    assert seen == []


SOURCE = """
def outer(self, x):
    global total
    total = self.step + helper(x)
    def inner():
        return deeper
    return inner
"""


def test_names_are_those_of_the_code_and_of_functions_inside() -> None:
    """Globals and attributes, mentioned or assigned."""
    assert {"total", "step", "helper", "deeper"} <= names_of(compile(SOURCE, "train.py", "exec"))


def test_values_of_a_frame_are_its_locals() -> None:
    """Asked twice, the second time sees what was bound since."""
    first = frame_values(sys._getframe())
    bound = object()
    second = frame_values(sys._getframe())
    assert "bound" not in first
    assert second["bound"] is bound


def test_which_files_are_the_programs() -> None:
    """Python, torch and installed packages are not."""
    files = (json.__file__, "/somewhere/site-packages/pack/age.py", "/home/user/train.py", __file__)
    assert [*map(is_library, files)] == [True, True, False, False]
