"""Picture of a run: the least headroom of each module and each batch of a trace, and its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..records.record import EVENTS, EXCUSES, Note, NoteKind
from ..report.page import NUMBER, TEXT, Chart, Level, Line, Section, Table, bits_words, page
from ..util.messages import module_name
from .trace_file import Strings, Trace, ends_of, strings

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

# Fewer points than these have no trend: the batches of a warm-up differ by more than they drift.
_LEAST_POINTS = 8
_TABLE = 200  # rows of the page's tables: the worst modules, the latest spikes and forecasts


class Row(NamedTuple):
    """One module: its least headroom in bits, the batch and the tensor that had it, and where its headroom is heading.

    `trend` is in bits per 100 batches, nan for a module with few points. `num_failed` counts batches with a non-finite
    value.
    """

    module: str
    bits: float
    batch: int
    abs_max: float
    trend: float
    num_failed: int
    label: str

    @property
    def place(self) -> str:
        """The module, with the tensor where that is not its output: "decoder.wo weight"."""
        name = module_name(self.module)
        return name if self.label in ("", "output") else f"{name} {self.label}"


class Mark(NamedTuple):
    """Spike or forecast that was reported in `batch`, at `label` of a module; `text` is the report in one line."""

    kind: NoteKind
    batch: int
    module: str
    label: str
    text: str


@dataclass(frozen=True)
class Picture:
    """Headroom over some batches of a trace, as `headroom_bits` counts it: -inf where a value was non-finite.

    `rows` are the modules that have one, the least first. `batches` are (number, least headroom or nan, the module that
    had it, whether the optimizer skipped a step). `marks` are the latest spikes and forecasts. `failure` is the first
    batch with a non-finite value, with the first module in it and the tensor, None without one.
    """

    rows: tuple[Row, ...]
    batches: tuple[tuple[int, float, str, bool], ...]
    marks: tuple[Mark, ...]
    failure: tuple[int, str, str] | None
    num_rows: int
    path: Path
    rank: int
    lost_frames: int

    def to_html(self) -> str:
        """Return one page that opens offline, to be written as UTF-8. Needs `jinja2`."""
        lost = f", {self.lost_frames:,} frames lost" if self.lost_frames else ""
        facts = [("Trace", f"`{self.path}`, rank {self.rank}{lost}")]
        if self.failure is not None:
            facts.append(("Next", f"`nanwatch show {self.path} --batch {self.failure[0]}`"))
        amount = f"{self.num_rows:,} records · {len(self.rows):,} modules · {len(self.batches):,} batches"
        sections = self._sections() if self.rows else ()
        is_bad = self.failure is not None
        return page("a picture of a run", self._headline(), amount, facts, sections, is_bad=is_bad)

    def _headline(self) -> str:
        if self.failure is not None:
            batch, module, label = self.failure
            return f"First non-finite in batch {batch}, in {label} of {module_name(module)}"
        if not self.rows:
            return "No headroom was read in this trace"
        return f"Least headroom: {bits_words(self.rows[0].bits)} at {module_name(self.rows[0].module)}"

    def _sections(self) -> list[Section]:
        cells = [[mark.batch, module_name(mark.module), mark.text] for mark in self.marks]
        columns = {"batch": NUMBER, "module": TEXT, "told": TEXT}
        marks = [Table("marks", "Spikes and forecasts", columns, cells)] if cells else []
        rows = self.rows[:_TABLE]
        worst = f"The worst {len(rows)} of {len(self.rows):,} modules. " if len(self.rows) > len(rows) else ""
        hint = "The trend is the slope of a line through the least headroom of every batch, in bits per 100."
        names = ("least headroom", "in batch", "abs max", "trend", "batches not finite")
        columns = {"module": TEXT, **dict.fromkeys(names, NUMBER)}
        cells = []
        for row in rows:
            abs_max, trend = f"{row.abs_max:.2e}", trend_words(row.trend)
            cells.append([row.place, Level(row.bits), row.batch, abs_max, trend, row.num_failed or ""])
        table = Table("modules", "Least headroom of each module", columns, cells, worst + hint)
        return [self._chart(), *marks, table]

    def _chart(self) -> Chart:
        """Return a chart of the share of a format's largest number that each batch used."""
        numbers = [batch for batch, *_ in self.batches]
        used = [2.0**-bits for _, bits, *_ in self.batches]
        places = [f"batch {batch}, {module_name(module)}" for batch, _, module, _ in self.batches]
        ones = [1.0] * len(numbers)
        lines = [
            Line("largest share", "output", places, used, numbers),
            Line("overflow", "gone", numbers, ones, numbers, "dashed"),
        ]
        for name, color, x in (
            ("not finite", "gone", [batch for batch, bits, *_ in self.batches if bits == -inf]),
            ("skipped step", "near", [batch for batch, *_, is_skipped in self.batches if is_skipped]),
        ):
            lines += [Line(name, color, x, ones[: len(x)], x, is_mark=True)] if x else []
        return Chart(
            "batches",
            "How near the run came to overflow",
            "The largest weight, output or gradient of each batch as a share of the largest number of its format. Half"
            " of it leaves one bit of headroom.",
            "share of the format's largest number that each batch used, on a logarithmic scale",
            "batch",
            "share of the largest number",
            lines,
        )


