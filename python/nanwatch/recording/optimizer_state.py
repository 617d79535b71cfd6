"""Tensors of an optimizer, by their names in frames and reports, and weights at a step, as ranks compare them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor
from torch.optim.optimizer import Optimizer


class StateTensor(NamedTuple):
    """Tensor of an optimizer: its label, the parameter that it belongs to, and whether it is that parameter."""

    label: str
    tensor: Tensor
    parameter: Tensor
    is_parameter: bool


def state_tensors(optimizer: Optimizer, names: dict[int, str]) -> Iterator[StateTensor]:
    """Yield the tensors of an optimizer's state: `exp_avg[0.weight]`, with the name of its parameter.

    `names` are those of the model's parameters, by id. Another parameter, such as a float32 copy of a weight, is called
    by its place, `[group][position]`, and comes itself too: `param[0][3]`.
    """
    for number, group in enumerate(optimizer.param_groups):
        for position, x in enumerate(group["params"]):
            name = names.get(id(x))
            where = f"[{number}][{position}]" if name is None else f"[{name}]"
            if name is None:
                yield StateTensor(f"param{where}", x, x, True)
            for key, value in optimizer.state.get(x, {}).items():
                if isinstance(value, Tensor):
                    yield StateTensor(f"{key}{where}", value, x, False)


class StepWeight(NamedTuple):
    """Weight of a model before a step: its full name, itself, samples of it and of its gradient.

    `group_size` is the number of ranks over which torch.distributed.all_reduce reduced the gradient, as far as seen.
    """

    name: str
    tensor: Tensor
    values: Tensor
    gradient: Tensor | None
    group_size: int | None = None


class RankFault(NamedTuple):
    """Kind of a fault across ranks, the weight that has it, the step; a rank that lost its gradient, or -1."""

    kind: str
    name: str
    step: int
    rank: int
