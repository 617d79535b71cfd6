"""What a script that a test runs in this process leaves behind."""

import sys

import pytest


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put `__main__`, sys.argv and sys.path back, which stay the script's."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", sys.path[:])
