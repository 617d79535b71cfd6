"""Comparison of two traces: the first record that differs, and what grew most."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from math import inf, log2

import numpy as np

from ..numerics._fingerprint import cosines, norms, relative_errors
from ..numerics.formats import limits
from ..records.record import is_same_part
from ..util.progress import Tell
from .align import Ints, Rows, align
from .difference import KINDS, Difference, Growth, Kind, Place, RowErrors, Series
from .trace import sizes
from .trace_file import Flags, Floats, Names, Side, Trace, batch_words

RTOL = 1e-3
# An element near zero is what is left of larger ones, so a small change of these moves the smallest magnitude by any
# factor, and rounding alone by some units in the last place of the largest.
_ROUNDING = 4.0
_GREW = 10
_SERIES = 8
_POINTS = 2000

_TEXTS = ("module", "class", "label", "role", "shape", "dtype", "phase", "note")


def diff(
    a: Trace | str | os.PathLike[str],
    b: Trace | str | os.PathLike[str] | None = None,
    *,
    batches: tuple[int, int] | None = None,
    rtol: float = RTOL,
    ignore: Sequence[Kind] = (),
) -> Difference:
    """Compare two traces, or two batches, and find the first place where they part.

    Calls are aligned by module, order and class; calls and records that one side lacks are passed over. Two records
    part when one is finite and the other is not, or nan where the other is inf; when shape or dtype differ; or when
    abs_min or abs_max differ by more than `rtol` of the larger. An abs_min must also differ by more than `rtol` of
    abs_max, and by more than rounding may account for: 4 units in the last place of abs_max, in the coarser dtype of
    the two. A tensor that was not read on either side equals anything.

    With `watch(fingerprints=True)` on both sides records of one shape and dtype also part when their bits differ,
    unless `batches` names two different batches. Of traces of two ranks, only what both should have in common is then
    compared: weights and optimizer state, where they hold the same part of them.

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
        >>> nanwatch.diff("run.parquet", batches=(0, 1)).differs
        False
        >>> nanwatch.diff("run.parquet", batches=(0, 2)).first.what
        'abs_max 1 against 2 (relative difference 0.5)'
    """
    if not 0 <= rtol < 1:
        raise ValueError(f"rtol should be at least 0 and below 1, got {rtol!r}")
    if unknown := [kind for kind in ignore if kind not in KINDS]:
        raise ValueError(f"ignore should be some of {', '.join(KINDS)}, got {unknown[0]!r}")
    if b is None and batches is None:
        raise ValueError("one trace alone: name a second one, or two of its batches")
    one = a if isinstance(a, Trace) else Trace.open(a)
    other = one if b is None else b if isinstance(b, Trace) else Trace.open(b)
    pairs, remarks = _batches(one, other, batches)
    sides = Side(one, [i for i, _ in pairs]), Side(other, [j for _, j in pairs])
    one.tell("aligning")
    ignored: set[Kind] = {*ignore}
    if batches is not None and batches[0] != batches[1]:
        ignored.add("bits")
    comparison = _Comparison(*sides, pairs, rtol, frozenset(ignored), one.tell)
    if one.rank != other.rank and comparison.has_bits.any():
        comparison.compare_replicas()
        remarks += (
            f"all that ranks {one.rank} and {other.rank} need not have in common, as inputs and outputs",
        )
    one.tell("comparing")
    names = [str(trace.path) for trace in (one, other)]
    if batches is not None:
        names = [f"{name} batch {batch}" for name, batch in zip(names, batches, strict=True)]
    return comparison.difference(names[0], names[1], remarks)


def _batches(
    a: Trace, b: Trace, wanted: tuple[int, int] | None
) -> tuple[list[tuple[int, int]], tuple[str, ...]]:
    if wanted is not None:
        for trace, batch in zip((a, b), wanted, strict=True):
            if batch not in trace.batches:
                raise ValueError(f"{trace.path} has no batch {batch}; it has {batch_words(trace.batches)}")
        return [wanted], ()
    both = sorted(set(a.batches) & set(b.batches))
    if not both:
        raise ValueError(
            f"no batch is in both: {a.path} has {batch_words(a.batches)}, {b.path} {batch_words(b.batches)};"
            " compare two of them with batches="
        )
    remarks = [
        f"{len(trace.batches) - len(both):,} batches are in {trace.path} alone"
        for trace in (a, b)
        if len(trace.batches) > len(both)
    ]
    remarks += [f"{trace.path} lacks {trace.lost_frames:,} frames" for trace in (a, b) if trace.lost_frames]
    return [(batch, batch) for batch in both], tuple(remarks)


class _Comparison:
    """Two sides, aligned."""

    def __init__(
        self,
        a: Side,
        b: Side,
        batches: list[tuple[int, int]],
        rtol: float,
        ignored: frozenset[Kind],
        tell: Tell,
    ) -> None:
        self.a, self.b, self.batches, self.rtol, self.ignored = a, b, batches, rtol, ignored
        self.names = {name: Names() for name in _TEXTS}
        self.numbers = [
            {name: side.numbers(name, self.names[name]) for name in self.names} for side in (a, b)
        ]
        labels = 1 + len(self.names["label"].texts)
        self.records = [number["role"] * labels + number["label"] for number in self.numbers]
        rows = [
            Rows(side.batch, side.call, number["module"], number["class"], side.again, record)
            for side, number, record in zip((a, b), self.numbers, self.records, strict=True)
        ]
        self.in_a, self.in_b = align(rows[0], rows[1], batches, tell)
        if len(self.in_a) == 0:
            raise ValueError("the two have no call of a module in common; are they of the same model?")
        self.has_bits: Flags = a.has_bits[self.in_a] & b.has_bits[self.in_b]
        self.is_compared: Flags = np.ones(len(self.in_a), np.bool_)

    def compare_replicas(self) -> None:
        """Compare only the tensors that two ranks of a data-parallel job have in common."""
        role, phase = (self.pair(name)[0] for name in ("role", "phase"))
        step = self.names["phase"].number("step")
        common = (role == self.names["role"].number("weight")) | (phase == step)
        both = np.stack(self.pair("note"), 1)
        kinds, which = np.unique(both, axis=0, return_inverse=True)
        texts = self.names["note"]
        same = [is_same_part(texts.text(int(one)), texts.text(int(other))) for one, other in kinds]
        self.is_compared = common & np.array(same, np.bool_)[which.reshape(-1)]

    def pair(self, name: str) -> tuple[Ints, Ints]:
        """Return a column of strings of the matched rows, as numbers."""
        return self.numbers[0][name][self.in_a], self.numbers[1][name][self.in_b]

    def floats(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return abs_min of A and B, abs_max of A and B."""
        a, b = self.a, self.b
        return a.low[self.in_a], b.low[self.in_b], a.high[self.in_a], b.high[self.in_b]

    def apart(self) -> dict[Kind, Flags]:
        """Return for each kind in which rows the two sides differ."""
        low_a, low_b, high_a, high_b = self.floats()
        finite_a, finite_b = self.a.is_finite[self.in_a], self.b.is_finite[self.in_b]
        both_read = self.a.was_read[self.in_a] & self.b.was_read[self.in_b]
        shape_a, shape_b = self.pair("shape")
        dtype_a, dtype_b = self.pair("dtype")
        units = np.array([_unit(name) for name in self.names["dtype"].texts] + [0.0])
        rounding = _ROUNDING * np.maximum(units[dtype_a], units[dtype_b])
        with np.errstate(invalid="ignore"):
            low, high = np.abs(low_a - low_b), np.abs(high_a - high_b)
            largest = np.maximum(high_a, high_b)
            part_low = low > np.maximum(rounding, self.rtol) * largest
            part_high = high > self.rtol * largest
        found: dict[Kind, Flags] = {
            "isfinite": both_read & ((finite_a != finite_b) | (np.isnan(high_a) != np.isnan(high_b))),
            "shape": (shape_a != shape_b) & (shape_a >= 0) & (shape_b >= 0),
            "dtype": (dtype_a != dtype_b) & (dtype_a >= 0) & (dtype_b >= 0),
            "range": finite_a & finite_b & (part_low | part_high),
        }
        found = {kind: flags & self.is_compared for kind, flags in found.items() if kind not in self.ignored}
        if "bits" not in self.ignored:
            bits = self.a.bits[self.in_a] != self.b.bits[self.in_b]
            # A record that differs in another way has other bits as well, and a shape or a dtype is a part of them.
            known = np.logical_or.reduce([shape_a != shape_b, dtype_a != dtype_b, *found.values()])
            found["bits"] = self.has_bits & self.is_compared & bits & ~known
        return found

    def difference(self, a: str, b: str, remarks: tuple[str, ...]) -> Difference:
        """Return the result of the comparison."""
        apart = self.apart()
        places = {kind: int(flags.argmax()) for kind, flags in apart.items() if flags.any()}
        ordered = sorted(places.items(), key=lambda item: (item[1], KINDS.index(item[0])))
        firsts = [self.place(kind, at) for kind, at in ordered]
        sketched = self.sketched(apart)
        if sketched is not None and sketched[0] == ordered[0][1]:
            firsts[0] = sketched[1]
        grew, places_of_growth = self.grew()
        last = int(self.a.batch[self.in_a[-1]])
        return Difference(
            a=a,
            b=b,
            rtol=self.rtol,
            first=firsts[0] if firsts else None,
            firsts=tuple(firsts),
            sketched=None if sketched is None else sketched[1],
            grew=grew,
            num_records=int(self.is_compared.sum()),
            num_apart=int(np.logical_or.reduce(list(apart.values())).sum()) if apart else 0,
            num_bits=int((self.has_bits & self.is_compared).sum()) if "bits" in apart else 0,
            batches=tuple(self.batches),
            only_a=self.only(0, self.a, self.in_a),
            only_b=self.only(1, self.b, self.in_b),
            remarks=remarks,
            calls=self.calls(firsts[0].batch if firsts else last),
            series=self.series([at for _, at in ordered] + places_of_growth),
        )

    def sketched(self, apart: dict[Kind, Flags]) -> tuple[int, Place] | None:
        """Return the first pair of outputs that differ and have sketches, with its place; None where there is none."""
        role, _ = self.pair("role")
        outputs = role == self.names["role"].number("output")
        places = np.flatnonzero(outputs & np.logical_or.reduce([*apart.values(), np.zeros_like(outputs)]))
        for side, rows in ((self.a, self.in_a), (self.b, self.in_b)):
            places = places[np.isin(side.batch[rows[places]], side.trace.sketched_batches)]
        _, firsts = np.unique(self.a.batch[self.in_a[places]], return_index=True)
        for at in places[firsts].tolist():
            errors = _row_errors(self.a, int(self.in_a[at]), self.b, int(self.in_b[at]))
            if errors is not None:
                kind = next(kind for kind in KINDS if kind in apart and apart[kind][at])
                return at, replace(self.place(kind, at), rows=errors)
        return None

    def place(self, kind: Kind, at: int) -> Place:
        """Return the pair of rows at `at` as a Place."""
        a, b = int(self.in_a[at]), int(self.in_b[at])
        return Place(
            batch=int(self.a.batch[a]),
            module=self.a.originals("module", a),
            class_name=self.a.originals("class", a),
            label=self.a.originals("label", a),
            kind=kind,
            what=self.what(kind, a, b),
            role=self.names["role"].text(int(self.numbers[0]["role"][a])),
            batch_b=int(self.b.batch[b]),
            module_b=self.b.originals("module", b),
            class_b=self.b.originals("class", b),
        )

    def what(self, kind: Kind, a: int, b: int) -> str:
        """Return in words how two rows differ."""
        if kind in ("shape", "dtype"):
            return f"{kind} {self.a.originals(kind, a)} against {self.b.originals(kind, b)}"
        if kind == "isfinite":
            return f"{_value(self.a, a)} against {_value(self.b, b)}"
        ends = [
            (_relative(one, other), name, one, other)
            for name, one, other in (
                ("abs_max", float(self.a.high[a]), float(self.b.high[b])),
                ("abs_min", float(self.a.low[a]), float(self.b.low[b])),
            )
        ]
        # The largest magnitude says more, unless it is not what differs.
        difference, name, one, other = ends[0] if ends[0][0] > self.rtol else max(ends)
        words = f"{name} {one:.6g} against {other:.6g} (relative difference {difference:.2g})"
        if kind == "range":
            return words
        return (
            f"other bits, {words}"
            if difference
            else f"other bits in the same range (abs_max {ends[0][2]:.6g})"
        )

    def grew(self) -> tuple[tuple[Growth, ...], list[int]]:
        """Return the records that grew most, and the pairs of rows that show it."""
        _, _, high_a, high_b = self.floats()
        given = self.names["role"].number("input")
        role, _ = self.pair("role")
        with np.errstate(divide="ignore", invalid="ignore"):
            bits = np.log2(high_b) - np.log2(high_a)
        bits[~np.isfinite(bits) | (role == given)] = -inf
        places = np.flatnonzero(bits > log2(1 + self.rtol))
        # Among records that grew alike, the first comes first.
        places = places[np.argsort(-bits[places].round(3), kind="stable")]
        module, record = self.pair("module")[0], self.records[0][self.in_a]
        names = module[places] * (1 + int(self.records[0].max())) + record[places]
        _, firsts = np.unique(names, return_index=True)
        alike: dict[tuple[int, float], list[int]] = {}
        for at in places[np.sort(firsts)].tolist():
            alike.setdefault((int(self.a.batch[self.in_a[at]]), round(float(bits[at]), 3)), []).append(at)
        chosen = sorted(list(alike.values())[:_GREW], key=lambda group: -bits[group[0]])
        return tuple(self.growth(at, len(rest)) for at, *rest in chosen), [at for at, *_ in chosen]

    def growth(self, at: int, num_alike: int) -> Growth:
        """Return the pair of rows at `at` as a Growth."""
        a, b = int(self.in_a[at]), int(self.in_b[at])
        name, label = self.a.originals("module", a), self.a.originals("label", a)
        batch, high_a, high_b = int(self.a.batch[a]), float(self.a.high[a]), float(self.b.high[b])
        return Growth(name, label, batch, high_a, high_b, num_alike)

    def only(self, which: int, side: Side, matched: Ints) -> tuple[tuple[str, int], ...]:
        """Return the modules, with the number of records, for which the other side has nothing."""
        wanted = np.array(sorted({pair[which] for pair in self.batches}), np.int64)
        alone = np.isin(side.batch, wanted)
        alone[matched] = False
        numbers, at, counts = np.unique(
            self.numbers[which]["module"][alone], return_index=True, return_counts=True
        )
        order = np.argsort(at)
        texts = self.names["module"]
        return tuple((texts.text(int(numbers[i])), int(counts[i])) for i in order)

    # Data for the charts.

    def calls(self, batch: int) -> Series:
        """Return the outputs of one batch in the order of their calls."""
        role, _ = self.pair("role")
        chosen = (role == self.names["role"].number("output")) & (self.a.batch[self.in_a] == batch)
        _, _, high_a, high_b = self.floats()
        chosen &= ~(np.isnan(high_a) & np.isnan(high_b))
        at = np.flatnonzero(chosen)[:_POINTS]
        names = tuple(
            f"{self.a.originals('module', row) or '(root)'} {self.a.originals('label', row)}"
            for row in self.in_a[at].tolist()
        )
        return Series(f"batch {batch}", names, tuple(high_a[at].tolist()), tuple(high_b[at].tolist()))

    def series(self, places: list[int]) -> tuple[Series, ...]:
        """Return the records of these pairs of rows over all batches, each record once."""
        _, _, high_a, high_b = self.floats()
        module, record = self.pair("module")[0], self.records[0][self.in_a]
        batch = self.a.batch[self.in_a]
        found: dict[str, Series] = {}
        for place in places:
            row = int(self.in_a[place])
            name = f"{self.a.originals('module', row) or '(root)'} {self.a.originals('label', row)}"
            if name in found or len(found) == _SERIES:
                continue
            at = np.flatnonzero((module == module[place]) & (record == record[place]))
            at = at[:: max(1, -(-len(at) // _POINTS))]
            x, one, other = (column[at].tolist() for column in (batch, high_a, high_b))
            found[name] = Series(name, tuple(x), tuple(one), tuple(other))
        return tuple(found.values())


def _row_errors(a: Side, row_a: int, b: Side, row_b: int) -> RowErrors | None:
    """Return how far the rows of two tensors are apart; None where a sketch is missing or the rows do not match."""
    shape, shape_b = (
        sizes(side.originals("shape", row) or "[]", "shape") or () for side, row in ((a, row_a), (b, row_b))
    )
    one, other = a.sketches(row_a), b.sketches(row_b)
    if one is None or other is None or one.shape != other.shape or shape[-1:] != shape_b[-1:]:
        return None
    known = np.flatnonzero(np.isfinite(one).all(1) & np.isfinite(other).all(1) & (norms(one) > 0))
    if len(known) == 0:
        return None
    one, other = one[known], other[known]
    errors = relative_errors(one, other)
    with np.errstate(invalid="ignore"):
        cosine = np.nan_to_num(cosines(one, other))  # 0 where a row of `b` is zero
        together = float(np.nan_to_num(cosines(one.reshape(-1), other.reshape(-1))))
    worst = int(errors.argmax())
    return RowErrors(
        num_rows=len(known),
        relative_error=float(relative_errors(one.reshape(-1), other.reshape(-1))),
        worst_relative_error=float(errors[worst]),
        worst_row=tuple(map(int, np.unravel_index(known[worst], shape[:-1]))) if shape[:-1] else (),
        cosine=together,
        worst_cosine=float(cosine.min()),
    )


def _unit(dtype: str) -> float:
    """Return the unit in the last place of 1.0."""
    ends = limits(dtype)
    return 0.0 if ends is None else ends.smallest_subnormal / ends.smallest_normal


def _relative(a: float, b: float) -> float:
    both_nan = a != a and b != b
    return 0.0 if a == b or both_nan else abs(a - b) / max(a, b)


def _value(side: Side, row: int) -> str:
    """Return "finite", "nan" or "inf"."""
    if side.is_finite[row]:
        return "finite"
    return "nan" if np.isnan(side.high[row]) else "inf"
