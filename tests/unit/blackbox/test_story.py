"""The report says where the process is: read by itself in the middle of a forward, a backward and a step."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch import watch
from nanwatch.blackbox.job import Job
from nanwatch.blackbox.story import BlackBoxReport
from nanwatch.blackbox.story import read as read_black_box
from support.black_boxes import black_box, needs_box
from support.toys import Does

pytestmark = needs_box


def calls(function: Any) -> nn.Module:
    """Return a Linear that calls a function in its forward."""
    return Does(lambda linear, x: (linear(x), function())[0], nn.Linear(4, 4))


def test_each_phase_is_told(tmp_path: Path) -> None:
    """In a backward, the innermost module that runs."""
    seen: list[BlackBoxReport] = []

    def look(*_: object) -> None:
        seen.append(read_black_box(box.path))

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), calls(look))
    steps = torch.optim.SGD(model.parameters())
    with black_box(tmp_path) as box, watch(model, black_box=True, gradients=True):
        look()
        model[0].register_forward_hook(lambda module, given, y: y.grad_fn.register_prehook(look) and None)
        for _ in range(2):
            y = model(torch.ones(2, 4))
            look()
            y.sum().backward()
            look()
            steps.step(lambda: look() or 0.0)  # type: ignore[func-returns-value, arg-type]
    begin, batches = seen[0], (seen[1:6], seen[6:11])
    assert (begin.phase, begin.batch, begin.num_calls) == ("", None, 0)
    for batch, (forward, after, backward, between, step) in enumerate(batches):
        assert (forward.phase, forward.batch, forward.under_way.module) == ("forward", batch, "1")
        assert (after.phase, after.batch, after.num_calls) == ("", batch, 5 * (batch + 1))
        assert (backward.phase, backward.batch) == ("backward", batch)
        assert (backward.gradient, between.phase) == (("0.0", "output"), "")
        assert (step.phase, step.batch, step.end) == ("step", batch, "runs")


def test_an_exception_is_placed_in_the_innermost_call_that_it_left(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), calls(lambda: 1 / 0))
    with black_box(tmp_path) as box, watch(model, black_box=True):
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 4))
        report = read_black_box(box.path)
    text = Job((replace(report, end="exception"),)).to_text()
    assert "Where:   batch 0, forward: 1 (Does) raised.\n" in text


def test_a_killed_process_runs_no_longer_before_its_parent_asks(tmp_path: Path) -> None:
    """Nobody may have waited for it: its number is still taken."""
    pid = os.fork()
    if pid == 0:
        try:
            watch(nn.Linear(2, 2), output_dir=tmp_path)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    (path,) = tmp_path.glob(f"blackbox/*-{pid}-*")
    try:
        assert read_black_box(path).end == "unknown"
    finally:
        os.waitpid(pid, 0)
