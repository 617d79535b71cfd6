"""Page of HTML that shows facts: a headline, lines of facts, tables and charts; and the display of it in a notebook.

Everything a page needs is in it, it runs no script, and it asks nobody for anything: its content security policy allows
no connection. Names of modules, labels and notes are whatever a user's model holds, so jinja2 escapes them in the
markup and `escape` in pictures. Both make visible what is not printable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from itertools import groupby
from math import ceil, inf, isfinite, log10
from typing import Any, ClassVar, NamedTuple, TypeAlias

from ..records.record import NEAR_FACTOR
from ..util.messages import needed, visible

_FRAME = "width: 100%; height: 36em; border: 0"  # of a page in a notebook
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


@dataclass(frozen=True, slots=True)
class Table:
    """Table of a page. `columns` are names with TEXT or NUMBER, and a cell is text or a Level."""

    id: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[Sequence[Any]]
    hint: str = ""
    after: str = ""
    picture: ClassVar = ""


_WIDTH, _LEFT, _RIGHT, _TOP = 1100, 80, 16, 12  # of a chart: its width and margins
_PLOT = 340  # height of its area
_MOST_POINTS = 400  # of a line, whose points show their numbers under the pointer
_DASHES = {"dotted": "2 4", "dashed": "7 5"}
_LABELS = 8  # names below a chart


def escape(text: object) -> str:
    """Return text for SVG, spelt out where it is not printable."""
    return escape_html(visible(str(text)))


def svg_text(x: float, y: float, text: object, anchor: str = "start") -> str:
    """Return a text of SVG."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def svg(height: float, label: str, parts: Sequence[str]) -> str:
    """Return a drawing as wide as the page. `label` is for a screen reader."""
    box = f'viewBox="0 0 {_WIDTH} {height:.0f}"'
    return f'<svg class="drawing" {box} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


@dataclass(frozen=True, slots=True)
class Chart:
    """Chart of lines on a logarithmic scale. `label` is for a screen reader.

    A line has `name`, `color`, `dash`, `x`, `y` and the names `at` each x. What is no positive finite number is a gap.
    A line with `isMark` is points alone.
    """

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
        """Return the legend and the drawing, "" without a point."""
        numbers = [float(x) for line in self.lines for x in line["x"]]
        if not numbers:
            return ""
        lowest_x, width = min(numbers), (max(numbers) - min(numbers)) or 1
        logs = [log10(y) for line in self.lines for y in line["y"] if _is_drawn(y)] or [0.0, 1.0]
        margin = 0.06 * (max(logs) - min(logs) or 1)
        low, top = min(logs) - margin, max(logs) + margin

        def place(x: float, power: float) -> tuple[float, float]:
            across = (_WIDTH - _LEFT - _RIGHT) * (x - lowest_x) / width
            return _LEFT + across, _TOP + _PLOT * (top - power) / (top - low)

        parts = []
        step = max(1, -(-int(top - low + 1) // 8))
        for power in range(ceil(low / step) * step, int(top) + 1, step):
            y = place(lowest_x, power)[1]
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
            parts.append(svg_text(_LEFT - 8, y + 4, f"1e{power:+d}", "end"))
        names = dict(zip(numbers, [at for line in self.lines for at in line["at"]], strict=True))
        for i, x in enumerate(sorted(names)[:: max(1, -(-len(names) // _LABELS))]):
            name, anchor = str(names[x]), "start" if i == 0 else "end" if x == lowest_x + width else "middle"
            shown = name if len(name) < 24 else f"…{name[-22:]}"
            parts.append(svg_text(place(x, low)[0], _TOP + _PLOT + 18, shown, anchor))
        for line in self.lines:
            parts += _line(line, place)
        parts.append(svg_text((_WIDTH + _LEFT) / 2, _TOP + _PLOT + 38, self.across, "middle"))
        high = svg_text(14, _PLOT / 2, self.high, "middle")
        parts.append(f'<g transform="rotate(-90 14 {_PLOT / 2:.0f})">{high}</g>')
        legend = [
            f'<span style="color:var(--{escape(line["color"])})">● {escape(line["name"])}</span>'
            for line in self.lines
        ]
        drawing = svg(_TOP + _PLOT + 46, self.label, parts)
        return f'<p class="hint key">{" ".join(legend)}</p>{drawing}'


def _is_drawn(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value) and value > 0


def _line(line: Mapping[str, Any], place: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    """Yield a polyline for each run between gaps, and the points."""
    points = [
        place(x, log10(y)) if _is_drawn(y) else None
        for x, y in zip(map(float, line["x"]), line["y"], strict=True)
    ]
    color, is_mark = f"var(--{escape(line['color'])})", bool(line.get("isMark"))
    dash = f' stroke-dasharray="{_DASHES[line["dash"]]}"' if line.get("dash") else ""
    for is_gap, run in groupby(points, lambda point: point is None):
        if not is_gap and not is_mark:
            path = " ".join(f"{point[0]:.1f},{point[1]:.1f}" for point in run if point is not None)
            yield f'<polyline points="{path}" fill="none" stroke="{color}"{dash}/>'
    for name, point, y in zip(line["at"], points, line["y"], strict=True):
        if point is not None and len(points) <= _MOST_POINTS:
            title = f"{escape(line['name'])}, {escape(name)}: {y:.4g}"
            circle = f'cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="{6 if is_mark else 2.5}" fill="{color}"'
            yield f"<circle {circle}><title>{title}</title></circle>"


Section: TypeAlias = "Table | Chart"


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


class InNotebook:
    """Base of results that a notebook shows as their page, and a console as their text."""

    __slots__ = ()

    def to_text(self) -> str:
        """Return the result for people."""
        raise NotImplementedError

    def to_html(self) -> str:
        """Return the result as one page."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own: its style does not reach the notebook."""
        try:
            document = self.to_html()
        except ImportError:  # no jinja2
            return f"<pre>{escape_html(self.to_text())}</pre>"
        frame = f'sandbox="" title="nanwatch" style="{_FRAME}"'
        return f'<iframe {frame} srcdoc="{escape_html(document)}"></iframe>'

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return both forms: IPython would take the `repr` of a dataclass for the text."""
        return {"text/plain": self.to_text(), "text/html": self._repr_html_()}
