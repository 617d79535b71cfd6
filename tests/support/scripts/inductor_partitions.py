"""How Inductor cuts a watched model for CUDA graphs, on a machine without a GPU: printed as JSON.

Dynamo's graph of the model is traced on the host and handed to Inductor as one for a GPU: tensors without data, a
torch.cuda that says there is one. Inductor plans the graph as it does with a GPU (the scheduler, its partitions and
what CUDA graph trees are told of them) and is stopped before it would generate code.

Arguments: the library made of tests/native/cuda_host/guard.cpp.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

import nanwatch
from nanwatch.instrumentation.compile import dynamo
from support.stand_in_device import stand_in


class Enough(BaseException):
    """Inductor has planned."""


class Device:
    """Properties of a GPU that Inductor asks for."""

    major, minor, multi_processor_count, warp_size = 9, 0, 132, 32
    name, gcnArchName, total_memory = "stand-in", "", 1 << 37
    regs_per_multiprocessor, max_threads_per_multi_processor = 65536, 2048


CUDA = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_properties": lambda *_: Device(),
    "get_device_capability": lambda *_: (9, 0),
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda *_: None,
    "_exchange_device": lambda *_: 0,
    "_maybe_exchange_device": lambda *_: 0,
    "_lazy_init": lambda: None,
}


class TakesTable(nn.Module):
    """Has a part that is given a tensor of another device along, and asks for its shape only."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.part(x, table) * 2


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.sin(x * self.weight) + table.shape[0]


def dynamo_graph(call: Callable[..., Tensor], *given: Tensor) -> tuple[Any, list[Tensor]]:
    """The graph that Dynamo hands to a backend that captures what is on the host here, and its inputs."""
    found: list[Any] = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        found.append((graph, inputs))
        return graph.forward

    torch._dynamo.reset()
    as_gpu = mock.patch.object(dynamo, "DEVICE_TYPE", "cpu")
    as_inductor = mock.patch.object(dynamo, "_setting", return_value=True)
    with torch.no_grad(), as_gpu, as_inductor:
        torch.compile(call, backend=backend, fullgraph=True)(*given)
    ((graph, inputs),) = found
    return graph, inputs


def placeholders(graph: Any) -> list[str]:
    """The names of the inputs, in their order."""
    return [node.name for node in graph.graph.nodes if node.op == "placeholder"]


def kind_of(x: Tensor) -> Any:
    """Not None if Dynamo says that it stays where it is: CUDA graph trees let a graph write to it."""
    return getattr(x, "_dynamo_static_input_type", None)


def on_gpu(graph: Any, inputs: list[Tensor], mode: FakeTensorMode) -> list[Tensor]:
    """The inputs on a GPU, without data. What stands for the host stays there."""
    moved = []
    with mode:
        for name, x in zip(placeholders(graph), inputs, strict=True):
            stays = name.endswith("impl_sequence") or x.device.type == "meta"
            moved.append(torch.empty(x.shape, dtype=x.dtype, device="cpu" if stays else "cuda"))
    return moved


def planned(graph: Any, inputs: list[Tensor]) -> list[dict[str, Any]]:
    """The partitions that Inductor makes of it."""
    plan: list[dict[str, Any]] = []
    names = placeholders(graph)
    static = {name for name, x in zip(names, inputs, strict=True) if kind_of(x) is not None}

    def log(self: Any, partitions: Any, signatures: Any) -> None:
        of_graph = list(V.graph.graph_inputs)
        for partition, signature in zip(partitions, signatures, strict=True):
            written = [
                of_graph[i] for i in V.graph.mutated_input_idxs if of_graph[i] in signature.input_nodes
            ]
            plan.append(
                {
                    "captured": not signature.skip_cudagraph,
                    "operators": [str(getattr(node.node, "op_overload", "kernel")) for node in partition],
                    "devices": sorted({str(one.get_device()) for one in signature.input_nodes.values()}),
                    "written": len(written),
                    "written_and_moving": sum(names[of_graph.index(name)] not in static for name in written),
                }
            )
        raise Enough

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = on_gpu(graph, inputs, mode)
    with (
        mock.patch.multiple(torch.cuda, **CUDA),
        mock.patch.object(scheduler, "has_triton", return_value=True),
        mock.patch.object(scheduler.Scheduler, "_log_graph_partitions", log),
        mock.patch.object(joint_graph, "lazy_init"),
        mock.patch.object(post_grad, "lazy_init"),
        config.patch({"triton.cudagraphs": True, "fx_graph_cache": False, "pattern_matcher": False}),
        torch._guards.tracing(torch._guards.TracingContext(mode)),
        torch.no_grad(),
    ):
        try:
            compile_fx.compile_fx(graph, fakes)
        except Enough:
            return plan
    raise AssertionError("Inductor cut nothing")


def main() -> None:
    """Print the plans of all models."""
    ctypes.CDLL(sys.argv[1])
    x, table = torch.ones(2, 64), torch.ones(3, device="meta")
    layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    takes_table = TakesTable()
    with stand_in():  # a build without CUDA sources has no device of its own
        json.dump(all_plans(layers, takes_table, x, table), sys.stdout)


def all_plans(
    layers: nn.Module, takes_table: nn.Module, x: torch.Tensor, table: torch.Tensor
) -> dict[str, Any]:
    """Return the plans by what is compiled."""
    plans = {"unwatched": planned(*dynamo_graph(layers, x))}
    with nanwatch.watch(layers):
        plans["whole"] = planned(*dynamo_graph(layers, x))
    with nanwatch.watch(takes_table):
        plans["called by a function"] = planned(
            *dynamo_graph(lambda x, table: takes_table(x, table), x, table)
        )
        plans["a forward alone"] = planned(*dynamo_graph(takes_table, x, table))
    return plans


if __name__ == "__main__":
    main()
