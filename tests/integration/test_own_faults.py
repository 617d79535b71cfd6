"""Errors inside nanwatch: the report keeps its finding, the weights stay as they were, a message names the error."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from nanwatch import NonFiniteError, Report
from nanwatch.report.finding import Finding
from nanwatch.util import messages
from support.recorders import watched
from support.toys import Does

X = torch.tensor([[1.0, 2.0, -3.0], [0.0, 0.0, 0.0]])


def ratio(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


def root(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


def forward(dtype: torch.dtype = torch.float32) -> Report:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Does(ratio)).to(dtype)
    return failed(model, lambda: model(X.to(dtype)))


def half() -> Report:
    return forward(torch.float16)


def backward() -> Report:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), Does(root))
    return failed(model, lambda: model(X).sum().backward())


def loss() -> Report:
    model = nn.Linear(3, 3, bias=False)
    return failed(model, lambda: root(model(X)).sum().backward())


def failed(model: nn.Module, step: Callable[[], Any]) -> Report:
    """Return the report of the watched step and of the optimizer's, which is to fail."""
    torch.manual_seed(0)
    for x in model.parameters():
        nn.init.normal_(x)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        step()
        optimizer.step()

    with watched(model, "python", gradients=True), pytest.raises(NonFiniteError) as error:
        train()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(module._compiled_call_impl is None for module in model.modules())
    return error.value.report


@functools.cache
def without_faults(situation: Callable[[], Report]) -> Finding | None:
    return situation().finding


# What breaks, in which situation, and the words of a remark, of a warning, or of what is counted.
BROKEN = [
    ("diagnosis.rerun.examine", forward, "nanwatch could not re-run a failed batch: RuntimeError: broken"),
    ("diagnosis.search.of_forward", forward, "the finding could not be examined: RuntimeError: broken"),
    ("diagnosis.experiment.observe", forward, "the re-run of the batch ended: it raised RuntimeError: broken"),
    ("diagnosis.provenance.ProvenanceMode._look", forward, "aten.div.Tensor could not be followed: RuntimeError"),
    ("diagnosis.cures._Formats.go", half, "the search for another format failed: RuntimeError: broken"),
    ("diagnosis.patching.rounds.Rounds.go", forward, "the search for a change of the source failed: RuntimeErr"),
    ("history.monitor._version", forward, "the versions of weights could not be noted"),
    ("history.monitor.Suspicion._of_weights", forward, "the growth of weights could not be told"),
    ("recording.observe.tensor_health", forward, "the elements of a tensor could not be counted"),
    ("diagnosis.search._of_backward", backward, "the finding could not be examined: RuntimeError: broken"),
    ("diagnosis.experiment.run_backward", backward, "the backward could not be examined: RuntimeError: broken"),
    ("session.reports.ProgramCall.of_backward", loss, "the statements of the loss could not be kept"),
    ("diagnosis.rerun.ProgramCall.statements", loss, "the loss was not computed again: RuntimeError: broken"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "situation", "words"), BROKEN, ids=[one[0] for one in BROKEN])
def test_a_fault_of_our_own_costs_no_finding(
    target: str, situation: Callable[[], Report], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Module, tensor and value are those of the report without the fault."""
    monkeypatch.setenv("NANWATCH_RERUN", "in-process")  # a child's calls are not seen
    expected = without_faults(situation)
    before = messages.counts.copy()
    broken = mock.patch(f"nanwatch.{target}", side_effect=RuntimeError("broken"))
    with broken as was_called, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = situation().finding
    assert was_called.called
    told_first = attrgetter("module", "label", "value", "phase", "origin", "batch")
    assert told_first(found) == told_first(expected)
    assert found.index in (None, expected.index)  # None: the re-run finds it
    counted = messages.counts - before
    told = [*found.remarks, *(str(one.message) for one in warned), *counted]
    assert any(words in one for one in told), told
