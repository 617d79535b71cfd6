"""Result of `nanwatch.scan`, and its text and JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from ..numerics.formats import BY_NAME, TensorHealth
from ..util.reading import plain
from ..util.visible import first_few, visible, without_wrappers

SCHEMA, VERSION = "nanwatch.scan", 3
_MOST_LINES = 10  # of one kind in the text
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


@dataclass(frozen=True, slots=True)
class TensorScan:
    """One tensor. `unread` says why its values are not checked, `lost` why they are not all in the file.

    `dtype` is the name of a number format, or of an encoding of GGUF ("q8_0"). With `against`, `fingerprint` is
    `nanwatch.fingerprint` of the tensor, of an encoded one that of its bytes.
    """

    name: str
    file: str
    dtype: str = "unknown"
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    unread: str = ""
    lost: str = ""
    health: TensorHealth | None = None
    fingerprint: int | None = None
    dead_rows: int = 0
    first_dead_rows: tuple[int, ...] = ()

    @property
    def is_encoded(self) -> bool:
        """Whether its elements share scales in blocks of GGUF."""
        return self.health is not None and self.dtype not in BY_NAME

    @property
    def is_float(self) -> bool:
        """Whether its elements are numbers of floating point with a sign."""
        return self.is_encoded or (self.dtype in BY_NAME and BY_NAME[self.dtype].has_sign_bit)


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

    def lines(self) -> list[str]:
        """Return the comparison for people: the verdict, the largest changes, and what has another name or none."""
        counts = Counter(change.kind for change in self.changes)
        counts.update({"missing there": len(self.only), "only there": len(self.only_other)})
        listed = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count)
        verdict = "faithful" if self.is_faithful else "not the same"
        lines = [f"{verdict}: {listed or 'nothing to compare'}", *self.problems]
        changed = [change for change in self.changes if change.kind != "equal"]
        changed.sort(key=lambda change: -change.relative)
        if changed:
            lines += ["", f"  {'relative':>9} {'largest':>9} {'kind':>12}  tensor"]
        for change in changed[:_MOST_LINES]:
            sizes = (f"{size:.3g}" for size in (change.relative, change.largest))
            relative, largest = ("-", "-") if change.kind == "not compared" else sizes
            lines.append(f"  {relative:>9} {largest:>9} {change.kind:>12}  {change}")
        if (left := len(changed) - _MOST_LINES) > 0:
            lines.append(_more(left))
        # Wrappers of the model change names too.
        renamed = [
            str(change)
            for change in self.changes
            if change.kind == "equal" and without_wrappers(change.name) != without_wrappers(change.other)
        ]
        for names, where in (
            (renamed, "equal under other names"),
            (self.only, "missing there"),
            (self.only_other, "only there"),
        ):
            lines += [f"  {where}: {first_few(names)}"] if names else []
        return lines


@dataclass(frozen=True, slots=True, repr=False)
class Scan:
    """Result of `nanwatch.scan`."""

    paths: tuple[str, ...]
    against: str | None
    tensors: tuple[TensorScan, ...]
    problems: tuple[Problem, ...]
    comparison: CheckpointComparison | None = None

    def __repr__(self) -> str:
        return self.to_text()

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

    def to_text(self) -> str:
        """Return the result for people."""
        faults = sum(problem.is_fault for problem in self.problems)
        unread = sum(bool(tensor.unread) for tensor in self.tensors)
        verdict = f"{faults} fault{'s' * (faults > 1)}" if faults else "sound"
        if not faults and not self.is_checked:
            verdict = "nothing was checked"
        lines = [
            f"{', '.join(self.paths)}: {verdict}" + (f", {unread} tensors not checked" if unread else ""),
            self._amount(),
        ]
        for title, is_fault in (("Faults", True), ("Worth a look", False)):
            kinds: dict[str, list[Problem]] = {}
            for problem in self.problems:
                if problem.is_fault is is_fault:
                    kinds.setdefault(problem.kind, []).append(problem)
            if kinds:
                lines += ["", f"{title}:"]
            for kind, problems in kinds.items():
                for problem in problems[:_MOST_LINES]:
                    names = f"{first_few(problem.tensors)}: " if problem.tensors else ""
                    lines.append(f"  {kind:<12} {names}{problem.text}")
                if (left := len(problems) - _MOST_LINES) > 0:
                    lines.append(f"  {kind:<10} {_more(left)}")
        if self.comparison is not None:
            verdict, *rest = self.comparison.lines()
            lines += ["", f"Against {self.against}: {verdict}", *rest]
        return "\n".join(map(visible, lines))

    def _amount(self) -> str:
        dtypes = Counter(tensor.dtype for tensor in self.tensors).most_common()
        named = ", ".join(f"{dtype} {count:,}" for dtype, count in dtypes)
        size = sum(tensor.nbytes for tensor in self.tensors)
        unit, name = next((pair for pair in _UNITS if size >= pair[0]), (1, "bytes"))
        return f"{len(self.tensors):,} tensors, {size / unit:.3g} {name}" + (f" ({named})" if named else "")


def _more(count: int) -> str:
    return f"  and {count:,} more (--json has them all)"
