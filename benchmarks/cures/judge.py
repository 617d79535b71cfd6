"""Judge of the cures that nanwatch tells: each is applied to the source of its failing model, which runs unwatched.

Each run has a process of its own, forked from one that has imported PyTorch and has run nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import nanwatch
from cures.forked import each_in_a_process
from cures.program import OUTSIDE, Program, Seen, operation_of
from cures.table import Cure
from nanwatch.report.finding import Cure as Told
from nanwatch.report.finding import Finding

COMMAND = Path(__file__).parents[1] / "judge_cures.py"
# Healthy values may move by this part of their norm, or by as much as the cure that the thread chose moves them.
_MOST_CHANGE = 0.01
_MOST_RUNS, _MOST_LINES = 8, 39


@dataclass
class Trial:
    """A cure that was told as working, and what came of it when it was applied."""

    cure: Told
    # Empty where the cure works as told.
    fault: str = ""
    is_patched: bool = False
    # Relative difference of the loss from that with the thread's own cure. None where either is non-finite.
    difference: float | None = None


@dataclass
class Verdict:
    """The judgement of one failing model."""

    cure: Cure
    finding: Finding | None = None
    trouble: str = ""
    runs: int = 0
    seconds: float = 0.0
    text_lines: int = 0
    is_module: bool = False
    is_operation: bool = False
    is_line: bool = False
    trials: list[Trial] = field(default_factory=list)

    @property
    def works(self) -> bool:
        """Return whether a cure was reported to work and works when it is applied."""
        return any(not one.fault for one in self.trials)

    @property
    def is_patched(self) -> bool:
        """Return whether the first patch was applied by git and works."""
        return any(one.is_patched and not one.fault for one in self.trials)

    @property
    def faults(self) -> list[str]:
        """Return the cures that were reported to work and do not, each with the reason."""
        return [f"{one.cure.what}: {one.fault}" for one in self.trials if one.fault]


def judge(cures: Sequence[Cure], folder: Path, jobs: int = 2) -> list[Verdict]:
    """Judge what nanwatch tells of these models, in a git repository below `folder` for each."""
    load()
    verdicts = [Verdict(cure) for cure in cures]
    for verdict, seen in zip(
        verdicts, each_in_a_process(fails_watched, [(one, folder) for one in cures], jobs), strict=True
    ):
        if isinstance(seen, str):
            verdict.trouble = seen
        else:
            _take(verdict, folder, *seen)
    pairs = [(verdict, trial) for verdict in verdicts for trial in verdict.trials]
    tasks = [
        (verdict.cure, trial.cure, verdict.finding, folder, i) for i, (verdict, trial) in enumerate(pairs)
    ]
    for (_, trial), result in zip(pairs, each_in_a_process(_applied, tasks, jobs), strict=True):
        trial.fault, trial.is_patched, trial.difference = (
            (result, False, None) if isinstance(result, str) else result
        )
    return verdicts


def load() -> None:
    """Import what a failure imports, so that the processes share it, and run no operation."""
    import torch._dynamo  # which every optimizer imports

    import nanwatch.capsule.capsule
    import nanwatch.diagnosis.rerun
    from nanwatch import watch  # noqa: F401 - imported when it is first named

    nanwatch.Report((), None, None).to_html()
    torch.set_num_threads(1)


# The watched run.


def fails_watched(cure: Any, folder: Path) -> tuple[int, float]:
    """Train the model watched until it fails. Return the forwards after the failed one, and the seconds taken."""
    repository = folder / cure.name
    repository.mkdir(parents=True)
    os.chdir(repository)
    path = repository / cure.path.name
    path.write_text(cure.path.read_text())
    _git("init", "-q")
    _git("add", path.name)
    program = Program(path, path.read_text())
    forwards = []
    program.model.register_forward_pre_hook(lambda *_: forwards.append(0))
    steps = 0
    begun = time.perf_counter()
    with (
        contextlib.suppress(nanwatch.NonFiniteError),
        nanwatch.watch(program.model, gradients=True, output_dir=folder / f"{cure.name}.out"),
    ):
        optimizer = program.optimizer() or torch.optim.SGD(program.model.parameters(), lr=1e-3)
        for steps in range(1, cure.steps + 1):
            optimizer.zero_grad()
            program.loss(program.model(*program.names.batch(steps - 1))).backward()
            optimizer.step()
    return len(forwards) - steps, time.perf_counter() - begun


def _take(verdict: Verdict, folder: Path, runs: int, seconds: float) -> None:
    """Read the report that the watched run has written."""
    verdict.runs, verdict.seconds = runs, seconds
    cure = verdict.cure
    reports = sorted((folder / f"{cure.name}.out").glob("batch-*/report.json"))
    if len(reports) != 1:
        verdict.trouble = f"wrote {len(reports)} reports"
        return
    finding = nanwatch.Report.from_json(reports[0].read_text()).finding
    assert finding is not None
    verdict.finding = finding
    verdict.text_lines = len(nanwatch.Report.from_json(reports[0].read_text()).to_text().splitlines())
    module = finding.module if finding.origin == "produced" else finding.source_module
    verdict.is_module = (OUTSIDE if module is None else module) == cure.module
    verdict.is_operation = finding.operation is not None and operation_of(finding.operation) == cure.operation
    verdict.is_line = _line_of(finding) == cure.culprit
    verdict.trials = [Trial(one) for one in finding.cures if one.works]
    patch = next((one.patch for one in finding.cures if one.works and one.patch), None)
    file = reports[0].with_name("cure.patch")
    if patch != (file.read_text() if file.exists() else None):
        verdict.trouble = "cure.patch is not the patch of the first cure"


def _line_of(finding: Finding) -> str:
    path, _, number = (finding.source or "").rpartition(":")
    if not path or not Path(path).is_file():
        return ""
    return Path(path).read_text().splitlines()[int(number) - 1].strip()


# The run with the cure.


def _applied(
    cure: Cure, told: Told, finding: Finding, folder: Path, number: int
) -> tuple[str, bool, float | None]:
    """Apply a cure as a user would. Return its fault, whether git applied it, and `Trial.difference`."""
    warnings.simplefilter("ignore")
    path = folder / cure.name / cure.path.name
    before = Program(path, cure.path.read_text()).look(cure.steps)
    chosen = Program(path, cure.cured()).look(cure.steps)
    is_patched = False
    if told.patch:
        try:
            path = apply(told.patch, cure.path, folder / f"{cure.name}.{number}")
        except subprocess.CalledProcessError as error:
            return f"git apply: {error.stderr.strip()}", False, None
        is_patched = True
        changed = [x for x in _git("diff", "-U0").splitlines() if re.match(r"[-+](?![-+]{2} )", x)]
        if [x[0] for x in changed] != ["-", "+"]:
            return f"changes {len(changed)} lines", True, None
        program = Program(path, path.read_text())
    else:
        program = Program(path, _with_code(cure, told, finding))
        if not told.code and not follow(told.what, program):
            return "nobody knows how to apply it", False, None
    after = program.look(cure.steps)
    return _compare(before, after, chosen, cure.steps), is_patched, _difference(after, chosen)


def apply(patch: str, path: Path, repository: Path) -> Path:
    """Apply a patch by git to a copy of the file in a new repository, and go there. Return the copy."""
    repository.mkdir()
    copy = repository / path.name
    copy.write_text(path.read_text())
    os.chdir(repository)
    _git("init", "-q")
    _git("add", copy.name)
    (repository / "cure.patch").write_text(patch)
    _git("apply", "cure.patch")
    return copy


def _with_code(cure: Cure, told: Told, finding: Finding) -> str:
    """The source with the statement that the cure tells in place of the one in the finding's line."""
    text = cure.path.read_text()
    line = _line_of(finding)
    return text.replace(line, told.code, 1) if told.code and line else text


