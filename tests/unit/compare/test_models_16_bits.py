"""`nanwatch.compare` of 16-bit models: what rounding hides, what it explains, and parameters that no output shows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch

X = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
NARROW = [torch.bfloat16, torch.float16]


class Curved(nn.Module):
    """Layer with a small term that may be left out."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x + self.share * x * x


def curved(share: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Curved(share), nn.Linear(16, 16))


@pytest.mark.parametrize("dtype", NARROW)
def test_a_difference_that_rounding_hides_is_told_with_its_module(dtype: torch.dtype) -> None:
    """The error of float32 copies is that of the models before the cast."""
    name = str(dtype).removeprefix("torch.")
    share = 10 * torch.finfo(dtype).eps / 16
    found = nanwatch.compare(curved(0.0).to(dtype), curved(share).to(dtype), X.to(dtype))
    assert found.first is not None
    assert (found.equal, found.first.module_a) == (False, "1")
    headline = found.to_text().splitlines()[0]
    assert headline.startswith(f"Equal in {name}; the float32 copies differ first in 1 (Curved), 0.00")
    exact = nanwatch.compare(curved(0.0), curved(share), X)
    assert exact.first is not None
    assert found.first.error == pytest.approx(exact.first.error, rel=0.05)


class Turned(nn.Module):
    """Product with frequencies that are kept in a buffer, which a cast rounds, or computed."""

    def __init__(self, base: float, *, is_kept: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.base, self.is_kept = base, is_kept
        if is_kept:
            self.register_buffer("frequencies", self.computed())

    def computed(self) -> Tensor:
        return self.base ** -(torch.arange(16) / 16)

    def forward(self, x: Tensor) -> Tensor:
        frequencies = self.frequencies if self.is_kept else self.computed()
        return (self.layer(x) * torch.cos(torch.arange(8.0)[:, None] * frequencies.float())).to(x.dtype)


def turned(base: float, *, is_kept: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Turned(base, is_kept=is_kept), nn.Linear(16, 16)).bfloat16()


def test_a_buffer_that_the_cast_rounded_is_no_difference() -> None:
    """Though the float32 copies have it rounded too. A buffer that is further off is one."""
    a = turned(100.0, is_kept=True)
    found = nanwatch.compare(a, turned(100.0, is_kept=False), X.bfloat16())
    assert found.equal, found.to_text()
    for is_kept in (True, False):
        found = nanwatch.compare(a, turned(200.0, is_kept=is_kept), X.bfloat16())
        assert found.first is not None
        assert found.first.module_a == "1"
    near = nanwatch.compare(a, turned(102.0, is_kept=True), X.bfloat16())
    assert near.first is not None
    assert near.headline.startswith("Equal in bfloat16; the float32 copies differ first in 1 ")


def embedded() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(9, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16)
    )


IDS = torch.tensor([[0, 1, 2, 3]])


def unused_row(model: Any) -> None:
    model[0].weight.data[7] += 1


def last_bit(model: Any) -> None:
    model[1].weight.data[3, 4] *= 1.01


def scaled(model: Any) -> None:
    """The norm after it takes the scale out again, up to its eps."""
    model[3].weight.data *= 2
    model[3].bias.data *= 2


def other_eps(model: Any) -> None:
    model[4].eps = 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("change", "module", "words"),
    [
        (unused_row, "0", "its weight is 0.3"),
        (last_bit, "1", "its weight is "),
        (scaled, "3", "its weight is 1 apart"),
        (other_eps, "4", "eps is 1e-05 in A and 1e-09 in B"),
    ],
)
def test_a_leaf_with_another_parameter_is_never_equal(
    change: Callable[[Any], None], module: str, words: str, dtype: torch.dtype
) -> None:
    """Whatever these inputs make of it."""
    a = embedded().to(dtype)
    b = copy.deepcopy(a)
    change(b)
    found = nanwatch.compare(a, b, IDS)
    assert found.equal is False
    assert found.first is not None
    assert found.first.module_a == module
    assert words in " ".join(found.words("Looks like"))
