"""Sentences on the operands of the operation that failed, in the words of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanwatch.session.api import watch
from support.toys import fault_of

ROWS = torch.arange(32.0).view(4, 8) + 1
ABSENT = ROWS.log().index_fill(0, torch.tensor([1]), float("-inf"))


class Adapter(nn.Module):
    """Computes a function of itself and of its arguments. Row 40 of its weight is zero."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.lora_B = nn.Linear(8, 64, bias=False)
        with torch.no_grad():
            self.lora_B.weight[40] = 0

    def forward(self, x: Tensor, labels: Any = None, teacher_logps: Any = None) -> Tensor:
        return self.function(self, x, labels, teacher_logps)


def distance(self: Adapter, x: Tensor, labels: Any, teacher_logps: Tensor) -> Tensor:
    return (x.softmax(-1) * (x.log_softmax(-1) - teacher_logps)).sum()


@pytest.mark.parametrize(
    ("function", "args", "cause"),
    [
        (lambda _, x, labels, __: F.cross_entropy(x, labels), (ROWS, torch.full((4,), -100)),
         "all 4 labels are ignore_index (-100): the mean is that of nothing"),
        (lambda _, x, labels, __: F.cross_entropy(x, labels, torch.arange(8.0)), (ROWS, torch.tensor([0, 0, -100, 0])),
         "all 3 labels are of classes of weight 0: the mean is that of nothing"),
        (lambda _, x, *__: x.mean(), (ROWS[:0],), "the batch is empty: `x` has shape [0, 8]"),
        (lambda _, x, *__: x[x < 0].mean(), (ROWS,), "operand[0] is empty, of shape [0]"),
        (lambda _, x, *__: x.masked_fill(x < 9, float("-inf")).softmax(-1), (ROWS,),
         "its operand is -inf everywhere along dimension 1 in 1 of 4 rows, the first at [0]: a row in which everything"
         " is masked leaves softmax nothing to choose from"),
        (lambda _, x, *__: (3 - x).log(), (ROWS,),
         "29 of 32 elements of its operand are below 0, the least -29: a guard fits only if rounding took them there"),
        (lambda _, x, *__: x.acos(), (ROWS,),
         "31 of 32 elements of its operand are above 1, the largest 32: a guard fits only if rounding took them there"),
        (lambda _, x, *__: torch.full_like(x[0], float("-inf")).softmax(-1), (ROWS,),
         "its operand is -inf everywhere along dimension 0 in 1 of 1 rows, the first at []: a row in which everything"
         " is masked leaves softmax nothing to choose from"),
        (distance, (ROWS, None, ABSENT), "`teacher_logps` came in with 8 -inf: 1 of 4 rows, row 1"),
    ],
)  # fmt: skip
def test_the_report_says_what_is_so(function: Any, args: tuple[Any, ...], cause: str) -> None:
    """The sentence is a remark of the finding."""
    model = Adapter(function)
    with watch(model):
        finding = fault_of(model, *args).finding
    assert cause in finding.remarks