def follow(what: str, program: Program) -> bool:
    """Do what the words of a cure say that is no change of a line. Return whether they are known."""
    model = program.model
    known = False
    for code in re.findall(r"nanwatch\.run_in_fp32\([^,]*?(?:, cast_output=False)?\)(?=,|$)", what):
        eval(code, {"nanwatch": nanwatch, "model": model})
        known = True
    if "model.to(torch.bfloat16)" in what:
        model.to(torch.bfloat16)
        known = True
    if "give it bfloat16 inputs" in what:
        program.convert = lambda x: x.bfloat16() if x.dtype is torch.float16 else x
    if "the whole of it in float32" in what:
        model.float()
        program.convert = lambda x: x.float() if x.dtype is torch.float16 else x
        known = True
    if limit := re.search(r"clamp the input of `(.*)` to ±(\S+?)(?=,|$)", what):
        end = float(limit[2])
        model.get_submodule(limit[1]).register_forward_pre_hook(lambda _, a: (a[0].clamp(-end, end), *a[1:]))
        known = True
    if factor := re.search(r"a loss scale that is (\S+) times smaller", what):
        program.scale = 1 / float(factor[1])
        known = True
    return known


def _compare(before: Seen, after: Seen, chosen: Seen, steps: int) -> str:
    """Return the reasons why a run under a cure is wrong, or nothing."""
    if after.step != steps - 1 or not after.is_finite:
        return f"not finite: {after.bad} in step {after.step}"
    if steps > 1:
        return ""  # its earlier steps have changed the model
    moved, allowed = _moved(before, after), _moved(before, chosen)
    if moved > max(_MOST_CHANGE, allowed):
        return f"moves healthy values by {moved:.2g} of their norm"
    return ""


