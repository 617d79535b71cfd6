"""Result of `nanwatch.scan`, and its text, JSON and page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

from ..numerics.formats import TensorHealth
from ..report.notebook import InNotebook
from ..report.page import NUMBER, TEXT, Section, Table, page
from ..util.reading import plain
from ..util.visible import visible
from .encodings import is_float

SCHEMA, VERSION = "nanwatch.scan", 1
_MOST_LINES = 10  # of one kind in the text
_MOST_NAMES = 4
_MOST_ROWS = 2000  # of a table of the page


@dataclass(frozen=True, slots=True)
class FormatFit:
    """Effect of a number format on one tensor. `unread` says why it was not tried.

    `overflow` counts elements that overflow, saturate or become nan, `underflow` those that become zero. `signal` and
    `noise` are the sums of squares of a block format, None for others.
    """

    format: str
    num_elements: int = 0
    overflow: int = 0
    underflow: int = 0
    signal: float | None = None
    noise: float | None = None
    unread: str = ""

    @property
    def sqnr(self) -> float | None:
        """Ratio of signal to noise of a block format, in dB."""
        if not self.signal or self.noise is None:
            return None
        return float("inf") if self.noise == 0 else 10 * log10(self.signal / self.noise)


@dataclass(frozen=True, slots=True)
class TensorScan:
    """One tensor. `unread` says why its values are not checked, `lost` why they are not all in the file.

    `fingerprint` is `nanwatch.fingerprint` of the tensor, of an encoded one (GGUF) that of its bytes. It is None of one
    that lies transposed, and where nothing needs it: without `against`, of one that no other tensor is like.
    `bad_blocks` counts blocks with a scale of nan or inf, of an encoding that is not decoded.
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
    bad_blocks: int = 0
    fits: tuple[FormatFit, ...] = ()

    @property
    def is_float(self) -> bool:
        """Whether its elements are numbers of floating point."""
        return is_float(self.dtype)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a scan found. A fault makes a checkpoint unsound, anything else is worth a look.

    `kind` is "file", "lost", "non-finite", "mask", "remark", "all zero", "zeros", "dead", "subnormal", "range",
    "outlier", "tied", "duplicate" or "not checked".
    """

    kind: str
    is_fault: bool
    text: str
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """Tensors of two checkpoints that are one: `names` of the first, `others` of the second.

    `kind` is "equal" (to the bit), "converted" (each element is the nearest in the other's format), "quantized" (to
    blocks, within their error), "changed", or "not compared" with the reason in `text`. `relative` is the norm of the
    difference by that of the first, `largest` the largest difference of an element, at number `at` in C order.
    `norm` is that of the first.
    """

    names: tuple[str, ...]
    others: tuple[str, ...]
    kind: str
    text: str = ""
    relative: float = 0.0
    largest: float = 0.0
    at: int = -1
    norm: float = 0.0


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
        verdict = "sound" if not faults else f"{faults} fault{'s' * (faults > 1)}"
        return f"{', '.join(self.paths)}: {verdict}" + (f", {unread} tensors not checked" if unread else "")

    @property
    def amount(self) -> str:
        """The number of tensors that were read, by dtype, in words."""
        dtypes = Counter(one.dtype for one in self.tensors).most_common()
        named = ", ".join(f"{name} {count:,}" for name, count in dtypes)
        size = sum(one.nbytes for one in self.tensors) / 1e9
        return f"{len(self.tensors):,} tensors, {size:.3g} GB" + (f" ({named})" if named else "")

    def to_text(self) -> str:
        """Return the result for people."""
        lines = [self.headline, self.amount]
        for title, is_fault in (("Faults", True), ("Worth a look", False)):
            found = [one for one in self.findings if one.is_fault is is_fault]
            if found:
                lines += ["", f"{title}:"]
            for kind, count in Counter(one.kind for one in found).items():
                shown = [one for one in found if one.kind == kind][:_MOST_LINES]
                lines += [f"  {kind:<12} {_names(one.tensors)}{one.text}" for one in shown]
                if count > len(shown):
                    lines.append(f"  {kind:<12} and {count - len(shown):,} more (--json has them all)")
        lines += self._fit_lines()
        if self.comparison is not None:
            lines += ["", *_comparison_lines(self.comparison, self.against or "")]
        return "\n".join(map(visible, lines))

    def _fit_lines(self) -> list[str]:
        fits = [(one.name, fit) for one in self.tensors for fit in one.fits]
        lines = []
        for name in dict.fromkeys(fit.format for _, fit in fits):
            of_format = [(tensor, fit) for tensor, fit in fits if fit.format == name]
            worst = sorted(of_format, key=lambda pair: _badness(pair[1]))[:_MOST_LINES]
            lines += ["", f"As {name}, the worst of {len(of_format)} matrices:"]
            lines += [f"  {_fit_words(fit)}  {tensor}" for tensor, fit in worst]
        return lines

    def to_html(self) -> str:
        """Return the result as one page. Raises ImportError without jinja2."""
        sections: list[Section] = []
        if self.findings:
            rows = [(one.kind, ", ".join(one.tensors[:_MOST_NAMES]), one.text) for one in self.findings]
            columns = {"kind": TEXT, "tensors": TEXT, "what": TEXT}
            sections.append(Table("findings", "Findings", columns, rows[:_MOST_ROWS], after=_left(rows)))
        if self.comparison is not None:
            changed = [one for one in self.comparison.changes if one.kind != "equal"]
            rows_of = [
                (
                    one.kind,
                    " + ".join(one.names),
                    " + ".join(one.others),
                    f"{one.relative:.3g}",
                    f"{one.largest:.3g}",
                )
                for one in sorted(changed, key=lambda one: -one.relative)
            ]
            columns = {"": TEXT, "tensor": TEXT, "other": TEXT, "relative": NUMBER, "largest": NUMBER}
            sections.append(Table("changes", "Changes", columns, rows_of[:_MOST_ROWS], after=_left(rows_of)))
        table = [(one.name, one.dtype, str(list(one.shape)), *_cells(one.health)) for one in self.tensors]
        columns = {"tensor": TEXT, "dtype": TEXT, "shape": TEXT, "abs max": NUMBER, "zeros": NUMBER}
        columns["not finite"] = NUMBER
        sections.append(Table("tensors", "Tensors", columns, table[:_MOST_ROWS], after=_left(table)))
        facts = []
        if self.comparison is not None:
            facts = [("Against", f"{self.against}: {_verdict(self.comparison)}")]
        return page("Scan.to_html", self.headline, self.amount, facts, sections, is_bad=not self.is_sound)


def _left(rows: Sequence[Any]) -> str:
    left = len(rows) - _MOST_ROWS
    return f"and {left:,} more (the JSON document has them all)" if left > 0 else ""


def _cells(health: TensorHealth | None) -> tuple[str, str, str]:
    if health is None:
        return "", "", ""
    bad = health.num_nan + health.num_posinf + health.num_neginf
    return f"{health.finite_abs_max:.4g}", f"{health.num_zero:,}", f"{bad:,}" if bad else ""


def _names(names: tuple[str, ...]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + f"{more}: "


def _badness(fit: FormatFit) -> tuple[float, float]:
    lost = (fit.overflow + fit.underflow) / max(fit.num_elements, 1)
    return (fit.sqnr if fit.sqnr is not None else 0.0, -lost)


def _fit_words(fit: FormatFit) -> str:
    if fit.unread:
        return f"not tried: {fit.unread}"
    count = max(fit.num_elements, 1)
    sqnr = "" if fit.sqnr is None else f"SQNR {fit.sqnr:5.1f} dB, "
    return f"{sqnr}{fit.overflow / count:.3%} overflow, {fit.underflow / count:.3%} become zero"


def _verdict(found: CheckpointComparison) -> str:
    counts = Counter(one.kind for one in found.changes)
    said = [f"{count:,} {kind}" for kind, count in counts.items()]
    said += [f"{len(found.only):,} missing there"] if found.only else []
    said += [f"{len(found.only_other):,} only there"] if found.only_other else []
    return f"{'faithful' if found.is_faithful else 'not the same'}: {', '.join(said) or 'nothing to compare'}"


def _comparison_lines(found: CheckpointComparison, other: str) -> list[str]:
    lines = [f"Against {other}: {_verdict(found)}", *(f"  {one}" for one in found.problems)]
    layers: dict[str, tuple[float, float, float, int]] = {}
    for one in found.changes:
        if one.kind != "equal":
            noise, norm, largest, count = layers.get(layer := layer_of(one.names[0]), (0.0, 0.0, 0.0, 0))
            square = one.norm**2
            layers[layer] = (
                noise + one.relative**2 * square,
                norm + square,
                max(largest, one.largest),
                count + 1,
            )
    if len(layers) > 1:
        lines += ["", f"  {'relative':>9} {'largest':>9} {'tensors':>8}  layer"]
        ordered = sorted(layers.items(), key=lambda pair: -pair[1][0] / (pair[1][1] or 1.0))
        for name, (noise, norm, largest, count) in ordered[:_MOST_LINES]:
            lines.append(f"  {(noise / (norm or 1.0)) ** 0.5:>9.3g} {largest:>9.3g} {count:>8}  {name}")
        if (left := len(ordered) - _MOST_LINES) > 0:
            lines.append(f"  and {left} more layers (--json has them all)")
    worst = sorted((one for one in found.changes if one.kind != "equal"), key=lambda one: -one.relative)
    if worst:
        lines += ["", f"  {'relative':>9} {'largest':>9} {'':<12} tensor"]
    for one in worst[:_MOST_LINES]:
        names = " + ".join(one.names)
        named = names if one.names == one.others else f"{names} -> {' + '.join(one.others)}"
        text = f" ({one.text})" if one.text else ""
        lines.append(f"  {one.relative:>9.3g} {one.largest:>9.3g} {one.kind:<12} {named}{text}")
    for what, alone in (("missing there", found.only), ("only there", found.only_other)):
        if alone:
            lines.append(f"  {what}: {_names(alone)[:-2]}")
    return lines


def layer_of(name: str) -> str:
    """Return the layer of a tensor: "model.layers.3" of "model.layers.3.mlp.up_proj.weight", else its module."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1]) or name
