"""find_operation: which call is the guilty one."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nanwatch.diagnosis.batch_snapshot import BatchSnapshot
from nanwatch.diagnosis.search import find_operation
from nanwatch.session.api import watch
from support.examined import Does, culprit, look

INF, NAN = math.inf, math.nan


# Which call


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


def test_a_nan_among_infinities_that_are_allowed() -> None:
    """Calls whose infinities are allowed are passed over; the one with the nan is examined."""
    part = Does(lambda x: x / (x - 1))
    model = Does(lambda part, x: part(x * 0) + part(x) + part(x * torch.tensor(INF)), part)
    start = BatchSnapshot.capture(model, (torch.ones(2),), {})
    with watch(model, on_nonfinite="record", allow_inf=["parts.0", ""], read="weights buffers outputs") as w:
        model(torch.ones(2))
    finding = w.report().finding
    assert finding is not None
    seen = find_operation(start, finding, model=model)
    assert finding.value == "nan"
    assert seen.call is not None
    assert seen.call.args[0].tolist() == [INF, INF]
