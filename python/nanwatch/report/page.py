"""Page of HTML that shows facts: a headline, lines of facts, tables, charts and a heat map.

Everything a page needs is in it, it runs no script, and it asks nobody for anything: its content security policy allows
no connection. Names of modules, labels and notes are whatever a user's model holds, so jinja2 escapes them in the
markup and `drawing.escape` in pictures. Both make visible what is not printable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, NamedTuple, TypeAlias

from ..records.headroom import NEAR_FACTOR
from ..util.imports import needed
from ..util.visible import visible
from . import drawing
from .histogram import StoredHistogram, histogram_words

LOW_BITS = NEAR_FACTOR.bit_length() - 1  # as text has it
NEAR_BITS = 2
TEXT, NUMBER = "", "number"


class Level(NamedTuple):
    """Cell of a table with a headroom, coloured by it."""

    bits: float | None

    @property
    def level(self) -> str:
        """Return the class of its colour."""
        return level_of(self.bits)

    def __str__(self) -> str:
        return bits_words(self.bits)


class Curve(NamedTuple):
    """Cell of a table with a small picture: the lines between gaps, each as the points of an SVG polyline."""

    points: Sequence[str]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Table:
    """Table of a page. `columns` are names with TEXT or NUMBER, and a cell is text, a Level or a Curve."""

    id: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Any]]
    hint: str = ""
    after: str = ""
    picture: ClassVar = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Chart of lines on a logarithmic scale, as `drawing.chart` takes them. `label` is for a screen reader."""

    id: str
    title: str
    hint: str
    label: str
    across: str
    high: str
    lines: Sequence[Mapping[str, Any]]
    after: str = ""
    columns: ClassVar = None

    @property
    def picture(self) -> str:
        """Return the drawing."""
        return drawing.chart(self.lines, self.across, self.high, self.label)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Heat map of headroom, as `drawing.heat_map` takes it."""

    id: ClassVar = "heat"
    title: str
    hint: str
    label: str
    rows: Sequence[str]
    first: Sequence[int]
    last: Sequence[int]
    bits: Any
    signs: Sequence[tuple[str, int, int | None, str]] = ()
    after: str = ""
    columns: ClassVar = None

    @property
    def picture(self) -> str:
        """Return the drawing."""
        return drawing.heat_map(self.bits, self.rows, self.first, self.last, self.label, self.signs)


@dataclass(frozen=True, slots=True)
class Spread:
    """Elements of one tensor by power of two, beside the spans of formats."""

    id: str
    histogram: StoredHistogram
    after: str = ""
    columns: ClassVar = None

    @property
    def title(self) -> str:
        """Return the label of the tensor."""
        return f"Elements of {self.histogram.label} by power of two"

    @property
    def hint(self) -> str:
        """Return the numbers in words."""
        return f"{histogram_words(self.histogram)}. Blue where numbers are normal, amber where they are subnormal."

    @property
    def picture(self) -> str:
        """Return the drawing."""
        return drawing.exponents(self.histogram)


Section: TypeAlias = "Table | Chart | HeatMap | Spread"


def page(
    who: str,
    headline: str,
    amount: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    *,
    is_bad: bool,
    cures: Sequence[Any] = (),
) -> str:
    """Return one HTML document, to be written as UTF-8. `who` is named by the ImportError without jinja2.

    `cures` are (cure, lines of its patch as (kind, text)).
    """
    jinja2 = needed("jinja2", who, "report", "use the text or the JSON")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nanwatch.report", "templates"),
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    style = environment.loader.get_source(environment, "page.css")[0]
    return str(
        environment.get_template("page.html.jinja").render(
            style=style,
            headline=headline,
            amount=amount,
            facts=facts,
            sections=[section for section in sections if section.columns is not None or section.picture],
            is_bad=is_bad,
            cures=cures,
        )
    )


def level_of(bits: float | None) -> str:
    """Return the class that colours a headroom: "gone", "near", "low", "fine", or "none" without a meaning."""
    if bits is None:
        return "none"
    if bits == -inf:
        return "gone"
    return "near" if bits < NEAR_BITS else "low" if bits < LOW_BITS else "fine"


def bits_words(bits: float | None) -> str:
    """Return a headroom as a page shows it, "" for None."""
    if bits is None:
        return ""
    return "all zero" if bits == inf else "none left" if bits == -inf else f"{bits:.1f} bits"
