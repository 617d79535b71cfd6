"""suppressed: what nanwatch swallows is counted and logged, and no broad `except` swallows anything without that."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.session.api import watch
from nanwatch.util import visible
from nanwatch.util.visible import MANY

PACKAGE = Path(nanwatch.__file__).parent


def _is_broad(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(map(_is_broad, kind.elts))
    return kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException"))


def _tells(handler: ast.ExceptHandler) -> bool:
    """Return whether it raises, mentions the exception, prints or counts it."""
    inside = [node for statement in handler.body for node in ast.walk(statement)]
    names = {node.id for node in inside if isinstance(node, ast.Name)}
    names |= {node.attr for node in inside if isinstance(node, ast.Attribute)}
    return any(isinstance(node, ast.Raise) for node in inside) or bool(
        names & {handler.name, "suppressed", "counts", "print_exc"}
    )


def test_every_broad_except_tells() -> None:
    """Each broad handler of the package raises, uses the exception, or calls suppressed()."""
    silent = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_silent = isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _tells(node)
            is_suppress = isinstance(node, ast.Call) and ast.unparse(node.func) == "contextlib.suppress"
            if is_silent or (is_suppress and any(map(_is_broad, node.args))):
                silent.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert silent == []


class Shapeless(torch.Tensor):
    """A tensor that does not tell its shape."""

    @property
    def shape(self) -> torch.Size:
        raise RuntimeError("no shape today")


def test_what_is_suppressed_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """The logger "nanwatch" gets a line at debug level for each count."""
    model, before = nn.Identity(), visible.counts.total()
    with caplog.at_level(logging.DEBUG, logger="nanwatch"), watch(model, rerun=False, forecast=False):
        model(torch.ones(2).as_subclass(Shapeless))
    assert visible.counts.total() - before == len(caplog.records) > 0
    assert "no shape today" in caplog.text
    assert caplog.records[0].levelno == logging.DEBUG


def test_an_outer_exception_stays_the_context() -> None:
    """suppressing() swallows an Exception, counts it, and lets KeyboardInterrupt through."""
    with visible.suppressing("a test"):
        raise ValueError("gone")
    assert visible.counts["a test"] == 1
    with pytest.raises(KeyboardInterrupt), visible.suppressing("a test"):
        raise KeyboardInterrupt
    assert visible.counts["a test"] == 1


def test_failures_that_never_end_are_worked_on_ever_less() -> None:
    """All of the first MANY, then MANY times a power of two."""
    due = [number for number in range(1, 10 * MANY) if visible.is_due(number)]
    assert due == [*range(1, MANY + 1), 2 * MANY, 4 * MANY, 8 * MANY]
