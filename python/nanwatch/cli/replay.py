"""`nanwatch replay CAPSULE --model pkg.mod:factory`: make a capsule's call again, in one dtype or several."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..capsule.capsule import FILE, Capsule
from ..capsule.replay import Replayed, dtype_of
from ..report import text
from ..session.replay import rerun
from ..util.progress import Tell, shown, wants_color
from ..util.visible import module_name, spell, visible
from .commands import UseError, command_parser, failed, imported

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_NONFINITE, _FAILED = 1, 2
_EXIT = (
    "exit status: 1 when a value was not finite again, 0 when all was finite, 2 when a call could not be made"
)
_EXAMPLES = f"""\
{_EXIT}

examples:
  nanwatch replay run/capsule --model train:make_model
  nanwatch replay run/capsule --model train:make_model --dtype float32 bfloat16
  nanwatch replay run/capsule --model train:make_model --device cpu --json
"""


@dataclass(frozen=True, slots=True)
class _Run:
    """Result of one call, or the reason why it failed. `dtype` is "" for the capsule's own."""

    dtype: str
    done: Replayed | None
    error: str = ""

    @property
    def verdict(self) -> str:
        """ "non-finite", "finite", "not seen" or "failed"."""
        if self.done is None:
            return "failed"
        if self.done.report.finding is not None:
            return "non-finite"
        read = [record.isfinite for frame in self.done.report.frames for record in frame.records]
        return "finite" if any(read) else "not seen"

    @property
    def words(self) -> str:
        """The verdict in words."""
        if self.done is None:
            return f"could not be run: {self.error}"
        if self.done.report.finding is not None:
            return text.summary(self.done.report.finding)
        return "all finite" if self.verdict == "finite" else "nothing could be looked at"


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
            capsule = Capsule.open(_folder(Path(options.capsule)))
            tell(f"importing {options.model}")
            model = imported(options.model, "--model")
            if not isinstance(model, torch.nn.Module):
                raise UseError(
                    f"--model {options.model} should be a torch.nn.Module or make one, got {type(model).__name__}"
                )
        except (UseError, ValueError, ImportError) as error:
            return failed("replay", error)
        runs = _runs(capsule, model, options.dtype, options.device, tell)
    if options.json:
        print(json.dumps(_document(capsule, runs), indent=2))
    else:
        print("\n".join(_lines(capsule, runs)))
    verdicts = {run.verdict for run in runs}
    if "non-finite" in verdicts:
        return _NONFINITE
    return 0 if verdicts == {"finite"} else _FAILED


def _folder(path: Path) -> Path:
    """Return the capsule's folder: `path`, or the one in the folder of a failure that `output_dir` holds."""
    inside = path / "capsule"
    return inside if inside.is_dir() and not (path / FILE).exists() else path


def _runs(capsule: Capsule, model: Any, dtypes: list[str], device: str | None, tell: Tell) -> list[_Run]:
    runs: list[_Run] = []
    for name in ("", *dtypes):
        tell(f"replaying in {_label(capsule, name)}", len(runs), 1 + len(dtypes), "runs")
        try:
            runs.append(_Run(name, rerun(capsule, model, getattr(torch, name) if name else None, device)))
        except Exception as error:  # other dtypes may work
            runs.append(_Run(name, None, spell(error)))
    return runs


def _label(capsule: Capsule, dtype: str) -> str:
    return dtype or f"{dtype_of(capsule)} (as recorded)"


def _labels(capsule: Capsule, runs: list[_Run]) -> list[str]:
    return [_label(capsule, run.dtype) for run in runs]


def _lines(capsule: Capsule, runs: list[_Run]) -> list[str]:
    name = module_name(capsule.module)
    versions = f"torch {capsule.versions.get('torch')}, nanwatch {capsule.versions.get('nanwatch')}"
    lines = [f"{capsule.folder}: {name} ({capsule.class_name}) on {capsule.device}, {versions}"]
    labels = _labels(capsule, runs)
    width = max(map(len, labels)) + 2
    lines += [f"{label:<{width}}{run.words}" for label, run in zip(labels, runs, strict=True)]
    lines = list(map(visible, lines))
    failed = next((run for run in runs if run.verdict == "non-finite"), None)
    if failed is not None and failed.done is not None:
        lines += ["", failed.done.report.to_text(color=wants_color(sys.stdout))]
    remarks = dict.fromkeys(remark for run in runs if run.done is not None for remark in run.done.remarks)
    if remarks:
        lines += ["", *(visible(f"Note:  {remark}") for remark in remarks)]
    return lines


def _document(capsule: Capsule, runs: list[_Run]) -> dict[str, Any]:
    return {
        "capsule": str(capsule.folder),
        "module": capsule.module,
        "class": capsule.class_name,
        "versions": dict(capsule.versions),
        "left_out": [str(missing) for missing in capsule.left_out],
        "runs": [
            {
                "dtype": label,
                "as_recorded": not run.dtype,
                "device": None if run.done is None else str(run.done.device),
                "verdict": run.verdict,
                "error": run.error or None,
                "remarks": [] if run.done is None else list(run.done.remarks),
                "report": None if run.done is None else json.loads(run.done.report.to_json()),
            }
            for label, run in zip(_labels(capsule, runs), runs, strict=True)
        ],
    }
