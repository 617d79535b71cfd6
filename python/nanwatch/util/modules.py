"""Modules and parameters of a model, also while another thread registers more: `list` copies a dict in one step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer


def each_module(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module of the tree once, with its path, in the order of `root.named_modules()`."""
    seen, left = set[int](), [("", root)]
    while left:
        path, module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            children = [(key, child) for key, child in list(module._modules.items()) if child is not None]
            left += [(f"{path}.{key}" if path else key, child) for key, child in reversed(children)]


def each_parameter(root: nn.Module) -> Iterator[Tensor]:
    """Yield each parameter of the tree once, in the order of `root.parameters()`."""
    tensors = (x for _, module in each_module(root) for x in list(module._parameters.values()))
    yield from {id(x): x for x in tensors if x is not None}.values()


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in all groups of an optimizer, none of one whose constructor has not ended."""
    return [x for group in getattr(optimizer, "param_groups", ()) for x in group["params"]]


def is_in(module: str, above: str) -> bool:
    """Return whether a module is the other one or inside it, by their names."""
    return not above or f"{module}.".startswith(f"{above}.")


def nodes_behind(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the nodes of the graph that made these tensors, each once."""
    nodes, left = dict[Any, None](), [x.grad_fn for x in tensors]
    for node in left:
        if node is not None and node not in nodes:
            nodes[node] = None
            left += [following for following, _ in node.next_functions]
    return list(nodes)
