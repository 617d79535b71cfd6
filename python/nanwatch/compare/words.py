"""Words for a difference: its shape, and the settings, parameters and buffers that two modules do not share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..numerics.readable import dtype_name
from .calls import CallPair, Errors, coarsest, errors_between


def shape_of_difference(a: Tensor, b: Tensor, errors: Errors, shape: Sequence[int]) -> list[str]:
    """Return in words what the difference between the rows `a` and `b` of tensors of this shape looks like."""
    difference, distance, floor = b - a, errors.total, errors.floor
    if not (0 < distance < float("inf")):
        return ["non-finite numbers on one side only"] if distance else []
    noise = max(0.05 * distance, 4 * floor)
    size = b.norm().clamp(min=1e-300)
    scale = float((a * b).sum() / (a * a).sum())
    if float((b - scale * a).norm() / size) < noise:
        return [f"a scale: B is {scale:.7g} times A"]
    scales = (a * b).sum(-1, keepdim=True) / (a * a).sum(-1, keepdim=True).clamp(min=1e-300)
    low, high = float(scales.min()), float(scales.max())
    # Another eps makes all tokens smaller, or all larger.
    if float((b - scales * a).norm() / size) < noise and (high < 1 or low > 1):
        return [f"a scale for each token, from {low:.4g} to {high:.4g}: the eps of a norm, or another norm"]
    words = []
    columns = difference.norm(dim=0)
    off = columns > max(1e-3 * float(columns.max()), 2 * floor * float(a.norm(dim=0).max()))
    places = off.nonzero().flatten().tolist()
    if 0 < len(places) <= len(columns) / 2:
        words.append(f"{len(places)} of {len(columns)} columns only, from {places[0]} to {places[-1]}")
    return words + _token_words(errors, shape)


def _token_words(errors: Errors, shape: Sequence[int]) -> list[str]:
    """Return in words at which positions of the sequence a tensor of shape (batch, length, ...) differs."""
    if len(shape) < 3 or shape[1] < 2 or len(errors.rows) != prod(shape[:-1]):
        return []
    by_token = errors.rows.reshape(shape[0], shape[1], -1).amax((0, 2)).to(torch.float64)
    count = len(by_token)
    off = (by_token > max(1e-3 * float(by_token.max()), 8 * errors.floor)).nonzero().flatten().tolist()
    if len(off) == 1:
        return [f"token {off[0]} of {count} only"]
    if off and off[0] > 0 and len(off) == count - off[0]:
        if off[0] == 1:
            return ["all tokens but the first: a mask, positions, or the scale of the attention"]
        return [f"tokens from {off[0]} on only: a mask or positions"]
    return [f"tokens up to {off[-1]} only"] if off and off[-1] < count - 1 else []


class Gap(NamedTuple):
    """Difference of a parameter or buffer, in words, and the share of its elements that rounding does not explain."""

    words: str
    beyond: float


def gaps(pair: CallPair) -> dict[str, Gap]:
    """Return the parameters and buffers that both modules of a pair have, and do not have alike."""
    a, b = pair.a.tensors(), pair.b.tensors()
    shared = {name: (x, b[name]) for name, x in a.items() if name in b and x.shape == b[name].shape}
    buffers = () if pair.a.module is None else pair.a.module._buffers
    apart = {name: gap_between(name, *both, is_buffer=name in buffers) for name, both in shared.items()}
    return {name: gap for name, gap in apart.items() if gap is not None}


def gap_between(name: str, x: Tensor, y: Tensor, *, is_buffer: bool) -> Gap | None:
    """Return how far two tensors of one shape are apart, or None where they are equal.

    Parameters are equal in the coarser of their dtypes or not at all.
    """
    dtypes = "" if x.dtype is y.dtype else f", {dtype_name(x.dtype)} in A and {dtype_name(y.dtype)} in B"
    coarse = coarsest(x.dtype, y.dtype)
    x, y = x.cpu(), y.cpu()
    if not is_buffer:
        x, y = x.to(coarse), y.to(coarse)
    if torch.equal(x, y):
        return None
    x, y = x.double(), y.double()
    error = errors_between(x.reshape(1, -1), y.reshape(1, -1)).total
    # A non-finite element is close to its equal alone, and to what the cast makes so, as the least float32 in a mask.
    is_close = partial(torch.isclose, rtol=torch.finfo(coarse).eps, atol=0.0, equal_nan=True)
    is_rounding = is_close(x, y) | is_close(y, x) | (x.to(coarse) == y.to(coarse))
    beyond = 1.0 - float(is_rounding.double().mean()) if is_buffer else 1.0
    is_turned = x.ndim == 2 and x.shape[0] == x.shape[1] and torch.equal(x.t(), y)
    words = "is transposed" if is_turned else f"is {error:.2g} apart{dtypes}"
    return Gap(f"its {name} {words}", beyond) if error else None


def module_differences(pair: CallPair) -> list[str]:
    """Return in words which settings and own parameters the two modules of a pair do not have alike."""
    settings = _settings_apart(pair)
    training = [settings.pop("training")] if "training" in settings else []
    has_bias = [call.module is not None and call.module._parameters.get("bias") is not None for call in pair]
    bias = [f"only {'A' if has_bias[0] else 'B'} has a bias"] if pair.is_leaf and len({*has_bias}) > 1 else []
    return [*settings.values(), *bias, *(gap.words for gap in gaps(pair).values()), *training]


def parameter_differences(pair: CallPair) -> list[str]:
    """Return in words which own tensors modules of equal outputs do not have alike, and of leaves which eps.

    Modules of two kinds or settings may keep a weight in two ways, and a buffer may have been rounded.
    """
    settings = _settings_apart(pair)
    words = [settings["eps"]] if "eps" in settings and pair.is_leaf else []
    kinds = {type(call.module).__name__ for call in pair}
    is_one_kind = pair.a.parts or pair.b.parts or len(kinds) == 1 or kinds == {"Conv1D", "Linear"}
    if is_one_kind and not settings.keys() - {"eps", "training"}:
        words += [gap.words for gap in gaps(pair).values() if gap.beyond]
    return words


def _settings_apart(pair: CallPair) -> dict[str, str]:
    """Return in words, by name, the numbers and words that both modules keep and do not have alike."""
    if pair.a.parts or pair.b.parts:
        return {}
    a, b = (_settings(call.module) for call in pair)
    apart = [name for name in a if name in b and a[name] != b[name]]
    return {name: f"{name} is {a[name]} in A and {b[name]} in B" for name in apart}


def _settings(module: nn.Module | None) -> dict[str, object]:
    """Return the numbers and words that a module keeps, by name; any name with eps is eps."""
    kept = {} if module is None else vars(module)
    numbers = {name: x for name, x in kept.items() if isinstance(x, bool | int | float | str)}
    return {"eps" if "eps" in name else name: x for name, x in numbers.items()}
