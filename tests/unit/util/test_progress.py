"""The line that says how far long work is: not without a terminal, and never in an exception's way."""

from __future__ import annotations

import io
import sys

import pytest

from nanwatch.util import progress


@pytest.mark.parametrize("stderr", [None, io.StringIO()])
def test_without_a_terminal_nothing_is_written(
    stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress.shown() as tell:
        tell("reading", 1, 2)
    assert stderr is None or not stderr.getvalue()


def test_an_exception_goes_through() -> None:
    with pytest.raises(ValueError, match="a fault"), progress.shown():
        raise ValueError("a fault")