def trend_words(bits: float) -> str:
    """Return a trend with its sign, "" for none."""
    return "" if isnan(bits) else f"{bits:+.1f}"


def draw(trace: Trace, batches: Sequence[int] | None = None) -> Picture:
    """Return the picture of these batches of a trace (default: all).

    An input counts only where it is non-finite.
    """
    names = ("dtype", "batch", "module", "label", "role", "abs_max", "isfinite", "note", "note_text")
    table = trace.table(names, batches)
    trace.tell("drawing the page")
    batch = table["batch"].to_numpy()
    module, label, role, note = (strings(table[name]) for name in ("module", "label", "role", "note"))
    abs_max = table["abs_max"].fill_null(np.nan).to_numpy()
    is_excused = note.each(EXCUSES.__contains__)
    is_fault = ~table["isfinite"].fill_null(True).to_numpy() & ~is_excused
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.log2(ends_of(table).largest) - np.log2(abs_max)  # two logarithms, as in headroom_bits
    bits[is_fault] = -inf
    counts = ~is_excused & ~np.isnan(bits) & (is_fault | ~role.each("input".__eq__))

    numbers, column = np.unique(batch, return_inverse=True)
    of_batch = _firsts(column[counts], bits[counts], np.flatnonzero(counts))
    least = {int(batch[i]): (float(bits[i]), module.text(i)) for i in of_batch.tolist()}
    skipped = {*batch[note.each("skipped_step".__eq__)].tolist()}
    marks = []
    for i in np.flatnonzero(note.each(EVENTS.__contains__))[-_TABLE:].tolist():
        kind: Any = note.text(i)
        text = str(Note(kind, table["note_text"][i].as_py() or ""))
        marks.append(Mark(kind, int(batch[i]), module.text(i), label.text(i), text))
    earliest = np.flatnonzero(is_fault)
    failure = None
    if len(earliest):
        i = int(earliest[batch[earliest].argmin()])
        failure = int(batch[i]), module.text(i), label.text(i)
    return Picture(
        rows=tuple(_rows(module, label, batch, abs_max, bits, np.flatnonzero(counts))),
        batches=tuple(
            (number, *least.get(number, (np.nan, "")), number in skipped) for number in numbers.tolist()
        ),
        marks=tuple(marks),
        failure=failure,
        num_rows=len(batch),
        path=trace.path,
        rank=trace.rank,
        lost_frames=trace.lost_frames,
    )


def _rows(
    module: Strings, label: Strings, batch: _Array, abs_max: _Array, bits: _Array, records: _Array
) -> list[Row]:
    """Return a row for each module by the records that count, the one with the least headroom first."""
    codes = module.codes
    # Modules in the order of their first calls, and the record with the least headroom in each batch of a module.
    _, first = np.unique(codes, return_index=True)
    order = np.zeros(len(module.values) + 1, np.int64)
    order[codes[first]] = first
    keys = order[codes[records]] * (1 + int(batch.max(initial=0))) + batch[records]
    cells = _firsts(keys, bits[records], records)
    worst = _firsts(order[codes[cells]], bits[cells], cells)
    trends = _trends(codes[cells], batch[cells], bits[cells], len(module.values))
    failed = np.bincount(codes[cells][np.isneginf(bits[cells])], minlength=len(module.values))
    return [
        Row(
            module.text(i), float(bits[i]), int(batch[i]), float(abs_max[i]), float(trends[codes[i]]),
            int(failed[codes[i]]), label.text(i),
        )
        for i in worst[np.argsort(bits[worst], kind="stable")].tolist()
    ]  # fmt: skip


def _firsts(keys: _Array, bits: _Array, records: _Array) -> _Array:
    """Return the record with the fewest bits for each key, in the order of the keys: the earliest of equal ones."""
    ordered = np.lexsort((bits, keys))
    _, starts = np.unique(keys[ordered], return_index=True)
    chosen: _Array = records[ordered[starts]]
    return chosen


def _trends(codes: _Array, batch: _Array, bits: _Array, number: int) -> _Array:
    """Return for each module the slope of the least-squares line through its finite points, by 100 batches."""
    is_point = np.isfinite(bits)
    codes, x, y = codes[is_point], batch[is_point].astype(float), bits[is_point]
    count = np.bincount(codes, minlength=number)
    with np.errstate(divide="ignore", invalid="ignore"):
        x = x - (np.bincount(codes, x, number) / count)[codes]
        slopes = 100 * np.bincount(codes, x * y, number) / np.bincount(codes, x * x, number)
    trends: _Array = np.where(count >= _LEAST_POINTS, slopes, np.nan)
    return trends
