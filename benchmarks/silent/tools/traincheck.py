"""TrainCheck 0.2 (OSDI 2025): invariants inferred from a case's own twin, checked on its other forms.

    python -m venv tc && tc/bin/pip install torch==2.13.0 traincheck==0.2.0
    TRAINCHECK=$PWD/tc/bin python benchmarks/silent/run.py --tool traincheck -k zero_grad_missing

To learn from the twin of the same training is the best case for TrainCheck, which a user seldom has. The twin itself is
its reference and cannot raise a false alarm. TrainCheck names a violated invariant and its step, and no cause, module
or line. Each form takes it 20 s of CPU. Cases with ranks are not run: its collector starts one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from silent.case import HERE, Case
from silent.tools.protocol import Finding

BIN = Path(os.environ.get("TRAINCHECK", ""))
PATIENCE = 900


def command(name: str, *arguments: object, folder: Path, form: str = "twin") -> None:
    """Run one of TrainCheck's commands in a folder."""
    environment = {**os.environ, "SILENT_FORM": form, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [BIN / f"traincheck-{name}", *arguments],
        cwd=folder, env=environment, timeout=PATIENCE, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"traincheck-{name} ended with {done.returncode}: {done.stderr.strip()[-200:]}")


def trace(case: Case, form: str, folder: Path) -> Path:
    """Run a form of a case under the collector and return the folder of its trace."""
    # The collector writes beside the script and drops PYTHONPATH.
    script = folder / f"{case.name}.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(HERE.parent)!r})\n{case.script.read_text()}")
    out = folder / form
    command(
        "collect", "--pyscript", script, "--models-to-track", "model", "--output-dir", out,
        folder=folder, form=form,
    )  # fmt: skip
    if "step 1 loss" not in (out / "program_output.txt").read_text():
        raise RuntimeError("the collected program failed: " + (out / "program_output.txt").read_text()[-200:])
    return out


_rules: dict[str, Path] = {}


def invariants(case: Case) -> Path:
    """Return the file of the invariants of a case's twin, which is made once."""
    if case.name not in _rules:
        folder = Path(tempfile.mkdtemp(prefix=f"traincheck_{case.name}_"))
        _rules[case.name] = folder / "invariants.json"
        command("infer", "-f", trace(case, "twin", folder), "-o", _rules[case.name], folder=folder)
    return _rules[case.name]


class Tool:
    def judge(self, case: Case, form: str, folder: Path) -> tuple[list[Finding], float]:
        if case.ranks > 1:
            raise RuntimeError("not run: the collector starts one process")
        begin = time.perf_counter()
        rules = invariants(case)
        if form == "twin":
            return [], time.perf_counter() - begin
        command("check", "-f", trace(case, form, folder), "-i", rules, folder=folder)
        found = [
            line for path in folder.glob("traincheck_checker_results*/**/failed*") for line in _read(path)
        ]
        return found, time.perf_counter() - begin


def _read(path: Path) -> list[Finding]:
    """Return the violated invariants of a result file: JSON objects one after the other."""
    text, decoder, place, found = path.read_text(), json.JSONDecoder(), 0, []
    while text[place:].strip():
        place += len(text[place:]) - len(text[place:].lstrip())
        result, place = decoder.raw_decode(text, place)
        steps = [entry.get("meta_vars.step") for entry in result["trace"]]
        seen = [int(step) + 1 for step in steps if isinstance(step, (int, float)) and step == step]
        words = result["invariant"].get("text_description") or json.dumps(result["invariant"]["params"])[:300]
        found.append(Finding(min(seen, default=None), text=f"{result['invariant']['relation']}: {words}"))
    return found
