"""The reports, and where the fault of each lies. `module`: the one whose forward has the fault, "-" for none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from programs.case import CASES, Case, Setup

HERE = Path(__file__).parent


class Reported(NamedTuple):
    """A report, the module at fault, and the name of the operation in torch.ops.aten."""

    name: str
    module: str
    operation: str
    thread: str
    steps: int = 1


def setup_of(names: ModuleType, steps: int) -> Setup:
    """Return the program of a file."""
    loss = getattr(names, "loss", lambda output: output.float().sum())
    optimizer = getattr(names, "optimizer", None)
    return Setup(names.make(), batch=names.batch, loss=loss, optimizer=optimizer, steps=steps)


def load(path: Path, text: str) -> ModuleType:
    """Return source text as a module of its own. Relative imports in it are those of `programs`."""
    names = ModuleType(f"text of {path.stem}")
    names.__package__ = "programs"
    sys.modules[names.__name__] = names  # where dataclasses look for annotations
    exec(compile(text, str(path), "exec"), names.__dict__)
    return names


def enter() -> None:
    """Enter the reports into CASES."""
    for report in REPORTS:
        path = HERE / f"{report.name}.py"

        def make(path: Path = path, steps: int = report.steps) -> Setup:
            return setup_of(load(path, path.read_text()), steps)

        facts = ("", "produced", "nan", None, (report.operation,), False, False)
        CASES.append(Case(report.name, make, path, report.thread, report.module, *facts))


REPORTS = [
    Reported("dice_empty", "criterion.dice", "div", "nasa/delta/pull/115"),
    Reported("pna_attenuation", "conv.scale", "reciprocal", "pyg-team/pytorch_geometric/pull/6609"),
    Reported("rtm3d_heatmap", "loss_heatmap", "log", "maudzung/RTM3D/issues/13"),
    Reported("ppo_ratio", "surrogate", "exp", "radixark/miles/pull/1363"),
    Reported("vae_kl_outside", "-", "exp", "vanderschaarlab/synthcity/issues/331"),
    Reported("cox_risk_set", "cox", "exp", "havakv/pycox/issues/144"),
    Reported("causal_sign", "attn", "masked_fill", "lucidrains/memory-compressed-attention/issues/2"),
    Reported("categorical_masked", "dist", "mul", "Farama-Foundation/MicroRTS-Py/pull/32"),
    Reported("gptq_zero_scale", "layer.quantise", "div", "ModelCloud/GPTQModel/pull/1531"),
    Reported("half_box_coder", "coder", "log", "rwightman/efficientdet-pytorch/issues/291"),
    Reported("lorentz_arcosh", "manifold.arcosh", "log", "geoopt/geoopt/pull/215"),
    Reported("learning_rate_quality", "head", "addmm", "pavancm/CONTRIQUE/issues/8", steps=5),
    # These fail in the backward.
    Reported("arcface_sine", "margin", "sqrt", "ronghuaiyang/arcface-pytorch/issues/91"),
    Reported("gem_pooling", "pool", "pow", "facebookresearch/multigrain/issues/5"),
    Reported("siamese_identical", "loss_fn", "sqrt", "adambielski/siamese-triplet/issues/18"),
    Reported("rotation_to_quaternion", "to_quaternion", "sqrt", "kornia/kornia/issues/1653"),
    Reported("geodesic_loss", "criterion.distance", "acos", "papagina/RotationContinuity/issues/11"),
    Reported("mse_missing_targets", "objective.criterion", "mse_loss", "pytorch/pytorch/issues/121416"),
    Reported("eigenvectors_repeated", "basis", "linalg_eigh", "pytorch/pytorch/issues/23133"),
    Reported("where_sqrt_negative", "companding", "sqrt", "tensorflow/tensorflow/pull/38467"),
    Reported("static_loss_scale", "reg", "addmm", "open-mmlab/mmdetection/issues/3690"),
    Reported("complex_head_angle", "demodulate", "angle", "pytorch/pytorch/issues/98276"),
    Reported("spectral_rmse", "-", "sqrt", "ZFTurbo/Music-Source-Separation-Training/pull/200"),
    Reported("attention_nan_refilled", "layer", "_softmax", "THUwangcy/ReChorus/issues/8"),
]
enter()
