"""Run the silent trainings under a tool, and print what it found.

    python benchmarks/silent/run.py --tool nanwatch               # 36 cases in three forms, a minute
    python benchmarks/silent/run.py --tool loss -k bf16           # cases with this in their name
    python benchmarks/silent/run.py --tool nanwatch --json a.json
    python benchmarks/silent/run.py --oracle                      # do the cases hold? without a tool
    python benchmarks/silent/run.py --calibrate-loss              # the limit of tools/loss.py, by the twins

A line a case: the expected cause, then `x` or `.` for found, cause, module and line, the step, and what was said. Then
the sums, the false alarms on the healthy forms, and the cost. README.md explains them, and how to add a tool.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from silent import effects, process, score
from silent.case import FORMS, Case, load
from silent.tools.protocol import Finding


def said_by(case: Case, form: str, name: str) -> tuple[list[Finding], float, str]:
    """Return a tool's findings of a form on all ranks, the seconds inside `watch`, and errors."""
    tool = importlib.import_module(f"silent.tools.{name}").Tool
    if hasattr(tool, "judge"):
        with tempfile.TemporaryDirectory() as folder:
            try:
                return (*tool().judge(case, form, Path(folder)), "")
            except Exception as error:  # the tool's failure is its result
                return [], 0.0, f"{form}: {error}"
    runs = process.run(case, form, name)
    findings = [finding for run in runs for finding in run.findings]
    errors = "".join(f"{form}: {run.error}" for run in runs if run.error)
    return findings, sum(run.seconds for run in runs), errors


def judged(case: Case, name: str) -> score.Verdict:
    """Run a tool on all forms of a case and judge it."""
    results = {form: said_by(case, form, name) for form in FORMS}
    verdict = score.judge(case, {form: result[0] for form, result in results.items()})
    verdict.seconds = sum(result[1] for result in results.values())
    verdict.error = "".join(result[2] for result in results.values())
    return verdict


def plain_seconds(cases: list[Case]) -> float:
    """Return the seconds inside `watch` of all forms without a tool."""
    return sum(said_by(case, form, "none")[1] for case in cases for form in FORMS)


def calibrate_loss(cases: list[Case]) -> None:
    """Print the highest share of its first loss at which a healthy twin ends."""
    from silent.tools import loss

    shares = {case.name: loss.share(process.run(case, "twin", "none")[0].losses) for case in cases}
    for name, share in sorted(shares.items(), key=lambda pair: -pair[1])[:8]:
        print(f"{name:<28} {share:.4f}")
    print(f"LIMIT = {math.ceil(100 * max(shares.values())) / 100}")


def check(cases: list[Case]) -> int:
    """Print what the oracle says of each case; return how many do not hold."""
    wrong = 0
    for case in cases:
        faults = effects.faults(case)
        wrong += bool(faults)
        print(f"{case.name:<28} {'; '.join(faults) or 'holds'}", flush=True)
    return wrong


def write(path: Path, totals: dict[str, Any], verdicts: list[score.Verdict]) -> None:
    """Write the sums and the verdicts as JSON, a line a case."""
    head = json.dumps({**totals, "torch": torch.__version__}, indent=1)[:-2]
    lines = ",\n".join(json.dumps(asdict(verdict)) for verdict in verdicts)
    path.write_text(f'{head},\n "verdicts": [\n{lines}\n]}}\n')


def main() -> int:
    """Do what the command line asks for."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--tool", help="the name of a file in tools/")
    parser.add_argument("-k", metavar="WORD", default="", help="only cases with this in their name")
    parser.add_argument("--json", metavar="FILE", help="write the verdicts here, with all that was said")
    parser.add_argument("--oracle", action="store_true", help="check the cases themselves")
    parser.add_argument("--calibrate-loss", action="store_true", help="print the limit of tools/loss.py")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [case for case in load() if options.k in case.name]
    if options.calibrate_loss:
        calibrate_loss(cases)
        return 0
    if options.oracle or not options.tool:
        return 1 if check(cases) else 0
    verdicts = []
    for case in cases:
        verdicts.append(judged(case, options.tool))
        print(score.row(verdicts[-1]), flush=True)
    totals: dict[str, Any] = {"tool": options.tool, **score.summary(verdicts)}
    plain = plain_seconds(cases)
    totals["cost"] = round(sum(verdict.seconds for verdict in verdicts) / plain, 1)
    print(", ".join(f"{key} {value}" for key, value in totals.items()))
    if options.json:
        write(Path(options.json), totals, verdicts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