def _moved(before: Seen, after: Seen) -> float:
    """The part of their norm by which values of modules, finite in `before`, have moved at most."""
    moved = 0.0
    for old, new in zip(before.values, after.values, strict=False):
        if old.shape != new.shape:
            break  # the cure has another sequence of calls
        old, new = (x.to(torch.promote_types(x.dtype, torch.float64)) for x in (old, new))
        healthy = old.isfinite() & new.isfinite()
        norm = float(old[healthy].norm())
        difference = float((new[healthy] - old[healthy]).norm())
        moved = max(moved, difference / norm if norm else float(difference > 0))
    return moved


def _difference(after: Seen, chosen: Seen) -> float | None:
    """The relative difference of the losses."""
    if not (after.is_finite and chosen.is_finite):
        return None
    return abs(after.loss - chosen.loss) / max(abs(chosen.loss), 1e-30) if after.loss != chosen.loss else 0.0


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


# The table.


def table(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Yield the lines that tell of each model, and the totals."""
    verdicts = list(verdicts)
    for one in verdicts:
        cure = one.cure
        marks = "".join(
            letter if is_right else "-"
            for letter, is_right in (("M", one.is_module), ("O", one.is_operation), ("L", one.is_line))
        )
        verdict = "WRONG" if one.faults else "works" if one.works else "none"
        patch = "patch" if one.is_patched else "-"
        yield (
            f"{cure.name:28} {cure.phase:8} {cure.cause:16} {cure.operation:14} {marks} {verdict:5} {patch:5}"
            f" {one.runs:2} runs {one.seconds:5.2f} s"
        )
        if one.trouble:
            yield f"    trouble: {one.trouble}"
        yield f"    line:   {cure.culprit}"
        yield f"    chosen: {cure.fixed}"
        finding = one.finding
        if finding is not None and marks != "MOL":
            where = finding.module if finding.origin == "produced" else finding.source_module
            yield f"    found:  {finding.origin} {where!r} {finding.operation} `{_line_of(finding)}`"
        for trial in one.trials:
            yield f"    cure:   {trial.cure.what}"
            if trial.cure.patch:
                new = [x[1:].strip() for x in trial.cure.patch.splitlines() if re.match(r"\+(?!\+\+ )", x)]
                yield f"            + {' '.join(new)}"
            if trial.cure.effect:
                yield f"            effect: {trial.cure.effect}"
            if trial.fault:
                yield f"            FAULT: {trial.fault}"
            elif trial.difference:
                yield f"            loss differs from that of the chosen cure by {trial.difference:.2g}"
        if finding is not None and not one.works:
            yield from (f"    told:   {one_cure}" for one_cure in finding.cures if not one_cure.works)
            yield from (f"    note:   {remark}" for remark in finding.remarks)
    number = len(verdicts)
    told = sum(bool(one.trials) for one in verdicts)
    right = [
        sum(marks)
        for marks in zip(*((v.is_module, v.is_operation, v.is_line) for v in verdicts), strict=True)
    ]
    yield f"{number} models: module right in {right[0]}, operation in {right[1]}, line in {right[2]}"
    yield f"a cure that works: {sum(one.works for one in verdicts)} (a cure told: {told})"
    yield f"told and does not work: {sum(len(one.faults) for one in verdicts)}"
    yield f"patches applied by git that work: {sum(one.is_patched for one in verdicts)}"
    yield f"most forwards beyond the failed one: {max((one.runs for one in verdicts), default=0)}"
    yield f"longest text of a report: {max((one.text_lines for one in verdicts), default=0)} lines"
    rules = Counter(rule_of(trial.cure.what) for one in verdicts for trial in one.trials[:1])
    yield from (f"cured by: {count:3} {rule}" for rule, count in rules.most_common())
    failed: dict[str, list[str]] = {}
    for one in verdicts:
        if not one.works:
            failed.setdefault(one.cure.cause, []).append(one.cure.name)
    yield from (f"no cure, {cause}: {', '.join(names)}" for cause, names in sorted(failed.items()))


def rule_of(what: str) -> str:
    """Return the words of the rule that proposed a cure, without its numbers, names and code."""
    words = re.sub(r"`[^`]*`|nanwatch\.\S+", "…", re.split(": write |, nanwatch|, tried", what)[0])
    return re.sub(r"-?\d+(\.\d+)?(e-?\d+)?( or less)?", "N", words)


def judged(*names: str) -> list[dict[str, Any]]:
    """Judge these models, all by default, in a process that may fork. Return the facts of each."""
    command = [sys.executable, str(COMMAND), "--json", *names]
    environment = os.environ | {"PYTHONPATH": str(Path(nanwatch.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def broken_promises(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the facts of these verdicts break, in words: nothing where all promises hold.

    At most eight forwards beyond the training's own, a text that fits a screen, no cure that does not work, and for
    nine models of ten one that works.
    """
    broken = [f"{one['name']}: {one['trouble']}" for one in found if one["trouble"]]
    broken += [f"{one['name']}: {fault}" for one in found for fault in one["faults"]]
    broken += [f"{one['name']}: {one['runs']} forwards" for one in found if one["runs"] > _MOST_RUNS]
    broken += [
        f"{one['name']}: {one['text_lines']} lines" for one in found if one["text_lines"] > _MOST_LINES
    ]
    cured = sum(one["works"] for one in found)
    return broken + [f"{cured} of {len(found)} are cured"] * (cured < 0.9 * len(found))


def facts(verdict: Verdict) -> dict[str, Any]:
    """Return what a test asks of a verdict."""
    return {
        "name": verdict.cure.name,
        "is_told": bool(verdict.trials),
        "works": verdict.works,
        "is_patched": verdict.is_patched,
        "faults": verdict.faults,
        "trouble": verdict.trouble,
        "runs": verdict.runs,
        "text_lines": verdict.text_lines,
    }
