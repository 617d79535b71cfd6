"""Tensors of a few elements expanded to 2^40 take the time of the few, wherever they are looked at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from support.watching import watch

pytestmark = pytest.mark.usefixtures("each_recorder")
DTYPES = [torch.float32, torch.int64, torch.complex64]
HUGE = 2**40


class First(nn.Module):
    """Hands on the first row of its input, and the input too; has a huge buffer."""

    def __init__(self, few: Tensor) -> None:
        super().__init__()
        self.register_buffer("huge", few.expand(HUGE, 2), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[0], x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", [False, True])
def test_a_watched_call_of_huge_tensors(dtype: torch.dtype, counts: bool) -> None:
    """Their ranges are those of the few elements, and counts are of all."""
    few = torch.tensor([0, 3]).to(dtype)
    model = First(few)
    with watch(model, counts=counts, gradients=True) as w:
        model(few.expand(HUGE, 2))
    shapes = {record.label: (record.shape, record.abs_min, record.abs_max) for record in w.frames[0].records}
    assert shapes["input[0]"] == shapes["output[1]"] == ((HUGE, 2), 0.0, 3.0)
    assert shapes["output[0]"] == ((2,), 0.0, 3.0)
    if dtype.is_floating_point or dtype.is_complex:
        assert shapes["huge"] == ((HUGE, 2), 0.0, 3.0)
    if counts:
        found = [record.health for record in w.frames[0].records if record.label == "input[0]"]
        assert [health.num_zero for health in found if health is not None] == [HUGE]
