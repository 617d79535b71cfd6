"""`nanwatch.bisect` names the module that is compiled wrongly, in at most log2(n) + 3 runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from math import ceil, log2
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import nanwatch


class Block(nn.Module):
    """Residual block with this function in its own forward."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.linear(self.norm(x)))


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None], x[None], x[None])[0]


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    F.gelu,
    lambda x: torch.softmax(x, dim=-1),
    attention,
    lambda x: 2.5 - x,
    lambda x: torch.matmul(x, x.T @ x),
    lambda x: torch.cumsum(x, 0),
    torch.relu,
    lambda x: torch.log1p(x * x),
]


class Plant(NamedTuple):
    """Miscompile: the place of its block, the name of the operation, and what is done to its node."""

    block: int
    operation: str
    change: Callable[[fx.Node], object]
    backward: bool = False


def call(function: Callable[..., Any], **kwargs: Any) -> Callable[[fx.Node], object]:
    """Return a change that calls another function, or with other arguments."""

    def change(node: fx.Node) -> None:
        node.target = function
        node.kwargs = {**node.kwargs, **kwargs}

    return change


def rounded(node: fx.Node) -> None:
    """Compute in bfloat16."""
    with node.graph.inserting_before(node):
        node.args = tuple(
            node.graph.call_method("float", (node.graph.call_method("bfloat16", (one,)),))
            for one in node.args
        )


def cut(node: fx.Node) -> None:
    """Cut the gradient."""
    with node.graph.inserting_after(node):
        detached = node.graph.call_method("detach", (node,))
    node.replace_all_uses_with(detached, lambda user: user is not detached)


def refuse(node: fx.Node) -> None:
    """Fail as a compiler does."""
    raise RuntimeError("no kernel")


# Other operations of kinds that the rest have too; a case takes 1 s.
SLOW = {"approximation", "wrong_dimension", "swapped_operands", "other_order"}
PLANTS = {
    "other_function": Plant(0, "sin", call(torch.cos)),
    "approximation": Plant(1, "gelu", call(F.gelu, approximate="tanh")),
    "wrong_dimension": Plant(2, "softmax", call(torch.softmax, dim=0)),
    "wrong_scale": Plant(3, "scaled_dot_product_attention", call(F.scaled_dot_product_attention, scale=0.36)),
    "swapped_operands": Plant(4, "sub", lambda node: setattr(node, "args", node.args[::-1])),
    "lower_precision": Plant(5, "matmul", rounded),
    "other_order": Plant(6, "cumsum", lambda node: setattr(node, "args", (node.args[0], 1))),
    "cut_gradient": Plant(7, "relu", cut, backward=True),
    "compiler_error": Plant(8, "log1p", refuse),
}


def backend_of(plant: Plant) -> Callable[..., Any]:
    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        for node in list(graph.graph.nodes):
            named = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            if node.op.startswith("call") and named == plant.operation:
                plant.change(node)
        graph.recompile()
        return graph.forward

    return backend


def make(*functions: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*map(Block, functions)), nn.Linear(8, 4))


@pytest.mark.parametrize(
    "plant",
    [
        pytest.param(plant, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, plant in PLANTS.items()
    ],
)
def test_a_miscompiled_module_is_named(plant: Plant) -> None:
    """The block, not its parts and not what holds it; the model is as it was, compiled or not.

    One has all blocks around it, the others their neighbours alone: each module takes 0.05 s to compile.
    """
    first = 0 if plant.backward else max(plant.block - 1, 0)
    model = make(*(FUNCTIONS if plant.backward else FUNCTIONS[first : plant.block + 2]))
    x = torch.randn(6, 8)
    expected = model(x)
    found = nanwatch.bisect(model, x, backend=backend_of(plant), loss=plant.backward)
    assert (found.module, found.class_name) == (f"1.{plant.block - first}", "Block"), found.to_text()
    assert found.runs <= ceil(log2(found.switches)) + 3
    assert bool(found.raised) == (plant.change is refuse)
    assert found.raised or found.error > 10 * found.floor
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_right_compiler_changes_nothing(backend: str) -> None:
    """Three runs, and not a word of a module."""
    found = nanwatch.bisect(make(*FUNCTIONS), torch.randn(6, 8), backend=backend, loss=True)
    assert found.equal, found.to_text()
    assert (found.changed_by, found.runs) == ("", 3)


@pytest.mark.slow  # a compiler of C++ for each graph, 0.5 s
@pytest.mark.parametrize(
    ("switch", "block"), [("inject_relu_bug_TESTING_ONLY", 1), ("inject_log1p_bug_TESTING_ONLY", 2)]
)
@pytest.mark.parametrize("kind", ["accuracy", "compile_error"])
def test_a_fault_of_inductor_is_named(switch: str, block: int, kind: str) -> None:
    """torch's own faults for tests."""
    config = importlib.import_module("torch._inductor.config")
    with config.patch({f"cpp.{switch}": kind, "fx_graph_cache": False}):
        found = nanwatch.bisect(make(*FUNCTIONS[6:]), torch.randn(6, 8), switches=["compile"])
    assert found.module == f"1.{block}", found.to_text()
    assert bool(found.raised) == (kind == "compile_error")


@pytest.mark.slow
def test_inductor_itself_changes_nothing() -> None:
    """Its rounding is below ten times the noise floor, and above the last bit."""
    assert nanwatch.bisect(make(*FUNCTIONS), torch.randn(6, 8), loss=True).equal
