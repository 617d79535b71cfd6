"""A difference as one page of HTML: where the two part, what grew, and the lines of both on the same charts."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from . import text
from .diff_text import place_line
from .html import page

if TYPE_CHECKING:
    from .difference import Difference, Series


def diff_html(found: Difference) -> str:
    """The difference as one HTML document, to be written as UTF-8. Raises ImportError without jinja2 and plotly."""
    # One batch is no line: then the calls alone are drawn.
    many = len(found.batches) > 1
    data = {"calls": _lines(found.calls), "series": [_lines(one) for one in found.series] if many else []}
    return page(
        "diff",
        "Difference.to_html()",
        data,
        found=found,
        headline=_headline(found),
        place_line=place_line,
        module_name=text.module_name,
        charts=bool(found.calls.x) or many,
    )


def _headline(found: Difference) -> str:
    if found.first is None:
        return "No difference"
    return f"They part at {found.first.label} of {text.module_name(found.first.module)}"


def _lines(one: Series) -> dict[str, Any]:
    x = [str(place) if isinstance(place, str) else place for place in one.x]
    return {"name": one.name, "x": x, "a": [_number(v) for v in one.a], "b": [_number(v) for v in one.b]}


def _number(value: float) -> float | str:
    return value if isfinite(value) else str(value)
