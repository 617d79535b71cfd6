"""Result of `nanwatch.scan`, and its text and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ..numerics.formats import BY_NAME, TensorHealth
from ..records.reading import plain
from ..util.visible import first_few, visible, without_wrappers

SCHEMA, VERSION = "nanwatch.scan", 5
_MOST_LINES = 10  # of one kind in the text
_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))


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
    """Tensor of two checkpoints: its name in the original, and in the other; "" where it has none.

    `kind` is "equal" (to the bit), "converted" (each element is the nearest in the narrower format), "changed",
    "missing there", "only there", or "not compared" with the reason in `text`. `relative` is the norm of the difference
    by that of the original, `largest` the largest difference of an element, at number `at` in C order.
    """

    name: str
    other: str
    kind: str
    text: str = ""
    relative: float = 0.0
    largest: float = 0.0
    at: int = -1

    def __str__(self) -> str:
        names = " -> ".join(dict.fromkeys(name for name in (self.name, self.other) if name))
        return f"{names} ({self.text})" if self.text else names


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
        num_faults = sum(problem.is_fault for problem in self.problems)
        num_unread = sum(bool(tensor.unread) for tensor in self.tensors)
        verdict = "sound" if self.is_checked else "nothing was checked"
        if num_faults:
            verdict = f"{num_faults} fault{'s' * (num_faults > 1)}"
        not_checked = f", {num_unread} tensors not checked" if num_unread else ""
        size = sum(tensor.nbytes for tensor in self.tensors)
        unit, name = next((pair for pair in _UNITS if size >= pair[0]), _UNITS[-1])
        dtypes = Counter(tensor.dtype for tensor in self.tensors).most_common()
        listed = f" ({', '.join(f'{dtype} {count:,}' for dtype, count in dtypes)})" if dtypes else ""
        amount = f"{len(self.tensors):,} tensors, {size / unit:.3g} {name}{listed}"
        lines = [f"{', '.join(self.paths)}: {verdict}{not_checked}", amount]
        for title, is_fault in (("Faults", True), ("Worth a look", False)):
            by_kind: dict[str, list[str]] = {}
            for problem in self.problems:
                if problem.is_fault is is_fault:
                    names = f"{first_few(problem.tensors)}: " if problem.tensors else ""
                    by_kind.setdefault(problem.kind, []).append(f"  {problem.kind:<12} {names}{problem.text}")
            lines += ["", f"{title}:"] if by_kind else []
            lines += [line for texts in by_kind.values() for line in _shortened(texts)]
        return "\n".join(map(visible, [*lines, *self._change_lines()]))

    __repr__ = to_text

    def _change_lines(self) -> Iterator[str]:
        """Yield which side is the original, the verdict, the largest changes, and what has another name or none."""
        if self.against is None:
            return

        def of(*kinds: str) -> list[Change]:
            return [change for change in self.changes if change.kind in kinds]

        counts = Counter(change.kind for change in self.changes).items()
        listed = ", ".join(f"{count:,} {kind}" for kind, count in counts)
        yield from ("", f"Original: {', '.join(self.paths)}. What became of it: {self.against}.")
        yield f"{'Faithful' if self.is_faithful else 'Not the same'}: {listed or 'nothing to compare'}"
        if compared := of("converted", "changed", "not compared"):
            yield from ("", f"  {'relative':>9} {'largest':>9} {'kind':>12}  tensor")
        compared.sort(key=lambda change: -change.relative)
        yield from _shortened([f"  {x.relative:>9.3g} {x.largest:>9.3g} {x.kind:>12}  {x}" for x in compared])
        renamed = [row for row in of("equal") if without_wrappers(row.name) != without_wrappers(row.other)]
        for words, changes in (
            ("equal under other names", renamed),
            ("in the original only", of("missing there")),
            (f"in {self.against} only", of("only there")),
        ):
            if changes:
                yield f"  {words}: {first_few([*map(str, changes)])}"


def _shortened(lines: list[str]) -> list[str]:
    left = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], *([f"    and {left:,} more (--json has them all)"] if left > 0 else [])]
