"""Words for a difference: its shape, and the settings, parameters and buffers that two modules do not share."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..numerics.readable import dtype_name
from ..trace.result import Errors, errors_between
from .tensors import coarsest


def shape_of_difference(
    a: Tensor, b: Tensor, errors: Errors, shape: Sequence[int], floor: float
) -> list[str]:
    """Return in words what the difference between the rows `a` and `b` of tensors of this shape looks like."""
    difference, distance = b - a, errors.total
    if not (0 < distance < float("inf")):
        return ["non-finite numbers on one side only"] if distance else []
    noise = max(0.05 * distance, 4 * floor)
    least = b.norm().clamp(min=1e-300)
    scale = float((a * b).sum() / (a * a).sum())
    if float((b - scale * a).norm() / least) < noise:
        return ["another sign: B is -A"] if abs(scale + 1) < noise else [f"a scale: B is {scale:.4g} times A"]
    scales = (a * b).sum(-1, keepdim=True) / (a * a).sum(-1, keepdim=True).clamp(min=1e-300)
    low, high = float(scales.min()), float(scales.max())
    # Another eps makes all tokens smaller, or all larger.
    if float((b - scales * a).norm() / least) < noise and (high < 1 or low > 1):
        return [f"a scale for each token, from {low:.4g} to {high:.4g}: the eps of a norm, or another norm"]
    words = []
    varies = float((difference - difference.mean(0)).norm()) / float(difference.norm())
    if len(a) > 1 and varies < max(0.05, 4 * floor / distance):
        words.append("an offset: the same in each token, as of a bias")
    if distance > 0.01 and _distance_of_sorted(a, b, -1) < noise:
        words.append("a permutation: the same numbers in another order")
    elif distance > 0.01 and _distance_of_sorted(a, b, 0) < noise:
        words.append("the same rows in another order, as of another order of the batch")
    columns = difference.norm(dim=0)
    off = columns > max(1e-3 * float(columns.max()), 2 * floor * float(a.norm(dim=0).max()))
    places = off.nonzero().flatten().tolist()
    if 0 < len(places) <= len(columns) / 2:
        words.append(f"{len(places)} of {len(columns)} columns only, from {places[0]} to {places[-1]}")
    return words + _token_words(errors.rows, shape, floor)


def _distance_of_sorted(a: Tensor, b: Tensor, dim: int) -> float:
    ordered_a, ordered_b = (x.sort(dim)[0] for x in (a, b))
    return float((ordered_a - ordered_b).norm() / ordered_a.norm().clamp(min=1e-300))


def by_token(rows: Tensor, shape: Sequence[int]) -> Tensor | None:
    """Return the largest error at each position of the sequence, for a tensor of shape (batch, length, ...)."""
    if len(shape) < 3 or shape[1] < 2 or len(rows) != prod(shape[:-1]):
        return None
    return rows.reshape(shape[0], shape[1], -1).amax((0, 2))


def _token_words(rows: Tensor, shape: Sequence[int], floor: float) -> list[str]:
    errors = by_token(rows, shape)
    if errors is None:
        return []
    count, errors = len(errors), errors.to(torch.float64)
    off = (errors > max(1e-3 * float(errors.max()), 8 * floor)).nonzero().flatten().tolist()
    if len(off) == 1:
        return [f"token {off[0]} of {count} only"]
    if off and off[0] > 0 and len(off) == count - off[0]:
        if off[0] == 1:
            return ["all tokens but the first: a mask, positions, or the scale of the attention"]
        return [f"tokens from {off[0]} on only: a mask or positions"]
    if off and off[-1] < count - 1:
        return [f"tokens up to {off[-1]} only"]
    places = torch.arange(count, dtype=torch.float64)
    grows = float(torch.corrcoef(torch.stack([places, errors]))[0, 1]) if count > 3 else 0.0
    return ["growing along the sequence: positions, or a state that is carried on"] if grows > 0.9 else []


# What two modules keep.


class Gap(NamedTuple):
    """Relative error of a parameter or buffer; whether the rounding of its elements may be all of it, and its words."""

    error: float
    is_rounding: bool
    is_buffer: bool
    words: str


def gaps(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> dict[str, Gap]:
    """Return how far the parameters and buffers are apart that all these modules have and do not have alike.

    Parameters are compared in the coarser of their dtypes. Those of the parts of a fused module are laid side by side.
    """
    sides = [[own_tensors(module) for module in modules] for modules in (ours, theirs)]
    apart: dict[str, Gap] = {}
    for name in sides[0][0] if sides[0] else ():
        if all(name in tensors for side in sides for tensors in side):
            x, y = (_joined([tensors[name] for tensors in side]) for side in sides)
            if x is not None and y is not None and x.shape == y.shape:
                gap = _gap(name, x, y, is_buffer=name in ours[0]._buffers)
                apart |= {name: gap} if gap.error else {}
    return apart


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Return tensors one after the other, or None where their rows have different shapes."""
    if len({part.shape[1:] for part in parts}) > 1:
        return None
    return parts[0].cpu() if len(parts) == 1 else torch.cat([torch.atleast_1d(part).cpu() for part in parts])


