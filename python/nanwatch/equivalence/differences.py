"""Tensors kept on the CPU for comparison, how far two of them are apart, and what the difference looks like.

A tensor is kept whole while there is room, else as a sketch of each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..numerics._fingerprint import WIDTH, sketch
from ..numerics.readable import dtype_name
from ..util.modules import WeakIdentityDict, each_module

# Rows with less than this share of the mean norm are compared by that share: padding may be all but zero.
_LEAST_ROW = 0.1
# Masks hold -inf or the least number of a dtype, whose squares have no norm.
_LARGEST = 1e30


class KeptTensor(NamedTuple):
    """Copy of a tensor as rows (its last dimension), or with `is_sketch` the sketches of its rows."""

    shape: tuple[int, ...]
    rows: Tensor
    is_sketch: bool


class Errors(NamedTuple):
    """Relative error of a whole tensor, and of each of its rows."""

    total: float
    rows: Tensor

    @property
    def largest(self) -> float:
        """The error of the worst row."""
        return float(self.rows.max()) if len(self.rows) else 0.0


def sketches(rows: Tensor) -> Tensor:
    """Return the sketches of all rows, as exact as they can be."""
    return sketch(rows, max_rows=None, wide=True)


class Store:
    """Copies of tensors, at most `most_bytes` of them whole."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._known: WeakIdentityDict[tuple[int, KeptTensor]] = WeakIdentityDict()

    def keep(self, x: Tensor, module: nn.Module | None = None) -> KeptTensor | None:
        """Return a copy; that of the same tensor, unchanged since, is one object.

        A subclass may return None for a tensor that is not comparable, and cut one of this module into blocks.
        """
        version = -1 if x.is_inference() else x._version
        known = self._known.get(x)
        if known is not None and known[0] == version != -1:
            return known[1]
        flat = torch.view_as_real(x.detach()).flatten(-2) if x.is_complex() else x.detach()
        rows = flat.reshape(-1, flat.shape[-1] if flat.ndim else 1)
        size = rows.numel() * rows.element_size()
        is_sketch = size > self._left and rows.shape[-1] > WIDTH
        if is_sketch:
            copy = sketches(rows).cpu()
        else:
            self._left -= size
            copy = rows.to("cpu", copy=True)
        found = KeptTensor(tuple(flat.shape), copy, is_sketch)
        self._known[x] = (version, found)
        return found


class Tokens:
    """Which tokens count: a mask of shape (batch, length), or None for all."""

    def __init__(self, mask: Tensor | None) -> None:
        self._mask = None if mask is None else mask.detach().to("cpu", torch.bool)

    def rows(self, kept: KeptTensor) -> Tensor:
        """Return the rows of the tokens that count. A tensor without padding has no others."""
        mask, lead = self._mask, kept.shape[:-1]
        if mask is None:
            return kept.rows
        if lead[:2] == mask.shape:
            chosen = mask.reshape(*mask.shape, *(1,) * (len(lead) - 2)).expand(lead)
        elif len(lead) == 3 and (lead[0], lead[2]) == mask.shape:
            chosen = mask[:, None, :].expand(lead)
        elif lead == (mask.numel(),):
            chosen = mask
        else:
            return kept.rows
        return kept.rows[chosen.reshape(-1)]

    def size(self, kept: KeptTensor) -> int:
        """Return how many numbers count. Two values of which this differs are not the same."""
        return len(self.rows(kept)) * (kept.shape or (1,))[-1]

    def pair(self, a: KeptTensor, b: KeptTensor) -> tuple[Tensor, Tensor] | None:
        """Return the rows of both in the same layout, or None where the shapes do not go together."""
        whole = not (a.is_sketch or b.is_sketch)
        if whole and len(a.shape) == len(b.shape) == 4 and a.shape != b.shape:
            turned = b.rows.reshape(b.shape).transpose(1, 2)
            if turned.shape == a.shape:  # heads before tokens on one side, after them on the other
                b = KeptTensor(a.shape, turned.reshape(-1, a.shape[-1]), is_sketch=False)
        one, other = self.rows(a), self.rows(b)
        if not whole:
            if a.shape[-1:] != b.shape[-1:]:
                return None
            one, other = (x if kept.is_sketch else sketches(x) for x, kept in ((one, a), (other, b)))
        if one.numel() != other.numel() or not one.numel():
            return None
        if one.shape != other.shape:
            width = max(one.shape[-1], other.shape[-1])
            if one.numel() % width:
                return None
            one, other = one.reshape(-1, width), other.reshape(-1, width)
        return one.to(torch.float64), other.to(torch.float64)


