"""Optional packages: what works without them, and which extra an error names."""

from __future__ import annotations

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
