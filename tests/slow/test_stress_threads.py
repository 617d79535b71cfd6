"""Threads that train, evaluate, save, swap weights, start and stop watches: nothing crashes, is lost or invented."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nanwatch.numerics import _extension
from support.paths import SCRIPTS
from support.processes import environment


@pytest.mark.parametrize(
    "script", ["stress_threads.py 12", "stress_threads.py 10 1", "watches_come_and_go.py 4"]
)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
def test_threads_for_a_while(script: str, compiled: bool) -> None:
    """A minute in all; a longer run is `stress_threads.py 1200`. Odd seeds watch gradients."""
    if compiled and _extension.C is None:
        pytest.skip(f"no compiled part: {_extension.reason}")
    # Freed memory holds other bytes than it had.
    env = environment(MALLOC_PERTURB_="165", NANWATCH_EXT=str(int(compiled)))
    name, *arguments = script.split()
    command = [sys.executable, str(SCRIPTS / name), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
