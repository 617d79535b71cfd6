"""Attention logits of models with compiled parts: compiled code is as it was, the rest is read."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanwatch.session.api import watch


class Attention(nn.Module):
    """Projects, and calls attention and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.scaled_dot_product_attention(self.project(x), x, x, is_causal=True)
        return functional.softmax(y, dim=-1)


def test_compiled_attention_is_one_graph_with_the_same_numbers() -> None:
    """The replaced functions break no graph; only the layer that is not compiled has logits."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    x = torch.randn(2, 2, 5, 8)
    expected = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    compiled = torch.compile(model[0], backend="aot_eager", fullgraph=True)
    with watch(model, attention=1) as w:
        found = model[1](compiled(x))
        assert list(w.attention) == ["1"]
    assert torch.equal(found, expected)
    assert torch.equal(model[1](compiled(x)), expected)
