"""The statements that computed a loss: those that it needs, and none that may not run twice."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanwatch.diagnosis.loss_slice import RESULT, Caller, Cut, Refused, cut_of
from nanwatch.diagnosis.patching.source import SourceFile


def caught(body: str, folder: Path, **names: Any) -> tuple[Caller, SourceFile]:
    """The function of this body, as it is when it calls `backward`, which here keeps the caller."""
    path = folder / "train.py"
    path.write_text("def step(out, target):\n" + "".join(f"    {line}\n" for line in body.splitlines()))
    callers: list[Caller] = []

    def backward(*_: Any) -> None:
        frame = sys._getframe(1)
        end: tuple[int | None, int | None] = None, None
        if sys.version_info >= (3, 11):
            positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
            end = positions[1], positions[3]
        callers.append(Caller(frame.f_code, frame.f_lineno, end, dict(frame.f_locals), frame.f_globals))

    space: dict[str, Any] = {"torch": torch, "backward": backward, **names}
    exec(compile(path.read_text(), str(path), "exec"), space)
    space["step"](torch.ones(3, requires_grad=True).exp(), torch.zeros(3))
    file = SourceFile.load(str(path))
    assert file is not None
    return callers[0], file


def cut(body: str, folder: Path, **names: Any) -> Cut | None:
    """The statements behind the model's output, which is the one exponential."""
    caller, file = caught(body, folder, **names)
    return cut_of(caller, file, lambda node: node.name() != "ExpBackward0")


def spelt(found: Cut | None) -> list[str]:
    assert found is not None
    module = ast.fix_missing_locations(ast.Module(found.body, []))
    return ast.unparse(module).replace(RESULT, "LOSS").splitlines()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "a = out * 2\nb = 7\nloss = (a - target).sum()\nbackward(loss)",
            ["a = out * 2", "loss = (a - target).sum()", "LOSS = loss"],
        ),
        ("a = out * 2\na += target\nbackward(a.sum())", ["a = out * 2", "a = a + target", "LOSS = a.sum()"]),
        (
            "x, y = out, out * 3\nlog = print\nbackward((x * y).sum())",
            ["x, y = (out, out * 3)", "LOSS = (x * y).sum()"],
        ),
        (
            "a = out * 2\na.clamp_(min=0)\nc = a.mean()\nbackward(c)",
            ["a = out * 2", "a.clamp_(min=0)", "c = a.mean()", "LOSS = c"],
        ),
        (
            "if True:\n    a = out * 2\nelse:\n    a = out\nbackward(a.sum())",
            ["if True:", "    a = out * 2", "else:", "    a = out", "LOSS = a.sum()"],
        ),
        (
            "total = 0\nfor i in range(2):\n    total = total + out[i]\nbackward(total)",
            ["total = 0", "for i in range(2):", "    total = total + out[i]", "LOSS = total"],
        ),
        (
            "with torch.no_grad():\n    k = target.sum()\n    unused = 3\nloss = out.sum() * k\nbackward(loss)",
            ["loss = out.sum() * k", "LOSS = loss"],
        ),
    ],
    ids=["names", "augmented", "tuple", "in place", "branch", "loop", "target"],
)  # fmt: skip
def test_only_what_the_loss_needs_runs_again(tmp_path: Path, body: str, expected: list[str]) -> None:
    """What is finite and comes from no output of the model keeps its value."""
    assert spelt(cut(body, tmp_path)) == expected


def test_the_values_that_are_kept_are_those_it_reads(tmp_path: Path) -> None:
    """Not those that its statements make."""
    found = cut("a = out * 2\nloss = (a - target).sum()\nbackward(loss)", tmp_path)
    assert found is not None
    assert {"target", "torch"} >= found.reads.keys() - {"out"}
    assert "a" not in found.reads
    assert torch.equal(found.reads["target"], torch.zeros(3))


@pytest.mark.parametrize(
    "line",
    ["a = out * next(batches)", "a = out * float(open('/dev/null').read() or 1)", "a = (b := out * 2)"],
)
def test_what_may_not_run_twice_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    with pytest.raises(Refused, match=r"line 2 of .*train\.py should not run a second time"):
        cut(f"{line}\nbackward(a.sum())", tmp_path, batches=iter([torch.ones(3)]))


def test_a_frame_that_was_handed_the_loss_has_no_statements(tmp_path: Path) -> None:
    """Its caller has."""
    assert cut("backward(out)", tmp_path) is None
