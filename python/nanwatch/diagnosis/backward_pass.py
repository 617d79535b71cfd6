"""A backward of a re-run: through torch.autograd.grad, so that no `.grad` is touched and no hook of the user's runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..recording.walk import leaves
from .batch_snapshot import BatchSnapshot


class BackwardStart(NamedTuple):
    """The gradients, by label, that the outputs of call `number` of module `name` had in the failed backward."""

    name: str
    number: int
    gradients: Mapping[str, Tensor]


def with_leaves(snapshot: BatchSnapshot) -> tuple[BatchSnapshot, list[Tensor]]:
    """The snapshot with tensors of its own for those that require a gradient, and what a backward gives gradients to.

    The graph behind what the batch was called with is the user's.
    """
    wanted: list[Tensor] = [x for x in snapshot.module.parameters() if x.requires_grad]

    def fresh(x: Tensor) -> Tensor:
        if not x.requires_grad:
            return x
        wanted.append(x.detach().requires_grad_())
        return wanted[-1].clone()  # a leaf could not be written to

    with torch.enable_grad():
        args, kwargs = tree_map_only(Tensor, fresh, (snapshot.args, dict(snapshot.kwargs)))
    return replace(snapshot, args=args, kwargs=kwargs), wanted


def run_backward(
    roots: list[Tensor], wanted: list[Tensor], gradients: list[Tensor], hook: Callable[[Any], Any]
) -> None:
    """A backward from these gradients of the roots to what is wanted, with what `hook(node)` gives at each node."""
    handles = [node.register_hook(hook(node)) for node in _nodes(x.grad_fn for x in roots) if node]
    try:
        with without_hooks(wanted):
            torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def without_hooks(tensors: list[Tensor]) -> Iterator[None]:
    """The user's hooks on these may add up what they are given. Emptied and filled again: the engine holds the dict."""
    own = [(hooks, dict(hooks)) for x in tensors if (hooks := x._backward_hooks)]
    try:
        for hooks, _ in own:
            hooks.clear()
        yield
    finally:
        for hooks, before in own:
            hooks.update(before)


def _nodes(roots: Any) -> list[Any]:
    """All nodes of the graph from these roots on, each once."""
    left, known, found = list(roots), set(), []
    while left:
        node = left.pop()
        if node is not None and node not in known:
            known.add(node)
            found.append(node)
            left += [following for following, _ in node.next_functions]
    return found


def with_graph(output: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module's output that have a graph, with their labels."""
    yield from (
        (label, x) for label, x in leaves(output, "output") if isinstance(x, Tensor) and x.requires_grad
    )


def mean_gradients(outputs: list[Tensor]) -> list[Tensor]:
    """For each tensor the gradient that the mean of its elements gives it, as a loss would."""
    return [torch.full_like(x, 1 / max(x.numel(), 1)) for x in outputs]
