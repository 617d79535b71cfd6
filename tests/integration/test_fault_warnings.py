"""The warning of a non-finite forward during an import."""

from __future__ import annotations

import os
import subprocess
import sys

from nanwatch.integrations.debug import SWITCH


def test_a_warning_of_an_import_is_at_the_import() -> None:
    """Past the frames of importlib."""
    done = subprocess.run(
        [sys.executable, "-c", "\nimport nanwatch"],
        env={**os.environ, SWITCH: "perhaps"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr.startswith(f"<string>:2: RuntimeWarning: {SWITCH}='perhaps' is not understood"), (
        done.stderr
    )
