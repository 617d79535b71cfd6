"""Headroom over a whole trace: the least of each module and batch as a page, and formats that would hold a module."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from ..numerics.fit import edges
from ..records.record import EVENTS, EXCUSES, Note, NoteKind
from ..report.page import NUMBER, TEXT, Chart, Level, Line, Section, Table, bits_words, page
from ..util.messages import module_name, without_wrappers
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
        bad = [batch for batch, bits, *_ in self.batches if bits == -inf]
        skipped = [batch for batch, *_, is_skipped in self.batches if is_skipped]
        for name, color, x in (("not finite", "gone", bad), ("skipped step", "near", skipped)):
            lines += [Line(name, color, x, ones[: len(x)], x, is_mark=True)] if x else []
        hint = (
            "The largest weight, output or gradient of each batch as a share of the largest number of its format. Half"
            " of it leaves one bit of headroom."
        )
        label = "share of the format's largest number that each batch used, on a logarithmic scale"
        title, high = "How near the run came to overflow", "share of the largest number"
        return Chart("batches", title, hint, label, "batch", high, lines)


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
    rows = tuple(_rows(module, label, batch, abs_max, bits, np.flatnonzero(counts)))
    batches_of = tuple((x, *least.get(x, (np.nan, "")), x in skipped) for x in numbers.tolist())
    about = trace.path, trace.rank, trace.lost_frames
    return Picture(rows, batches_of, tuple(marks), failure, len(batch), *about)


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


# Formats.

# The narrowest first, and among formats of one width the more precise one. No format is wider than float64, so the
# formats behind it are judged and never proposed.
FORMATS = (
    *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz"),
)
Part: TypeAlias = Literal["outputs", "weights"]
Verdict: TypeAlias = Literal["fits", "overflows", "no room", "becomes zero", "not finite"]
_PARTS: dict[str, Part] = {"output": "outputs", "weight": "weights", "buffer": "weights"}
# An element that becomes zero has to be less than this part of the largest element of its tensor: float16 itself rounds
# off as much.
NEGLIGIBLE = 2.0**-12
MARGINS = (0.0, 1000.0)  # bits; 2^1000 is still a normal float64


@dataclass(frozen=True, slots=True)
class Need:
    """The outputs, or the weights and buffers, of one module over a trace, and whether formats hold them.

    A verdict is "fits", or why the format does not: something "overflows", or would with the margin ("no room"),
    "becomes zero" though it matters beside the largest element of its tensor, or is "not finite" as it is. `abs_max` is
    the largest magnitude; `abs_min` the smallest that is not zero among the smallest magnitudes of the records, None
    when each was zero.
    """

    module: str
    part: Part
    dtypes: tuple[str, ...]
    abs_min: float | None
    abs_max: float
    verdicts: Mapping[str, Verdict]

    @property
    def fits(self) -> str | None:
        """Return the narrowest of FORMATS that fits."""
        return next((name for name in FORMATS if self.verdicts[name] == "fits"), None)


def fits(trace: Trace | str | os.PathLike[str], margin_bits: float = 1.0) -> tuple[Need, ...]:
    """Return a Need for the outputs and one for the weights of each module, in the order in which they were first seen.

    `margin_bits` are left free at both ends of a format: with 1 the values may still double. Integers and bools, masks,
    and infinities that are allowed do not count. Raises ValueError for a margin outside 0 to 1000.
    """
    if not MARGINS[0] <= margin_bits <= MARGINS[1]:
        raise ValueError(f"margin_bits is {margin_bits!r}; accepted are 0 to {MARGINS[1]:g} bits")
    trace = trace if isinstance(trace, Trace) else Trace.open(trace)
    table = trace.table(("dtype", "module", "role", "abs_min", "abs_max", "isfinite", "note"))
    modules, roles, dtypes, notes = (strings(table[name]) for name in ("module", "role", "dtype", "note"))
    is_part, is_excused = roles.each(_PARTS.__contains__), notes.each(EXCUSES.__contains__)
    ends = ends_of(table)
    counts = is_part & ~is_excused & ~np.isnan(ends.largest) & ~table["abs_max"].is_null().to_numpy()
    finite = table["isfinite"].fill_null(True).to_numpy()
    columns = (table["abs_min"].to_numpy(), table["abs_max"].to_numpy(), ends.smallest_subnormal, finite)
    numbers = np.stack(columns, 1).astype(np.float64)[counts]
    groups: dict[tuple[str, Part], list[int]] = {}
    for i, (module, role) in enumerate(zip(modules.codes[counts], roles.codes[counts], strict=True)):
        groups.setdefault((modules.values[module], _PARTS[roles.values[role]]), []).append(i)
    names = [dtypes.values[code] for code in dtypes.codes[counts]]
    return tuple(
        _need(module, part, {names[i] for i in rows}, numbers[rows], margin_bits)
        for (module, part), rows in groups.items()
    )


def _need(module: str, part: Part, dtypes: set[str], numbers: _Array, margin_bits: float) -> Need:
    """Return the Need of some records: abs_min, abs_max, the format's smallest number, whether it is finite."""
    low, high, smallest, finite = numbers.T
    room = 2.0**margin_bits
    # A tensor that holds a zero may hold its format's smallest number too.
    least = np.where(low > 0, low, smallest)
    abs_max = float(high.max())
    above_zero = low[low > 0]
    abs_min = float(above_zero.min()) if len(above_zero) else None
    verdicts: dict[str, Verdict] = {}
    for name in FORMATS:
        limits = edges(name)
        is_lost = (high > 0) & (least <= limits.zero_up_to) & (high * NEGLIGIBLE < limits.zero_up_to * room)
        if not finite.all():
            verdicts[name] = "not finite"
        elif abs_max >= limits.overflows_from:
            verdicts[name] = "overflows"
        elif abs_max * room >= limits.overflows_from:
            verdicts[name] = "no room"
        else:
            verdicts[name] = "becomes zero" if is_lost.any() else "fits"
    return Need(without_wrappers(module), part, tuple(sorted(dtypes)), abs_min, abs_max, verdicts)
