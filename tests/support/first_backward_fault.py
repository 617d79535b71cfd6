"""The oracle for a backward that overflows: plain torch hooks on the nodes of the graph, which stop at the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from support.first_fault import Stopped, stopped_at


class BackwardFault(NamedTuple):
    """The operation of the backward that made the value, the innermost module whose forward had it, the batch, and
    which of the operation's results are not finite.
    """

    operation: str
    module: str
    batch: int
    results: tuple[int, ...]


def first_backward_fault(model: nn.Module, train: Callable[[], Any]) -> BackwardFault:
    """The first node in the backwards of `train()` that makes what is not finite of gradients that are.

    All outputs before it were finite. The weights are left as they were before the step that would have taken it.
    """
    names = {module: name for name, module in model.named_modules()}
    depth = batch = 0

    def begins(module: nn.Module, args: Any) -> None:
        nonlocal depth, batch
        batch += depth == 0
        depth += 1

    def ends(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        outputs, inputs = list(_tensors(output)), list(_tensors((args, kwargs)))
        assert all(x.isfinite().all() for x in outputs), "the forward was first"
        # Nodes between a call's inputs and its outputs are the call's; children end before their parents.
        for node in _nodes(outputs, {x.grad_fn for x in inputs}):
            if "module" not in node.metadata:
                node.metadata["module"] = names[module]
                node.register_hook(_looker(node, batch - 1))

    handles = [module.register_forward_pre_hook(begins) for module in names]
    handles += [module.register_forward_hook(ends, with_kwargs=True) for module in names]
    return stopped_at(train, handles)


def _looker(node: Any, batch: int) -> Callable[..., None]:
    def look(made: Iterable[Tensor | None], given: Iterable[Tensor | None]) -> None:
        bad = tuple(i for i, x in enumerate(made) if not _is_finite(x))
        if bad and all(map(_is_finite, given)):
            raise Stopped(BackwardFault(node.name(), node.metadata["module"], batch, bad))

    return look


def _is_finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(gradient.isfinite().all())


def _tensors(value: Any) -> Iterable[Tensor]:
    return (x for x in tree_leaves(value) if torch.is_tensor(x))


def _nodes(outputs: Iterable[Tensor], ends: set[Any]) -> Iterable[Any]:
    left, known = [x.grad_fn for x in outputs], {None, *ends}
    while left:
        node = left.pop()
        if node not in known:
            known.add(node)
            yield node
            left += [following for following, _ in node.next_functions]
