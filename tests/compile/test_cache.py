"""The cache of the recorder under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.numerics import _extension
from support.toys import fresh, seen
from support.watching import watch

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder remembers nothing")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), [(torch.optim.AdamW, "fused"), (torch.optim.SGD, "foreach")])
def test_weights_are_current_after_a_compiled_step(kind: type[Any], how: str) -> None:
    """A step inside torch.compile has the hook too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = kind(model.parameters(), lr=0.1, **{how: True})
    step = torch.compile(optimizer.step, backend="eager")
    with watch(model, verify_hits=True) as w:
        for _ in range(4):
            model(torch.randn(3, 4)).square().sum().backward()
            assert seen(w, "weight", "0") == fresh(model[0].weight)
            step()
            optimizer.zero_grad()
    assert w.counters["stale_hits"] == 0
