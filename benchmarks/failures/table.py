"""The table of docs/failures.md, which `python benchmarks/judge_failures.py --write-table` writes anew."""

from __future__ import annotations

from pathlib import Path

from .case import CASES, PRODUCTS, Case

PAGE = Path(__file__).resolve().parents[2] / "docs" / "failures.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
HEAD = (
    "| cause | first seen | where it comes from | made by | finite in float32 |",
    "|---|---|---|---|---|",
)


def rows() -> list[str]:
    """The lines of the table, one for each case, by the files' order."""
    return [*HEAD, *(f"| {' | '.join(_cells(case))} |" for case in CASES)]


def page(text: str) -> str:
    """The page with the table of now between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return "\n".join([before + BEGIN, *rows(), END + after])


def _cells(case: Case) -> tuple[str, ...]:
    origin = case.origin
    if case.source_module is not None:
        origin += f" from {_name(case.source_module)}"
    if case.transient:
        made_by = "nothing that a re-run shows: transient"
    elif case.operations == tuple(PRODUCTS.split()):
        made_by = "a matrix product"
    else:
        made_by = f"`{case.operations[0]}`" if case.operations else "–"
    seen = f"{case.value} in `{case.label}` of {_name(case.module)}"
    return case.cause, seen, origin, made_by, "yes" if case.format_cause else ""


def _name(module: str) -> str:
    return f"`{module}`" if module else "the root"
