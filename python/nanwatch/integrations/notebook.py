"""`%load_ext nanwatch`: a failure in a cell shows its report, and its cure as the next cell."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from ..report.report import NonFiniteError, Report
from ..report.text import patch_lines
from ..util.messages import needed, suppressing, visible


def load_ipython_extension(shell: Any) -> None:
    """Show the report of each NonFiniteError that a cell raises."""
    shell.set_custom_exc((NonFiniteError,), _show)


def unload_ipython_extension(shell: Any) -> None:
    """Show errors as IPython does."""
    shell.set_custom_exc((), None)


def _show(
    shell: Any,
    kind: type[BaseException],
    error: NonFiniteError,
    traceback: TracebackType,
    tb_offset: int | None = None,
) -> None:
    shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)
    with suppressing("a notebook took no report"):
        needed("IPython.display", "%load_ext nanwatch", "notebook").display(error.report)
        if cell := cure_cell(error.report):
            shell.set_next_input(cell)


def cure_cell(report: Report) -> str:
    """Return the first cure that works, as a cell to copy from: the new code, the old as comments; "" without one."""
    cures = () if report.finding is None else report.finding.cures
    cure = next((candidate for candidate in cures if candidate.works), None)
    if cure is None:
        return ""
    old = [f"# instead of: {visible(line[1:].strip())}" for part, line in patch_lines(cure) if part == "old"]
    new = [visible(line[1:]) for part, line in patch_lines(cure) if part == "new"]
    return "\n".join([f"# nanwatch: {visible(cure.what)}", *old, *new])
