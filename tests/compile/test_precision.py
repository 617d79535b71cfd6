"""run_in_fp32 under torch.compile."""

from __future__ import annotations

import copy

import torch
from torch import nn

from nanwatch import run_in_fp32
from support.narrow import HALF, Take, both, surroundings


@both
def test_compiled_in_one_graph(is_half: bool) -> None:
    """torch.compile(fullgraph=True) of a model with a float32 module equals the eager one, gradients included."""
    model, x, context = surroundings(is_half)
    run_in_fp32(model[1])
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with context():
        y, expected = compiled(x), eager(x)
    assert torch.equal(y, expected)
    y.float().square().sum().backward()
    expected.float().square().sum().backward()
    for got, wanted in zip(model.parameters(), eager.parameters(), strict=True):
        # The traced backward adds up in another order.
        torch.testing.assert_close(got.grad, wanted.grad, rtol=2e-3, atol=2e-3)
    assert torch.equal(model[1].norm.running_mean, eager[1].norm.running_mean)


def test_a_compiled_model_takes_it_up_and_lets_it_go() -> None:
    """After compilation too: the graph is made anew when a module goes to float32 and when it comes back."""
    model = nn.Sequential(Take(lambda x: x * 300), nn.Sequential(Take(lambda x: (x * x).log())))
    compiled, x = torch.compile(model, backend="aot_eager", fullgraph=True), torch.ones(2, dtype=HALF)
    assert compiled(x).isinf().all()
    handle = run_in_fp32(model[1])
    assert compiled(x).isfinite().all()
    handle.remove()
    assert compiled(x).isinf().all()
