"""Comparisons: the distance of two tensors, and the form of every result, as text, JSON and a page."""

from __future__ import annotations

import json
import textwrap
from typing import Any, NamedTuple

from torch import Tensor

from ..report.page import InNotebook, Section, page
from ..util.reading import plain
from ..util.visible import visible

VERSION = 1
# Columns before the words of a fact, and of a whole line.
_INDENT, _WIDTH = 12, 100
# Rows with less than this share of the mean norm are compared by that share: padding may be all but zero.
_LEAST_ROW = 0.1
# Masks hold -inf or the least number of a dtype, whose squares have no norm.
_LARGEST = 1e30


class Errors(NamedTuple):
    """Distance of two tensors: relative error of all and of each row, cosine, and largest difference of an element."""

    total: float
    rows: Tensor
    cosine: float
    largest_difference: float

    @property
    def worst_row(self) -> float:
        """The relative error of the worst row."""
        return float(self.rows.max()) if len(self.rows) else 0.0


def errors_between(a: Tensor, b: Tensor) -> Errors:
    """Return how far the rows of `b` are from those of `a`. The same non-finite number on both sides is no error."""
    same = ~a.isfinite() & ((a == b) | (a.isnan() & b.isnan()))
    apart = (~a.isfinite() | ~b.isfinite()) & ~same
    a, b = (x.masked_fill(same, 0).nan_to_num(0.0).clamp(-_LARGEST, _LARGEST) for x in (a, b))
    difference = a - b
    norms = a.norm(dim=-1)
    distances = difference.norm(dim=-1).masked_fill(apart.any(-1), float("inf"))
    whole, overall = float(norms.norm()), float(distances.norm())
    least = max(_LEAST_ROW * whole / max(len(norms), 1) ** 0.5, 1e-300)
    both = whole * float(b.norm())
    return Errors(
        overall / whole if whole else (0.0 if overall == 0 else float("inf")),
        distances / norms.clamp(min=least),
        float((a * b).sum()) / both if both else 1.0,
        float("inf") if bool(apart.any()) else float(difference.abs().max()) if difference.numel() else 0.0,
    )


class Result(InNotebook):
    """Base of the results of `diff`, `compare` and `twice`, which are dataclasses.

    `equal` is None where nothing can be said. `facts` are (head, words). `remarks` say what was not compared.
    """

    __slots__ = ()
    remarks: tuple[str, ...]
    equal: Any  # bool, or None

    @property
    def headline(self) -> str:
        """The result in a line."""
        raise NotImplementedError

    @property
    def amount(self) -> str:
        """The number of what was compared, in words."""
        raise NotImplementedError

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The facts in words, in the order in which a reader needs them."""
        raise NotImplementedError

    def sections(self) -> list[Section]:
        """Return the charts and tables of the page."""
        return []

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        head = {
            "schema": f"nanwatch.{type(self).__name__.lower()}",
            "version": VERSION,
            "equal": self.equal,
        }
        return json.dumps({**head, **plain(self)}, allow_nan=False, indent=2)

    def to_text(self) -> str:
        """Return the result for people, without a newline at its end."""
        lines = [f"{self.headline}.", ""]
        for head, words in [*self.facts, ("Compared", self.amount)]:
            lines += _wrapped(head, words)
        notes = [line for remark in self.remarks for line in _wrapped("Note", remark)]
        return "\n".join(map(visible, [*lines, *([""] if notes else []), *notes]))

    def to_html(self) -> str:
        """Return a page that opens offline. Needs `jinja2`; write it as UTF-8."""
        facts = [*self.facts, *(("Note", remark) for remark in self.remarks)]
        return page(
            f"{type(self).__name__}.to_html()",
            self.headline,
            self.amount,
            facts,
            self.sections(),
            is_bad=not self.equal,
        )


def _wrapped(head: str, words: str) -> list[str]:
    line = f"{head + ':' if head else '':<{_INDENT - 1}} {words}"
    indent = " " * _INDENT
    return textwrap.wrap(line, _WIDTH, subsequent_indent=indent, break_long_words=False)


def plural(count: int, singular: str, more: str = "") -> str:
    """Return a count with its noun."""
    return f"{count:,} {singular if count == 1 else more or f'{singular}s'}"
