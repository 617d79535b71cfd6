"""Sketches: the matrix, linearity, and how close the estimates come to the true relative error and cosine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nanwatch.numerics._fingerprint import WIDTH, sketch

ROWS = 1024


def hash_of(place: int) -> int:
    """SplitMix64 of the place and the seed, in Python's integers."""
    ones = (1 << 64) - 1
    x = ((place + 1) * 0x9E3779B97F4A7C15 + int.from_bytes(b"nanwatch", "big")) & ones
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & ones
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & ones
    return x ^ (x >> 31)


def test_the_matrix_is_the_hash_of_the_place() -> None:
    """A unit row shows the signs of its place."""
    size = 70
    numbers = sketch(torch.eye(size, dtype=torch.float64)) * WIDTH**0.5
    signs = [[1 - 2 * (hash_of(place) >> bit & 1) for bit in range(WIDTH)] for place in range(size)]
    assert torch.equal(numbers.round(), torch.tensor(signs).float())


def inputs(shape: tuple[int, ...] = (ROWS, 384)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def noise(x: Tensor) -> Tensor:
    return x + 0.01 * x.std() * inputs(x.shape).flip(0, 1)


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def half_zero(x: Tensor) -> Tensor:
    return torch.nn.functional.dropout(x, 0.5)


def plain(x: Tensor) -> Tensor:
    return x


def outliers(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 7] *= 100  # as in the residual stream of large models
    return x


@pytest.mark.parametrize("make", [plain, outliers])
@pytest.mark.parametrize("change", [noise, rounded, half_zero])
def test_the_estimates_are_close_to_the_truth(
    make: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]
) -> None:
    """All rows together are within 20 %; 99 rows of 100 each within 4 standard deviations of both norms."""
    torch.manual_seed(0)
    a = make(inputs())
    b = change(a)
    before, after = sketch(a).double(), sketch(b).double()
    truth = (b - a).norm() / a.norm()
    by_row = (b - a).norm(dim=1) / a.norm(dim=1)
    assert abs((after - before).norm() / before.norm() / truth - 1) < 0.2
    ratio = (after - before).norm(dim=1) / before.norm(dim=1) / by_row
    assert ((ratio - 1).abs() < 4 * 0.18).double().mean() > 0.99
    cosine = torch.nn.functional.cosine_similarity(a, b)
    apart = (torch.nn.functional.cosine_similarity(before, after) - cosine).abs()
    assert (apart < 4 * WIDTH**-0.5 * (1 - cosine**2).clamp(min=1e-12)).double().mean() > 0.99
