"""A report as one page of HTML: the finding in words, a chart, the room left by module, and every record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..records.record import Frame, Record, by_module, headroom_bits
from ..util.messages import module_name
from . import text
from .finding import Finding
from .page import NUMBER, TEXT, Chart, Level, Section, Table, page

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
    amounts = (*where, _plural(len(frames), "frame"), _plural(len(records), "record"))
    facts: list[text.Fact] = []
    cures = []
    if finding is not None:
        of = f"`{finding.label}` of `{module_name(finding.module)}`"
        headline = f"{finding.value} first seen in {of}"
        facts = [fact for fact in text.finding_facts(finding, frames) if fact[0] not in ("What", "Cure")]
        cures = [(cure, text.patch_lines(cure)) for cure in finding.cures]
    facts += [text.Fact("Note", remark) for remark in remarks]
    return page(
        "Report.to_html()",
        headline,
        " · ".join(amounts),
        facts,
        _sections(frames, finding, records) if records else [],
        is_bad=finding is not None,
        cures=cures,
    )


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


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
    hint = (
        f"The last {len(shown):,} of {len(records):,}."
        if len(records) > len(shown)
        else "The oldest call first."
    )
    rows = [_row(frame, record, finding) for frame, record in shown]
    sections.append(Table("records", "Records", columns, rows, hint))
    return sections


def _row(frame: Frame, record: Record, finding: Finding | None) -> list[Any]:
    shape = "" if record.shape is None else str(list(record.shape))
    ends = ["" if value is None else f"{value:.3e}" for value in (record.abs_min, record.abs_max)]
    notes = [*text.frame_words(frame), *text.small_words(record), text.note_words(record)]
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
    lines: list[dict[str, Any]] = []
    for role in _ROLES:
        of_role = [i for i, (_, record) in enumerate(records) if record.role == role]
        if of_role:
            values = [records[i][1].abs_max for i in of_role]
            at = [names[i] for i in of_role]
            lines.append({"name": f"abs max of {role}s", "color": role, "at": at, "x": of_role, "y": values})
    largest = {record.dtype: record.ends.largest for _, record in records if record.ends is not None}
    span, ends = [0, len(records) - 1], (names[0], names[-1])
    highest = max((value for line in lines for value in line["y"] if isinstance(value, float)), default=0.0)
    for name, value in sorted(largest.items()):
        if value < 1e6 * max(highest, 1.0):  # the end of float32 would flatten everything else
            line = {"name": f"largest of {name}", "color": "quiet", "dash": "dashed", "at": ends}
            lines.append({**line, "x": span, "y": [value, value]})
    hint = "Each tensor's largest magnitude, the oldest call on the left. What is zero, nan or inf is a gap."
    marks = [i for i, (frame, record) in enumerate(records) if _is_culprit(frame, record, finding)]
    label = "abs max of every record on a logarithmic scale; the table below has the same numbers"
    after = f"The first bad value is in record {marks[0]:,}, {names[marks[0]]}." if marks else ""
    return Chart("range", "Range of every record", hint, label, "record", "largest magnitude", lines, after)
