"""benchmarks/judge_reruns.py: no program of its cases differs for being watched, and each finding is right."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from support.paths import BENCHMARKS
from support.processes import environment, forked

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the judge forks its programs")

CASES = [
    f"{path.stem}.{name}"
    for path in sorted((BENCHMARKS / "reruns").glob("*.py"))
    for name in re.findall(r"^@case\([^@]*?^def (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("name", CASES)
def test_a_rerun_leaves_no_trace(name: str, tmp_path: Path) -> None:
    """State, end and output are those of the unwatched program; operation, line and cure are right."""
    file = tmp_path / "verdicts.json"
    judge = BENCHMARKS / "judge_reruns.py"
    done = forked(
        str(judge),
        "-k",
        name.partition(".")[2],
        "--json",
        str(file),
        "--verbose",
        env=environment(OMP_NUM_THREADS="1"),
    )
    assert done.returncode == 0, done.stderr
    verdict = next(x for x in json.loads(file.read_text()) if x["name"] == name.partition(".")[2])
    assert verdict["right"], done.stdout
