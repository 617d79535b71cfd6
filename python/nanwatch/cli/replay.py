"""`nanwatch replay CAPSULE --model pkg.mod:factory`: make a capsule's call again, in one dtype or several."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..capsule.capsule import FILE, Capsule
from ..capsule.replay import Replayed
from ..report import text
from ..session.api import rerun
from ..util.progress import shown, wants_color
from ..util.visible import module_name, spell, visible
from .commands import UseError, command_parser, failed, imported

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


class _Run(NamedTuple):
    """One call: its dtype, its result or None, the verdict, and the verdict in words.

    `verdict` is "non-finite", "finite", "not seen" or "failed".
    """

    dtype: str
    result: Replayed | None
    verdict: str
    words: str


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
    options = parser.parse_args(arguments)
    # The user's own code, which is imported and run, must not print on this command's stdout.
    with shown() as tell, contextlib.redirect_stdout(sys.stderr):
        try:
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
        except (UseError, ValueError, ImportError) as error:
            return failed("replay", error)
        runs = []
        for dtype in (_RECORDED, *options.dtype):
            tell(f"replaying {dtype}")
            runs.append(_run(capsule, model, dtype, options.device))
    print(_document(capsule, runs) if options.json else "\n".join(_lines(capsule, runs)))
    verdicts = {run.verdict for run in runs}
    if "non-finite" in verdicts:
        return _NONFINITE
    return 0 if verdicts == {"finite"} else _FAILED


def _run(capsule: Capsule, model: torch.nn.Module, dtype: str, device: str | None) -> _Run:
    try:
        result = rerun(capsule, model, None if dtype == _RECORDED else getattr(torch, dtype), device)
    except Exception as error:  # other dtypes may work
        return _Run(dtype, None, "failed", f"could not be run: {spell(error)}")
    if result.report.finding is not None:
        return _Run(dtype, result, "non-finite", text.summary(result.report.finding))
    if any(record.isfinite for frame in result.report.frames for record in frame.records):
        return _Run(dtype, result, "finite", "all finite")
    return _Run(dtype, result, "not seen", "nothing could be looked at")


def _lines(capsule: Capsule, runs: list[_Run]) -> list[str]:
    name = module_name(capsule.module)
    versions = f"torch {capsule.versions.get('torch')}, nanwatch {capsule.versions.get('nanwatch')}"
    lines = [
        f"{capsule.folder}: {name} ({capsule.class_name}) on {capsule.device}, {versions}",
        *(f"{run.dtype:<13}{run.words}" for run in runs),
    ]
    results = [run.result for run in runs if run.result is not None]
    remarks = dict.fromkeys(f"Note:  {remark}" for result in results for remark in result.remarks)
    report = next((result.report for result in results if result.report.finding is not None), None)
    return [
        *map(visible, lines),
        *([] if report is None else ["", report.to_text(color=wants_color(sys.stdout))]),
        *(["", *map(visible, remarks)] if remarks else []),
    ]


def _document(capsule: Capsule, runs: list[_Run]) -> str:
    described = [
        {
            "dtype": run.dtype,
            "device": None if run.result is None else str(run.result.device),
            "verdict": run.verdict,
            "error": run.words.partition(": ")[2] if run.result is None else None,
            "remarks": [] if run.result is None else list(run.result.remarks),
            "report": None if run.result is None else json.loads(run.result.report.to_json()),
        }
        for run in runs
    ]
    document: dict[str, Any] = {
        "capsule": str(capsule.folder),
        "module": capsule.module,
        "class": capsule.class_name,
        "versions": dict(capsule.versions),
        "left_out": list(capsule.left_out),
        "runs": described,
    }
    return json.dumps(document, indent=2)
