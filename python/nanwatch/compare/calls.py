"""Module calls of a run with copies of their tensors, the pairs that two runs have in common, and their distance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..util.visible import module_name

# By precision.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SUM = -1  # index of the sum of the first two values of a call
# Values of a call's inputs or outputs that are tried against those of the other side.
MOST_VALUES = 4
# Rows with less than this share of the mean norm are compared by that share: padding may be all but zero.
_LEAST_ROW = 0.1
# Masks hold -inf or the least number of a dtype, whose squares have no norm.
_LARGEST = 1e30
# Path of the module, and which of its calls it is.
Key = tuple[str, int]


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype with the fewest bits of precision."""
    return max(dtypes, key=FLOATS.index)


def most_common(dtypes: Iterable[torch.dtype], otherwise: torch.dtype) -> torch.dtype:
    """Return the commonest of the floating-point dtypes, or `otherwise` where there is none."""
    return next((dtype for dtype, _ in Counter(dtypes).most_common() if dtype in FLOATS), otherwise)


def rows_of(x: Tensor) -> Tensor:
    """Return the tensor as rows, its last dimension."""
    return x.reshape(-1, x.shape[-1] if x.ndim else 1)


class Tokens:
    """Which tokens count: a mask of shape (batch, length), or None for all."""

    def __init__(self, mask: Tensor | None) -> None:
        self._mask = None if mask is None else mask.detach().to("cpu", torch.bool)

    def rows(self, x: Tensor) -> Tensor:
        """Return the rows of the tokens that count. A tensor without padding has no others."""
        mask, lead = self._mask, x.shape[:-1]
        if mask is None:
            return rows_of(x)
        if lead[:2] == mask.shape:
            chosen = mask.reshape(*mask.shape, *(1,) * (len(lead) - 2)).expand(lead)
        elif len(lead) == 3 and (lead[0], lead[2]) == mask.shape:  # heads before tokens
            chosen = mask[:, None, :].expand(lead)
        elif lead == (mask.numel(),):
            chosen = mask
        else:
            return rows_of(x)
        return rows_of(x)[chosen.reshape(-1)]

    def pair(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the rows of both in the same layout, or None where the shapes do not go together."""
        if a.ndim == b.ndim == 4 and a.shape != b.shape == a.transpose(1, 2).shape:
            b = b.transpose(1, 2)  # heads before tokens on one side, after them on the other
        rows_a, rows_b = self.rows(a), self.rows(b)
        width = max(rows_a.shape[-1], rows_b.shape[-1])
        if rows_a.numel() != rows_b.numel() or not rows_a.numel() or rows_a.numel() % width:
            return None
        return rows_a.reshape(-1, width).to(torch.float64), rows_b.reshape(-1, width).to(torch.float64)


class Errors(NamedTuple):
    """Distance of two tensors: relative error of all and of each row, cosine, and largest difference of an element."""

    total: float
    rows: Tensor
    cosine: float
    largest_difference: float

    @property
    def worst_row(self) -> float:
        """The relative error of the worst row."""
        return float(self.rows.max()) if len(self.rows) else 0.0


def errors_between(a: Tensor, b: Tensor) -> Errors:
    """Return how far the rows of `b` are from those of `a`. The same non-finite number on both sides is no error."""
    same = ~a.isfinite() & ((a == b) | (a.isnan() & b.isnan()))
    apart = (~a.isfinite() | ~b.isfinite()) & ~same
    a, b = (x.masked_fill(same, 0).nan_to_num(0.0).clamp(-_LARGEST, _LARGEST) for x in (a, b))
    difference = a - b
    norms = a.norm(dim=-1)
    distances = difference.norm(dim=-1).masked_fill(apart.any(-1), float("inf"))
    whole, overall = float(norms.norm()), float(distances.norm())
    least = max(_LEAST_ROW * whole / max(len(norms), 1) ** 0.5, 1e-300)
    both = whole * float(b.norm())
    return Errors(
        overall / whole if whole else (0.0 if overall == 0 else float("inf")),
        distances / norms.clamp(min=least),
        float((a * b).sum()) / both if both else 1.0,
        float("inf") if bool(apart.any()) else float(difference.abs().max()) if difference.numel() else 0.0,
    )


@dataclass(eq=False)
class ModuleCall:
    """Call of a module, with copies of its tensors.

    `module` is None for a call of a trace. `start` and `end` count the starts and ends of all calls. `parent` is the
    call around it. `weight_shape` is that of the module's weight, or () where it has none.
    """

    key: Key
    class_name: str
    module: nn.Module | None
    parent: ModuleCall | None
    start: int
    end: int = 0
    is_leaf: bool = True
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    weight_shape: tuple[int, ...] = ()

    @property
    def path(self) -> str:
        """The name of the module."""
        return self.key[0]

    def holds(self, call: ModuleCall) -> bool:
        """Return True if the call happened during this one."""
        return self.start < call.start and call.end < self.end


# Calls of one run, by their keys.
Run = dict[Key, ModuleCall]


@dataclass(frozen=True)
class CallPair:
    """Calls that compute the same: one on each side, or several beside a fused one, in the order of its columns."""

    a: tuple[ModuleCall, ...]
    b: tuple[ModuleCall, ...]

    @property
    def sides(self) -> tuple[tuple[ModuleCall, ...], tuple[ModuleCall, ...]]:
        """The calls of A and those of B."""
        return self.a, self.b

    @property
    def names(self) -> tuple[str, str]:
        """The paths of A's modules and of B's."""
        a, b = (", ".join(call.path for call in side) for side in self.sides)
        return a, b

    @property
    def name(self) -> str:
        """The names of both sides in words."""
        return " | ".join(dict.fromkeys(map(module_name, self.names)))

    @property
    def modules(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules of both sides."""
        a, b = ([call.module for call in side if call.module is not None] for side in self.sides)
        return a, b

    @property
    def is_leaf(self) -> bool:
        """Whether no call holds another."""
        return all(call.is_leaf for side in self.sides for call in side)

    def time(self, kind: str, side: int) -> int:
        """Return when the "inputs" or "outputs" were there, on side 0 or 1."""
        calls = self.sides[side]
        return calls[0].start if kind == "inputs" else calls[-1].end


def value(calls: Sequence[ModuleCall], kind: str, index: int) -> Tensor | None:
    """Return a value of the call, or the SUM of two; those of several calls, which had one input, side by side."""
    values = []
    for call in calls if kind == "outputs" else calls[:1]:
        kept: list[Tensor] = getattr(call, kind)[:MOST_VALUES]
        if index == SUM and len(kept) > 1 and kept[0].shape == kept[1].shape and kept[0].is_floating_point():
            values.append(kept[0] + kept[1])  # perhaps `hidden` and `residual`
        elif 0 <= index < len(kept):
            values.append(kept[index])
        else:
            return None
    if len(values) > 1 and len({x.shape[:-1] for x in values}) == 1:
        return torch.cat(values, -1)
    return values[0] if len(values) == 1 else None


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point parameters and buffers, the weight with a row for each output."""
    kept = {**module._parameters, **module._buffers}
    tensors = {name: x.detach() for name, x in kept.items() if x is not None and _is_read(x)}
    # transformers' Conv1D keeps its weight turned.
    if type(module).__name__ == "Conv1D" and "weight" in tensors and tensors["weight"].ndim == 2:
        tensors["weight"] = tensors["weight"].t()
    return tensors


def _is_read(x: Tensor) -> bool:
    return x.is_floating_point() and x.layout is torch.strided and not x.is_meta and x.numel() > 0
