"""Pages of HTML: of anything that has a headline, lines of facts, tables and charts, of a report, and in a notebook.

Everything a page needs is in it, it runs no script, and it asks nobody for anything: its content security policy allows
no connection. Names of modules, labels and notes are whatever a user's model holds, so jinja2 escapes them in the
markup and `_escape` in pictures. Both make visible what is not printable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from itertools import groupby
from math import ceil, inf, isfinite, log10
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeGuard

from ..records.record import NEAR_FACTOR, Frame, Record, by_module, headroom_bits
from ..util.messages import module_name, needed, plural, visible
from . import text
from .finding import Finding

_FRAME = "width: 100%; height: 36em; border: 0"  # of a page in a notebook
_LOW_BITS = NEAR_FACTOR.bit_length() - 1  # as text has it
_NEAR_BITS = 2
TEXT, NUMBER = "", "number"
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
    loader, form = jinja2.PackageLoader("nanwatch.report", "templates"), {"undefined": jinja2.StrictUndefined}
    form |= dict.fromkeys(("autoescape", "trim_blocks", "lstrip_blocks"), True)
    environment = jinja2.Environment(loader=loader, **form)
    environment.finalize = lambda value: visible(value) if type(value) is str else value
    style = environment.loader.get_source(environment, "page.css")[0]
    sections = [section for section in sections if section.columns is not None or section.picture]
    words = {"style": style, "headline": headline, "amount": amount, "facts": facts}
    template = environment.get_template("page.html.jinja")
    return str(template.render(words, sections=sections, is_bad=is_bad, cures=cures))


class Level(NamedTuple):
    """Cell of a table with a headroom, coloured by it."""

    bits: float | None

    @property
    def level(self) -> str:
        """Return the class of its colour: "gone", "near", "low", "fine", or "none" without a meaning."""
        if self.bits is None:
            return "none"
        if self.bits == -inf:
            return "gone"
        return "near" if self.bits < _NEAR_BITS else "low" if self.bits < _LOW_BITS else "fine"

    def __str__(self) -> str:
        return bits_words(self.bits)


def bits_words(bits: float | None) -> str:
    """Return a headroom as a page shows it, "" for None."""
    if bits is None:
        return ""
    return "all zero" if bits == inf else "none left" if bits == -inf else f"{bits:.1f} bits"


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


class Line(NamedTuple):
    """Line of a chart: a value `y` for each of the names `at`, side by side unless `x` says where.

    A value that is not finite and positive leaves a gap. A line with `is_mark` has points only.
    """

    name: str
    color: str
    at: Sequence[object]
    y: Sequence[float | None]
    x: Sequence[int] | None = None
    dash: str = ""
    is_mark: bool = False

    @property
    def across(self) -> list[float]:
        """Return where each value stands."""
        return [*map(float, range(len(self.y)) if self.x is None else self.x)]


_WIDTH, _LEFT, _RIGHT, _TOP = 1100, 80, 16, 12  # of a chart: its width and margins
_PLOT = 340  # height of its area
_MOST_POINTS = 400  # of a line, whose points show their numbers under the pointer
_DASHES = {"dotted": "2 4", "dashed": "7 5"}
_LABELS = 8  # names below a chart


@dataclass(frozen=True, slots=True)
class Chart:
    """Chart of lines on a logarithmic scale, as wide as the page. `label` is for a screen reader."""

    id: str
    title: str
    hint: str
    label: str
    across: str
    high: str
    lines: Sequence[Line]
    after: str = ""
    columns: ClassVar = None

    @property
    def picture(self) -> str:
        """Return the legend and the drawing, "" without a point."""
        numbers = [x for line in self.lines for x in line.across]
        if not numbers:
            return ""
        lowest_x, width = min(numbers), (max(numbers) - min(numbers)) or 1
        logs = [log10(y) for line in self.lines for y in line.y if _is_drawn(y)] or [0.0, 1.0]
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
            parts.append(_svg_text(_LEFT - 8, y + 4, f"1e{power:+d}", "end"))
        names = dict(zip(numbers, [at for line in self.lines for at in line.at], strict=True))
        for i, x in enumerate(sorted(names)[:: max(1, -(-len(names) // _LABELS))]):
            name, anchor = str(names[x]), "start" if i == 0 else "end" if x == lowest_x + width else "middle"
            shown = name if len(name) < 24 else f"…{name[-22:]}"
            parts.append(_svg_text(place(x, low)[0], _TOP + _PLOT + 18, shown, anchor))
        for line in self.lines:
            parts += _line_parts(line, place)
        parts.append(_svg_text((_WIDTH + _LEFT) / 2, _TOP + _PLOT + 38, self.across, "middle"))
        high = _svg_text(14, _PLOT / 2, self.high, "middle")
        parts.append(f'<g transform="rotate(-90 14 {_PLOT / 2:.0f})">{high}</g>')
        keys = [(_escape(line.color), _escape(line.name)) for line in self.lines]
        legend = [f'<span style="color:var(--{color})">● {name}</span>' for color, name in keys]
        box = f'viewBox="0 0 {_WIDTH} {_TOP + _PLOT + 46}" role="img" aria-label="{_escape(self.label)}"'
        drawing = f'<svg class="drawing" {box}>{"".join(parts)}</svg>'
        return f'<p class="hint key">{" ".join(legend)}</p>{drawing}'


def _escape(text: object) -> str:
    """Return text for SVG, spelt out where it is not printable."""
    return escape_html(visible(str(text)))


def _svg_text(x: float, y: float, text: object, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{_escape(text)}</text>'


def _is_drawn(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and isfinite(value) and value > 0


def _line_parts(line: Line, place: Callable[[float, float], tuple[float, float]]) -> Iterator[str]:
    """Yield a polyline for each run between gaps, and the points."""
    points = [place(x, log10(y)) if _is_drawn(y) else None for x, y in zip(line.across, line.y, strict=True)]
    color = f"var(--{_escape(line.color)})"
    dash = f' stroke-dasharray="{_DASHES[line.dash]}"' if line.dash else ""
    radius = 6 if line.is_mark else 2.5
    for is_gap, run in groupby(points, lambda point: point is None):
        if not is_gap and not line.is_mark:
            path = " ".join(f"{point[0]:.1f},{point[1]:.1f}" for point in run if point is not None)
            yield f'<polyline points="{path}" fill="none" stroke="{color}"{dash}/>'
    for name, point, y in zip(line.at, points, line.y, strict=True):
        if point is not None and len(points) <= _MOST_POINTS:
            title = f"{_escape(line.name)}, {_escape(name)}: {y:.4g}"
            circle = f'cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="{radius}" fill="{color}"'
            yield f"<circle {circle}><title>{title}</title></circle>"


class InNotebook:
    """Base of results that a notebook shows as their page, and a console as their text."""

    __slots__ = ()
    to_text: Callable[[], str]
    to_html: Callable[[], str]

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


# The page of a report.

_MOST_ROWS = 5000  # of the table of records, at 250 bytes each
_MOST_MODULES = 400
_ROLES = ("output", "input", "weight", "buffer", "gradient")


def report_html(
    frames: Sequence[Frame],
    finding: Finding | None,
    where: Sequence[str],
    headline: str,
    remarks: Sequence[str],
) -> str:
    """Return a report as one HTML document, to be written as UTF-8. Raises ImportError without jinja2.

    `where` is its batch and rank in words.
    """
    records = [(frame, record) for frame in frames for record in frame.records]
    amounts = (*where, plural(len(frames), "frame"), plural(len(records), "record"))
    facts: list[text.Fact] = []
    cures = []
    if finding is not None:
        of = f"`{finding.label}` of `{module_name(finding.module)}`"
        headline = f"{finding.value} first seen in {of}"
        facts = [fact for fact in text.finding_facts(finding, frames) if fact[0] not in ("What", "Cure")]
        cures = [(cure, text.patch_lines(cure)) for cure in finding.cures]
    facts += [text.Fact("Note", remark) for remark in remarks]
    who, amount, is_bad = "Report.to_html()", " · ".join(amounts), finding is not None
    sections = _sections(frames, finding, records) if records else []
    return page(who, headline, amount, facts, sections, is_bad=is_bad, cures=cures)


def _sections(
    frames: Sequence[Frame], finding: Finding | None, records: Sequence[tuple[Frame, Record]]
) -> list[Section]:
    sections: list[Section] = [_chart(records, finding)]
    worst = list(by_module(frames).values())
    modules = [[module_name(least.module), Level(least.bits)] for least in worst[:_MOST_MODULES]]
    if modules:
        hint = "How often the largest element may still double, worst first."
        more = f"and {len(worst) - len(modules):,} more" if len(worst) > len(modules) else ""
        columns = {"module": TEXT, "headroom": NUMBER}
        sections.append(Table("headroom", "Headroom by module", columns, modules, hint, more))
    columns = dict.fromkeys(("batch", "module", "class", "label", "role", "shape", "dtype"), TEXT)
    columns |= dict.fromkeys(("abs min", "abs max", "headroom"), NUMBER) | {"note": TEXT}
    shown = records[-_MOST_ROWS:]
    is_cut = len(records) > len(shown)
    hint = f"The last {len(shown):,} of {len(records):,}." if is_cut else "The oldest call first."
    rows = [_row(frame, record, finding) for frame, record in shown]
    sections.append(Table("records", "Records", columns, rows, hint))
    return sections


def _row(frame: Frame, record: Record, finding: Finding | None) -> list[Any]:
    shape = "" if record.shape is None else str(list(record.shape))
    ends = ["" if value is None else f"{value:.3e}" for value in (record.abs_min, record.abs_max)]
    notes = [*text.frame_words(frame), *text.small_words(record), str(record.note or "")]
    notes += ["first"] * _is_culprit(frame, record, finding)
    call = (frame.batch, module_name(frame.name), frame.class_name)
    tensor = (record.label, record.role, shape, record.dtype, *ends, Level(headroom_bits(record)))
    return [*call, *tensor, ", ".join(filter(None, notes))]


def _is_culprit(frame: Frame, record: Record, finding: Finding | None) -> bool:
    named = None if finding is None else (finding.module, finding.batch, finding.label)
    return record.is_fault and (frame.name, frame.batch, record.label) == named


def _chart(records: Sequence[tuple[Frame, Record]], finding: Finding | None) -> Chart:
    """Return the chart of abs max by record, with the largest number of each format."""
    names = [f"{record.label} of {module_name(frame.name)}, batch {frame.batch}" for frame, record in records]
    lines = []
    for role in _ROLES:
        of_role = [i for i, (_, record) in enumerate(records) if record.role == role]
        if of_role:
            values = [records[i][1].abs_max for i in of_role]
            lines.append(Line(f"abs max of {role}s", role, [names[i] for i in of_role], values, of_role))
    largest = {record.dtype: record.ends.largest for _, record in records if record.ends is not None}
    span, ends = [0, len(records) - 1], (names[0], names[-1])
    highest = max((y for line in lines for y in line.y if y is not None), default=0.0)
    for name, value in sorted(largest.items()):
        if value < 1e6 * max(highest, 1.0):  # the end of float32 would flatten everything else
            lines.append(Line(f"largest of {name}", "quiet", ends, [value, value], span, "dashed"))
    hint = "Each tensor's largest magnitude, the oldest call on the left. What is zero, nan or inf is a gap."
    marks = [i for i, (frame, record) in enumerate(records) if _is_culprit(frame, record, finding)]
    label = "abs max of every record on a logarithmic scale; the table below has the same numbers"
    after = f"The first bad value is in record {marks[0]:,}, {names[marks[0]]}." if marks else ""
    return Chart("range", "Range of every record", hint, label, "record", "largest magnitude", lines, after)
