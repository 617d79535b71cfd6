"""rerun_forward: which call is the guilty one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.diagnosis.batch_snapshot import BatchSnapshot
from nanwatch.diagnosis.forward_rerun import rerun_forward
from nanwatch.session.api import watch
from support.examined import Does, culprit, exponential, look

INF, NAN = math.inf, math.nan


# Which call


class Third(nn.Module):
    """Calls its part three times, each time with ten times the value."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        for factor in (1, 10, 100):
            result = self.part(x * factor)
        return result


def test_the_third_call_of_a_module() -> None:
    """The guilty call is the one whose result is bad, with what it was handed."""
    finding, seen = look(Third(Does(torch.exp)), torch.ones(2))
    assert (finding.module, seen.operation) == ("part", "aten.exp.default")
    assert seen.call is not None
    assert (seen.call.name, seen.call.args[0].tolist()) == ("part", [100.0, 100.0])
    assert seen.operands[0].abs_max == 100.0


def test_a_module_that_calls_itself() -> None:
    """In a recursion the innermost bad call is found."""

    class Recursive(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            return self(x * 1e13, depth - 1) * 2 if depth else x  # culprit

    finding, seen = look(Recursive(), torch.ones(2), 3)
    assert (finding.origin, finding.source_module) == ("received", "")
    assert (seen.operation, seen.source) == ("aten.mul.Tensor", culprit(Recursive))
    assert seen.call is not None
    assert seen.call.args[1] == 1


def test_a_module_under_two_names() -> None:
    """A module shared between two parents is found by the name that its first frame has."""
    shared = Does(torch.exp)
    model = nn.Sequential(nn.Sequential(shared), Does(lambda x: x * 100), nn.Sequential(shared))
    finding, seen = look(model, torch.ones(2))
    assert (finding.module, seen.operation) == ("0.0", "aten.exp.default")
    assert seen.call is not None
    assert seen.call.args[0].tolist() == pytest.approx([100 * math.e] * 2)


def test_a_linear_layer_is_named_by_its_caller() -> None:
    """The line of a torch.nn module's operation is that of the code that called it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            nn.init.constant_(self.linear.weight, 1e30)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            return self.linear(x)  # culprit

    finding, seen = look(nn.Sequential(Block()), torch.full((2, 3), 1e10))
    assert finding.module == "0.linear"
    assert (seen.operation, seen.source) == ("aten.addmm.default", culprit(Block))


def test_a_line_that_there_is_not() -> None:
    """Where all code is PyTorch's own there is no line; code without a file has its name."""
    layer = nn.Linear(3, 3)
    nn.init.constant_(layer.weight, 1e30)
    _, seen = look(nn.Sequential(layer), torch.full((2, 3), 1e10))
    assert (seen.operation, seen.source) == ("aten.addmm.default", None)
    made: dict[str, Any] = {}
    exec("def forward(x):\n    return x / 0\n", made)
    _, seen = look(Does(made["forward"]), torch.ones(2))
    assert seen.source == "<string>:2"


def test_a_value_that_was_received() -> None:
    """Code between two calls of submodules: the operation is looked for in the module that called."""

    def forward(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        y = first(x)
        y = y / (y - y)  # culprit
        return second(y.transpose(0, 1))

    model = nn.Sequential(Does(forward, nn.Identity(), nn.Identity()))
    finding, seen = look(model, torch.ones(2, 3))
    assert (finding.origin, finding.source_module, finding.module) == ("received", "0", "0.parts.1")
    assert (seen.operation, seen.source) == ("aten.div.Tensor", culprit(forward))
    assert (seen.extent, seen.transient) == ("all", False)
    assert seen.call is not None
    assert seen.call.name == "0"


def test_a_value_from_a_module_that_is_not_watched() -> None:
    """The operations of submodules without a frame are looked at too."""
    model = Does(lambda first, second, x: second(first(x)), Does(exponential), nn.Identity())
    start = BatchSnapshot.capture(model, (torch.ones(2),), {})
    with watch(model, on_nonfinite="record", ignore_modules=["parts.0"]) as w:
        model(torch.ones(2))
    finding = w.report().finding
    assert finding is not None
    assert finding.origin == "received"
    seen = rerun_forward(start, finding, model=model)
    assert (seen.operation, seen.source) == ("aten.exp.default", culprit(exponential))


def test_a_module_that_spoils_its_own_input() -> None:
    """Written in place by the very module whose input is bad."""

    def forward(part: nn.Module, x: Tensor) -> Tensor:
        return part(x * 2)

    def spoil(x: Tensor) -> Tensor:
        x.div_(0)  # culprit
        return torch.zeros(2)

    finding, seen = look(Does(forward, Does(spoil)), torch.ones(2))
    assert (finding.label, finding.origin) == ("input[0]", "received")
    assert (seen.operation, seen.source) == ("aten.div_.Tensor", culprit(spoil))


def test_a_nan_among_infinities_that_are_allowed() -> None:
    """Calls whose infinities are allowed are passed over; the one with the nan is examined."""
    part = Does(lambda x: x / (x - 1))
    model = Does(lambda part, x: part(x * 0) + part(x) + part(x * torch.tensor(INF)), part)
    start = BatchSnapshot.capture(model, (torch.ones(2),), {})
    with watch(model, on_nonfinite="record", allow_inf=["parts.0", ""], read="weights buffers outputs") as w:
        model(torch.ones(2))
    finding = w.report().finding
    assert finding is not None
    seen = rerun_forward(start, finding, model=model)
    assert finding.value == "nan"
    assert seen.call is not None
    assert seen.call.args[0].tolist() == [INF, INF]
