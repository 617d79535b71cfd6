"""`nanwatch.compare` of 16-bit models: what rounding hides, what it explains, and parameters that no output shows."""

from __future__ import annotations

import copy
import json
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


def under_autocast(model: nn.Module, x: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        model(x)


@pytest.mark.parametrize("dtype", NARROW)
def test_a_difference_that_rounding_hides_is_told_with_its_module(dtype: torch.dtype) -> None:
    """The error of float32 copies is that of the models before the cast."""
    name = str(dtype).removeprefix("torch.")
    share = 10 * torch.finfo(dtype).eps / 16
    found = nanwatch.compare(curved(0.0).to(dtype), curved(share).to(dtype), X.to(dtype))
    assert found.first is not None
    assert (found.equal, found.equal_in, found.first.module_a) == (False, name, "1")
    headline = found.to_text().splitlines()[0]
    assert headline.startswith(f"Equal in {name}; the float32 copies differ first in 1 (Curved), 0.00")
    assert json.loads(found.to_json())["equal_in"] == name
    exact = nanwatch.compare(curved(0.0), curved(share), X)
    assert exact.first is not None
    assert found.first.error == pytest.approx(exact.first.error, rel=0.05)


def test_copies_of_models_under_autocast_compute_without_it() -> None:
    a, b = curved(0.0), curved(3e-3)
    found = nanwatch.compare(a, b, X, call_a=under_autocast, call_b=under_autocast)
    assert found.first is not None
    assert (found.equal_in, found.first.module_a) == ("bfloat16", "1")
    assert nanwatch.compare(a, copy.deepcopy(a), X, call_a=under_autocast, call_b=under_autocast).equal


def test_the_module_that_16_bits_name_later_is_told_too() -> None:
    a = curved(0.0)
    b = copy.deepcopy(a)
    b[1].share = 1e-3
    b[2].weight.data *= 1.5
    found = nanwatch.compare(a.bfloat16(), b.bfloat16(), X.bfloat16())
    assert found.first is not None
    assert (found.equal_in, found.first.module_a) == ("", "1")
    assert found.remarks[0].startswith(
        "this is of float32 copies; in bfloat16 they differ first in 2 (Linear), 0."
    )


class Narrow(nn.Module):
    """Sum that saturates in 16 bits, or not."""

    def __init__(self, *, is_wide: bool) -> None:
        super().__init__()
        self.is_wide = is_wide

    def forward(self, x: Tensor) -> Tensor:
        total = x.float() if self.is_wide else x
        for _ in range(600):
            total = total + x
        return total.to(x.dtype)


def test_a_difference_of_16_bits_alone_is_told_as_one() -> None:
    a, b = (nn.Sequential(nn.Identity(), Narrow(is_wide=one)) for one in (True, False))
    found = nanwatch.compare(a, b, X.bfloat16())
    assert found.first is not None
    assert (found.equal_in, found.first.module_a) == ("", "1")
    assert "the float32 copies are equal" in found.remarks[0]


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
    assert (near.equal_in, near.first.module_a) == ("bfloat16", "1")


class Far(nn.Module):
    """Angles of far positions, of frequencies in a buffer that a cast rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 100.0 ** -(torch.arange(16) / 16))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.arange(2000.0, 2008.0)[:, None] * self.frequencies.float()).cos().to(x.dtype) * x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_that_has_the_fault_hides_it_not(dtype: torch.dtype) -> None:
    """A run in bfloat16, in which the noise of a float32 model is measured, has rounded frequencies as B has."""
    a = nn.Sequential(nn.Linear(16, 16), Far()).to(dtype)
    b = copy.deepcopy(a).bfloat16()
    a[1].frequencies = Far().frequencies
    x = X.to(dtype)
    outputs = [one(x.to(one[0].weight.dtype)).double().detach() for one in (a, b)]
    assert float((outputs[0] - outputs[1]).norm() / outputs[0].norm()) > 0.2
    found = nanwatch.compare(a, b, x, call_b=lambda model, inputs: model(inputs.bfloat16()))
    assert found.equal is False
    assert found.first is not None
    assert found.first.module_a == "1"
    gap = float((a[1].frequencies - b[1].frequencies).norm() / a[1].frequencies.norm())
    words = f"its frequencies is {gap:.2g} apart, float32 in A and bfloat16 in B"
    assert found.remarks[-1] == f"apart before anything is run: 1 ({words})"
    assert (words in found.likely) == (dtype is torch.float32)


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


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
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
    assert words in " ".join(found.likely)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_another_order_of_hidden_numbers_is_a_convention(dtype: torch.dtype) -> None:
    """The weights of two leaves differ, and so do the values between them."""
    a = embedded()
    b = copy.deepcopy(a)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    b[1].weight.data, b[1].bias.data = a[1].weight.data[order], a[1].bias.data[order]
    b[3].weight.data = a[3].weight.data[:, order]
    whole = [nn.Sequential(one[0], nn.Sequential(*one[1:4]), one[4]).to(dtype) for one in (a, b)]
    assert nanwatch.compare(*whole, IDS).equal


def test_a_model_that_runs_in_16_bits_alone_is_compared_there() -> None:
    def cast(model: nn.Module, x: Tensor) -> None:
        model(x.bfloat16())

    a = curved(0.0).bfloat16()
    found = nanwatch.compare(a, copy.deepcopy(a), X, call_a=cast, call_b=cast)
    assert found.equal
    assert [one.partition(":")[0] for one in found.remarks] == [
        "A did not run in float32",
        "B did not run in float32",
    ]