def _gap(name: str, x: Tensor, y: Tensor, *, is_buffer: bool) -> Gap:
    dtypes = "" if x.dtype is y.dtype else f", {dtype_name(x.dtype)} in A and {dtype_name(y.dtype)} in B"
    coarse = coarsest(x.dtype, y.dtype)
    if not is_buffer:
        x, y = x.to(coarse), y.to(coarse)
    error = 0.0 if torch.equal(x, y) else errors_between(*(z.double().reshape(1, -1) for z in (x, y))).total
    eps = torch.finfo(coarse).eps
    x, y = x.double(), y.double()
    is_rounding = bool(((x - y).abs() <= eps * torch.maximum(x.abs(), y.abs())).all())
    words = f"its {name} is {error:.2g} apart{dtypes}"
    if x.ndim == 2 and x.shape[0] == x.shape[1] and torch.equal(x.t(), y):
        words = f"its {name} is transposed"
    return Gap(error, is_rounding, is_buffer, words)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point parameters and buffers, the weight with a row for each output."""
    kept = {**module._parameters, **module._buffers}
    tensors = {name: x.detach() for name, x in kept.items() if x is not None and _is_read(x)}
    weight = weight_of(module)
    return tensors if weight is None else {**tensors, "weight": weight}


def _is_read(x: Tensor) -> bool:
    return x.is_floating_point() and x.layout is torch.strided and not x.is_meta and x.numel() > 0


def weight_of(module: nn.Module | None) -> Tensor | None:
    """Return the weight with a row for each output, or None."""
    weight = None if module is None else module._parameters.get("weight")
    if weight is None or not _is_read(weight) or not weight.ndim:
        return None
    is_turned = type(module).__name__ == "Conv1D" and weight.ndim == 2  # transformers' own
    return weight.detach().t() if is_turned else weight.detach()


def are_of_a_kind(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> bool:
    """Return True if modules are of one class, or the parts of a fused one."""
    names = {type(module).__name__ for module in (*ours, *theirs)}
    return len(ours) != len(theirs) or len(names) == 1 or names == {"Conv1D", "Linear"}


def module_differences(ours: Sequence[nn.Module], theirs: Sequence[nn.Module], *, is_leaf: bool) -> list[str]:
    """Return in words which settings and own parameters modules do not have alike."""
    settings = _settings_apart(ours, theirs)
    training = [settings.pop("training")] if "training" in settings else []
    words = list(settings.values())
    if is_leaf and len(ours) == len(theirs) == 1:
        has_bias = [side[0]._parameters.get("bias") is not None for side in (ours, theirs)]
        if has_bias[0] != has_bias[1]:
            words.append(f"only {'A' if has_bias[0] else 'B'} has a bias")
    return [*words, *(gap.words for gap in gaps(ours, theirs).values()), *training]


def parameter_differences(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> list[str]:
    """Return in words which parameters, and which eps, leaf modules of equal outputs do not have alike.

    Modules of two kinds or settings may keep a weight in two ways, and a buffer may have been rounded.
    """
    settings = _settings_apart(ours, theirs)
    words = [text for name, text in settings.items() if name == "eps"]
    if are_of_a_kind(ours, theirs) and not settings.keys() - {"eps", "training"}:
        apart = gaps(ours, theirs).values()
        words += [gap.words for gap in apart if not (gap.is_rounding and gap.is_buffer)]
    return words


def _settings_apart(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> dict[str, str]:
    """Return in words, by name, the numbers and words that both modules keep and do not have alike."""
    if len(ours) != 1 or len(theirs) != 1:
        return {}
    a, b = (_settings(side[0]) for side in (ours, theirs))
    apart = [name for name in a if name in b and a[name] != b[name]]
    return {name: f"{name} is {a[name]} in A and {b[name]} in B" for name in apart}


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and words that a module keeps, by name; any name with eps is eps."""
    kept = vars(module).items()
    return {
        "eps" if "eps" in name else name: value
        for name, value in kept
        if isinstance(value, bool | int | float | str)
    }
