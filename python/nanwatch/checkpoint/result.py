"""Result of `nanwatch.scan`, and its text, JSON and page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..numerics.formats import BY_NAME, TensorHealth
from ..report.notebook import InNotebook
from ..report.page import NUMBER, TEXT, Table, page
from ..util.reading import plain
from ..util.visible import first_few, visible, without_wrappers

SCHEMA, VERSION = "nanwatch.scan", 2
_MOST_LINES = 10  # of one kind in the text
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_MOST_ROWS = 2000  # of a table of the page


@dataclass(frozen=True, slots=True)
class TensorScan:
    """One tensor. `unread` says why its values are not checked, `lost` why they are not all in the file.

    `dtype` is the name of a number format, or of an encoding of GGUF ("q8_0"). With `against`, `fingerprint` is
    `nanwatch.fingerprint` of the tensor, of an encoded one that of its bytes. `sqnr` has the ratio of signal to
    quantization noise in dB by the block formats that a matrix was tried in.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    unread: str = ""
    lost: str = ""
    health: TensorHealth | None = None
    fingerprint: int | None = None
    dead_rows: int = 0
    dead_columns: int = 0
    first_dead_rows: tuple[int, ...] = ()
    first_dead_columns: tuple[int, ...] = ()
    sqnr: Mapping[str, float] | None = None

    @property
    def is_encoded(self) -> bool:
        """Whether its elements share scales in blocks of GGUF."""
        return self.health is not None and self.dtype not in BY_NAME

    @property
    def is_float(self) -> bool:
        """Whether its elements are numbers of floating point with a sign."""
        return self.is_encoded or (self.dtype in BY_NAME and BY_NAME[self.dtype].has_sign_bit)

    @property
    def is_distinct(self) -> bool:
        """Whether its values tell it from others, unlike those of a new norm or bias."""
        return (
            self.fingerprint is not None
            and self.health is not None
            and self.health.abs_min != self.health.abs_max
        )


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a scan met. A fault makes a checkpoint unsound, anything else is worth a look.

    `kind` is "file", "lost", "non-finite", "mask", "all zero", "zeros", "dead", "subnormal", "range", "outlier" or
    "not checked".
    """

    kind: str
    is_fault: bool
    text: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """Tensor of two checkpoints: its name in the first, and in the other.

    `kind` is "equal" (to the bit), "converted" (each element is the nearest in the narrower format), "changed", or "not
    compared" with the reason in `text`. `relative` is the norm of the difference by that of the first, `largest` the
    largest difference of an element, at number `at` in C order.
    """

    name: str
    other: str
    kind: str
    text: str = ""
    relative: float = 0.0
    largest: float = 0.0
    at: int = -1

    @property
    def is_renamed(self) -> bool:
        """Whether the names differ by more than wrappers, so that the values say that they are one."""
        return without_wrappers(self.name) != without_wrappers(self.other)

    def __str__(self) -> str:
        names = self.name if self.name == self.other else f"{self.name} -> {self.other}"
        return f"{names} ({self.text})" if self.text else names


@dataclass(frozen=True, slots=True)
class CheckpointComparison:
    """Comparison of two checkpoints. `only` and `only_other` are the tensors that one of them alone has."""

    changes: tuple[Change, ...]
    only: tuple[str, ...]
    only_other: tuple[str, ...]
    problems: tuple[str, ...] = ()

    @property
    def is_faithful(self) -> bool:
        """Whether the other has all tensors, equal or as exact as its formats allow."""
        kinds = {change.kind for change in self.changes}
        return not (kinds & {"changed", "not compared"} or self.only or self.only_other or self.problems)

    @property
    def verdict(self) -> str:
        """Whether it is faithful, and how many tensors are of which kind, in words."""
        counts = Counter(change.kind for change in self.changes)
        counts.update({"missing there": len(self.only), "only there": len(self.only_other)})
        listed = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
        return f"{'faithful' if self.is_faithful else 'not the same'}: {listed or 'nothing to compare'}"

    def table(self) -> Table:
        """Return what changed, the largest change first."""
        changed = sorted(
            (change for change in self.changes if change.kind != "equal"), key=lambda change: -change.relative
        )
        columns = {"relative": NUMBER, "largest": NUMBER, "kind": TEXT, "tensor": TEXT}
        rows = [
            ("-", "-", change.kind, str(change))
            if change.kind == "not compared"
            else (f"{change.relative:.3g}", f"{change.largest:.3g}", change.kind, str(change))
            for change in changed
        ]
        return Table("changes", "Changes", columns, rows)


@dataclass(frozen=True, slots=True)
class Scan(InNotebook):
    """Result of `nanwatch.scan`."""

    paths: tuple[str, ...]
    against: str | None
    tensors: tuple[TensorScan, ...]
    problems: tuple[Problem, ...]
    comparison: CheckpointComparison | None = None

    @property
    def is_sound(self) -> bool:
        """Whether all files are whole and no value is nan or inf, but for those of masks."""
        return not any(problem.is_fault for problem in self.problems)

    @property
    def is_checked(self) -> bool:
        """Whether the values of any tensor were read."""
        return any(tensor.health is not None for tensor in self.tensors)

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        head = {"schema": SCHEMA, "version": VERSION, "is_sound": self.is_sound}
        faithful = {} if self.comparison is None else {"is_faithful": self.comparison.is_faithful}
        return json.dumps({**head, **faithful, **plain(self)}, allow_nan=False, indent=2)

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        faults = sum(problem.is_fault for problem in self.problems)
        unread = sum(bool(tensor.unread) for tensor in self.tensors)
        verdict = "sound" if self.is_checked else "nothing was checked"
        if faults:
            verdict = f"{faults} fault{'s' * (faults > 1)}"
        return f"{', '.join(self.paths)}: {verdict}" + (f", {unread} tensors not checked" if unread else "")

    @property
    def amount(self) -> str:
        """The number of tensors that were read, by dtype, in words."""
        dtypes = Counter(tensor.dtype for tensor in self.tensors).most_common()
        named = ", ".join(f"{dtype} {count:,}" for dtype, count in dtypes)
        size = sum(tensor.nbytes for tensor in self.tensors)
        unit, name = next((pair for pair in _UNITS if size >= pair[0]), (1, "bytes"))
        return f"{len(self.tensors):,} tensors, {size / unit:.3g} {name}" + (f" ({named})" if named else "")

    def to_text(self) -> str:
        """Return the result for people."""
        lines = [self.headline, self.amount]
        for title, is_fault in (("Faults", True), ("Worth a look", False)):
            problems = [problem for problem in self.problems if problem.is_fault is is_fault]
            if problems:
                lines += ["", f"{title}:"]
            for kind, count in Counter(problem.kind for problem in problems).items():
                shown = [problem for problem in problems if problem.kind == kind][:_MOST_LINES]
                for problem in shown:
                    names = f"{first_few(problem.tensors)}: " if problem.tensors else ""
                    lines.append(f"  {kind:<12} {names}{problem.text}")
                if count > len(shown):
                    lines.append(f"  {kind:<12} and {count - len(shown):,} more (--json has them all)")
        if (comparison := self.comparison) is not None:
            lines += ["", f"Against {self.against}: {comparison.verdict}", *comparison.problems]
            table = comparison.table()
            if table.rows:
                lines += ["", *(_line(row) for row in (list(table.columns), *table.rows[:_MOST_LINES]))]
            if (left := len(table.rows) - _MOST_LINES) > 0:
                lines.append(f"  and {left:,} more (--json has them all)")
            moved = [
                str(change) for change in comparison.changes if change.kind == "equal" and change.is_renamed
            ]
            alone = {
                "equal under other names": moved,
                "missing there": comparison.only,
                "only there": comparison.only_other,
            }
            lines += [f"  {what}: {first_few(names)}" for what, names in alone.items() if names]
        return "\n".join(map(visible, lines))

    def to_html(self) -> str:
        """Return the result as one page. Raises ImportError without jinja2."""
        columns = {"kind": TEXT, "tensor": TEXT, "what": TEXT}
        rows = [(problem.kind, first_few(problem.tensors), problem.text) for problem in self.problems]
        tables = [Table("problems", "Problems", columns, rows)] if rows else []
        facts = []
        if self.comparison is not None:
            facts = [("Against", f"{self.against}: {self.comparison.verdict}")]
            tables.append(self.comparison.table())
        columns = {"tensor": TEXT, "dtype": TEXT, "shape": TEXT}
        columns |= {"abs max": NUMBER, "zeros": NUMBER, "not finite": NUMBER}
        tables.append(Table("tensors", "Tensors", columns, [*map(_cells, self.tensors)]))
        for i, table in enumerate(tables):
            if (left := len(table.rows) - _MOST_ROWS) > 0:
                after = f"and {left:,} more (the JSON document has them all)"
                tables[i] = replace(table, rows=table.rows[:_MOST_ROWS], after=after)
        return page("Scan.to_html", self.headline, self.amount, facts, tables, is_bad=not self.is_sound)


def _line(row: Sequence[str]) -> str:
    return f"  {' '.join(f'{cell:>9}' for cell in row[:-1])}  {row[-1]}"


def _cells(tensor: TensorScan) -> tuple[str, ...]:
    health, what = tensor.health, (tensor.name, tensor.dtype, str(list(tensor.shape)))
    if health is None:
        return *what, "", "", ""
    bad = health.num_nan + health.num_posinf + health.num_neginf
    return *what, f"{health.finite_abs_max:.4g}", f"{health.num_zero:,}", f"{bad:,}" if bad else ""
