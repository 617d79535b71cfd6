"""`nanwatch.recipe`: which layers stay wide, how many runs it takes, and how it goes on after an interruption."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.precision.emulation import emulated


class Regression(nn.Module):
    """Four layers, of which `outlier` multiplies large elements that cancel out by weights that a format blurs."""

    def __init__(self, killed_at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.outlier, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.last = nn.Linear(64, 1)
        self.unused = nn.Linear(4, 4)
        with torch.no_grad():
            self.first.bias[:2] = 20.0  # mxfp8 has steps of 2 there, bfloat16 of 1/8
            self.outlier.weight[:, :2] = torch.tensor([3.0, -3.0])
        self.calls, self.killed_at = 0, killed_at

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls == self.killed_at:
            raise KeyboardInterrupt
        hidden = self.third(self.outlier(self.first(x)).relu()).relu()
        return {"loss": (self.last(hidden) - y).square().mean()}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(64, 64, generator=generator), "y": torch.randn(64, 1, generator=generator)}


def test_a_layer_with_outliers_stays_wide() -> None:
    """It alone is in bfloat16, the budget is kept by a run that is really made, and the runs are within the bound."""
    model = Regression()
    found = nanwatch.recipe(model, batch(), ["mxfp8", "nvfp4", "bfloat16"], loss_budget="1%", train=True)
    assert found.formats["outlier"] in ("bfloat16", "float32")
    assert all(found.formats[name] in ("mxfp8", "nvfp4") for name in ("first", "third", "last"))
    assert abs(found.change) <= 0.01
    assert found.remarks == (
        "not called with this batch, and left out: unused",
        "nvfp4 was not tried on last: its blocks do not divide their weights",
    )
    assert model.calls == found.forwards <= 4 * 3 * 2 + 20
    assert found.cost == pytest.approx(
        sum(
            one.share * {"nvfp4": 4, "mxfp8": 8, "bfloat16": 16, "float32": 32}[one.format] / 16
            for one in found.layers
        )
    )
    with torch.no_grad(), emulated(model, found.formats):
        loss = float(model(**batch())["loss"])
    assert found.change == pytest.approx(loss / found.loss - 1)


def test_formats_that_are_not_cheaper_are_not_tried() -> None:
    """A layer in bfloat16 has no use for bfloat16. One that stays as it is has its own dtype as its format."""
    model = Regression().bfloat16()
    model.last.float().weight.data.mul_(1.001)  # no longer what bfloat16 has
    model.last.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    found = nanwatch.recipe(
        model, {k: x.bfloat16() for k, x in batch().items()}, ["bfloat16", "mxfp8"], loss_budget=0
    )
    assert [one.format for one in found.layers] == [one.own_format for one in found.layers]
    assert [one.own_format for one in found.layers] == ["bfloat16"] * 3 + ["float32"]
    assert [one.alone.keys() for one in found.layers] == [{"mxfp8"}] * 3 + [{"bfloat16", "mxfp8"}]
    assert found.formats == {}
    assert found.cost == found.cost_before == pytest.approx(1 + found.layers[-1].share)


def test_blocks_that_do_not_divide_a_weight_are_not_tried() -> None:
    """30 inputs are no blocks of 32 or 16, 10 outputs none of NVFP4's 16; a scale for a whole row takes any."""
    model = nn.Sequential(nn.Linear(32, 30), nn.Linear(30, 64), nn.Linear(64, 10))
    tried = ["mxfp8", "nvfp4", "float8_rowwise", "float8_block128x128"]
    found = nanwatch.recipe(model, torch.randn(8, 32), tried, loss=lambda y: y.square().mean() + 1)
    assert [sorted(one.alone) for one in found.layers] == [
        ["float8_rowwise", "mxfp8"],
        ["float8_rowwise"],
        ["float8_rowwise", "mxfp8"],
    ]
    assert "mxfp8 was not tried on 1: its blocks do not divide" in found.to_text()
    assert "nvfp4 was not tried on 0, 1, 2: its" in found.to_json()


def test_a_loss_with_coarse_steps() -> None:
    """A note says that bfloat16 has the same number for two losses that are less than 0.8 % apart."""
    found = nanwatch.recipe(Regression(), batch(), ["mxfp8"], loss=lambda output: output["loss"].bfloat16())
    assert "the loss is bfloat16, which has steps of 0.78 %: compute it in float32" in found.remarks


