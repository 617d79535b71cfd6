"""The trainings of `benchmarks/silent` have the faults that they claim, and its runner judges a tool rightly.

Plain PyTorch: no test here needs nanwatch's audit.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from silent import effects, score
from silent.case import Case, load
from silent.tools.protocol import Finding

from support.paths import BENCHMARKS

CASES = load()
# `benchmarks/silent/run.py --oracle` looks at all of them, and its exit status says whether they hold.
FEW = ("frozen_but_norms", "tie_lost_on_meta", "reduced_over_one_rank")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in FEW], ids=lambda case: case.name)
def test_the_faulty_form_has_the_effect_and_the_healthy_ones_have_not(case: Case) -> None:
    runs = effects.collect(case)
    assert effects.faults(case, runs) == []
    # The oracle can fail: it takes the twin for no faulty form.
    assert effects.faults(case, runs | {"faulty": runs["twin"]})


def test_each_script_has_one_line_to_blame_and_one_case() -> None:
    scripts = {path.stem for path in (BENCHMARKS / "silent" / "trainings").glob("*.py")}
    assert sorted(scripts) == sorted(case.name for case in CASES)
    assert all(case.line > 1 for case in CASES)


CASE = Case("zero_grad_missing", "source", "wrong", "absorbed", ("layers.0",), 2, {}, also=("never-decayed",))


def judged(*faulty: Finding, healthy: tuple[Finding, ...] = ()) -> score.Verdict:
    return score.judge(CASE, {"faulty": list(faulty), "mended": list(healthy), "twin": []})


def test_a_finding_is_judged_by_cause_and_place() -> None:
    right = judged(Finding(3, "absorbed", "layers.0.weight"))
    assert (right.found, right.cause, right.module, right.line, right.step) == (True, True, True, False, 3)
    other_slug = judged(Finding(2, "never-decayed", "layers"))
    assert (other_slug.cause, other_slug.module) == (True, False)
    wrong = judged(Finding(2, "clipping", "layers.0"))
    assert (wrong.found, wrong.cause, wrong.module) == (True, False, False)
    placed = judged(Finding(2, "absorbed", "layers.0", CASE.line))
    assert placed.line
    similar_name = judged(Finding(2, "absorbed", "layers.01"))
    assert not similar_name.module


def test_a_finding_that_comes_too_early_or_of_a_healthy_form_does_not_count() -> None:
    assert not judged(Finding(1, "absorbed", "layers.0")).found
    noise = Finding(2, "absorbed", "layers.0")
    verdict = judged(noise, healthy=(noise,))
    assert not verdict.found
    assert verdict.alarms == ("mended",)


def test_the_command_judges_a_tool(tmp_path) -> None:
    command = [sys.executable, BENCHMARKS / "silent" / "run.py", "--tool", "loss", "-k", "frozen_but_norms"]
    written = tmp_path / "loss.json"
    subprocess.run([*command, "--json", written], check=True, capture_output=True, timeout=120)
    document = json.loads(written.read_text())
    assert (document["cases"], document["healthy"], document["alarms"], document["errors"]) == (1, 2, 0, 0)
    assert document["cause"] == 0  # a curve names no cause
