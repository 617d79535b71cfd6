"""The entry points of inference engines, which start the plugins of all packages in each of their processes."""

from __future__ import annotations

from support.processes import environment, forked

SCRIPT = """
import sys
from nanwatch.integrations import start_in_sglang, start_in_vllm
start_in_sglang()
start_in_vllm()
parts = "nanwatch.session", "nanwatch.instrumentation", "sglang", "vllm"
assert not any(name.startswith(parts) for name in sys.modules)
"""


def test_without_the_switch_no_part_of_a_watch_is_imported() -> None:
    """Neither engine is installed here, so that the plugin itself could not start."""
    done = forked("-c", SCRIPT, env=environment(NANWATCH=""), imported=False)
    assert done.returncode == 0, done.stderr
