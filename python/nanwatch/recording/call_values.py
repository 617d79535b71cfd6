"""The values that a frame of a module call shows: weights, buffers, inputs and outputs, with roles and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..report.record import Role
from .listener import Parts
from .observe import holds_fractions
from .walk import call_leaves, leaves


def call_values(
    wanted: Parts,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: Any,
) -> list[tuple[Role, str, Any]]:
    """Return what a frame of this call shows, each value with its role and its label, in the order of the records."""
    values: list[tuple[Role, str, Any]] = []
    if wanted.weights:
        values += [("weight", name, x) for name, x in own_tensors(module._parameters)]
    if wanted.buffers:
        values += [("buffer", name, x) for name, x in own_tensors(module._buffers) if holds_fractions(x)]
    if wanted.inputs:
        values += [("input", label, x) for label, x in call_leaves(args, kwargs)]
    if wanted.outputs:
        values += [("output", label, x) for label, x in leaves(output, "output")]
    return values


def own_tensors(named: Mapping[str, Tensor | None]) -> list[tuple[str, Tensor]]:
    """The tensors of a module's `_parameters` or `_buffers`, each once, without the empty places."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, x in named.items():
        if x is not None:
            found.setdefault(id(x), (name, x))
    return list(found.values())
