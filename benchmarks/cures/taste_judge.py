"""Judge of the taste of patches: whether a reviewer would accept the line, and whether it has the value of float64."""

from __future__ import annotations

import inspect
import math
import re
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import nanwatch
from cures.forked import each_in_a_process
from cures.judge import apply, fails_watched, load
from cures.program import Program
from cures.taste import Taste


@dataclass(frozen=True)
class Model:
    """A case with the file that it was written to."""

    taste: Taste
    path: Path
    steps: int = 1

    @property
    def name(self) -> str:
        """The name of the case."""
        return self.taste.name


@dataclass
class Opinion:
    """The judgement of one case: the line, its effect in words, and what is wrong with either."""

    taste: Taste
    line: str = ""
    effect: str = ""
    trouble: str = ""
    is_accepted: bool = False
    is_exact: bool = False

    @property
    def passes(self) -> bool:
        """Return whether the patch works, is accepted, and has the value of float64."""
        return self.is_accepted and self.is_exact and not self.trouble


def judge_taste(tastes: Sequence[Taste], folder: Path, jobs: int) -> list[Opinion]:
    """Judge these cases, in a git repository below `folder` for each."""
    load()
    models = []
    (folder / "sources").mkdir(parents=True)
    for taste in tastes:
        models.append(Model(taste, folder / "sources" / f"{taste.name}.py"))
        models[-1].path.write_text(taste.source())
    results = each_in_a_process(_opinion, [(one, folder) for one in models], jobs)
    return [
        Opinion(one.taste, trouble=result) if isinstance(result, str) else result
        for one, result in zip(models, results, strict=True)
    ]


def _opinion(model: Model, folder: Path) -> Opinion:
    warnings.simplefilter("ignore")
    taste = model.taste
    opinion = Opinion(taste)
    fails_watched(model, folder)
    reports = sorted((folder / f"{model.name}.out").glob("batch-*/report.json"))
    if len(reports) != 1:
        opinion.trouble = f"wrote {len(reports)} reports"
        return opinion
    finding = nanwatch.Report.from_json(reports[0].read_text()).finding
    assert finding is not None
    cure = next((one for one in finding.cures if one.works and one.patch), None)
    if cure is None:
        words = [*(str(one) for one in finding.cures), *finding.remarks]
        opinion.trouble = f"no patch: {'; '.join(words)}"
        return opinion
    opinion.effect = cure.effect
    new = [x[1:].strip() for x in cure.patch.splitlines() if re.match(r"\+(?!\+\+ )", x)]
    opinion.line = " ".join(new)
    try:
        path = apply(cure.patch, model.path, folder / f"{model.name}.patched")
    except subprocess.CalledProcessError as error:
        opinion.trouble = f"git apply: {error.stderr.strip()}"
        return opinion
    is_there = any(one in opinion.line for one in taste.accepts)
    opinion.is_accepted = is_there and not any(one in opinion.line for one in taste.rejects)
    program = Program(path, path.read_text())
    values: list[Tensor] = []
    program.model.part.register_forward_hook(lambda _m, _a, output: values.append(output.detach()))
    after = program.look(1)
    if not after.is_finite:
        opinion.trouble = f"not finite: {after.bad}"
        return opinion
    opinion.is_exact = _is_equal(values[0], truth(taste, program))
    return opinion


def truth(taste: Taste, program: Program) -> Tensor:
    """Return the value of the module's result in float64."""
    names = list(inspect.signature(program.model.part.forward).parameters)
    given = [x.double() if x.is_floating_point() else x for x in program.names.batch()]
    value: Tensor = eval(
        taste.truth, {"torch": torch, "F": F, "math": math, **dict(zip(names, given, strict=True))}
    )
    return value


def _is_equal(value: Tensor, expected: Tensor) -> bool:
    """Return whether the finite elements of what is expected, as far as the format has them, are met."""
    ends = torch.finfo(value.dtype)
    there = expected.isfinite() & (expected.abs() <= ends.max)
    # A few roundings of the format, of the element or of a sum with others.
    error = (value.double() - expected)[there].abs()
    return bool((error <= 64 * ends.eps * (expected[there].abs() + ends.tiny)).all())


def lines(opinions: Sequence[Opinion]) -> Iterator[str]:
    """Yield a line for each case, what is wrong with those that do not pass, and the scores."""
    for one in opinions:
        half = "held" if one.taste.is_held else "tuned"
        marks = "".join(
            x if is_right else "-" for x, is_right in (("A", one.is_accepted), ("=", one.is_exact))
        )
        yield f"{one.taste.name:28} {half:5} {marks} {'passes' if one.passes else 'FAILS ':6} {one.line}"
        if one.trouble:
            yield f"    {one.trouble}"
        if one.effect:
            yield f"    effect: {one.effect}"
    for half, is_held in (("tuned", False), ("held back", True)):
        few = [one for one in opinions if one.taste.is_held == is_held]
        accepted, exact = sum(one.is_accepted for one in few), sum(one.is_exact for one in few)
        passed = sum(one.passes for one in few)
        yield f"taste, {half}: {passed} of {len(few)} (line accepted {accepted}, value of float64 {exact})"