def test_an_interrupted_call_goes_on(tmp_path: Path) -> None:
    """The second call makes the runs that are left and one of the model as it is, and the result is the same."""
    options: dict[str, Any] = {
        "to": ["mxfp8", "nvfp4"],
        "loss_budget": 0.02,
        "train": True,
        "stochastic": True,
    }
    whole = nanwatch.recipe(Regression(), batch(), **options)
    journal = tmp_path / "measured.jsonl"
    with pytest.raises(KeyboardInterrupt):
        nanwatch.recipe(Regression(killed_at=8), batch(), journal=journal, **options)
    model = Regression()
    resumed = nanwatch.recipe(model, batch(), journal=os.fspath(journal), **options)
    assert (
        model.calls == whole.forwards - 6
    )  # seven were finished, of which that of the model as it is is made again
    assert resumed.layers == whole.layers
    assert (resumed.change, resumed.together) == (whole.change, whole.together)
    again = Regression()
    nanwatch.recipe(again, batch(), journal=journal, **{**options, "loss_budget": 0.03})
    assert again.calls < 8  # another budget is another search over the same measurements


def test_runs_that_are_not_repeatable() -> None:
    """A note says that the budget is less than what two equal runs differ by."""
    model = Regression()
    found = nanwatch.recipe(
        model, batch(), ["mxfp8"], loss=lambda output: output["loss"] * (1 + model.calls % 2), loss_budget=0.4
    )
    assert found.floor == pytest.approx(found.loss / 2)
    assert any("two equal runs differ by more than the budget" in remark for remark in found.remarks)


class Noisy(nn.Module):
    """Classifier whose labels are chance, so that its loss says nothing about its layers. `bad` is blurred most."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.good, self.bad, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)
        with torch.no_grad():
            self.good.bias[::32] = 20.0
            self.bad.weight[:, ::32] = 0.0

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x + self.bad(self.good(x))), labels)


def test_the_divergence_tells_layers_apart_where_the_loss_does_not() -> None:
    """The same layer is the worst on each batch, by a number that two batches agree on to a fifth."""
    found = []
    for seed in range(3):
        chance = torch.Generator().manual_seed(seed)
        one = {
            "x": torch.randn(256, 64, generator=chance),
            "labels": torch.randint(0, 8, (256,), generator=chance),
        }
        found.append(nanwatch.recipe(Noisy(), one, ["mxfp4"], loss_budget=0.0001))
    trials = [{layer.name: layer.alone["mxfp4"] for layer in one.layers} for one in found]
    assert {max(one, key=lambda name: one[name].damage) for one in trials} == {"bad"}
    damages = [one["bad"].damage for one in trials]
    assert max(damages) < 1.2 * min(damages)
    assert all(one["bad"].error > 0 for one in trials)
    assert all("the batch is small" in " ".join(one.remarks) or not one.formats for one in found)
    assert any("do not tell layers apart" in " ".join(one.remarks) for one in found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"to": ["mxfp9"]}, "no format 'mxfp9'; the formats are mxfp8.*close names: mxfp8"),
        ({"to": []}, "no format was given; the formats are"),
        ({"loss_budget": "half"}, "a share of the loss.*'0.5%', got 'half'"),
        ({"loss_budget": 5}, "a share of the loss.*got 5"),
        ({"loss_budget": float("nan")}, "a share of the loss"),
        ({"hadamard": 7}, "16 or 32, got 7"),
        ({"stochastic": True}, "train=True"),
        ({"loss": lambda output: output}, "the batch gives no loss"),
        ({"model": nn.ReLU()}, "has no nn.Linear"),
        (
            {"batch": {"x": torch.full((1, 64), torch.inf), "y": torch.zeros(1, 1)}},
            "loss of the model as it is is nan",
        ),
    ],
)
def test_bad_input(options: dict[str, Any], words: str) -> None:
    """Errors say what came, what is accepted and what to try."""
    with pytest.raises(ValueError, match=words):
        nanwatch.recipe(**{"model": Regression(), "batch": batch(), **options})
    with pytest.raises(TypeError, match=r"a torch\.nn\.Module, got str"):
        nanwatch.recipe("model", batch())  # type: ignore[arg-type]
