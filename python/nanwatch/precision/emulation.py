"""Linear layers that multiply operands of another number format: what a narrow matmul would make of a model.

Each operand is rounded to the format's values along the axis that its matmul contracts, and the product is taken in
float32. No module is replaced: a wrapper takes the slot of the module's `forward` while the block lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from ..numerics.block_formats import BLOCKS_BY_NAME
from ..numerics.block_reference import quantized
from ..util.modules import each_module
from ..util.visible import close_names

BFLOAT16 = "bfloat16"
TARGETS = (*BLOCKS_BY_NAME, BFLOAT16)
HADAMARD_SIZES = (16, 32)
# DeepSeek's recipe has square blocks in weights, which serve both axes, and blocks of one row in all else.
_OF_ACTIVATIONS = {"float8_block128x128": "float8_block1x128"}
# Callback for each product: the name of the layer and its multiplications.
Count = Callable[[str, int], object]


@dataclass(frozen=True, slots=True)
class Rounding:
    """How the operands of a matmul are rounded.

    Args:
        backward: round the operands of the two backward matmuls too, not only those of the forward.
        hadamard: rotate blocks of 16 or 32 elements of both operands before they are rounded, which spreads outliers
            and leaves the exact product as it is. 0 rotates nothing. bfloat16 is never rotated.
        stochastic: round gradients up or down by chance, so that their rounding errors have the mean zero.
    """

    backward: bool = False
    hadamard: int = 0
    stochastic: bool = False

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.hadamard not in (0, *HADAMARD_SIZES):
            raise ValueError(f"hadamard should be 0 (no rotation), 16 or 32, got {self.hadamard!r}")
        if self.stochastic and not self.backward:
            raise ValueError("stochastic rounds gradients, which only training has; add train=True (--train)")


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the nn.Linear modules of a model by their names. Raise ValueError where it has none."""
    layers = {name: module for name, module in each_module(model) if isinstance(module, nn.Linear)}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear, and only its operands are rounded; layers of other classes,"
            " such as transformers' Conv1D, have to be made nn.Linear first"
        )
    return layers


@contextmanager
def emulated(
    model: nn.Module,
    formats: Mapping[str, str],
    rounding: Rounding | None = None,
    *,
    count: Count | None = None,
    seed: int = 0,
) -> Iterator[None]:
    """Let linear layers multiply operands of other number formats inside the block.

    Args:
        model: holds the layers. Its classes, hooks, parameters and state_dict stay as they are.
        formats: the format of each layer, by the layer's name. Layers without one compute as they are.
        rounding: how operands are rounded, by default those of the forward to nearest.
        count: called with the name and the multiplications of each product of any linear layer.
        seed: that of stochastic rounding, whose random numbers are its own.
    """
    layers = linear_layers(model)
    for name, target in formats.items():
        if name not in layers:
            raise ValueError(f"the model has no nn.Linear {name!r}; {close_names(name, layers)}")
        if target not in TARGETS:
            raise ValueError(f"there is no format {target!r}; the formats are {', '.join(TARGETS)}")
    chance = _Chance(seed)
    before = []
    try:
        for name, module in layers.items():
            product = _Product(name, formats.get(name), rounding or Rounding(), chance, count)
            before.append((module, module.__dict__.get("forward")))
            # Not by setattr: a class with a __setattr__ of its own would make something else of it.
            module.__dict__["forward"] = product.around(module.forward)
        yield
    finally:
        for module, forward in before:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward


class _Product(TorchFunctionMode):
    """Mode in which torch's linear multiplies rounded operands, also in a subclass with a forward of its own."""

    def __init__(
        self, name: str, target: str | None, rounding: Rounding, chance: _Chance, count: Count | None
    ) -> None:
        super().__init__()
        self._name, self._target, self._rounding = name, target, rounding
        self._chance, self._count = chance, count

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward with other products inside it."""

        @wraps(forward)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        return self._linear(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._count is not None:
            self._count(self._name, input.numel() * weight.shape[0])
        if self._target is None:
            return linear(input, weight, bias)
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        product: Tensor = _RoundedLinear.apply(
            input, weight, bias, self._target, self._rounding, self._chance
        )  # type: ignore[no-untyped-call]
        return product


class _Chance(dict[torch.device, torch.Generator]):
    """Random numbers of stochastic rounding: a generator for each device, apart from the model's own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __missing__(self, device: torch.device) -> torch.Generator:
        self[device] = torch.Generator(device).manual_seed(self._seed)
        return self[device]


class _RoundedLinear(torch.autograd.Function):
    """Linear map of rounded operands, and its two backward matmuls, rounded on request."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: str,
        rounding: Rounding,
        chance: _Chance,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.target, ctx.rounding, ctx.chance = target, rounding, chance
        with torch.autocast(x.device.type, enabled=False):
            rows = _rounded(x, _OF_ACTIVATIONS.get(target, target), -1, rounding.hadamard)
            columns = _rounded(weight, target, -1, rounding.hadamard)
            return linear(rows, columns, None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, tokens = gradient.reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1])
        target, rounding = ctx.target, ctx.rounding
        narrow = _OF_ACTIVATIONS.get(target, target)

        def product(gradient: Tensor, other: Tensor, other_target: str) -> Tensor:
            """Return gradient @ other, which contracts the gradient's last axis and the other's first."""
            with torch.autocast(x.device.type, enabled=False):
                if not rounding.backward:
                    return gradient.to(other.dtype) @ other
                generator = ctx.chance[x.device] if rounding.stochastic else None
                left = _rounded(gradient, narrow, -1, rounding.hadamard, generator)
                return left @ _rounded(other, other_target, 0, rounding.hadamard)

        needs = ctx.needs_input_grad
        return (
            product(rows, weight, target).to(x.dtype).view(x.shape) if needs[0] else None,
            product(rows.T, tokens, narrow).to(weight.dtype) if needs[1] else None,
            rows.sum(0) if needs[2] else None,
            None,
            None,
            None,
        )


def _rounded(
    x: Tensor, target: str, dim: int, hadamard: int, generator: torch.Generator | None = None
) -> Tensor:
    """Return the values of `x` in a format, in float32, with blocks along `dim`, which is rotated before."""
    x = x.detach()
    if target == BFLOAT16:
        return x.to(torch.bfloat16).float()
    return quantized(rotated(x, dim, hadamard) if hadamard else x, target, dim, generator=generator)


def rotated(x: Tensor, dim: int, size: int) -> Tensor:
    """Return `x` in float32 with each whole block of `size` elements along `dim` times one orthogonal matrix."""
    rows = x.float().movedim(dim, -1)
    whole = rows.shape[-1] // size * size
    blocks: Tensor = rows[..., :whole].unflatten(-1, (-1, size)) @ _hadamard(size).to(x.device)
    return torch.cat([blocks.flatten(-2), rows[..., whole:]], -1).movedim(-1, dim)


@cache
def _hadamard(size: int) -> Tensor:
    """Return Sylvester's Hadamard matrix, orthogonal, with signs by chance: a constant row has no outlier in it."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([matrix.repeat(1, 2), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(0)) * 2 - 1
    rotation: Tensor = matrix * signs / size**0.5
    return rotation
