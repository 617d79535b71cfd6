"""What `import nanwatch` brings with it."""

from __future__ import annotations

import subprocess
import sys

import nanwatch
from support.processes import environment

NUMERICS = {f"nanwatch.numerics.{name}" for name in ("_extension", "_ops", "_reference")}
MODULES = {"nanwatch", "nanwatch._C", "nanwatch._version", "nanwatch.numerics", *NUMERICS}


def test_importing_it_imports_little_before_its_first_use() -> None:
    """The operators and what they need. Every public name is imported when it is first asked for."""
    script = "import sys, torch, nanwatch; print(*(m for m in sys.modules if m.split('.')[0] == 'nanwatch'))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) <= MODULES


def test_public_names_are_there_and_listed() -> None:
    """`dir` and `import *` see all of them."""
    assert {name for name in nanwatch.__all__ if getattr(nanwatch, name, None) is None} == set()
    assert set(nanwatch.__all__) <= set(dir(nanwatch))
