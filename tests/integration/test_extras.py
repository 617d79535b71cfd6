"""Optional packages: what works without them, and which extra an error names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.html_page import growing
from support.merges import report


def test_text_and_json_need_neither() -> None:
    """A report is made, printed, written and read where jinja2 and plotly are not installed."""
    code = (
        "import sys; sys.modules['jinja2'] = sys.modules['plotly'] = None\n"
        "import nanwatch; from nanwatch.report.report import Report\n"
        "report = Report.from_json(sys.stdin.read()); print(report.to_text(), end=''); report.to_json()"
    )
    report = growing()
    done = subprocess.run(
        [sys.executable, "-c", code], input=report.to_json(), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, report.to_text()), done.stderr


@pytest.mark.slow
def test_without_jinja2_the_extra_is_named(tmp_path: Path) -> None:
    """And the text needs nothing."""
    (tmp_path / "report.json").write_text(report(0).to_json())
    script = """
import sys
sys.modules["jinja2"] = None
from nanwatch.__main__ import main
from nanwatch.util.visible import visible
assert main(["merge", sys.argv[1]]) == 0
assert main(["merge", sys.argv[1], "--html", sys.argv[1] + "/m.html"]) == 2
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "pip install jinja2" in done.stderr
