"""A report as one page of HTML: the finding in words, a chart, the room left by module, and every record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from ..records.headroom import by_module, headroom_bits
from ..records.record import Frame, Record
from ..util.progress import Tell
from ..util.visible import module_name
from . import text
from .cure_text import Kind, patch_lines
from .finding import Finding
from .histogram import SHOWN_FORMATS, StoredHistogram, exponent_picture, histogram_words
from .page import LOW_BITS, WIDEST_BAR, bits_words, level_of, rendered

_WORST_SHOWN = 16  # bars at once; the rest is folded away
_BARS = 400  # and no more than these: a bar is 300 bytes, and the table has every record
_TREE_NODES = 4000  # a tree that nobody unfolds to the end, at 250 bytes a node
# Python's and the browser's recursion end somewhere (Chromium nests 512 elements); what is deeper stays in one line.
_TREE_DEPTH = 24
_TREE_OPEN = 60  # a tree with more nodes than fit a screen or two is unfolded only towards the culprit

# A line of a patch, for readers who do not see its colour.
_ELEMENTS: dict[Kind, str] = {"head": "span", "same": "span", "old": "del", "new": "ins"}


def report_html(
    frames: Sequence[Frame],
    finding: Finding | None,
    where: Sequence[str],
    headline: str,
    told: Sequence[str],
    tell: Tell,
) -> str:
    """Return a report as one HTML document, to be written as UTF-8. Raises ImportError without jinja2.

    `where` is its batch and rank in words.
    """
    data = _data(frames, finding, tell)
    tell("drawing the page")
    num_records = len(data["records"])
    amounts = (*where, _plural(len(frames), "frame"), _plural(num_records, "record"))
    return rendered(
        "report",
        "Report.to_html()",
        data,
        ("chart.js", "report.js"),
        headline=headline,
        amount=" · ".join(amounts),
        finding=finding,
        told=told,
        facts=() if finding is None else text.finding_facts(finding, frames),
        patch_lines=patch_lines,
        elements=_ELEMENTS,
        operands=[
            [one.label, one.dtype, _shape(one), _shown(one.abs_min), _shown(one.abs_max), _remark(one)]
            for one in (() if finding is None else finding.operands)
        ],
        bars=_bars(frames),
        worst_shown=_WORST_SHOWN,
        tree=_tree(frames, finding),
        pictures=[_picture(one) for one in (() if finding is None else finding.spreads)],
        num_records=num_records,
        low_bits=LOW_BITS,
        module_name=module_name,
        level_of=level_of,
        bits_words=bits_words,
    )


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _picture(one: StoredHistogram) -> tuple[str, str, str]:
    """Return the label of a histogram, its numbers in words, and its picture against the formats."""
    own = () if one.dtype in SHOWN_FORMATS else (one.dtype,)
    return one.label, histogram_words(one), exponent_picture(one, (*SHOWN_FORMATS, *own))


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
            record.format: list(record.ends)
            for record in sorted(
                (one for frame in frames for one in frame.records), key=lambda one: one.format
            )
            if record.ends is not None
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
        record.format,
        _number(record.abs_min),
        _number(record.abs_max),
        record.isfinite,
        _number(bits if bits is None else round(bits, 3)),
        level_of(bits),
        text.note_words(record),
    ]


def _number(value: float | None) -> float | str | None:
    return value if value is None or isfinite(value) else str(value)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _remark(record: Record) -> str:
    return ", ".join((*text.small_words(record), *([text.note_words(record)] if record.note else [])))


def _shape(record: Record) -> str:
    return "" if record.shape is None else str(list(record.shape))


# Headroom by module: bars and tree.


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
