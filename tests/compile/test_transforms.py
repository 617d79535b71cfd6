"""A watched model in torch.compile."""

from __future__ import annotations

import pytest
import torch

from nanwatch.session.watch import watch
from support.toys import mlp


@pytest.mark.parametrize("watched", ["before", "after"])
def test_torch_compile_takes_a_watched_model_whole(watched: str) -> None:
    """With fullgraph=True there is no break, and the result is the plain one's, whichever came first."""
    torch._dynamo.reset()
    model, plain = mlp(), mlp()
    x = torch.randn(2, 3)
    compiled = torch.compile(model, backend="eager", fullgraph=True) if watched == "after" else None
    with watch(model):
        compiled = compiled or torch.compile(model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), plain(x))
    assert torch.equal(compiled(x), plain(x))
