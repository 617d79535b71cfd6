"""Messages, suppressed exceptions, and the job."""

import ast
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.session.api import watch
from nanwatch.util import messages
from nanwatch.util.job import rank_and_world_size

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
    model, before = nn.Identity(), messages.counts.total()
    with caplog.at_level(logging.DEBUG, logger="nanwatch"), watch(model, rerun=False, forecast=False):
        model(torch.ones(2).as_subclass(Shapeless))
    assert messages.counts.total() - before == len(caplog.records) > 0
    assert "no shape today" in caplog.text
    assert caplog.records[0].levelno == logging.DEBUG


def test_a_keyboard_interrupt_is_not_suppressed() -> None:
    with messages.suppressing("a test"):
        raise ValueError("gone")
    assert messages.counts["a test"] == 1
    with pytest.raises(KeyboardInterrupt), messages.suppressing("a test"):
        raise KeyboardInterrupt
    assert messages.counts["a test"] == 1


def test_failures_that_never_end_are_worked_on_ever_less() -> None:
    due = [number for number in range(1, 200) if messages.is_due(number)]
    assert due == [*range(1, 21), 40, 80, 160]


def test_a_late_warning_is_at_the_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of `nanwatch run`, when no frame of the script is left."""
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    Path(main.__file__).write_text("import torch\n\nmain()\n")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(messages, "users_frame", lambda frame: None)
    with pytest.warns(RuntimeWarning, match="late") as caught:
        messages.warn_user("late")
    assert (caught[0].filename, caught[0].lineno) == (main.__file__, 3)


def test_the_jobs_own_word_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch.distributed has begun, rank and size are those of torchrun's environment, if they are numbers."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert rank_and_world_size() == (0, 1)
    finally:
        torch.distributed.destroy_process_group()
    assert rank_and_world_size() == (3, 4)
    monkeypatch.setenv("RANK", "first")
    assert rank_and_world_size() == (0, 1)
