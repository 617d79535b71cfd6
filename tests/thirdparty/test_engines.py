"""The entry points of inference engines, which start the plugins of all packages in each of their processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.processes import environment

PARTS = ("nanwatch.session", "nanwatch.instrumentation", "sglang", "vllm")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_the_switch_no_part_of_a_watch_is_imported(engine: str) -> None:
    """Neither engine is installed here, so that the plugin itself could not start."""
    script = f"""
import sys
from nanwatch.integrations import start_in_{engine}
start_in_{engine}()
assert not any(name.startswith({PARTS!r}) for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, env=environment(NANWATCH=""))
