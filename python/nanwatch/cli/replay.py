"""`nanwatch replay CAPSULE --model pkg.mod:factory`: make a capsule's call again, in one dtype or several."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from ..capsule.capsule import FILE, Capsule
from ..capsule.replay import Replayed
from ..report import text
from ..session.api import rerun
from ..util.progress import Tell
from ..util.visible import module_name, spell, visible
from .commands import UseError, answered, command_parser, imported

_RECORDED = "as recorded"
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_NONFINITE, _FAILED = 1, 2
_EXAMPLES = """\
exit status: 1 when a value was not finite again, 0 when all was finite, 2 when a call could not be made

examples:
  nanwatch replay run/capsule --model train:make_model
  nanwatch replay run/capsule --model train:make_model --dtype float32 bfloat16
  nanwatch replay run/capsule --model train:make_model --device cpu --json
"""


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    parser = command_parser(
        "replay",
        "Make the module call in a capsule again and say whether a value is not finite again.",
        _EXAMPLES,
    )
    parser.add_argument(
        "capsule", metavar="CAPSULE", help="the folder of the capsule, or of the failure that it is in"
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="PKG.MOD:NAME",
        help="the model, or what makes it when called without arguments; imported from the current directory too."
        " This runs its code: name only what you trust",
    )
    parser.add_argument("--device", help="where to run; by default where the recorded call ran, or the CPU")
    parser.add_argument(
        "--dtype",
        nargs="+",
        action="extend",
        default=[],
        choices=_DTYPES,
        help="after the capsule's own, with weights and inputs cast to it and autocast off",
    )
    return answered(parser, arguments, _replay)


def _replay(options: argparse.Namespace, tell: Tell) -> tuple[str, int]:
    tell(f"reading {options.capsule}")
    folder = Path(options.capsule)
    inside = folder / "capsule"  # in the folder of a failure, which `output_dir` holds
    capsule = Capsule.open(inside if inside.is_dir() and not (folder / FILE).exists() else folder)
    tell(f"importing {options.model}")
    model = imported(options.model, "--model")
    if not isinstance(model, torch.nn.Module):
        raise UseError(
            f"--model {options.model} should be a torch.nn.Module or make one, got {type(model).__name__}"
        )
    results: dict[str, Replayed | Exception] = {}
    for dtype in (_RECORDED, *options.dtype):
        tell(f"replaying {dtype}")
        try:
            results[dtype] = rerun(
                capsule, model, None if dtype == _RECORDED else getattr(torch, dtype), options.device
            )
        except Exception as error:  # other dtypes may work
            results[dtype] = error
    verdicts = {_verdict(result)[0] for result in results.values()}
    status = _NONFINITE if "non-finite" in verdicts else 0 if verdicts == {"finite"} else _FAILED
    return (_document if options.json else _text)(capsule, results), status


def _verdict(result: Replayed | Exception) -> tuple[str, str]:
    """Return what came of a call: "non-finite", "finite", "not seen" or "failed"; and the same in words."""
    if isinstance(result, Exception):
        return "failed", f"could not be run: {spell(result)}"
    if result.report.finding is not None:
        return "non-finite", text.summary(result.report.finding)
    if any(record.isfinite for frame in result.report.frames for record in frame.records):
        return "finite", "all finite"
    return "not seen", "nothing could be looked at"


def _text(capsule: Capsule, results: dict[str, Replayed | Exception]) -> str:
    versions = f"torch {capsule.versions.get('torch')}, nanwatch {capsule.versions.get('nanwatch')}"
    name = f"{module_name(capsule.module)} ({capsule.class_name})"
    lines = [f"{capsule.folder}: {name} on {capsule.device}, {versions}"]
    lines += [f"{dtype:<13}{_verdict(result)[1]}" for dtype, result in results.items()]
    replayed = [result for result in results.values() if isinstance(result, Replayed)]
    remarks = dict.fromkeys(f"Note:  {remark}" for result in replayed for remark in result.remarks)
    reports = [result.report for result in replayed if result.report.finding is not None]
    shown = ["", reports[0].to_text()] if reports else []
    return "\n".join([*map(visible, lines), *shown, *(["", *map(visible, remarks)] if remarks else [])])


def _document(capsule: Capsule, results: dict[str, Replayed | Exception]) -> str:
    runs = []
    for dtype, result in results.items():
        replayed = None if isinstance(result, Exception) else result
        run = {
            "dtype": dtype,
            "device": replayed and str(replayed.device),
            "verdict": _verdict(result)[0],
            "error": spell(result) if isinstance(result, Exception) else None,
            "remarks": list(replayed.remarks) if replayed else [],
            "report": replayed and json.loads(replayed.report.to_json()),
        }
        runs.append(run)
    document: dict[str, Any] = {
        "capsule": str(capsule.folder),
        "module": capsule.module,
        "class": capsule.class_name,
        "versions": dict(capsule.versions),
        "left_out": list(capsule.left_out),
        "runs": runs,
    }
    return json.dumps(document, indent=2)
