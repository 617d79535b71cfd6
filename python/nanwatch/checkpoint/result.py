"""Result of `nanwatch.scan`, and its text, JSON and page."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot

from ..numerics.formats import TensorHealth
from ..report.notebook import InNotebook
from ..report.page import NUMBER, TEXT, Table, page
from ..util.reading import plain
from ..util.visible import first_few, visible, without_wrappers
from .encodings import ENCODINGS, is_float

SCHEMA, VERSION = "nanwatch.scan", 1
_MOST_LINES = 10  # of one kind in the text
_MOST_NAMES = 4
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_MOST_ROWS = 2000  # of a table of the page


@dataclass(frozen=True, slots=True)
class TensorScan:
    """One tensor. `unread` says why its values are not checked, `lost` why they are not all in the file.

    `fingerprint` is `nanwatch.fingerprint` of the tensor, of an encoded one (GGUF) that of its bytes. It is None of one
    that lies transposed, and where nothing needs it: without `against`, of one that no other tensor is like.
    `sqnr` has the ratio of signal to quantization noise in dB by the block formats that a matrix was tried in.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
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
    def is_float(self) -> bool:
        """Whether its elements are numbers of floating point."""
        return is_float(self.dtype)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a scan found. A fault makes a checkpoint unsound, anything else is worth a look.

    `kind` is "file", "lost", "non-finite", "mask", "remark", "all zero", "zeros", "dead", "subnormal", "range",
    "sqnr", "outlier", "tied", "duplicate" or "not checked".
    """

    kind: str
    is_fault: bool
    text: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """Tensors of two checkpoints that are one: `names` of the first, `others` of the second.

    `kind` is "equal" (to the bit), "converted" (each element is the nearest in the narrower format, which rounds it and
    no more), "quantized" (each block is within its encoding's error), "changed", or "not compared" with the reason in
    `text`. `relative` is the norm of the difference by that of the first, `largest` the largest difference of an
    element, at number `at` in C order. `norm` is that of the first.
    """

    names: tuple[str, ...]
    others: tuple[str, ...]
    kind: str
    text: str = ""
    relative: float = 0.0
    largest: float = 0.0
    at: int = -1
    norm: float = 0.0

    @property
    def is_renamed(self) -> bool:
        """Whether the names differ by more than wrappers, so that the values say that they are one."""
        return [*map(without_wrappers, self.names)] != [*map(without_wrappers, self.others)]

    def __str__(self) -> str:
        names, others = " + ".join(self.names), " + ".join(self.others)
        named = names if names == others else f"{names} -> {others}"
        return f"{named} ({self.text})" if self.text else named


def _relative(changes: Sequence[Change]) -> float:
    """Return the relative difference of several tensors together."""
    norm = hypot(*(one.norm for one in changes))
    return hypot(*(one.relative * one.norm for one in changes if one.norm)) / (norm or 1.0)


def _extent(changes: Sequence[Change]) -> tuple[float, float]:
    """Return the relative and the largest difference, -1 where nothing was compared."""
    compared = [one for one in changes if one.kind != "not compared"]
    return (_relative(compared), max(one.largest for one in compared)) if compared else (-1.0, -1.0)


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
        kinds = {one.kind for one in self.changes}
        return not (kinds & {"changed", "not compared"} or self.only or self.only_other or self.problems)

    @property
    def verdict(self) -> str:
        """Whether it is faithful, and how many tensors are of which kind, in words."""
        counts = Counter(one.kind for one in self.changes)
        counts.update({"missing there": len(self.only), "only there": len(self.only_other)})
        said = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
        return f"{'faithful' if self.is_faithful else 'not the same'}: {said or 'nothing to compare'}"

    def tables(self) -> list[Table]:
        """Return what changed, the largest change first: by layers if there are several, and each tensor."""
        changed = sorted((one for one in self.changes if one.kind != "equal"), key=lambda one: -one.relative)
        layers: dict[str, list[Change]] = defaultdict(list)
        for one in changed:
            layers[layer_of(one.names[0])].append(one)
        found = [(*_extent(ones), str(len(ones)), layer) for layer, ones in layers.items()]
        each = [(*_extent([one]), one.kind, str(one)) for one in changed]
        sizes = {"relative": NUMBER, "largest": NUMBER}
        return [
            Table(
                title.lower(),
                title,
                {**sizes, **columns},
                [("-" if a < 0 else f"{a:.3g}", "-" if a < 0 else f"{b:.3g}", *row) for a, b, *row in rows],
            )
            for title, columns, rows in (
                ("Layers", {"tensors": NUMBER, "layer": TEXT}, sorted(found, reverse=True)),
                ("Changes", {"kind": TEXT, "tensor": TEXT}, each),
            )
            if len(rows) > (title == "Layers")
        ]


@dataclass(frozen=True, slots=True)
class Scan(InNotebook):
    """Result of `nanwatch.scan`."""

    paths: tuple[str, ...]
    against: str | None
    tensors: tuple[TensorScan, ...]
    findings: tuple[Finding, ...]
    comparison: CheckpointComparison | None = None

    @property
    def is_sound(self) -> bool:
        """Whether all files are whole and no value is nan or inf, but for those of masks."""
        return not any(one.is_fault for one in self.findings)

    @property
    def is_checked(self) -> bool:
        """Whether values, or scales of blocks, of any tensor were read."""
        return any(one.health is not None or one.dtype in ENCODINGS for one in self.tensors)

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        head = {"schema": SCHEMA, "version": VERSION, "is_sound": self.is_sound}
        faithful = {} if self.comparison is None else {"is_faithful": self.comparison.is_faithful}
        return json.dumps({**head, **faithful, **plain(self)}, allow_nan=False, indent=2)

    @property
    def headline(self) -> str:
        """The verdict in one sentence."""
        faults = sum(one.is_fault for one in self.findings)
        unread = sum(bool(one.unread) for one in self.tensors)
        verdict = "sound" if self.is_checked else "nothing was checked"
        if faults:
            verdict = f"{faults} fault{'s' * (faults > 1)}"
        return f"{', '.join(self.paths)}: {verdict}" + (f", {unread} tensors not checked" if unread else "")

    @property
    def amount(self) -> str:
        """The number of tensors that were read, by dtype, in words."""
        dtypes = Counter(one.dtype for one in self.tensors).most_common()
        named = ", ".join(f"{dtype} {count:,}" for dtype, count in dtypes)
        size = sum(one.nbytes for one in self.tensors)
        unit, name = next((pair for pair in _UNITS if size >= pair[0]), (1, "bytes"))
        return f"{len(self.tensors):,} tensors, {size / unit:.3g} {name}" + (f" ({named})" if named else "")

    def to_text(self) -> str:
        """Return the result for people."""
        lines = [self.headline, self.amount]
        for title, is_fault in (("Faults", True), ("Worth a look", False)):
            found = [one for one in self.findings if one.is_fault is is_fault]
            if found:
                lines += ["", f"{title}:"]
            for kind, count in Counter(one.kind for one in found).items():
                shown = [one for one in found if one.kind == kind][:_MOST_LINES]
                lines += [f"  {kind:<12} {_names(one.tensors, ': ')}{one.text}" for one in shown]
                if count > len(shown):
                    lines.append(f"  {kind:<12} and {count - len(shown):,} more (--json has them all)")
        if (found_there := self.comparison) is not None:
            lines += ["", f"Against {self.against}: {found_there.verdict}", *found_there.problems]
            for table in found_there.tables():
                lines += ["", *(_line(row) for row in (list(table.columns), *table.rows[:_MOST_LINES]))]
                if (left := len(table.rows) - _MOST_LINES) > 0:
                    lines.append(f"  and {left:,} more (--json has them all)")
            if moved := [str(one) for one in found_there.changes if one.kind == "equal" and one.is_renamed]:
                lines += ["", f"  equal under other names: {_names(moved)}"]
            for what, alone in (("missing there", found_there.only), ("only there", found_there.only_other)):
                lines += [f"  {what}: {_names(alone)}"] if alone else []
        return "\n".join(map(visible, lines))

    def to_html(self) -> str:
        """Return the result as one page. Raises ImportError without jinja2."""
        columns = {"kind": TEXT, "tensor": TEXT, "what": TEXT}
        said = [(one.kind, _names(one.tensors), one.text) for one in self.findings]
        tables = [Table("findings", "Findings", columns, said)] if said else []
        facts = []
        if self.comparison is not None:
            facts = [("Against", f"{self.against}: {self.comparison.verdict}")]
            tables += self.comparison.tables()
        columns = {"tensor": TEXT, "dtype": TEXT, "shape": TEXT}
        columns |= {"abs max": NUMBER, "zeros": NUMBER, "not finite": NUMBER}
        rows = [(one.name, one.dtype, str(list(one.shape)), *_cells(one.health)) for one in self.tensors]
        tables.append(Table("tensors", "Tensors", columns, rows))
        for i, one in enumerate(tables):
            if (left := len(one.rows) - _MOST_ROWS) > 0:
                after = f"and {left:,} more (the JSON document has them all)"
                tables[i] = replace(one, rows=one.rows[:_MOST_ROWS], after=after)
        return page("Scan.to_html", self.headline, self.amount, facts, tables, is_bad=not self.is_sound)


def _line(row: Sequence[str]) -> str:
    return f"  {' '.join(f'{cell:>9}' for cell in row[:-1])}  {row[-1]}"


def _cells(health: TensorHealth | None) -> tuple[str, str, str]:
    if health is None:
        return "", "", ""
    bad = health.num_nan + health.num_posinf + health.num_neginf
    return f"{health.finite_abs_max:.4g}", f"{health.num_zero:,}", f"{bad:,}" if bad else ""


def _names(names: Sequence[str], end: str = "") -> str:
    return first_few(names, _MOST_NAMES) + end if names else ""


def layer_of(name: str) -> str:
    """Return the layer of a tensor: "model.layers.3" of "model.layers.3.mlp.up_proj.weight", else its module."""
    numbered = re.match(r"(?:.*?\.)??\d+(?=\.|$)", name)
    return numbered.group() if numbered else name.rpartition(".")[0] or name
