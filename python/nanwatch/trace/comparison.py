"""Comparison of two traces: the first record that differs, and what grew most; the alignment of their calls; and the
result of this and of every comparison, as text, JSON and a page.

Calls are aligned though modules were added, removed, swapped or renamed: by keys, from the strictest to the loosest, as
a diff of two texts does it. First calls of the same module and class match; then, between those, calls of the same
class and with the same labels (a module put into a Sequential renames all behind it); at last calls of the same name (a
module that was swapped). `nanwatch compare` aligns with other keys.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ..records.fields import plain
from ..report.page import Chart, InNotebook, Line, page
from ..util.messages import Tell, module_name, plural, visible, without_wrappers
from .trace_file import Flags, Trace, arrow, batch_words, ends_of, in_order, strings

_Number = TypeVar("_Number", bound=np.generic)
Column: TypeAlias = "np.ndarray[Any, np.dtype[_Number]]"
Ints: TypeAlias = "Column[np.int64]"
Pairs: TypeAlias = "list[tuple[int, int]]"
Levels: TypeAlias = "Sequence[tuple[Sequence[Hashable], Sequence[Hashable]]]"
Kind: TypeAlias = Literal["isfinite", "shape", "dtype", "range", "bits"]
# In one record the first of these that differs is named.
KINDS: tuple[Kind, ...] = ("isfinite", "shape", "dtype", "range", "bits")
RTOL = 1e-3
# An element near zero is what is left of larger ones, so a small change of these moves the smallest magnitude by any
# factor, and rounding alone by some units in the last place of the largest.
_ROUNDING = 4.0
_GREW = 10
_LISTED = 5  # modules that one side lacks
# SequenceMatcher takes time for each pair of equal calls. Beyond half a second of it, calls of modules that are called
# more than once are matched by their order alone.
_MATCHED = 400_000

SCHEMA, VERSION = "nanwatch.comparison", 2
# Columns before the words of a fact, and of a whole line.
_INDENT, _WIDTH = 12, 100

_TEXTS = ("module", "class", "label", "role", "shape", "dtype")
_NUMBERS = ("batch", "call", "abs_min", "abs_max", "isfinite", "recomputed", "fingerprint")


def diff(
    a: Trace | str | os.PathLike[str],
    b: Trace | str | os.PathLike[str] | None = None,
    *,
    batches: tuple[int, int] | None = None,
    rtol: float = RTOL,
    ignore: Sequence[Kind] = (),
) -> Comparison:
    """Compare two traces, or two batches, and find the first place where they part.

    Calls are aligned by module, order and class; calls and records that one side lacks are passed over. Two records
    part when one is finite and the other is not, or nan where the other is inf; when shape or dtype differ; or when
    abs_min or abs_max differ by more than `rtol` of the larger. An abs_min must also differ by more than `rtol` of
    abs_max, and by more than rounding may account for: 4 units in the last place of abs_max, in the coarser dtype of
    the two. A tensor that was not read on either side equals anything.

    With `Trace(fingerprints=True)` on both sides records of one shape and dtype also part when their bits differ,
    unless `batches` names two different batches. The result also names the weights, buffers and outputs that grew most.

    Args:
        a, b: traces, or their paths. Without `b`, two batches of `a` are compared. A Trace that was opened with `tell`
            reports the progress of this too.
        batches: compare this batch of `a` with that of `b`; without, each batch that both have with its like.
        rtol: relative difference of ranges that is still equal, at least 0 and below 1.
        ignore: kinds of difference to pass over, such as ("dtype",) for a model in float16 and in float32.

    Raises TraceError for a file that is no trace, and ValueError for batches that do not exist or have no call in
    common.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.ReLU()
        >>> with nanwatch.watch(model, trace="run.parquet"):
        ...     for scale in (1.0, 1.0, 2.0):
        ...         output = model(torch.tensor([scale]))
        >>> nanwatch.diff("run.parquet", batches=(0, 1)).equal
        True
        >>> nanwatch.diff("run.parquet", batches=(0, 2)).headline
        'They part at input[0] of the root module'
    """
    if not 0 <= rtol < 1:
        raise ValueError(f"rtol should be at least 0 and below 1, got {rtol!r}")
    if unknown := [kind for kind in ignore if kind not in KINDS]:
        raise ValueError(f"ignore should be some of {', '.join(KINDS)}, got {unknown[0]!r}")
    if b is None and batches is None:
        raise ValueError("one trace alone: name a second one, or two of its batches")
    trace_a = a if isinstance(a, Trace) else Trace.open(a)
    trace_b = trace_a if b is None else b if isinstance(b, Trace) else Trace.open(b)
    pairs, remarks = _batches(trace_a, trace_b, batches)
    ignored: set[Kind] = {*ignore}
    if batches is not None and batches[0] != batches[1]:
        ignored.add("bits")
    trace_a.tell("comparing")
    names = [str(trace.path) for trace in (trace_a, trace_b)]
    if batches is not None:
        names = [f"{name} batch {batch}" for name, batch in zip(names, batches, strict=True)]
    records = _Records((trace_a, trace_b), pairs, rtol)
    apart = {kind: flags for kind, flags in records.apart().items() if kind not in ignored}
    is_apart = np.logical_or.reduce([*apart.values(), np.zeros(len(records.a), np.bool_)])
    facts, first, headline = [("A", names[0]), ("B", names[1])], None, "No difference"
    if is_apart.any():
        at = int(is_apart.argmax())
        first, words = records.place(next(kind for kind in KINDS if kind in apart and apart[kind][at]), at)
        facts.append(("First", words))
        headline = f"They part at {first.label} of {module_name(first.module_a)}"
    facts += [("Grew", words) for words in records.grew()]
    facts += [(f"Only in {side}", words) for side, words in zip("AB", records.only(), strict=True) if words]
    bits = f", {int(records.both_have_bits.sum()):,} of them bit by bit" if "bits" in apart else ""
    compared = f"{plural(len(records.a), 'record')} of {plural(len(pairs), 'batch', 'batches')}"
    compared += f", {int(is_apart.sum()):,} apart (rtol {rtol:g}{bits})"
    return Comparison(first is None, headline, first, tuple(facts), compared, remarks)


def _batches(
    a: Trace, b: Trace, wanted: tuple[int, int] | None
) -> tuple[list[tuple[int, int]], tuple[str, ...]]:
    """Return the pairs of batches to compare, and remarks on what is not compared."""
    if wanted is not None:
        for trace, batch in zip((a, b), wanted, strict=True):
            if batch not in trace.batches:
                raise ValueError(f"{trace.path} has no batch {batch}; it has {batch_words(trace.batches)}")
        return [wanted], ()
    shared_batches = sorted(set(a.batches) & set(b.batches))
    if not shared_batches:
        both = f"{a.path} has {batch_words(a.batches)}, {b.path} {batch_words(b.batches)}"
        raise ValueError(f"no batch is in both: {both}; compare two of them with batches=")
    alone = [(len(trace.batches) - len(shared_batches), trace.path) for trace in (a, b)]
    remarks = [f"not compared: {count:,} batches are in {path} alone" for count, path in alone if count]
    remarks += [f"{trace.path} lacks {trace.lost_frames:,} frames" for trace in (a, b) if trace.lost_frames]
    return [(batch, batch) for batch in shared_batches], tuple(remarks)


class _Records:
    """Records of two traces in one table, A's before B's, and the pairs of rows that the aligner matches.

    `a` and `b` have the rows of each pair, in the order of A.
    """

    def __init__(self, traces: tuple[Trace, Trace], batches: list[tuple[int, int]], rtol: float) -> None:
        self.rtol = rtol
        tables = []
        for side, trace in enumerate(traces):
            compared = sorted({pair[side] for pair in batches})
            few = compared if len(compared) < len(trace.batches) else None
            tables.append(in_order(trace.table((*_NUMBERS, *_TEXTS), few)))
        table, num_a = arrow("pyarrow", "comparing traces").concat_tables(tables), tables[0].num_rows
        self.batch: Ints = table["batch"].to_numpy()
        self.low: Column[np.float64] = table["abs_min"].to_numpy()
        self.high: Column[np.float64] = table["abs_max"].to_numpy()
        self.was_read: Flags = table["isfinite"].is_valid().to_numpy()
        self.is_finite: Flags = table["isfinite"].fill_null(False).to_numpy()
        self.bits: Column[np.uint64] = table["fingerprint"].fill_null(0).to_numpy()
        self.texts = {name: strings(table[name]) for name in _TEXTS}
        ends = ends_of(table)
        # The units in the last place of 1.0.
        self.unit: Column[np.float64] = np.nan_to_num(ends.smallest_subnormal / ends.smallest_normal)
        places: dict[str, int] = {}
        plain = (without_wrappers(name) for name in self.texts["module"].values)
        by_name = np.array([places.setdefault(name, len(places)) for name in plain], np.int64)
        self.names = tuple(places)
        self.module: Ints = by_name[self.texts["module"].codes]
        labels = self.texts["label"]
        roles = self.texts["role"].codes.astype(np.int64)
        self.record: Ints = roles * (1 + len(labels.values)) + labels.codes
        call = table["call"].to_numpy()
        begins = np.ones(len(call), np.bool_)
        begins[1:] = (call[1:] != call[:-1]) | (self.batch[1:] != self.batch[:-1])
        begins[num_a : num_a + 1] = True
        again = table["recomputed"].to_numpy()
        columns = (self.batch, begins, self.module, self.texts["class"].codes, again, self.record)
        rows: Ints = np.stack(columns, 1).astype(np.int64)
        self.a, self.b = align(rows[:num_a], rows[num_a:], batches, traces[0].tell)
        if len(self.a) == 0:
            raise ValueError("the two have no call of a module in common; are they of the same model?")
        self.b, self.num_a = self.b + num_a, num_a
        self.both_have_bits: Flags = np.logical_and(*self.pairs(table["fingerprint"].is_valid().to_numpy()))

    def pairs(self, column: Column[_Number]) -> tuple[Column[_Number], Column[_Number]]:
        """Return the values of a column in the rows of A and of B, pair by pair."""
        return column[self.a], column[self.b]

    def apart(self) -> dict[Kind, Flags]:
        """Return for each kind in which pairs the two sides differ."""
        (low_a, low_b), (high_a, high_b) = self.pairs(self.low), self.pairs(self.high)
        finite_a, finite_b = self.pairs(self.is_finite)
        codes = (self.pairs(self.texts[name].codes) for name in ("shape", "dtype"))
        (shape_a, shape_b), (dtype_a, dtype_b) = codes
        rounding = _ROUNDING * np.maximum(*self.pairs(self.unit))
        with np.errstate(invalid="ignore"):
            largest = np.maximum(high_a, high_b)
            part_low = np.abs(low_a - low_b) > np.maximum(rounding, self.rtol) * largest
            part_high = np.abs(high_a - high_b) > self.rtol * largest
        apart: dict[Kind, Flags] = {
            "isfinite": np.logical_and(*self.pairs(self.was_read))
            & ((finite_a != finite_b) | (np.isnan(high_a) != np.isnan(high_b))),
            "shape": (shape_a != shape_b) & (shape_a >= 0) & (shape_b >= 0),
            "dtype": (dtype_a != dtype_b) & (dtype_a >= 0) & (dtype_b >= 0),
            "range": finite_a & finite_b & (part_low | part_high),
        }
        # A record that differs in another way has other bits as well, and a shape or a dtype is a part of them.
        is_explained = np.logical_or.reduce([shape_a != shape_b, dtype_a != dtype_b, *apart.values()])
        apart["bits"] = self.both_have_bits & np.not_equal(*self.pairs(self.bits)) & ~is_explained
        return apart

    def place(self, kind: Kind, at: int) -> tuple[Place, str]:
        """Return the records of a pair of rows, which differ, and the difference in words."""
        a, b = int(self.a[at]), int(self.b[at])
        batch_a, batch_b = int(self.batch[a]), int(self.batch[b])
        module, class_name, label = (self.texts[name] for name in ("module", "class", "label"))
        names = module.text(a), module.text(b), class_name.text(a), class_name.text(b)
        place = Place(*names, label.text(a), batch_a, kind)
        where = place.name.replace(" | ", ", in B ")
        batches = f"batch {batch_a}" + ("" if batch_b == batch_a else f" and batch {batch_b}")
        return place, f"`{place.label}` of {where} in {batches}: {self._what(kind, a, b)}"

    def _what(self, kind: Kind, a: int, b: int) -> str:
        """Return in words how two rows differ."""
        if kind in ("shape", "dtype"):
            return f"{kind} {self.texts[kind].text(a)} against {self.texts[kind].text(b)}"
        if kind == "isfinite":
            flags = ((self.is_finite[i], np.isnan(self.high[i])) for i in (a, b))
            return " against ".join("finite" if finite else "nan" if nan else "inf" for finite, nan in flags)
        columns = ("abs_max", self.high), ("abs_min", self.low)
        both = [(name, float(column[a]), float(column[b])) for name, column in columns]
        ends = [(_relative(x, y), name, x, y) for name, x, y in both]
        # The largest magnitude says more, unless it is not what differs.
        difference, name, x, y = ends[0] if ends[0][0] > self.rtol else max(ends)
        if not difference:
            return f"other bits in the same range (abs_max {ends[0][2]:.6g})"
        words = f"{name} {x:.6g} against {y:.6g} (relative difference {difference:.2g})"
        return words if kind == "range" else f"other bits, {words}"

    def grew(self) -> list[str]:
        """Return the records that grew most in words, each once, in the batch where it grew most."""
        high_a, high_b = self.pairs(self.high)
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = high_b / high_a
        is_known = np.isfinite(high_b) & (high_a > 0) & ~self.texts["role"].each("input".__eq__)[self.a]
        places = np.flatnonzero(is_known & (factors > 1 + self.rtol))
        places = places[np.argsort(-factors[places], kind="stable")]
        keys = self.module[self.a] * (1 + int(self.record.max())) + self.record[self.a]
        _, firsts = np.unique(keys[places], return_index=True)
        words = []
        for at in places[np.sort(firsts)][:_GREW].tolist():
            factor = f"{factors[at]:.2f}" if factors[at] < 1e5 else f"{factors[at]:.1e}"
            sizes = f"{high_a[at]:.2e} -> {high_b[at]:.2e}"
            row = int(self.a[at])
            name = f"{self.texts['label'].text(row)} of {module_name(self.texts['module'].text(row))}"
            words.append(f"x {factor}, {sizes}, {name} in batch {self.batch[row]}")
        return words

    def only(self) -> tuple[str, str]:
        """Return the modules in words whose records one side has alone: those of A, and those of B."""
        is_alone = np.ones(len(self.batch), np.bool_)
        is_alone[self.a] = is_alone[self.b] = False
        alone = np.flatnonzero(is_alone)
        in_a, in_b = (self._listed(rows) for rows in (alone[alone < self.num_a], alone[alone >= self.num_a]))
        return in_a, in_b

    def _listed(self, rows: Ints) -> str:
        modules, at, counts = np.unique(self.module[rows], return_index=True, return_counts=True)
        order = np.argsort(at)
        words = [plural(int(count), "record") for count in counts]
        names = [f"{module_name(self.names[modules[i]])} ({words[i]})" for i in order[:_LISTED]]
        more = [f"{len(order) - _LISTED} modules more"] if len(order) > _LISTED else []
        return ", ".join(names + more)


def _relative(a: float, b: float) -> float:
    return 0.0 if a == b or (a != a and b != b) else abs(a - b) / max(a, b)


# Alignment.


def align(a: Ints, b: Ints, batches: Sequence[tuple[int, int]], tell: Tell) -> tuple[Ints, Ints]:
    """Return the rows of `a` and the rows of `b` that match them, for these pairs of batches, in the order of `a`.

    A row is the number of its batch, whether it begins a call, its module and its class, whether it was recomputed, and
    its record (role and label), in numbers that mean the same on both sides. The rows of a batch stand together, and
    those of a call. The calls are aligned once for each pair of patterns, as nearly all batches make the same calls.
    """
    known: dict[tuple[bytes, bytes], Ints] = {}
    rows: list[Ints] = [np.empty((0, 2), np.int64)]
    for done, pair in enumerate(batches):
        tell("aligning", done, len(batches), "batches")
        bounds = [np.searchsorted(x[:, 0], (batch, batch + 1)) for x, batch in zip((a, b), pair, strict=True)]
        parts = [x[start:end, 1:] for x, (start, end) in zip((a, b), bounds, strict=True)]
        key = parts[0].tobytes(), parts[1].tobytes()
        if key not in known:
            known[key] = _align_batch(*parts)
        rows.append(known[key] + [start for start, _ in bounds])
    pairs = np.concatenate(rows)
    return pairs[:, 0], pairs[:, 1]


def _align_batch(*parts: Ints) -> Ints:
    """Return the matching rows of two batches, of shape (pairs, 2), counted from the first of each."""
    sides = []
    for numbers in parts:
        bounds = [*np.flatnonzero(numbers[:, 0]).tolist(), len(numbers)]
        heads, records = numbers[:, 1:4].tolist(), numbers[:, 4].tolist()
        sides.append([(*heads[start], tuple(records[start:end]), start) for start, end in pairwise(bounds)])
    slices = (slice(0, 3), slice(1, 4), slice(0, 1))
    levels = [([call[part] for call in sides[0]], [call[part] for call in sides[1]]) for part in slices]
    rows: Pairs = []
    for i, j in align_calls(levels):
        *_, records_a, start_a = sides[0][i]
        *_, records_b, start_b = sides[1][j]
        if records_a == records_b:
            rows += [(start_a + k, start_b + k) for k in range(len(records_a))]
            continue
        place = {record: start_b + k for k, record in enumerate(records_b)}
        rows += [(start_a + k, place[record]) for k, record in enumerate(records_a) if record in place]
    return np.array(sorted(rows), np.int64).reshape(-1, 2)


def align_calls(levels: Levels, fits: Callable[[int, int], bool] | None = None) -> Pairs:
    """Return the matching calls of two sequences as positions, each at most once.

    A level has a key for each call of A, and for each of B. Calls with equal keys match in their order, of a looser
    level only between those of the stricter ones. Then calls between these match, in their order, that `fits` accepts,
    and at last those that have the strictest key alike, in any order.
    """
    strict_a, strict_b = levels[0]
    pairs: Pairs = []
    gaps = [(0, len(strict_a), 0, len(strict_b))]
    for keys_a, keys_b in levels:
        smaller = []
        for from_a, to_a, from_b, to_b in gaps:
            common = _common(keys_a[from_a:to_a], keys_b[from_b:to_b])
            inside = [(i + from_a, j + from_b) for i, j in common]
            pairs += inside
            for i, j in [*inside, (to_a, to_b)]:
                if i > from_a and j > from_b:
                    smaller.append((from_a, i, from_b, j))
                from_a, from_b = i + 1, j + 1
        gaps = smaller
    for from_a, to_a, from_b, to_b in gaps:
        for i in range(from_a, to_a) if fits is not None else ():
            match = next((j for j in range(from_b, to_b) if fits and fits(i, j)), None)
            if match is not None:
                pairs.append((i, match))
                from_b = match + 1
    # Modules that were moved, so that no order brings them together.
    left_a = set(range(len(strict_a))) - {i for i, _ in pairs}
    waiting = defaultdict(list)
    for j in sorted(set(range(len(strict_b))) - {j for _, j in pairs}, reverse=True):
        waiting[strict_b[j]].append(j)
    pairs += [(i, waiting[strict_a[i]].pop()) for i in sorted(left_a) if waiting[strict_a[i]]]
    return sorted(pairs)


def _common(a: Sequence[Hashable], b: Sequence[Hashable]) -> Pairs:
    """Return a long common subsequence: equal ends, and what difflib finds between them."""
    least = min(len(a), len(b))
    begin = next((i for i in range(least) if a[i] != b[i]), least)
    end = next((i for i in range(least - begin) if a[-1 - i] != b[-1 - i]), least - begin)
    middle_a, middle_b = a[begin : len(a) - end], b[begin : len(b) - end]
    pairs = [(i, i) for i in range(begin)]
    count = Counter(middle_b)
    if sum(count[key] for key in middle_a) <= _MATCHED:
        for block in SequenceMatcher(None, middle_a, middle_b, autojunk=False).get_matching_blocks():
            pairs += [(begin + block.a + k, begin + block.b + k) for k in range(block.size)]
    return pairs + [(len(a) - end + k, len(b) - end + k) for k in range(end)]


# The result.


class Place(NamedTuple):
    """Module of A and the one of B that it was compared with, or a tensor of both, and how far they are apart.

    `module_a` or `module_b` names several where the other is their fused projection. `label` is the tensor, as
    "output[0]", "" for the whole call. `batch` is that of A, None for `compare`. `kind` is how a tensor differs in a
    trace ("isfinite", "shape", "dtype", "range", "bits"), or what it is in a run of a script ("weight", "buffer",
    "input", "output", "gradient", "step", "end").

    `error` is the relative error of the output, which differs above `limit`. `input_error` is that of the input,
    `cosine` and `largest_difference` are those of the output. They are None where nothing could be compared.
    """

    module_a: str
    module_b: str
    class_a: str
    class_b: str
    label: str = ""
    batch: int | None = None
    kind: str = ""
    input_error: float | None = None
    error: float | None = None
    limit: float | None = None
    cosine: float | None = None
    largest_difference: float | None = None

    @property
    def name(self) -> str:
        """The modules and classes of both sides in words."""
        a = f"{module_name(self.module_a)} ({self.class_a})"
        b = f"{module_name(self.module_b)} ({self.class_b})"
        return a if a == b else f"{a} | {b}"


@dataclass(frozen=True, slots=True)
class Comparison(InNotebook):
    """Result of `nanwatch.compare`, `diff` and `twice`.

    `equal` is None where nothing can be said. `first` is the first place where the two differ. `facts` are (head,
    words) in the order in which a reader needs them, and `compared` counts what was compared. `remarks` say what was
    not compared, and what may mislead. `modules` has every module that `compare` has compared, in the order of the
    calls in A.

    Examples:
        >>> import json, nanwatch, pathlib, torch
        >>> model = torch.nn.ReLU()
        >>> with nanwatch.watch(model, trace="run.parquet"):
        ...     for scale in (1.0, 2.0):
        ...         output = model(torch.tensor([scale]))
        >>> difference = nanwatch.diff("run.parquet", batches=(0, 1))
        >>> difference.equal, difference.first.label, difference.first.kind
        (False, 'input[0]', 'range')
        >>> difference.words("Grew")
        ['x 2.00, 1.00e+00 -> 2.00e+00, output of the root module in batch 0']
        >>> json.loads(difference.to_json())["first"]["label"]
        'input[0]'
        >>> size = pathlib.Path("diff.html").write_text(difference.to_html(), encoding="utf-8")
    """

    equal: bool | None
    headline: str
    first: Place | None
    facts: tuple[tuple[str, str], ...]
    compared: str
    remarks: tuple[str, ...] = ()
    modules: tuple[Place, ...] = ()

    def words(self, head: str) -> list[str]:
        """Return the words of the facts with this head."""
        return [words for name, words in self.facts if name == head]

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        document = {"schema": SCHEMA, "version": VERSION, **plain(self)}
        return json.dumps(document, allow_nan=False, indent=2)

    def to_text(self) -> str:
        """Return the result for people, without a newline at its end."""
        lines = [f"{self.headline}.", ""]
        for head, words in (*self.facts, ("Compared", self.compared)):
            lines += _wrapped(head, words)
        notes = [line for remark in self.remarks for line in _wrapped("Note", remark)]
        return "\n".join(map(visible, [*lines, *([""] if notes else []), *notes]))

    def to_html(self) -> str:
        """Return a page that opens offline, with a chart of the `modules`. Needs `jinja2`; write it as UTF-8."""
        facts = [*self.facts, *(("Note", remark) for remark in self.remarks)]
        who, charts = "Comparison.to_html()", [self._chart()] if self.modules else []
        return page(who, self.headline, self.compared, facts, charts, is_bad=not self.equal)

    def _chart(self) -> Chart:
        places, names = self.modules, [place.name for place in self.modules]
        errors, before, limits = zip(*((x.error, x.input_error, x.limit) for x in places), strict=True)
        lines = [
            Line("error", "output", names, errors),
            Line("error of the input", "input", names, before, dash="dotted"),
            Line("limit", "near", names, limits, dash="dashed"),
        ]
        if self.first is not None and self.first in places:
            at = [places.index(self.first)]
            lines.append(Line("first", "gone", [self.first.name], [self.first.error], at, is_mark=True))
        hint = "Relative error of every compared module's output, in the order of the calls in A. Zeros are gaps."
        label = "relative error and limit of each module's output, on a logarithmic scale"
        across, high = "call of a module, in order", "relative error"
        return Chart("depth", "Error over depth", hint, label, across, high, lines)


def _wrapped(head: str, words: str) -> list[str]:
    line = f"{head + ':' if head else '':<{_INDENT - 1}} {words}"
    return textwrap.wrap(line, _WIDTH, subsequent_indent=" " * _INDENT, break_long_words=False)