def total(values: Sequence[KeptTensor]) -> KeptTensor:
    """Return the sum of tensors of one shape: `hidden + residual`."""
    if len(values) == 1:
        return values[0]
    is_sketch = any(one.is_sketch for one in values)
    rows = (sketches(one.rows) if is_sketch and not one.is_sketch else one.rows for one in values)
    return values[0]._replace(rows=torch.stack(list(rows)).sum(0), is_sketch=is_sketch)


def side_by_side(values: Sequence[KeptTensor]) -> KeptTensor | None:
    """Return tensors next to each other in their last dimension, as one fused projection has them."""
    if values[0].is_sketch or len({(one.shape[:-1], one.is_sketch) for one in values}) > 1:
        return None
    rows = torch.cat([one.rows for one in values], -1)
    width = sum(one.shape[-1] for one in values)
    return values[0]._replace(shape=(*values[0].shape[:-1], width), rows=rows)


def relative_errors(a: Tensor, b: Tensor) -> Errors:
    """Return the error of `b` relative to `a`. The same non-finite number on both sides is no error."""
    same = ~a.isfinite() & ((a == b) | (a.isnan() & b.isnan()))
    apart = (~a.isfinite() | ~b.isfinite()) & ~same
    a, b = (x.masked_fill(same, 0).nan_to_num(0.0).clamp(-_LARGEST, _LARGEST) for x in (a, b))
    norms, differences = a.norm(dim=-1), (a - b).norm(dim=-1).masked_fill(apart.any(-1), float("inf"))
    whole = float(norms.norm())
    least = max(_LEAST_ROW * whole / max(len(norms), 1) ** 0.5, 1e-300)
    overall = float(differences.norm())
    return Errors(
        overall / whole if whole else (0.0 if overall == 0 else float("inf")),
        differences / norms.clamp(min=least),
    )


def shape_of_difference(
    a: Tensor, b: Tensor, errors: Errors, shape: Sequence[int], floor: float
) -> list[str]:
    """Return in words what the difference between the rows `a` and `b` of tensors of this shape looks like."""
    difference, d = b - a, errors.total
    if not (0 < d < float("inf")):
        return ["non-finite numbers on one side only"] if d else []
    noise = max(0.05 * d, 4 * floor)
    scale = float((a * b).sum() / (a * a).sum())
    if float((b - scale * a).norm() / b.norm().clamp(min=1e-300)) < noise:
        return ["another sign: B is -A"] if abs(scale + 1) < noise else [f"a scale: B is {scale:.4g} times A"]
    scales = (a * b).sum(-1, keepdim=True) / (a * a).sum(-1, keepdim=True).clamp(min=1e-300)
    low, high = float(scales.min()), float(scales.max())
    is_scaled = float((b - scales * a).norm() / b.norm().clamp(min=1e-300)) < noise
    if is_scaled and (high < 1 or low > 1):  # another eps makes all tokens smaller, or all larger
        return [f"a scale for each token, from {low:.4g} to {high:.4g}: the eps of a norm, or another norm"]
    found = []
    if len(a) > 1 and float((difference - difference.mean(0)).norm()) < max(0.05, 4 * floor / d) * float(
        difference.norm()
    ):
        found.append("an offset: the same in each token, as of a bias")
    ordered, other = (x.sort(-1)[0] for x in (a, b))
    if d > 0.01 and float((ordered - other).norm() / ordered.norm().clamp(min=1e-300)) < noise:
        found.append("a permutation: the same numbers in another order")
    columns = difference.norm(dim=0)
    off = columns > max(1e-3 * float(columns.max()), 2 * floor * float(a.norm(dim=0).max()))
    places = off.nonzero().flatten().tolist()
    if 0 < len(places) <= len(columns) / 2:
        found.append(f"{len(places)} of {len(columns)} columns only, from {places[0]} to {places[-1]}")
    return found + _by_token(errors.rows, shape, floor)


