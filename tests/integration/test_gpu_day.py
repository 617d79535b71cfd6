"""benchmarks/gpu_day.sh without a GPU: its plan holds together, it resumes, and it says when it cannot run."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from support.paths import BENCHMARKS, ROOT

SCRIPT = BENCHMARKS / "gpu_day.sh"
PARTS = ["build", "selfcheck", "tests", "range", "memcheck", "step", "racecheck", "ncu", "frame"]
PARTS += ["block_fit", "synccheck", "initcheck"]

# Stands for python3: a GPU named "Fake GPU", and commands that fail where BROKEN names a word of theirs.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *get_device_name*) echo fake-gpu ;;
  *get_device_capability*) echo 9.0 ;;
  -c*) echo 3.12 ;;
  *) echo "$*" >>"$CALLS"; [ -z "$BROKEN" ] || [[ "$*" != *"$BROKEN"* ]] ;;
esac
"""


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([str(SCRIPT), *arguments], capture_output=True, text=True, env=env, timeout=60)


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """An environment in which every tool of the script is a stand-in."""
    tools = tmp_path / "bin"
    tools.mkdir()
    passes_on = '#!/usr/bin/env bash\nwhile [ $# -gt 0 ] && [ "$1" != python3 ]; do shift; done\nexec "$@"\n'
    scripts = {"python3": PYTHON, "compute-sanitizer": passes_on, "ncu": passes_on}
    scripts |= dict.fromkeys(("make", "nvidia-smi", "nvcc"), "#!/bin/sh\nexit 0\n")
    for name, text in scripts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "RESULTS": str(tmp_path / "results"),
        "CALLS": str(tmp_path / "calls"),
        "BROKEN": "",
        "PYTHON": "python3",
    }


def test_the_plan_fits_into_25_minutes_and_names_files_that_exist() -> None:
    """The limits add up to 1,500 s at most, and every script and test of the plan is there."""
    lines = _run("--plan").stdout.splitlines()
    assert [line.split()[1].rstrip(":") for line in lines] == PARTS
    assert sum(int(line.split()[0]) for line in lines) <= 25 * 60
    files = {word for line in lines for word in line.split() if word.endswith(".py")}
    assert files
    assert all((ROOT / file).exists() for file in files)


def test_a_part_that_failed_is_run_again_and_no_other(machine: dict[str, str]) -> None:
    """Results are written as they come, and a second start does only what has not passed (and the build)."""
    first = _run(**{**machine, "BROKEN": "bench_range"})
    results = Path(machine["RESULTS"])
    assert first.returncode == 1
    assert first.stderr.strip() == "failed: range"
    assert {path.stem for path in results.glob("*.status")} == set(PARTS)
    assert (results / "range.status").read_text().startswith("1 after")
    Path(machine["CALLS"]).unlink()
    assert _run(**machine).returncode == 0
    assert Path(machine["CALLS"]).read_text().split()[:2] == ["benchmarks/bench_range.py", "--device"]
    assert len(Path(machine["CALLS"]).read_text().splitlines()) == 1


def test_a_word_that_is_no_part_and_a_machine_without_a_gpu(machine: dict[str, str]) -> None:
    """Both end with status 2 and a sentence, before anything runs."""
    unknown = _run("ranges", **machine)
    assert unknown.returncode == 2
    assert "there is no part ranges; the parts are: build selfcheck" in unknown.stderr
    blind = _run(**{**machine, "PYTHON": "false"})
    assert blind.returncode == 2
    assert "sees no GPU; nothing was run" in blind.stderr
    assert not Path(machine["RESULTS"]).exists()
