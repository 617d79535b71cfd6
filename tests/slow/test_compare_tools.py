"""examples/compare_tools.py: that the tools see what its page says they see."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.paths import ROOT
from support.processes import environment


def test_what_each_tool_says(tmp_path):
    """Tools that read the forward stop in the first bad step, anomaly mode not before. nanwatch names the module."""
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    script = [sys.executable, str(ROOT / "examples" / "compare_tools.py"), "--quick"]
    done = subprocess.run(
        [*script, "--json", "-", "--markdown", str(tmp_path / "cost.md")],
        env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    bad, said = document["first_bad_step"], document["said"]
    stops = {name: words["stopped_at_step"] for name, words in said.items()}
    anomaly = [name for name in said if "anomaly" in name]
    assert len(anomaly) == 2
    assert {stops[name] for name in said if name not in anomaly} == {bad}
    assert all(stops[name] >= bad for name in anomaly)
    assert "(Linear) in batch" in said["nanwatch"]["raised"]
    assert "By:    aten." in said["nanwatch"]["raised"]
    assert set(document["cost"]) == set(said)
    assert all(ratio > 0 for ratio in document["cost"].values())
    assert document["torch"] in (tmp_path / "cost.md").read_text()