def by_token(rows: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return the largest error at each position of the sequence, for a tensor of shape (batch, length, ...)."""
    if len(shape) < 3 or shape[1] < 2 or len(rows) != prod(shape[:-1]):
        return None
    return rows.reshape(shape[0], shape[1], -1).amax((0, 2))


def module_differences(a: nn.Module, b: nn.Module, *, is_leaf: bool) -> list[str]:
    """Return in words which settings and own parameters two modules do not have alike."""
    found = settings_apart(_settings(a), _settings(b))
    has_bias = [module._parameters.get("bias") is not None for module in (a, b)]
    if is_leaf and has_bias[0] != has_bias[1]:
        found["bias"] = f"only {'A' if has_bias[0] else 'B'} has a bias"
    apart = {name: gap.error for name, gap in gaps([a], [b]).items() if gap.error}
    return [*found.values(), *(f"its {name} is {error:.2g} apart" for name, error in apart.items())]


def parameter_differences(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> list[str]:
    """Return in words which parameters, and which eps, leaf modules of equal outputs do not have alike.

    Modules of two kinds or settings may keep a weight in two ways, and a buffer may have been rounded.
    """
    is_one = len(ours) == len(theirs)
    found = settings_apart(_settings(ours[0]), _settings(theirs[0])) if is_one else {}
    apart = gaps(ours, theirs) if are_of_a_kind(ours, theirs) and not found.keys() - {"eps"} else {}
    return [words for name, words in found.items() if name == "eps"] + [
        f"its {name} is {gap.error:.2g} apart"
        for name, gap in apart.items()
        if gap.error and not (gap.is_rounding and name in ours[0]._buffers)
    ]


def stored_differences(a: nn.Module, b: nn.Module) -> dict[str, list[str]]:
    """Return in words, by path, the parameters and buffers that modules of one path keep apart, before anything is run.

    A parameter that only has another dtype is left out.
    """
    theirs, found = dict(each_module(b)), dict[str, list[str]]()
    for path, module in each_module(a):
        sides = [own_tensors(module), own_tensors(theirs.get(path, nn.Module()))]
        for name, gap in gaps([module], [theirs[path]]).items() if sides[1] else ():
            x, y = (side[name] for side in sides)
            error, dtypes = gap.error, ""
            if x.dtype is not y.dtype:
                dtypes = f", {dtype_name(x.dtype)} in A and {dtype_name(y.dtype)} in B"
                if name in module._buffers:
                    error = relative_errors(*(one.double().cpu().reshape(1, -1) for one in (x, y))).total
            if error:
                found.setdefault(path, []).append(f"its {name} is {error:.2g} apart{dtypes}")
    return found


def are_apart(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> bool:
    """Return True if modules have another class, setting, parameter or buffer."""
    if len(ours) != len(theirs):
        return bool(parameter_differences(ours, theirs))
    return not are_of_a_kind(ours, theirs) or bool(module_differences(ours[0], theirs[0], is_leaf=True))


def are_of_a_kind(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> bool:
    """Return True if modules are of one class, or the parts of a fused one."""
    names = {type(one).__name__ for one in (*ours, *theirs)}
    return len(ours) != len(theirs) or len(names) == 1 or names == {"Conv1D", "Linear"}


class Gap(NamedTuple):
    """Relative error of a whole parameter or buffer, and whether the rounding of its elements may be all of it."""

    error: float
    is_rounding: bool


def gaps(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> dict[str, Gap]:
    """Compare the parameters and buffers that all these modules have, in the coarser of their dtypes.

    Those of the parts of a fused module are laid side by side. The error is 0 where all bits are equal alone.
    """
    sides = [[own_tensors(one) for one in modules] for modules in (ours, theirs)]
    names = [name for name in sides[0][0] if all(name in one for side in sides for one in side)]
    both = {name: [_joined([one[name] for one in side]) for side in sides] for name in names}
    return {
        name: _gap(x, y)
        for name, (x, y) in both.items()
        if x is not None and y is not None and x.shape == y.shape
    }


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors one after the other, or None where their rows have different shapes."""
    if len({one.shape[1:] for one in parts}) > 1:
        return None
    return parts[0].cpu() if len(parts) == 1 else torch.cat([torch.atleast_1d(one).cpu() for one in parts])


def _gap(x: Tensor, y: Tensor) -> Gap:
    coarse = max(x, y, key=lambda one: torch.finfo(one.dtype).eps).dtype
    x, y = x.to(coarse), y.to(coarse)
    if torch.equal(x, y):
        return Gap(0.0, is_rounding=True)
    eps = torch.finfo(coarse).eps
    x, y = (one.to(torch.float64).reshape(1, -1) for one in (x, y))
    is_rounding = bool(((x - y).abs() <= eps * torch.maximum(x.abs(), y.abs())).all())
    return Gap(relative_errors(x, y).total, is_rounding)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point parameters and buffers, the weight with a row for each output."""
    kept = {**module._parameters, **module._buffers}
    found = {
        name: x.detach()
        for name, x in kept.items()
        if x is not None
        and x.is_floating_point()
        and x.layout is torch.strided
        and not x.is_meta
        and x.numel()
    }
    weight = weight_of(module)
    return found if weight is None else {**found, "weight": weight}


def weight_of(module: nn.Module | None) -> Tensor | None:
    """Return the weight with a row for each output, or None."""
    weight = None if module is None else module._parameters.get("weight")
    if (
        weight is None
        or weight.is_meta
        or not weight.is_floating_point()
        or not weight.numel()
        or not weight.ndim
    ):
        return None
    found = weight.detach()
    return found.t() if type(module).__name__ == "Conv1D" and found.ndim == 2 else found  # transformers' own


def settings_apart(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, str]:
    """Return in words, by name, the settings that both sides have and have not alike."""
    apart = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    return {name: f"{name} is {ours[name]} in A and {theirs[name]} in B" for name in apart}


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and words that a module keeps, by name; any name with eps is eps."""
    kept = {name: one for name, one in vars(module).items() if isinstance(one, bool | int | float | str)}
    return {"eps" if "eps" in name else name: one for name, one in kept.items() if name != "training"}


def _by_token(rows: Tensor, shape: Sequence[int], floor: float) -> list[str]:
    errors = by_token(rows, shape)
    if errors is None:
        return []
    is_off = (errors > max(1e-3 * float(errors.max()), 8 * floor)).tolist()
    count, first = len(is_off), is_off.index(True) if any(is_off) else 0
    if sum(is_off) == 1:
        return [f"token {first} of {count} only"]
    if first and all(is_off[first:]):
        return [
            f"tokens from {first} on only: a mask or positions"
            if first > 1
            else "all tokens but the first: a mask, positions, or the scale of the attention"
        ]
    if not is_off[-1] and any(is_off):
        return [f"tokens up to {count - 1 - is_off[::-1].index(True)} only"]
    place = torch.arange(count, dtype=torch.float64)
    grows = float(torch.corrcoef(torch.stack([place, errors.to(torch.float64)]))[0, 1]) if count > 3 else 0.0
    return ["growing along the sequence: positions, or a state that is carried on"] if grows > 0.9 else []
