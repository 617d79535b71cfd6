"""The warnings of `on_nonfinite="warn"`: few, true, and at the user's own line."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.util.visible import warn_user
from support.toys import Scale
from support.watching import watch

INF = float("inf")


@contextmanager
def told() -> Iterator[list[warnings.WarningMessage]]:
    """All warnings, as they come."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def texts(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught]


@pytest.mark.usefixtures("each_recorder")
def test_a_run_of_nonfinite_batches_is_one_line_and_a_sum() -> None:
    """9 of 12 batches are bad, in all 6 modules: the first is told, and the batches are counted at stop()."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    with told() as caught:
        w = watch(model, on_nonfinite="warn")
        for batch in range(12):
            model(torch.full((2, 4), float("nan") if batch >= 3 else 1.0))
        (begun,) = texts(caught)
        w.stop()
        w.stop()
    assert begun.startswith("nan first seen in `input[0]` of the root module (Sequential) in batch 3; ")
    assert texts(caught)[1:] == ["non-finite batches: 9 of 12, first in the root module 9x"]
    assert {warning.category for warning in caught} == {RuntimeWarning}


def scales() -> nn.Sequential:
    return nn.Sequential(Scale(), Scale(), Scale())


def run(model: nn.Sequential, places: list[int | None], **options: Any) -> list[str]:
    """Return the warnings for batches whose first faulty module is given by its place; None is a good batch."""
    with told() as caught, watch(model, on_nonfinite="warn", **options):
        for place in places:
            for number, module in enumerate(model):
                module.factor = INF if number == place else 1.0
            model(torch.ones(1))
    return texts(caught)


def test_runs_become_rarer_lines() -> None:
    """Of five runs the first, second and fourth have a line each, and the end has the sum."""
    lines = run(scales(), [None, 1, 0, None, 2, None, 2, None, 2, None, 2, None])
    assert [re.sub(r"; Watch.report.*", "", line) for line in lines] == [
        "inf first seen in `output` of 1 (Scale) in batch 1",
        "inf first seen in `output` of 2 (Scale) in batch 4",
        "inf first seen in `output` of 2 (Scale) in batch 8",
        "non-finite batches: 6 of 12, first in '2' 4x, '1' 1x, '0' 1x",
    ]


# Where


def line_after() -> int:
    """The number of the line after the caller's."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno + 1


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize("check", ["module", "batch"])
def test_every_warning_is_at_the_users_line(check: Any) -> None:
    """The call of the model, and stop()."""
    model = nn.Sequential(nn.Sequential(Scale(INF)))
    lines = []
    with told() as caught:
        w = watch(model, on_nonfinite="warn", act_at=check)
        lines.append(line_after())
        model(torch.ones(1))
        lines.append(line_after())
        w.stop()
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line) for line in lines]


def test_a_warning_that_is_an_error_replaces_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """The sum goes to stderr when the block ends by an exception of its own."""

    def fail() -> None:
        model = nn.Sequential(Scale(INF))
        with watch(model, on_nonfinite="warn"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(torch.ones(1))
            raise LookupError("mine")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LookupError, match="mine") as caught:
            fail()
    assert caught.value.__context__ is None
    assert "non-finite batches: 1 of 1" in capsys.readouterr().err
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            warn_user("asked for")
