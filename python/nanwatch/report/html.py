"""A report as one page of HTML: the finding in words, a chart, the room left by module, and every record.

Everything the page needs is in it, and it asks nobody for anything: its content security policy allows two scripts,
known by their hashes, and no connection. Names of modules, labels and notes are whatever a user's model holds, so
jinja2 escapes them in the markup, `_json` in the data, and the page's own script writes them as text. Both make
visible what is not printable.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from math import inf, isfinite
from typing import Any

from ..numerics.formats import limits
from ..records.headroom import NEAR_FACTOR, by_module, headroom_bits
from ..records.record import Frame, Record
from ..util.imports import needed
from ..util.progress import Tell
from ..util.visible import module_name, visible
from . import text
from .cure_text import Kind, patch_lines
from .finding import Finding
from .histogram import SHOWN_FORMATS, StoredHistogram, exponent_figure

LOW_BITS = NEAR_FACTOR.bit_length() - 1  # as text has it
NEAR_BITS = 2
_INSTEAD = "use to_text() or to_json()"

_WORST_SHOWN = 16  # bars at once; the rest is folded away
_BARS = 400  # and no more than these: a bar is 300 bytes, and the table has every record
_TREE_NODES = 4000  # a tree that nobody unfolds to the end, at 250 bytes a node
# Python's and the browser's recursion end somewhere (Chromium nests 512 elements); what is deeper stays in one line.
_TREE_DEPTH = 24
_TREE_OPEN = 60  # a tree with more nodes than fit a screen or two is unfolded only towards the culprit

WIDEST_BAR = 40.0  # bits; float16 has 40 from its smallest number to its largest

# Lines of text.finding_lines. The rest of a finding is told by its fields.
_ADVICE = ("Where", "Why", "Data", "Next")

# A line of a patch, for readers who do not see its colour.
_ELEMENTS: dict[Kind, str] = {"head": "span", "same": "span", "old": "del", "new": "ins"}


def report_html(
    frames: Sequence[Frame],
    finding: Finding | None,
    batch: int | None,
    rank: int,
    mesh: Sequence[str],
    headline: str,
    told: Sequence[str],
    tell: Tell,
) -> str:
    """Return a report as one HTML document, to be written as UTF-8. Raises ImportError without jinja2 and plotly."""
    data = _data(frames, finding, tell)
    tell("drawing the page")
    pictures = [] if finding is None else [_picture(one) for one in finding.spreads]
    data["spreads"] = [figure for _, _, figure in pictures]
    return page(
        "report",
        "Report.to_html()",
        data,
        frames=frames,
        batch=batch,
        rank=rank,
        mesh=mesh,
        finding=finding,
        told=told,
        advice=_advice(frames, finding),
        headline=headline,
        patch_lines=patch_lines,
        elements=_ELEMENTS,
        operands=[
            [one.label, one.dtype, _shape(one), _shown(one.abs_min), _shown(one.abs_max), _remark(one)]
            for one in (() if finding is None else finding.operands)
        ],
        room=text.room_words(frames),
        bars=_bars(frames),
        worst_shown=_WORST_SHOWN,
        tree=_tree(frames, finding),
        pictures=pictures,
        num_records=sum(len(frame.records) for frame in frames),
        low_bits=LOW_BITS,
        module_name=module_name,
        level_of=level_of,
        bits_words=bits_words,
    )


def page(name: str, who: str, data: Any, *, with_plotly: bool = True, **values: Any) -> str:
    """Return the template of this name as a page with its script behind chart.js, the report's style and plotly.

    `data` is what the script draws from. A page that draws by itself leaves out plotly.
    `who` is named by the ImportError that is raised without jinja2 and plotly.
    """
    environment = _environment(who, _INSTEAD)
    script = "\n".join(_source(environment, file) for file in ("chart.js", f"{name}.js"))
    parts: dict[str, Any] = {"data": _json(data), "script": script, "script_hashes": [_hash(script)]}
    if with_plotly:
        needed("plotly.offline", who, "report", _INSTEAD)
        parts["packed_plotly"], plotly_hash = _packed_plotly()
        parts["script_hashes"].append(plotly_hash)
    return _rendered(environment, name, {**parts, **values})


def still_page(name: str, who: str, **values: Any) -> str:
    """Return the template of this name as a page with the report's style, without any script.

    `who` is named by the ImportError that is raised without jinja2.
    """
    return _rendered(_environment(who, "use the text or --json"), name, values)


def _environment(who: str, instead: str) -> Any:
    jinja2 = needed("jinja2", who, "report", instead)
    loader = jinja2.PackageLoader("nanwatch.report", "templates")
    return jinja2.Environment(
        loader=loader,
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


def _source(environment: Any, file: str) -> str:
    source: str = environment.loader.get_source(environment, file)[0]
    return source


def _rendered(environment: Any, name: str, values: dict[str, Any]) -> str:
    style = _source(environment, "report.css")
    return str(environment.get_template(f"{name}.html.jinja").render(style=style, **values))


@lru_cache(maxsize=1)
def _packed_plotly() -> tuple[str, str]:
    """Return plotly.js as base64 of gzip, and its hash: 4.8 MB become 1.9, which unpack in 0.1 s."""
    source: str = import_module("plotly.offline").get_plotlyjs()
    packed = gzip.compress(source.encode(), compresslevel=6, mtime=0)
    return base64.b64encode(packed).decode(), _hash(source)


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


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


# The finding.


def _advice(frames: Sequence[Frame], finding: Finding | None) -> list[tuple[str, str]]:
    if finding is None:
        return []
    lines = [line.partition(":") for line in text.finding_lines(finding, frames)]
    return [(head, body.strip()) for head, _, body in lines if head in _ADVICE]


def _picture(one: StoredHistogram) -> tuple[str, str, dict[str, Any]]:
    """Return the label of a histogram, its numbers in words, and its figure against the formats."""
    own = () if one.dtype in SHOWN_FORMATS else (one.dtype,)
    figure = exponent_figure(one, (*SHOWN_FORMATS, *own))
    return one.label, figure["layout"].pop("title")["text"], figure


# The data of chart and table.


def _data(frames: Sequence[Frame], finding: Finding | None, tell: Tell) -> dict[str, Any]:
    """Return the data that the page's script draws; see `records` in report.js for the columns."""
    named = None if finding is None else (finding.module, finding.batch, finding.label)
    rows: list[list[Any]] = []
    culprit = None
    for number, frame in enumerate(frames):
        tell("drawing the page", number, len(frames), "frames")
        for record in frame.records:
            if culprit is None and record.is_fault and (frame.name, frame.batch, record.label) == named:
                culprit = len(rows)
            rows.append(_row(number, record))
    return {
        "frames": [
            [str(frame.batch), frame.name, frame.class_name, " ".join(text.frame_words(frame))]
            for frame in frames
        ],
        "records": rows,
        "limits": {
            dtype: list(ends)
            for dtype in sorted({record.dtype for frame in frames for record in frame.records})
            if (ends := limits(dtype)) is not None
        },
        "culprit": culprit,
        "value": None if finding is None else finding.value,
    }


