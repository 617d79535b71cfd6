"""Trainers under `nanwatch run`, 20 steps each, without a line of code in them.

TRL and DeepSpeed pin versions of their own: `make test-trainers` runs this in an environment of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from support.paths import SCRIPTS
from support.processes import user_environment

SCRIPT = SCRIPTS / "train_in_host.py"
# The package of each host, and the module that becomes infinite.
HOSTS = {
    "trainer": ("transformers", "model.layers.1.mlp.act_fn"),
    "lightning": ("lightning", "net.act"),
    "fabric": ("lightning", "act"),
    "accelerate": ("accelerate", "act"),
    "sft": ("trl", "model.layers.1.mlp.act_fn"),
    "zero": ("deepspeed", "act"),
}
# How stage 3 of ZeRO is started.
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
WATCH = ["-m", "nanwatch", "run", "--output-dir", "out", "--gradients"]

pytestmark = pytest.mark.slow


def run(folder: Path, *command: object, status: int = 0) -> None:
    """Run Python in the folder and expect its exit status."""
    env = user_environment(
        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1"
    )
    line = [sys.executable, *map(str, command)]
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]


def is_installed(package: str) -> bool:
    """Return whether a process of its own finds the package. Other tests add the folder of engines to their path."""
    spec = find_spec(package)
    return spec is not None and Path(sys.prefix, "engines") not in Path(spec.origin or "").parents


def finding(folder: Path) -> Any:
    reports = [*folder.glob("out/batch-*/report.json")]
    return json.loads(reports[0].read_text())["finding"] if reports else None


def equal(a: Path, b: Path) -> bool:
    x, y = (torch.load(path, weights_only=True) for path in (a, b))
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


@pytest.mark.parametrize("host", HOSTS)
def test_a_trainer_is_watched_and_computes_the_same(host: str, tmp_path: Path) -> None:
    """The weights after 20 steps are bit-equal, and a planted infinity ends the run at its module."""
    package, module = HOSTS[host]
    if not is_installed(package):
        pytest.skip(f"{package} is not installed")
    launch = TWO_RANKS if host == "zero" else []
    run(tmp_path, *launch, SCRIPT, host, "unwatched.pt")
    run(tmp_path, *launch, *WATCH, SCRIPT, host, "watched.pt")
    assert equal(tmp_path / "unwatched.pt", tmp_path / "watched.pt")
    assert finding(tmp_path) is None
    run(tmp_path, *launch, *WATCH, SCRIPT, host, "fault.pt", "fault", status=1 if launch else 3)
    named = finding(tmp_path)
    assert (named["module"], named["label"], named["origin"]) == (module, "output", "produced")
    assert not (tmp_path / "fault.pt").exists()


def test_accelerate_launch_starts_the_script_watched(tmp_path: Path) -> None:
    """Between the launcher and the script stands `-m nanwatch run`."""
    pytest.importorskip("accelerate")
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", 1, "-m"]
    watch = ["nanwatch", "run", "--output-dir", "out"]
    run(tmp_path, *launch, *watch, SCRIPT, "accelerate", "weights.pt", "fault", status=1)
    assert finding(tmp_path)["module"] == "act"
