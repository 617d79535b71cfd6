"""The recipe's forms: text, JSON, and the configurations of torchao and TransformerEngine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.equivalence.recipes.forwards import Distance
from nanwatch.equivalence.recipes.result import TORCHAO, LayerRecipe, Recipe, Trial

TRIALS = {"mxfp8": Trial(0.001, Distance(0.02, 0.999)), "nvfp4": Trial(-0.04, Distance(0.3, 0.9))}
RECIPE = Recipe(
    loss=2.5,
    floor=0.0,
    change=0.0021,
    loss_budget=0.005,
    cost=0.4,
    cost_before=1.0,
    layers=(
        LayerRecipe(
            "fc1", "nvfp4", "bfloat16", 0.5, {**TRIALS, "nvfp4": Trial(0.0011)}, Distance(0.25, 0.95)
        ),
        LayerRecipe("fc2", "mxfp8", "bfloat16", 0.3, TRIALS, Distance(0.02, 0.999)),
        LayerRecipe("fc3", "mxfp6_e2m3", "bfloat16", 0.1, {}),
        LayerRecipe("head", "bfloat16", "bfloat16", 0.1, TRIALS, Distance(0.01, 1.0)),
    ),
    together={"mxfp8": 0.002, "nvfp4": float("inf")},
    forwards=17,
    remarks=("torchao has no configuration for mxfp6_e2m3",),
    error=0.0004,
)


def test_text() -> None:
    """The verdict, the formats, the worst layers with their own changes, and what emulation cannot show."""
    lines = RECIPE.to_text().splitlines()
    assert lines[0] == (
        "Recipe: 3 of 4 linear layers in narrower formats, at 0.40 of the cost of bfloat16 (before: 1.00)."
    )
    assert "+0.21 % ± 0.04 % with the recipe (budget 0.5 %" in lines[1]
    rows = [line.split() for line in lines]
    assert ["nvfp4", "1", "50.0", "%", "+inf", "%"] in rows
    assert ["mxfp8", "30.0%", "+0.1", "%", "-4", "%", "0.02,", "0.9990", "fc2"] in rows
    assert ["mxfp6_e2m3", "10.0%", "-", "-", "-", "fc3"] in rows
    assert [row[-1] for row in rows if row[-1:] and row[-1] in ("fc1", "fc2", "head", "fc3")] == [
        "fc2",
        "head",
        "fc1",
        "fc3",
    ]
    text = " ".join(RECIPE.to_text().split())
    assert "cannot show the order and the width" in text
    assert "does not see how gradients are rounded" in text
    assert lines[-1] == "Note: torchao has no configuration for mxfp6_e2m3"


def test_text_with_the_damage() -> None:
    """Beside each change, and for the whole recipe: both have to be within the budget."""
    trial = Trial(-0.001, divergence=0.03)
    layer = LayerRecipe("fc", "bfloat16", "bfloat16", 1.0, {"mxfp8": trial})
    text = replace(RECIPE, layers=(layer,), divergence=0.0004).to_text()
    assert "+0.21 % ± 0.04 % with the recipe, damage 0.04 % (budget 0.5 %" in text
    assert "Change of the loss / damage (divergence) with one layer in a format" in text
    assert ["bfloat16", "100.0%", "-0.1", "/", "3", "%", "-", "fc"] in map(str.split, text.splitlines())


def test_json() -> None:
    """One document with the configurations of both libraries by the names of layers; infinity is a string."""
    document = json.loads(RECIPE.to_json())
    assert (document["schema"], document["version"]) == ("nanwatch.recipe", 1)
    assert document["together"] == {"mxfp8": 0.002, "nvfp4": "inf"}
    assert document["torchao"] == {
        "fc1": "NVFP4DynamicActivationNVFP4WeightConfig()",
        "fc2": "MXDynamicActivationMXWeightConfig(scaling_mode=ScaleCalculationMode.FLOOR)",
    }
    assert document["transformer_engine"] == {"NVFP4BlockScaling": ["fc1"], "MXFP8BlockScaling": ["fc2"]}
    assert document["layers"][1]["alone"]["nvfp4"]["gradients"] == {"error": 0.3, "cosine": 0.9}


@pytest.mark.parametrize("expression", sorted(set(TORCHAO.values())))
def test_torchao_has_the_configurations(expression: str) -> None:
    """Each expression makes one, from the names that the how-to page imports."""
    names = {"torch": torch}
    for module in ("torchao.quantization", "torchao.prototype.mx_formats"):
        names |= vars(pytest.importorskip(module))
    assert type(eval(expression, names)).__name__ == expression.partition("(")[0]


def test_torchao_computes_what_the_recipe_of_a_bfloat16_model_predicts() -> None:
    """Used as on the how-to page, by torchao's emulation; the loss to 1e-4."""
    quantization = pytest.importorskip("torchao.quantization")
    names = {
        "torch": torch,
        **vars(quantization),
        **vars(pytest.importorskip("torchao.prototype.mx_formats")),
    }
    names |= vars(pytest.importorskip("torchao.quantization.quantize_.common"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).bfloat16()
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    found = nanwatch.recipe(model, x, ["mxfp8"], loss=lambda y: y.float().square().mean(), loss_budget=0.5)
    emulated = "Config(kernel_preference=KernelPreference.EMULATED, "
    for name, expression in found.torchao.items():
        config = eval(expression.replace("Config(", emulated), names)
        quantization.quantize_(model, config, filter_fn=lambda _, one, name=name: one == name)
    assert len(found.formats) == 2
    assert float(model(x).detach().float().square().mean()) == pytest.approx(
        found.loss * (1 + found.change), rel=1e-4
    )
