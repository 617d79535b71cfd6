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
        whole_a, whole_b = a.reshape(-1), b.reshape(-1)
        errors = relative_errors(a, b)
        worst = int(errors.argmax())
        with np.errstate(invalid="ignore"):  # a row of B may be zero
            return cls(
                num_rows=len(known),
                relative_error=float(relative_errors(whole_a, whole_b)),
                worst_relative_error=float(errors[worst]),
                worst_row=tuple(map(int, np.unravel_index(known[worst], lead))) if lead else (),
                cosine=float(np.nan_to_num(cosines(whole_a, whole_b))),
                worst_cosine=float(np.nan_to_num(cosines(a, b)).min()),
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
        return "\n".join(map(visible, diff_lines(self)))

    def to_json(self) -> str:
        """Return `{"differs", "first": {"batch", "module", "label", "what"} or null, "grew": [...]}`.

        With sketches on both sides also `"sketched"`, like `first`, with the RowErrors as `"rows"`.
        """
        first = self.first
        names = ("batch", "module", "label", "what")
        grew = [
            {"batch": one.batch, "module": one.module, "label": one.label, "abs_max": [one.a, one.b]}
            | {"factor": one.factor if isfinite(one.factor) else str(one.factor)}
            for one in self.grew
        ]
        found = None if first is None else {name: getattr(first, name) for name in names}
        members = {"differs": self.differs, "first": found, "grew": grew}
        if self.sketched is not None and self.sketched.rows is not None:
            pair = {name: getattr(self.sketched, name) for name in names}
            members["sketched"] = pair | {"rows": asdict(self.sketched.rows)}
        return json.dumps(members, allow_nan=False)

    def to_html(self) -> str:
        """Return a page that opens offline, with charts. Needs `jinja2`; write it as UTF-8."""
        return diff_html(self)


# In words, for a terminal.


def diff_lines(found: Difference) -> Iterator[str]:
    """Yield the first difference, that of every other kind, what grew, and what was not compared; one line each."""
    yield f"A: {found.a}"
    yield f"B: {found.b}"
    many = f"{found.num_records:,} records of {_plural(len(found.batches), 'batch', 'batches')}"
    if found.first is None:
        yield f"No difference in {many} ({comparison_words(found)})."
    else:
        yield f"They part in {found.num_apart:,} of {many} ({comparison_words(found)})."
        yield ""
        yield f"First: {pair_line(found.first)}"
        if found.sketched is not None and found.sketched != found.first:
            yield f"First with sketches: {pair_line(found.sketched)}"
        for pair in found.firsts[1:]:
            yield f"First by {pair.kind}: {pair_line(pair)}"
        if advice := _weight_advice(found.first, found.batches):
            yield advice
    if found.grew:
        yield ""
        yield "Grew most from A to B:"
        for one in found.grew:
            yield (
                f"{_factor(one.factor)}  {one.a:8.2e} -> {one.b:8.2e}  {one.label} of {module_name(one.module)}"
                f" in batch {one.batch}{f', and {one.num_alike:,} more by this factor' if one.num_alike else ''}"
            )
    notes = [*found.remarks]
    notes += [f"only in A: {_listed(found.only_a)}"] if found.only_a else []
    notes += [f"only in B: {_listed(found.only_b)}"] if found.only_b else []
    if notes:
        yield ""
        yield from (f"Not compared: {note}." for note in notes)


def comparison_words(found: Difference) -> str:
    """Return `rtol 0.001`, and of how many records the bits were compared."""
    bits = f"; {found.num_bits:,} of them bit by bit" if found.num_bits else ""
    return f"rtol {found.rtol:g}{bits}"


def pair_line(pair: RecordPair) -> str:
    """Return `output of h.0.mlp (MLP) in batch 3: abs_max 1 against 2 (relative difference 0.5)`."""
    other = ""
    if (pair.module_b, pair.class_b) != (pair.module, pair.class_name):
        other = f", in B {module_name(pair.module_b)} ({pair.class_b})"
    batch = f"batch {pair.batch}" + ("" if pair.batch_b == pair.batch else f" and batch {pair.batch_b}")
    rows = "" if pair.rows is None else f"; {pair.rows}"
    return (
        f"`{pair.label}` of {module_name(pair.module)} ({pair.class_name}){other} in {batch}: {pair.what}"
        f"{rows}"
    )


def _weight_advice(pair: RecordPair, batches: Sequence[tuple[int, int]]) -> str:
    """Return what to look at where two runs part at a weight; "" elsewhere, and for two batches of one number each."""
    if pair.role != "weight" or pair.kind in ("shape", "dtype") or pair.batch != pair.batch_b:
        return ""
    before = [batch for batch, _ in batches if batch < pair.batch]
    if before:
        return (
            f"All that was compared before agrees, so a step between batch {before[-1]} and batch {pair.batch} made"
            " the difference: look at the optimizer, the learning rate and the loss."
        )
    return (
        "The weights differ from the first batch on: look at the seed, the initialisation and the checkpoint."
    )


def _factor(factor: float) -> str:
    return f"x {factor:8.2f}" if factor < 1e5 else f"x {factor:8.1e}"


def _listed(modules: Sequence[tuple[str, int]]) -> str:
    shown = [
        f"{module_name(name)} ({_plural(count, 'record', 'records')})" for name, count in modules[:_SHOWN]
    ]
    more = [f"{len(modules) - _SHOWN} modules more"] if len(modules) > _SHOWN else []
    return ", ".join(shown + more)


def _plural(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"


# The page: where the two part, what grew, and the lines of both on the same charts.


def diff_html(found: Difference) -> str:
    """Return one HTML document, to be written as UTF-8. Raise ImportError without jinja2."""
    amount = f"{found.num_records:,} records compared, {found.num_apart:,} apart · {comparison_words(found)}"
    facts = [("A", f"`{found.a}`"), ("B", f"`{found.b}`")]
    for i, pair in enumerate(found.firsts):
        facts.append((f"By {pair.kind}" if i else "First", pair_line(pair)))
    facts += [("Note", remark) for remark in found.remarks]
    facts += [
        (f"Only in {side}", _listed(only))
        for side, only in (("A", found.only_a), ("B", found.only_b))
        if only
    ]
    sections = [one for one in _sections(found) if one is not None]
    return page("Difference.to_html()", _headline(found), amount, facts, sections, is_bad=found.differs)


_COLORS = ("output", "near", "fine", "input", "low", "gradient", "gone", "weight")


def _sections(found: Difference) -> Iterator[Section | None]:
    label = "abs max {} in A and in B, on a logarithmic scale"
    calls = found.calls
    if calls.x:
        names = list(map(str, calls.x))
        sides = ((calls.a, "A", "output", ""), (calls.b, "B", "near", "dotted"))
        yield Chart(
            "calls",
            "Largest magnitude of every output, in the order of the calls",
            f"{calls.name}; a nan or an inf is a gap.",
            label.format("of every output"),
            "call of a module, in order",
            "largest magnitude",
            [
                {"name": name, "color": color, "dash": dash, "at": names, **_line(range(len(names)), values)}
                for values, name, color, dash in sides
            ],
        )
    # One batch is no line: then the calls alone are drawn.
    if len(found.batches) > 1 and found.series:
        yield Chart(
            "series",
            "Over the batches, where they part and what grew",
            "A solid, B dotted, a colour a module. A click on a name hides it.",
            label.format("over the batches"),
            "batch",
            "largest magnitude",
            [
                {
                    "name": one.name,
                    "group": str(i),
                    "side": side,
                    "inLegend": side == "A",
                    "color": _COLORS[i % len(_COLORS)],
                    "dash": dash,
                    **_line(one.x, values),
                }
                for i, one in enumerate(found.series)
                for values, side, dash in ((one.a, "A", ""), (one.b, "B", "dotted"))
            ],
        )
    if found.grew:
        yield Table(
            "grew",
            "Grew most from A to B",
            {
                "module": TEXT,
                "label": TEXT,
                "batch": NUMBER,
                "abs max in A": NUMBER,
                "in B": NUMBER,
                "factor": NUMBER,
            },
            [
                [
                    module_name(one.module),
                    one.label,
                    one.batch,
                    f"{one.a:.2e}",
                    f"{one.b:.2e}",
                    f"{one.factor:.3g}",
                ]
                for one in found.grew
            ],
        )


def _headline(found: Difference) -> str:
    if found.first is None:
        return "No difference"
    return f"They part at {found.first.label} of {module_name(found.first.module)}"


def _line(x: Iterable[Any], values: Iterable[float]) -> dict[str, Any]:
    return {"x": list(x), "y": [_number(value) for value in values]}


def _number(value: float) -> float | str:
    return value if isfinite(value) else str(value)
