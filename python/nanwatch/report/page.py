"""Page of HTML that shows facts: a headline, lines of facts, tables, charts and a heat map.

Everything a page needs is in it, and it asks nobody for anything: its content security policy allows one script, known
by its hash, and no connection. Names of modules, labels and notes are whatever a user's model holds, so jinja2 escapes
them in the markup, `_json` in the data, and the script writes them as text. Both make visible what is not printable.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from ..records.headroom import NEAR_FACTOR
from ..util.imports import needed
from ..util.visible import visible

LOW_BITS = NEAR_FACTOR.bit_length() - 1  # as text has it
NEAR_BITS = 2
WIDEST_BAR = 40.0  # bits; float16 has 40 from its smallest number to its largest
TEXT, NUMBER = "", "number"

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


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

    kind: ClassVar = "table"
    id: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Any]]
    hint: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Chart of lines on a logarithmic scale, as `lines` of chart.js takes them. `label` tells it to a screen reader."""

    kind: ClassVar = "chart"
    id: str
    title: str
    hint: str
    label: str
    across: str
    high: str
    lines: Sequence[Mapping[str, Any]]
    after: str = ""

    @property
    def data(self) -> dict[str, Any]:
        """Return what the script draws."""
        return {"across": self.across, "high": self.high, "lines": self.lines}


# Cells of a map are whole numbers of 16 bits: tenths of a bit, whose 2098 in float64 fit. These stand for other cells.
ABSENT, GONE, ZERO = -32768, -32767, 32767

HEADROOM_STOPS: tuple[tuple[Any, ...], ...] = (
    (10 * NEAR_BITS, "near"),
    # Redder below the middle, paler above it, so that a fall is seen.
    (10 * NEAR_BITS, "low", 0.4, "near"),
    (5 * (NEAR_BITS + LOW_BITS), "low"),
    (10 * LOW_BITS, "low", 0.4),
    (10 * LOW_BITS, "fine"),
    (10 * WIDEST_BAR, "fine", 0.18),
)
HEADROOM_KEY = (
    ("gone", "not finite"),
    ("near", f"less than {NEAR_BITS} bits"),
    ("low", f"less than {LOW_BITS} bits, redder with less"),
    ("fine", f"{LOW_BITS} bits and more, paler with more room"),
)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Heat map of a page, at most one. `cells` by row and column are whole numbers, the worst the least.

    `rows` are names, `first` and `last` the numbers at the ends of each column, which `columns` names in the singular
    and the plural. `stops` are `(cell, colour, share of it, colour behind)`. `magnitudes` are those of the cells, told
    as `measure` under the pointer. `marks` are kind, column, row and text; `failed` and `skipped` are columns.
    """

    kind: ClassVar = "map"
    id: ClassVar = "heat"
    title: str
    hint: str
    label: str
    rows: Sequence[str]
    first: Sequence[int]
    last: Sequence[int]
    columns: tuple[str, str]
    cells: Array
    stops: Sequence[tuple[Any, ...]] = HEADROOM_STOPS
    key: Sequence[tuple[str, str]] = HEADROOM_KEY
    none: str = "no headroom read"
    unit: str = "bits"
    magnitudes: Array | None = None
    measure: str = "abs max"
    failed: Sequence[int] = ()
    skipped: Sequence[int] = ()
    marks: Sequence[Sequence[Any]] = ()
    after: str = ""

    @property
    def data(self) -> dict[str, Any]:
        """Return what the script draws."""
        with np.errstate(divide="ignore", invalid="ignore"):
            log2 = np.log2(() if self.magnitudes is None else self.magnitudes)
        names = (
            "rows",
            "first",
            "last",
            "stops",
            "none",
            "unit",
            "measure",
            "failed",
            "skipped",
            "marks",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "column": self.columns[0],
            "plural": self.columns[1],
            "absent": ABSENT,
            "gone": GONE,
            "zero": ZERO,
            "cells": _packed(self.cells, "<i2"),
            "log2": _packed(log2, "<f4"),
        }


def headroom_cells(bits: Array) -> Array:
    """Return bits of headroom as the cells of a map: nan where there is no number, -inf where one is not finite."""
    # -0.5 bits of a complex tensor is the least that a finite value has.
    cells: Array = np.rint(10 * np.where(np.isfinite(bits), bits, 0.0)).astype(np.int64)
    cells[np.isnan(bits)] = ABSENT
    cells[np.isneginf(bits)] = GONE
    cells[np.isposinf(bits)] = ZERO
    return cells


def _packed(values: Array, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, np.dtype(kind)).tobytes()).decode()


Section: TypeAlias = "Table | Chart | HeatMap"


def page(
    who: str,
    headline: str,
    amount: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    *,
    is_bad: bool,
) -> str:
    """Return one HTML document, to be written as UTF-8. `who` is named by the ImportError without jinja2."""
    charts = [one for one in sections if isinstance(one, Chart)]
    maps = [one for one in sections if isinstance(one, HeatMap)]
    data: dict[str, Any] = {"charts": {f"{one.id}-chart": one.data for one in charts}}
    scripts = ["chart.js"] * bool(charts or maps)
    for one in maps:
        data["map"] = one.data
        scripts.append("map.js")
    return rendered(
        "page",
        who,
        data,
        scripts,
        headline=headline,
        amount=amount,
        facts=facts,
        sections=sections,
        is_bad=is_bad,
    )


def rendered(name: str, who: str, data: Any, scripts: Sequence[str], **values: Any) -> str:
    """Return the template of this name with the report's style, the scripts, and the data from which they draw."""
    jinja2 = needed("jinja2", who, "report", "use the text or the JSON")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("nanwatch.report", "templates"),
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )

    def source(file: str) -> str:
        return str(environment.loader.get_source(environment, file)[0])

    script = "\n".join(map(source, scripts))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    values |= {"style": source("report.css"), "script": script, "script_hash": f"sha256-{digest}"}
    return str(environment.get_template(f"{name}.html.jinja").render(data=_json(data), **values))


def _json(value: Any) -> str:
    """Return JSON that is safe in a script element: no `<`, and only ASCII (U+2028 ends a line of script)."""
    plain = json.dumps(_visible(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return plain.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _visible(value: Any) -> Any:
    """Return `value` with each of its strings as a page shows it."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {key: _visible(one) for key, one in value.items()}
    return [_visible(one) for one in value] if isinstance(value, list | tuple) else value


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
