"""Threads that train, evaluate, save, swap weights, start and stop watches: nothing crashes, is lost or invented."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import nanwatch
from nanwatch import _extension

SCRIPT = Path(__file__).parent / "scripts" / "stress_threads.py"


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
def test_a_minute_of_threads(compiled: bool) -> None:
    """Half a minute with each recorder; a longer run is `stress_threads.py 1200`."""
    if compiled and _extension.C is None:
        pytest.skip(f"no compiled part: {_extension.reason}")
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(nanwatch.__file__).parent.parent),
        "MALLOC_PERTURB_": "165",  # freed memory holds other bytes than it had
        "NANWATCH_EXT": str(int(compiled)),
    }
    command = [sys.executable, str(SCRIPT), "30"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
