"""Optional packages: what works without them, and which extra an error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.html_page import growing
from support.processes import forked


def test_text_and_json_need_no_extra() -> None:
    """A report is made, printed, written and read where jinja2 is not installed."""
    code = (
        "import sys; sys.modules['jinja2'] = None\n"
        "import nanwatch; from nanwatch.report.report import Report\n"
        "report = Report.from_json(sys.stdin.read()); print(report.to_text(), end=''); report.to_json()"
    )
    report = growing()
    done = forked("-c", code, input=report.to_json())
    assert (done.returncode, done.stdout) == (0, report.to_text()), done.stderr


@pytest.mark.slow
def test_without_jinja2_the_extra_is_named(tmp_path: Path) -> None:
    """And the text needs nothing."""
    (tmp_path / "report.json").write_text(growing().to_json())
    script = """
import sys
sys.modules["jinja2"] = None
from nanwatch.__main__ import main
from nanwatch.util.visible import visible
assert main(["show", "--ranks", sys.argv[1]]) == 1
assert main(["show", "--ranks", sys.argv[1], "--html", sys.argv[1] + "/m.html"]) == 2
"""
    done = forked("-c", script, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "pip install jinja2" in done.stderr
