"""Environment of a Python process that a test starts."""

from __future__ import annotations

import os
from pathlib import Path

import nanwatch
from support.paths import TESTS

PYTHONPATH = os.pathsep.join([str(Path(nanwatch.__file__).parents[1]), str(TESTS)])


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with the changes, in which Python finds the same nanwatch and `support`."""
    return os.environ | {"PYTHONPATH": PYTHONPATH} | changes
