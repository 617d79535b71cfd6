"""torch.compile beside other abilities: attention logits, the black box, run_in_fp32, re-runs, no compiled part."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nanwatch import run_in_fp32, watch
from nanwatch.blackbox.reader import BlackBoxReport
from nanwatch.blackbox.reader import read as read_black_box
from support.black_boxes import black_box, needs_box
from support.narrow import HALF, both, surroundings
from support.processes import environment, forked
from support.toys import Does


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.scaled_dot_product_attention(self.project(x), x, x, is_causal=True)
        return functional.softmax(y, dim=-1)


def test_compiled_attention_is_one_graph_with_the_same_numbers() -> None:
    """The replaced functions break no graph; only the layer that is not compiled has logits."""
    torch.manual_seed(0)
    model = nn.Sequential(CausalAttention(), CausalAttention())
    x = torch.randn(2, 2, 5, 8)
    expected = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    compiled = torch.compile(model[0], backend="aot_eager", fullgraph=True)
    with watch(model, attention=1) as w:
        found = model[1](compiled(x))
        assert list(w.attention) == ["1"]
    assert torch.equal(found, expected)
    assert torch.equal(model[1](compiled(x)), expected)


@needs_box
def test_modules_of_compiled_code_are_in_the_file(tmp_path: Path) -> None:
    """As ended calls without a beginning; the outermost call is under way meanwhile."""
    seen: list[BlackBoxReport] = []

    class Graphless(nn.Module):
        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(read_black_box(box.path))
            return x

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Graphless())
    with black_box(tmp_path) as box, watch(model, black_box=True):
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            compiled(torch.ones(2, 4))
        report = read_black_box(box.path)
    assert {one.batch for one in report.calls} == {0, 1, 2}
    latest = [one for one in report.calls if one.batch == 2]
    assert {one.module for one in latest} == {"", "0", "1", "2"}
    assert report.threads == ()
    assert seen[-1].threads[0].calls[0].module == ""


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
    model = nn.Sequential(Does(lambda x: x * 300), nn.Sequential(Does(lambda x: (x * x).log())))
    compiled, x = torch.compile(model, backend="aot_eager", fullgraph=True), torch.ones(2, dtype=HALF)
    assert compiled(x).isinf().all()
    handle = run_in_fp32(model[1])
    assert compiled(x).isfinite().all()
    handle.remove()
    assert compiled(x).isinf().all()


_PROGRAM = """
import torch, nanwatch
from torch import nn
model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
with nanwatch.watch(model) as watch:
    torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 2)).sum().backward()
    model[1](torch.ones(2))
print([frame.name for frame in watch.frames])
"""


@pytest.mark.slow
def test_compiled_code_is_not_watched_and_the_user_is_told() -> None:
    """One warning with the reason; the graph is whole, and calls in the interpreter are recorded."""
    done = forked("-c", _PROGRAM, env=environment(NANWATCH_EXT="0"), imported=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['1.0', '1']"
    assert done.stderr.count("calls inside torch.compile need the compiled part") == 1
