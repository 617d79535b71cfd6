"""Compiled code writes its calls into the black box."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from nanwatch import watch
from nanwatch.blackbox.story import BlackBoxReport
from nanwatch.blackbox.story import read as read_black_box
from support.black_boxes import black_box, needs_box

pytestmark = needs_box


def test_modules_of_compiled_code_are_in_the_file(tmp_path: Path) -> None:
    """As ended calls without a beginning; the outermost call is under way meanwhile."""
    seen: list[BlackBoxReport] = []

    class Graphless(nn.Module):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(read_black_box(box.path))
            return x

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Graphless())
    with black_box(tmp_path) as box, watch(model, black_box=True):
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            compiled(torch.ones(2, 4))
        report = read_black_box(box.path)
    assert {one.batch for one in report.calls} == {0, 1, 2}
    latest = [one for one in report.calls if one.batch == 2]
    assert {one.module for one in latest} == {"", "0", "1", "2"}
    assert report.threads == ()
    assert seen[-1].threads[0].calls[0].module == ""
