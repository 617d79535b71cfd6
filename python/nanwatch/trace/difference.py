"""Result of a comparison of two traces, its text and its page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, Literal, TypeAlias

import numpy as np

from ..numerics._fingerprint import cosines, norms, relative_errors
from ..report.notebook import InNotebook
from ..report.page import NUMBER, TEXT, Chart, Section, Table, page
from ..util.visible import module_name, visible
from .trace_file import Sketches

Kind: TypeAlias = Literal["isfinite", "shape", "dtype", "range", "bits"]
_SHOWN = 5
# In one record the first of these that differs is named.
KINDS: tuple[Kind, ...] = ("isfinite", "shape", "dtype", "range", "bits")


@dataclass(frozen=True, slots=True)
class RowErrors:
    """Distance of two records by their rows (tokens), estimated from sketches.

    `relative_error` and `cosine` are those of all rows together. `num_rows` leaves out rows that are zero in A, and
    non-finite ones. `worst_row` is the index of the row with the largest relative error.
    """

    num_rows: int
    relative_error: float
    worst_relative_error: float
    worst_row: tuple[int, ...]
    cosine: float
    worst_cosine: float

    @classmethod
    def between(cls, a: Sketches, b: Sketches, lead: Sequence[int]) -> RowErrors | None:
        """Return the errors of the sketches `b` of a tensor whose leading sizes are `lead`; None without known rows."""
        known = np.flatnonzero(np.isfinite(a).all(1) & np.isfinite(b).all(1) & (norms(a) > 0))
        if len(known) == 0:
            return None
        a, b = a[known], b[known]
        errors = relative_errors(a, b)
        worst = int(errors.argmax())
        with np.errstate(invalid="ignore"):  # a row of B may be zero
            return cls(
                len(known),
                float(relative_errors(a.reshape(-1), b.reshape(-1))),
                float(errors[worst]),
                tuple(map(int, np.unravel_index(known[worst], lead))) if lead else (),
                float(np.nan_to_num(cosines(a.reshape(-1), b.reshape(-1)))),
                float(np.nan_to_num(cosines(a, b)).min()),
            )

    def __str__(self) -> str:
        return (
            f"relative error about {self.relative_error:.2g} over {_plural(self.num_rows, 'row', 'rows')}, worst"
            f" {self.worst_relative_error:.2g} in row {list(self.worst_row)}; cosine {self.cosine:.6g}, worst"
            f" {self.worst_cosine:.6g}"
        )


@dataclass(frozen=True, slots=True)
class RecordPair:
    """A record of A and its match in B, which differ. `batch`, `module` and `class_name` are A's, those with `_b` B's.

    `kind` is "isfinite", "shape", "dtype", "range" or "bits". `what` says it in words, A's value first.
    `rows` says how far the rows of the two are apart, where both have a sketch. `role` is A's record's.
    """

    batch: int
    module: str
    class_name: str
    label: str
    kind: Kind
    what: str
    batch_b: int
    module_b: str
    class_b: str
    rows: RowErrors | None = None
    role: str = ""

    def __str__(self) -> str:
        counterpart = ""
        if (self.module_b, self.class_b) != (self.module, self.class_name):
            counterpart = f", in B {module_name(self.module_b)} ({self.class_b})"
        batch = f"batch {self.batch}" + ("" if self.batch_b == self.batch else f" and batch {self.batch_b}")
        place = f"`{self.label}` of {module_name(self.module)} ({self.class_name}){counterpart} in {batch}"
        return f"{place}: {self.what}" + ("" if self.rows is None else f"; {self.rows}")


@dataclass(frozen=True, slots=True)
class Growth:
    """A record whose abs_max is `b` where it was `a`, in the batch where the factor between them is the largest.

    `num_alike` more records, called later in this batch, grew by the same factor, as through a dropout or a sum.
    """

    module: str
    label: str
    batch: int
    a: float
    b: float
    num_alike: int = 0

    @property
    def factor(self) -> float:
        """Return b / a; inf beyond 1e308."""
        return self.b / self.a


@dataclass(frozen=True, slots=True)
class Series:
    """Two lines of a chart: abs_max of an output, at the places `x`, in A and in B."""

    name: str
    x: tuple[Any, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]

    def lines(self, styles: Sequence[dict[str, Any]], **options: Any) -> Iterator[dict[str, Any]]:
        """Yield both as the page draws them."""
        for style, values in zip(styles, (self.a, self.b), strict=True):
            y = [value if isfinite(value) else str(value) for value in values]
            yield {"x": list(self.x), "y": y, **options, **style}


@dataclass(frozen=True, slots=True)
class Difference(InNotebook):
    """Result of `diff`.

    `first` is the first pair where the two part, None where they do not; `firsts` the first of each kind. `sketched`
    is the first output where they part and both have sketches, with its RowErrors. `grew` are the weights, buffers and
    outputs that grew most, by the factor. `num_records` were compared, `num_bits` of them bit by bit. `only_a` and
    `only_b` are the modules, with the number of records, for which the other side has nothing; they are no difference.

    Examples:
        >>> import json, nanwatch, pathlib, torch
        >>> model = torch.nn.ReLU()
        >>> with nanwatch.watch(model, trace="run.parquet"):
        ...     for scale in (1.0, 2.0):
        ...         output = model(torch.tensor([scale]))
        >>> difference = nanwatch.diff("run.parquet", batches=(0, 1))
        >>> difference.differs, difference.num_records, difference.num_apart
        (True, 2, 2)
        >>> print(difference.to_text().splitlines()[-1])
        x     2.00  1.00e+00 -> 2.00e+00  output of the root module in batch 0
        >>> json.loads(difference.to_json())["first"]["label"]
        'input[0]'
        >>> size = pathlib.Path("diff.html").write_text(difference.to_html(), encoding="utf-8")
    """

    a: str
    b: str
    rtol: float
    first: RecordPair | None
    firsts: tuple[RecordPair, ...]
    sketched: RecordPair | None
    grew: tuple[Growth, ...]
    num_records: int
    num_apart: int
    num_bits: int
    batches: tuple[tuple[int, int], ...]
    only_a: tuple[tuple[str, int], ...]
    only_b: tuple[tuple[str, int], ...]
    remarks: tuple[str, ...]
    calls: Series
    series: tuple[Series, ...] = field(repr=False)

    @property
    def differs(self) -> bool:
        """Return whether the two differ anywhere."""
        return self.first is not None

    def to_text(self) -> str:
        """Return a paragraph to read in a terminal, without a newline at its end."""
        return "\n".join(map(visible, self._lines()))

    def to_json(self) -> str:
        """Return `{"differs", "first": {"batch", "module", "label", "what"} or null, "grew": [...]}`.

        With sketches on both sides also `"sketched"`, like `first`, with the RowErrors as `"rows"`.
        """
        names = ("batch", "module", "label", "what")
        pairs = {
            key: None if pair is None else {name: getattr(pair, name) for name in names}
            for key, pair in (("first", self.first), ("sketched", self.sketched))
        }
        grew = [
            {
                "batch": growth.batch,
                "module": growth.module,
                "label": growth.label,
                "abs_max": [growth.a, growth.b],
            }
            | {"factor": growth.factor if isfinite(growth.factor) else str(growth.factor)}
            for growth in self.grew
        ]
        members: dict[str, Any] = {"differs": self.differs, "first": pairs["first"], "grew": grew}
        if self.sketched is not None and self.sketched.rows is not None:
            members["sketched"] = {**(pairs["sketched"] or {}), "rows": asdict(self.sketched.rows)}
        return json.dumps(members, allow_nan=False)

    def to_html(self) -> str:
        """Return a page that opens offline, with charts. Needs `jinja2`; write it as UTF-8."""
        headline = "No difference"
        if self.first is not None:
            headline = f"They part at {self.first.label} of {module_name(self.first.module)}"
        amount = f"{self.num_records:,} records compared, {self.num_apart:,} apart · {self._how}"
        facts = [("A", f"`{self.a}`"), ("B", f"`{self.b}`")]
        facts += [(f"By {pair.kind}" if i else "First", str(pair)) for i, pair in enumerate(self.firsts)]
        facts += [("Note", remark) for remark in self.remarks]
        facts += [
            (f"Only in {side}", _listed(only))
            for side, only in (("A", self.only_a), ("B", self.only_b))
            if only
        ]
        return page(
            "Difference.to_html()", headline, amount, facts, list(self._sections()), is_bad=self.differs
        )

    @property
    def _how(self) -> str:
        """The tolerance, and of how many records the bits were compared."""
        bits = f"; {self.num_bits:,} of them bit by bit" if self.num_bits else ""
        return f"rtol {self.rtol:g}{bits}"

    def _lines(self) -> Iterator[str]:
        """Yield the first difference, that of every other kind, what grew, and what was not compared."""
        yield f"A: {self.a}"
        yield f"B: {self.b}"
        many = f"{self.num_records:,} records of {_plural(len(self.batches), 'batch', 'batches')}"
        if self.first is None:
            yield f"No difference in {many} ({self._how})."
        else:
            yield f"They part in {self.num_apart:,} of {many} ({self._how})."
            yield ""
            yield f"First: {self.first}"
            if self.sketched is not None and self.sketched != self.first:
                yield f"First with sketches: {self.sketched}"
            yield from (f"First by {pair.kind}: {pair}" for pair in self.firsts[1:])
            yield from self._weight_advice(self.first)
        if self.grew:
            yield ""
            yield "Grew most from A to B:"
        for growth in self.grew:
            factor = f"{growth.factor:8.2f}" if growth.factor < 1e5 else f"{growth.factor:8.1e}"
            more = f", and {growth.num_alike:,} more by this factor" if growth.num_alike else ""
            place = f"{growth.label} of {module_name(growth.module)} in batch {growth.batch}{more}"
            yield f"x {factor}  {growth.a:8.2e} -> {growth.b:8.2e}  {place}"
        only = [
            f"only in {side}: {_listed(names)}"
            for side, names in (("A", self.only_a), ("B", self.only_b))
            if names
        ]
        if notes := [*self.remarks, *only]:
            yield ""
            yield from (f"Not compared: {note}." for note in notes)

    def _weight_advice(self, pair: RecordPair) -> Iterator[str]:
        """Yield what to look at where two runs part at a weight; nothing for two batches of one number each."""
        if pair.role != "weight" or pair.kind in ("shape", "dtype") or pair.batch != pair.batch_b:
            return
        before = [batch for batch, _ in self.batches if batch < pair.batch]
        if before:
            yield (
                f"All that was compared before agrees, so a step between batch {before[-1]} and batch {pair.batch}"
                " made the difference: look at the optimizer, the learning rate and the loss."
            )
        else:
            yield "The weights differ from the first batch on: look at the seed, the initialisation and the checkpoint."

    def _sections(self) -> Iterator[Section]:
        styles: list[dict[str, Any]]
        label, high = "abs max {} in A and in B, on a logarithmic scale", "largest magnitude"
        if self.calls.x:
            names = list(map(str, self.calls.x))
            styles = [
                {"name": "A", "color": "output", "dash": ""},
                {"name": "B", "color": "near", "dash": "dotted"},
            ]
            lines = [{**line, "at": names, "x": list(range(len(names)))} for line in self.calls.lines(styles)]
            title = "Largest magnitude of every output, in the order of the calls"
            hint = f"{self.calls.name}; a nan or an inf is a gap."
            across = "call of a module, in order"
            yield Chart("calls", title, hint, label.format("of every output"), across, high, lines)
        # One batch is no line: then the calls alone are drawn.
        if len(self.batches) > 1 and self.series:
            styles = [
                {"side": "A", "inLegend": True, "dash": ""},
                {"side": "B", "inLegend": False, "dash": "dotted"},
            ]
            lines = [
                line
                for i, series in enumerate(self.series)
                for line in series.lines(
                    styles, name=series.name, group=str(i), color=_COLORS[i % len(_COLORS)]
                )
            ]
            title = "Over the batches, where they part and what grew"
            hint = "A solid, B dotted, a colour a module. A click on a name hides it."
            yield Chart("series", title, hint, label.format("over the batches"), "batch", high, lines)
        if self.grew:
            columns = dict.fromkeys(("module", "label"), TEXT)
            columns |= dict.fromkeys(("batch", "abs max in A", "in B", "factor"), NUMBER)
            rows = [
                [
                    module_name(row.module),
                    row.label,
                    row.batch,
                    f"{row.a:.2e}",
                    f"{row.b:.2e}",
                    f"{row.factor:.3g}",
                ]
                for row in self.grew
            ]
            yield Table("grew", "Grew most from A to B", columns, rows)


_COLORS = ("output", "near", "fine", "input", "low", "gradient", "gone", "weight")


def _listed(modules: Iterable[tuple[str, int]]) -> str:
    names = [f"{module_name(name)} ({_plural(count, 'record', 'records')})" for name, count in modules]
    more = [f"{len(names) - _SHOWN} modules more"] if len(names) > _SHOWN else []
    return ", ".join(names[:_SHOWN] + more)


def _plural(count: int, singular: str, plural: str) -> str:
    return f"{count:,} {singular if count == 1 else plural}"
