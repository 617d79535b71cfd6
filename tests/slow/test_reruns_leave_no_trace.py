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

CASES = {
    path.stem: re.findall(r"^@case\([^@]*?^def (\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    for path in sorted((BENCHMARKS / "reruns").glob("*.py"))
}


@pytest.mark.parametrize("file", [file for file, names in CASES.items() if names])
def test_reruns_leave_no_trace(file: str, tmp_path: Path) -> None:
    """State, end and output are those of the unwatched program; operation, line and cure are right."""
    verdicts = tmp_path / "verdicts.json"
    done = forked(
        str(BENCHMARKS / "judge_reruns.py"),
        *(part for name in CASES[file] for part in ("-k", name)),
        *("--json", str(verdicts), "--verbose"),
        env=environment(OMP_NUM_THREADS="1"),
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    found = {one["name"]: one for one in json.loads(verdicts.read_text())}
    assert set(CASES[file]) <= set(found)
    assert [name for name, one in found.items() if not one["right"]] == [], done.stdout
