"""Threads that train, evaluate, save, swap weights, start and stop watches: nothing crashes, is lost or invented."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import nanwatch
from nanwatch.numerics import _extension
from support.paths import SCRIPTS


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["stress_threads.py 25", "stress_threads.py 20 1", "watches_come_and_go.py 6"]
)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
def test_threads_for_a_while(script: str, compiled: bool) -> None:
    """A minute and a half in all; a longer run is `stress_threads.py 1200`. Odd seeds watch gradients."""
    if compiled and _extension.C is None:
        pytest.skip(f"no compiled part: {_extension.reason}")
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(nanwatch.__file__).parent.parent),
        "MALLOC_PERTURB_": "165",  # freed memory holds other bytes than it had
        "NANWATCH_EXT": str(int(compiled)),
    }
    name, *arguments = script.split()
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