def _row(frame: int, record: Record) -> list[Any]:
    bits = headroom_bits(record)
    return [
        frame,
        record.label,
        record.role,
        _shape(record),
        record.dtype,
        _number(record.abs_min),
        _number(record.abs_max),
        record.isfinite,
        _number(bits if bits is None else round(bits, 3)),
        level_of(bits),
        record.note,
    ]


def _number(value: float | None) -> float | str | None:
    return value if value is None or isfinite(value) else str(value)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _remark(record: Record) -> str:
    return ", ".join((*text.small_words(record), *([record.note] if record.note else [])))


def _shape(record: Record) -> str:
    return "" if record.shape is None else str(list(record.shape))


# Headroom by module: bars and tree.


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


def _bars(frames: Sequence[Frame]) -> list[tuple[str, float, float]]:
    """Return name, bits and width in percent of the modules with the least headroom, worst first."""
    worst = list(by_module(frames).items())[:_BARS]
    return [
        (name, bits, round(100 * min(max(bits, 0.0), WIDEST_BAR) / WIDEST_BAR, 1)) for name, bits in worst
    ]


@dataclass(slots=True)
class Node:
    """A module in the tree: its own part of the name, and the least headroom of it and all below."""

    part: str
    class_name: str = ""
    bits: float | None = None
    is_culprit: bool = False
    is_open: bool = False
    children: dict[str, Node] = field(default_factory=dict)


def _tree(frames: Sequence[Frame], finding: Finding | None) -> Node | None:
    """Return the modules that were called, as their dotted names nest; None without frames."""
    if not frames:
        return None
    worst = by_module(frames)
    frame_of = {frame.name: frame for frame in frames}
    root, nodes = Node(module_name("")), []
    for name, frame in frame_of.items():
        path = [root]
        for part in name.split(".", _TREE_DEPTH) if name else ():
            node = path[-1].children.get(part)
            if node is None:
                node = path[-1].children[part] = Node(part)
                nodes.append(node)
            path.append(node)
        path[-1].class_name = frame.class_name
        bits = worst.get(name)
        is_culprit = finding is not None and name == finding.module
        path[-1].is_culprit = is_culprit
        for node in path:
            node.is_open |= is_culprit
            if bits is not None:
                node.bits = bits if node.bits is None else min(bits, node.bits)
        if len(nodes) >= _TREE_NODES:
            break
    root.is_open = True
    if len(nodes) < _TREE_OPEN:
        for node in nodes:
            node.is_open = True
    return root
