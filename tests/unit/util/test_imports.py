"""Something to do when a module is imported: now, later, or never."""

from __future__ import annotations

import importlib
import sys

import pytest

from nanwatch.util.imports import when_imported


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
    assert when_imported(module, lambda: seen.append(sys.modules[module].value)) is not None
    finders = list(sys.meta_path)
    assert seen == []
    imported = importlib.import_module(module)
    assert seen == [3]
    assert imported.__spec__.loader is not None
    assert len(sys.meta_path) == len(finders) - 1
    importlib.reload(imported)
    assert seen == [3]


def test_it_is_done_at_once_or_called_off(module):
    """A module that is there needs no waiting. After `cancel`, also a second one, the import does nothing."""
    seen = []
    waiting = when_imported(module, lambda: seen.append(1))
    waiting.cancel()
    waiting.cancel()
    importlib.import_module(module)
    assert seen == []
    assert when_imported(module, lambda: seen.append(1)) is None
    assert seen == [1]
