"""Picture of a run: the least headroom of each module over the batches of a trace, its table and its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isnan
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..records.note import EVENTS, EXCUSES, Note, NoteKind
from ..report.page import (
    COLORS,
    NUMBER,
    TEXT,
    Chart,
    Level,
    Section,
    Table,
    bits_words,
    page,
)
from ..util.visible import first_few, module_name
from .trace_file import Strings, Trace, ends_of, strings

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

# A screen is hardly wider than this, and the page takes 8 bytes for each cell.
COLUMNS = 1000
_CELLS = 1_000_000
# Fewer points than these have no trend: the batches of a warm-up differ by more than they drift.
_LEAST_POINTS = 8
_TABLE = 200  # rows of the page's tables: the worst modules, the latest spikes and forecasts


class Row(NamedTuple):
    """One module: its least headroom in bits, the batch and the tensor that had it, and where its headroom is heading.

    `trend` is in bits per 100 batches, nan for a module with few points. `num_failed` counts columns.
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
    """Headroom of modules, in the order of their first calls, over neighbouring batches, a column for some of them.

    `bits` has the least headroom of each cell as `headroom_bits` counts it: -inf where a value was non-finite, nan
    where the module has no number. `labels` are the tensors with the least headroom of each module. `abs_max` is the
    largest magnitude of the cell. `first` and `last` are the batches at the ends of each column. `skipped` marks the
    columns in which the optimizer skipped a step. `marks` are the latest spikes and forecasts. `failure` is the first
    batch with a non-finite value and the first module in it, None without one.
    """

    modules: tuple[str, ...]
    first: Array
    last: Array
    bits: Array
    abs_max: Array
    skipped: Array
    failure: tuple[int, str] | None
    num_batches: int
    num_rows: int
    path: Path
    rank: int
    lost_frames: int
    labels: tuple[str, ...]
    marks: tuple[Mark, ...]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Return the modules that have a headroom, the one with the least first."""
        known = ~np.isnan(self.bits)
        least = np.where(known, self.bits, inf)
        place = least.argmin(axis=1)
        worst = least[np.arange(len(self.modules)), place] if least.size else np.empty(0)
        failed = np.isneginf(self.bits).sum(axis=1)
        trend = self._trend()
        made = [
            Row(
                self.modules[i], float(worst[i]), int(self.first[place[i]]), float(self.abs_max[i, place[i]]),
                float(trend[i]), int(failed[i]), self.labels[i],
            )
            for i in np.flatnonzero(known.any(axis=1))[np.argsort(worst[known.any(axis=1)], kind="stable")]
        ]  # fmt: skip
        return tuple(made)

    def _trend(self) -> Array:
        """Return the slope of the least-squares line through the finite headroom of each module."""
        is_point = np.isfinite(self.bits)
        number = is_point.sum(axis=1)
        x = np.where(is_point, (self.first + self.last) / 2, 0.0)
        y = np.where(is_point, self.bits, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            x = np.where(is_point, x - (x.sum(axis=1) / number)[:, None], 0.0)
            slope = 100 * (x * y).sum(axis=1) / (x * x).sum(axis=1)
        trend: Array = np.where(number >= _LEAST_POINTS, slope, np.nan)
        return trend

    def to_html(self) -> str:
        """Return one page that opens offline, to be written as UTF-8. Needs `jinja2`."""
        lost = f", {self.lost_frames:,} frames lost" if self.lost_frames else ""
        facts = [("Trace", f"`{self.path}`, rank {self.rank}{lost}")]
        if self.failure is not None:
            facts.append(("Next", f"`nanwatch show {self.path} --batch {self.failure[0]}`"))
        if skipped := self.last[self.skipped].tolist():
            facts.append(("Skipped", f"steps after batches {first_few([*map(str, skipped)], 8)}"))
        amount = f"{self.num_rows:,} records · {len(self.modules):,} modules · {self.num_batches:,} batches"
        sections = self._sections() if self.rows else ()
        is_bad = self.failure is not None
        return page("a picture of a run", self._headline(), amount, facts, sections, is_bad=is_bad)

    def _sections(self) -> list[Section]:
        whole = len(self.first) >= self.num_batches
        at = [f"batch {batch}" for batch in self.first.tolist()]
        lines = [
            {
                "name": row.place,
                "color": color,
                "at": at,
                "x": self.first.tolist(),
                "y": self.abs_max[self.modules.index(row.module)].tolist(),
            }
            for row, color in zip(self.rows, COLORS, strict=False)
        ]
        picture = Chart(
            "run",
            "The modules with the least headroom over the run",
            "A zero, a nan and an inf are gaps.",
            "largest magnitude of the modules with the least headroom, by batch, on a logarithmic scale",
            "batch",
            "largest magnitude",
            lines,
        )
        marks = Table(
            "marks",
            "Spikes and forecasts",
            {"batch": NUMBER, "module": TEXT, "told": TEXT},
            [[mark.batch, module_name(mark.module), mark.text] for mark in self.marks],
        )
        rows = self.rows[:_TABLE]
        of = f"The worst {len(rows)} of {len(self.rows):,} modules. " if len(self.rows) > len(rows) else ""
        names = ("least headroom", "in batch" if whole else "from batch", "abs max", "trend")
        failures = f"{'batches' if whole else 'columns'} not finite"
        table = Table(
            "modules",
            "Least headroom of each module",
            {"module": TEXT, **dict.fromkeys((*names, failures), NUMBER)},
            [
                [
                    row.place,
                    Level(row.bits),
                    row.batch,
                    f"{row.abs_max:.2e}",
                    trend_words(row.trend),
                    row.num_failed or "",
                ]
                for row in rows
            ],
            f"{of}The trend is the slope of a line through the least headroom of every column, in bits per 100"
            " batches.",
        )
        return [picture, *([marks] if self.marks else []), table]

    def _headline(self) -> str:
        if self.failure is not None:
            batch, module = self.failure
            label = self.labels[self.modules.index(module)]
            return f"First non-finite in batch {batch}, in {label} of {module_name(module)}"
        if not self.rows:
            return "No headroom was read in this trace"
        least = self.rows[0]
        return f"Least headroom: {bits_words(least.bits)} at {module_name(least.module)}"


def trend_words(bits: float) -> str:
    """Return a trend with its sign, "" for none."""
    return "" if isnan(bits) else f"{bits:+.1f}"


def draw(trace: Trace, batches: Sequence[int] | None = None) -> Picture:
    """Return the picture of these batches of a trace (default: all), of at most 1000 columns.

    An input counts only where it is non-finite, as in `by_module`.
    """
    names = ("dtype", "batch", "module", "label", "role", "abs_max", "isfinite", "note", "note_text")
    table = trace.table(names, batches)
    trace.tell("drawing the page")
    batch = table["batch"].to_numpy()
    module = strings(table["module"])
    label, role, note = (strings(table[name]) for name in ("label", "role", "note"))
    text = table["note_text"]
    abs_max = table["abs_max"].fill_null(np.nan).to_numpy()
    is_bad = ~table["isfinite"].fill_null(True).to_numpy()

    order, row = _by_first_call(module)
    numbers = np.unique(batch)
    num_columns = max(1, min(COLUMNS, len(numbers), _CELLS // max(len(order), 1)))
    per_column = max(1, -(-len(numbers) // num_columns))
    column = np.searchsorted(numbers, batch) // per_column
    first = numbers[::per_column]
    last = numbers[np.minimum(np.arange(len(first)) * per_column + per_column, len(numbers)) - 1]

    excused = _each(note, EXCUSES.__contains__, False)
    is_fault = is_bad & ~excused
    with np.errstate(divide="ignore", invalid="ignore"):
        bits = np.log2(ends_of(table).largest) - np.log2(abs_max)  # two logarithms, as in headroom_bits
    bits[is_fault] = -inf
    counts = ~excused & ~np.isnan(bits) & (is_fault | ~_each(role, "input".__eq__, False))

    shape = (len(order), len(first))
    cell = (row[module.codes] * shape[1] + column)[counts]
    least = np.full(shape, inf)
    np.minimum.at(least.reshape(-1), cell, bits[counts])
    largest = np.full(shape, np.nan)
    np.fmax.at(largest.reshape(-1), cell, abs_max[counts])
    # Backwards, as the last of the values assigned to one place stays: the first of equal ones.
    of_module = row[module.codes]
    hits = np.flatnonzero(counts & (bits == least.min(axis=1)[of_module]))[::-1]
    labels = np.full(shape[0], "", object)
    labels[of_module[hits]] = _each(label, str, "")[hits]
    seen = np.zeros(shape, bool)
    seen.reshape(-1)[cell] = True
    marks = tuple(
        _mark(
            text[i].as_py(),
            int(batch[i]),
            *(column.values[column.codes[i]] for column in (module, label, note)),
        )
        for i in np.flatnonzero(_each(note, EVENTS.__contains__, False))[-_TABLE:].tolist()
    )
    skipped = np.zeros(len(first), bool)
    skipped[column[_each(note, "skipped_step".__eq__, False)]] = True
    failure = None
    if is_fault.any():
        rows = np.flatnonzero(is_fault)
        earliest = rows[batch[rows].argmin()]
        failure = int(batch[earliest]), module.values[module.codes[earliest]]
    return Picture(
        tuple(module.values[code] for code in order.tolist()),
        first,
        last,
        np.where(seen, least, np.nan),
        largest,
        skipped,
        failure,
        len(numbers),
        len(batch),
        trace.path,
        trace.rank,
        trace.lost_frames,
        tuple(labels.tolist()),
        marks,
    )


def _mark(text: str | None, batch: int, module: str, label: str, kind: Any) -> Mark:
    return Mark(kind, batch, module, label, str(Note(kind, text or "")))


def _by_first_call(module: Strings) -> tuple[Array, Array]:
    """Return the codes in the order of their first rows, and for each code its place in that order."""
    first = np.full(len(module.values), len(module.codes))
    # The last of the values assigned to one place stays.
    first[module.codes[::-1]] = np.arange(len(module.codes))[::-1]
    order = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(module.codes))]
    place = np.zeros(len(first), np.int64)
    place[order] = np.arange(len(order))
    return order, place


def _each(column: Strings, value: Any, absent: float | bool | str) -> Array:
    """Return `value` of each row's string, which is asked once for each string; `absent` for none."""
    found: Array = np.array([*map(value, column.values), absent])[column.codes]
    return found
