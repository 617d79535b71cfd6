"""benchmarks/gpu_day.sh without a GPU: its two parts fit into their time, and what they run is there and runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.paths import BENCHMARKS, ROOT
from support.processes import environment


def test_each_part_fits_into_240_seconds() -> None:
    """The build and the longest command beside it, as both commands of a part run at the same time."""
    plan = subprocess.run(
        [str(BENCHMARKS / "gpu_day.sh"), "--plan"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    commands = [line.split(maxsplit=2) for line in plan]
    for part in ("right", "cost"):
        build, *others = [int(seconds) for name, seconds, _ in commands if name == part]
        assert build + max(others) <= 240
    files = {word for line in plan for word in line.split() if word.endswith(".py")}
    assert all((ROOT / file).exists() for file in files)


def test_the_steps_are_rehearsed_on_the_cpu(tmp_path: Path) -> None:
    """Every way of every step runs and has its ratio."""
    path = tmp_path / "gpu.json"
    command = [sys.executable, str(BENCHMARKS / "bench_gpu.py"), "--rehearse", "--json", str(path)]
    subprocess.run([*command, "--parts", "train", "decode"], check=True, env=environment(), timeout=300)
    rows = {row["part"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(rows["train"]["ratio"]) == {"watch", "gradients", "transformers"}
    assert set(rows["decode"]["ratio"]) == {"watch", "transformers"}
