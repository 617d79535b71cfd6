"""Modules, imports and code: each seen without a call of the user's own."""

import importlib
import json
import sys

from torch import nn

from nanwatch.util import program


def test_the_order_is_that_of_pytorch() -> None:
    """A module under two names comes once, under the first, and so does a tied weight."""
    shared = nn.Linear(2, 2)
    twins = nn.ModuleDict({"x": shared, "y": nn.Linear(2, 2)})
    model = nn.Sequential(nn.Sequential(nn.ReLU(), shared), twins)
    twins["y"].weight = shared.weight
    model.register_module("absent", None)
    assert list(program.each_module(model)) == list(model.named_modules())
    assert list(map(id, program.each_parameter(model))) == list(map(id, model.parameters()))
    for path, module in program.each_module(model):  # as another thread may
        module.register_module("late", None if path.endswith("late") else nn.Identity())


def test_values_of_a_frame_are_its_locals() -> None:
    """Asked twice, the second time sees what was bound since."""
    first = program.frame_values(sys._getframe())
    bound = object()
    second = program.frame_values(sys._getframe())
    assert "bound" not in first
    assert second["bound"] is bound


def test_an_action_waits_for_an_import_unless_it_is_called_off(tmp_path, monkeypatch) -> None:
    """It is done once, after the module's own code, and leaves no finder."""
    monkeypatch.syspath_prepend(tmp_path)
    names = ["nanwatch_test_late", "nanwatch_test_off"]
    for name in names:
        (tmp_path / f"{name}.py").write_text("value = 3\n")
    importlib.invalidate_caches()
    seen, finders = [], list(sys.meta_path)
    program.when_imported(names[0], lambda: seen.append(sys.modules[names[0]].value))
    program.when_imported(names[1], lambda: seen.append("off"))()
    assert seen == []
    for name in names:
        importlib.reload(importlib.import_module(name))
    assert (seen, sys.meta_path) == ([3], finders)
    program.when_imported(names[0], lambda: seen.append("at once"))
    assert seen == [3, "at once"]
    for name in names:
        del sys.modules[name]


def test_names_are_those_of_the_code_and_of_functions_inside() -> None:
    source = "def outer(self):\n    def inner():\n        return deeper\n    return self.step + helper()\n"
    assert {"step", "helper", "deeper"} <= program.names_of(compile(source, "train.py", "exec"))


def test_which_files_are_the_programs() -> None:
    files = (json.__file__, "/a/site-packages/b.py", "/a/dist-packages/b.py", "/a/b.py", __file__)
    assert [*map(program.is_library, files)] == [True, True, True, False, False]
