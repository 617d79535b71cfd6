"""The way of a failure from the recorder's event to the exception: which files it enters, and how often it comes back.

A walk that comes back to a file again and again cannot be read from top to bottom.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.numerics import _extension
from nanwatch.report.report import NonFiniteError
from nanwatch.session.reports import Reports
from nanwatch.session.rerun_policy import RerunPolicy
from support.paths import ROOT

# The recorder in Python enters its own files on the way; the compiled one none.
pytestmark = pytest.mark.skipif(_extension.C is None, reason="no compiled part")

PACKAGE = f"{Path(nanwatch.__file__).parent}{os.sep}"
# Rooms of small values and helpers: they know of no failure.
BELOW = ("records", "numerics", "util")
# A re-run has a life of its own, in a process of its own. The search in the calls around reads tensors, call by call.
APART = (RerunPolicy.examine.__code__, Reports._first_nonfinite.__code__)
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_FILES, MOST_RETURNS = 15, 8


class Model(nn.Module):
    """The norm divides 0 by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4, eps=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.zeros_like(self.linear(x)))


def walk(**options: Any) -> list[str]:
    """The files that a failing call enters, from the recorder's event until the error that it raises is complete."""
    model, x = Model(), torch.ones(2, 4)
    stays: list[str] = []
    begun: set[FrameType] = set()  # generators, which are entered once
    apart: list[FrameType] = []
    end = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal end
        code = frame.f_code
        if event == "return" and apart and frame is apart[0]:
            apart.clear()
        if event != "call" or apart or not code.co_filename.startswith(PACKAGE) or frame in begun:
            return
        path = Path(code.co_filename.removeprefix(PACKAGE)).as_posix()
        if not (stays or code.co_name == "on_nonfinite") or path.startswith(BELOW):
            return
        if code.co_flags & inspect.CO_GENERATOR:
            begun.add(frame)
        if code in APART:
            apart.append(frame)
        stays.append(path)
        if code is NonFiniteError.__init__.__code__:
            end = len(stays)

    with nanwatch.watch(model, **options):
        with pytest.raises(NonFiniteError):
            model(x)  # imports and first times
        sys.setprofile(profile)
        try:
            with pytest.raises(NonFiniteError):
                model(x)
        finally:
            sys.setprofile(None)
    return [path for path, _ in itertools.groupby(stays[:end])]


@pytest.mark.parametrize("rerun", [True, False])
def test_the_walk_is_short(rerun: bool) -> None:
    """A return is an entry into a file that was left before."""
    stays = walk(rerun=rerun)
    files = set(stays)
    assert len(files) <= MOST_FILES, files
    assert len(stays) - len(files) <= MOST_RETURNS, stays


def test_the_page_lists_the_walk() -> None:
    """Each file once, in the order in which the walk first enters them."""
    section = PAGE.partition("## From a failure to an exception")[2].partition("\n## ")[0]
    listed = re.findall(r"^\d+\. `(\w+/\w+\.py)`", section, re.MULTILINE)
    assert listed == list(dict.fromkeys(walk()))
