"""Calls of two models that are matched by the names of their modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import nanwatch


class Shared(nn.Module):
    """Three layers, each behind one shared norm, of which one call may be left out."""

    def __init__(self, *, skips: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.x, self.y, self.z = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.x(x))
        y = self.y(x)
        return self.norm(self.z(x if self.skips else x + 0 * self.norm(y)))


def test_a_call_of_a_shared_module_that_one_side_lacks_moves_no_other() -> None:
    """The third call of the norm is matched with the second of the other side, by the layers around it."""
    found = nanwatch.compare(Shared(skips=False), Shared(skips=True), torch.randn(2, 8))
    assert found.equal, found.to_text()
    norms = [one for one in found.modules if one.module_a == "norm"]
    assert (found.calls_a, found.calls_b, len(norms)) == (7, 6, 2)
    assert all(one.error == 0 for one in norms)
