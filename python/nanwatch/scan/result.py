"""Result of `nanwatch.scan`, and its text and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..numerics.formats import BY_NAME, TensorHealth
from ..records.fields import plain
from ..util.messages import visible, without_wrappers

SCHEMA, VERSION = "nanwatch.scan", 6
_MOST_LINES = 10  # of one kind in the text


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
    def is_float(self) -> bool:
        """Whether its values were read and are numbers of floating point with a sign, also as blocks of GGUF."""
        return self.health is not None and (self.dtype not in BY_NAME or BY_NAME[self.dtype].has_sign_bit)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a scan met. A fault makes a checkpoint unsound, anything else is worth a look.

    `kind` is "file", "lost", "non-finite", "mask", "zeros", "dead", "range", "outlier" or "not checked".
    """

    kind: str
    is_fault: bool
    text: str
    tensors: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = f"{', '.join(self.tensors)}: " if self.tensors else ""
        return f"{self.kind:<12} {names}{self.text}"


@dataclass(frozen=True, slots=True)
class Change:
    """Tensor of two checkpoints: its name in the original, and in the other; "" where it has none.

    `kind` is "equal" (to the bit), "converted" (each element is the nearest in the narrower format), "changed",
    "missing there", "only there", or "not compared" with the reason in `text`. `relative` is the norm of the difference
    by that of the original.
    """

    name: str
    other: str
    kind: str
    text: str = ""
    relative: float = 0.0

    def __str__(self) -> str:
        names = " -> ".join(dict.fromkeys(name for name in (self.name, self.other) if name))
        text = f" ({self.text})" if self.text else ""
        return f"{self.relative:>9.3g} {self.kind:>13}  {names}{text}"


@dataclass(frozen=True, slots=True, repr=False)
class Scan:
    """Result of `nanwatch.scan`: `changes` are from the checkpoint in `paths`, the original, to `against`."""

    paths: tuple[str, ...]
    against: str | None
    tensors: tuple[TensorScan, ...]
    problems: tuple[Problem, ...]
    changes: tuple[Change, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether all files are whole and no value is nan or inf, but for those of masks."""
        return not any(problem.is_fault for problem in self.problems)

    @property
    def is_checked(self) -> bool:
        """Whether the values of any tensor were read."""
        return any(tensor.health is not None for tensor in self.tensors)

    @property
    def is_faithful(self) -> bool:
        """Whether the checkpoint `against` has all tensors, equal or as exact as its formats allow."""
        return all(change.kind in ("equal", "converted") for change in self.changes)

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        head = {"schema": SCHEMA, "version": VERSION, "is_sound": self.is_sound}
        faithful = {} if self.against is None else {"is_faithful": self.is_faithful}
        return json.dumps({**head, **faithful, **plain(self)}, allow_nan=False, indent=2)

    def to_text(self) -> str:
        """Return the result for people."""
        faults = [problem for problem in self.problems if problem.is_fault]
        remarks = [problem for problem in self.problems if not problem.is_fault]
        verdict = f"{len(faults)} fault{'s' * (len(faults) > 1)}" if faults else "sound"
        verdict = verdict if faults or self.is_checked else "nothing was checked"
        num_unread = sum(bool(tensor.unread) for tensor in self.tensors)
        not_checked = f", {num_unread} tensors not checked" if num_unread else ""
        size = sum(tensor.nbytes for tensor in self.tensors) / 1e6
        dtypes = Counter(tensor.dtype for tensor in self.tensors).most_common()
        listed = f" ({', '.join(f'{dtype} {count:,}' for dtype, count in dtypes)})" if dtypes else ""
        paths = ", ".join(self.paths)
        lines = [f"{paths}: {verdict}{not_checked}", f"{len(self.tensors):,} tensors, {size:,.2f} MB{listed}"]
        lines += [*_section("Faults:", faults), *_section("Worth a look:", remarks)]
        if self.against is not None:
            counts = Counter(change.kind for change in self.changes).items()
            listed = ", ".join(f"{count:,} {kind}" for kind, count in counts) or "nothing to compare"
            lines += ["", f"Original: {paths}. What became of it: {self.against}."]
            lines += [f"{'Faithful' if self.is_faithful else 'Not the same'}: {listed}"]
            changes = [x for x in self.changes if x.kind != "equal" or _is_renamed(x)]
            changes.sort(key=lambda change: -change.relative)
            lines += _section(f"{'relative':>11} {'':>13}  tensor", changes)
        return "\n".join(map(visible, lines))

    __repr__ = to_text


def _is_renamed(change: Change) -> bool:
    return without_wrappers(change.name) != without_wrappers(change.other)


def _section(title: str, rows: Sequence[Problem | Change]) -> Iterator[str]:
    """Yield the title and the first rows of each kind, nothing where there are no rows."""
    if rows:
        yield from ("", title)
    for kind in dict.fromkeys(row.kind for row in rows):
        texts = [str(row) for row in rows if row.kind == kind]
        yield from (f"  {text}" for text in texts[:_MOST_LINES])
        if (left := len(texts) - _MOST_LINES) > 0:
            yield f"    and {left:,} more (--json has them all)"
