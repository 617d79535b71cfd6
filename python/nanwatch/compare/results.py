"""Result of `nanwatch.twice`, and its text and JSON."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..util.place import Place
from ..util.reading import plain
from ..util.visible import module_name, visible

VERSION = 1
# Columns before the text of a line.
_INDENT = 12
_OUTCOMES = {"equal": "bit-equal", "differ": "differ", "failed": "failed"}
_AT = {
    "weight": "before the call of {}",
    "buffer": "before the call of {}",
    "input": "of {}",
    "output": "of {}",
    "gradient": "of {}, its gradient",
    "step": "of {}, after the optimizer's step",
    "result": "of the step",
}


def tensor_words(kind: str, module: str, class_name: str, label: str) -> str:
    """Return a tensor of a run in words, such as "`output` of fc1 (Linear)"."""
    named = module_name(module)
    if class_name and class_name != module:
        named += f" ({visible(class_name)})"
    return f"`{visible(label)}` {_AT[kind].format(named)}"


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """First tensor that two runs do not have alike, and the operation and line that made it, where they are known.

    `kind`, `module`, `class_name`, `label` and `form` are those of TensorPrint. `equal_before` counts the tensors that
    were equal up to there. `place` is the line, `code` its text.
    """

    batch: int
    kind: str
    module: str
    class_name: str
    label: str
    form: str
    equal_before: int
    other: str = ""
    operation: str = ""
    operation_module: str = ""
    place: Place | None = None
    code: str = ""
    in_backward: bool = False
    cause: str = ""

    @property
    def where(self) -> str:
        """The tensor in words."""
        return tensor_words(self.kind, self.module, self.class_name, self.label)


@dataclass(frozen=True, slots=True)
class Tried:
    """A change that was tried, and how the runs came out: "equal", "differ", or "failed" with the reason.

    `change` is code or words; `where` is the first difference that is left, or the error.
    """

    change: str
    outcome: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Repetition:
    """Result of `nanwatch.twice`.

    `equal` is True when all runs were bit-equal. Else `difference` has the first tensor that was not, with operation,
    line and cause, and `tried` the changes that were tried; those that made the runs bit-equal have the outcome
    "equal". `tensors` counts the compared tensors and numbers of a run. `remarks` say what could not be compared.
    """

    what: str
    runs: int
    batches: int
    tensors: int
    difference: FirstDifference | None = None
    tried: tuple[Tried, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True when no difference was first."""
        return self.difference is None

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        return as_json(self)

    def to_text(self) -> str:
        """Return the result for people."""
        first = self.difference
        if first is None:
            amount = f"{self.batches:,} batch{'' if self.batches == 1 else 'es'}"
            lines = [
                f"Repeatable: {self.runs} runs of {self.what} are bit-equal over {amount}"
                f" ({self.tensors:,} tensors each)."
            ]
        else:
            lines = [f"Not repeatable: the runs of {self.what} part in batch {first.batch}.", ""]
            before = f"after {first.equal_before:,} equal ones" if first.equal_before else "the first of all"
            lines.append(f"First:      {first.where}, {first.form}, {before}")
            if first.other:
                lines.append(f"            where the other run has {first.other}")
            if first.operation:
                where = f" of {first.operation_module}" if first.operation_module else ""
                side = "in the backward of" if first.in_backward else "at"
                lines.append(f"Operation:  {first.operation}{where}, {side} {_short(first.place)}")
                lines += [f"                {first.code}"] if first.code else []
            lines += wrapped("Cause:", first.cause)
        if self.tried:
            lines += ["", "Tried, with runs of its own each:"]
            for trial in self.tried:
                why = f": {trial.where}" if trial.outcome == "failed" else ""
                lines.append(f"  {_OUTCOMES[trial.outcome]:<9}  {trial.change}{why}")
        return as_text(lines, self.remarks)


def _short(place: Place | None) -> str:
    """Return a place with its file relative to the current folder, where it is below it."""
    if place is None:
        return ""
    relative = os.path.relpath(place.file)
    return str(place if relative.startswith("..") else place._replace(file=relative))


def as_json(result: Any) -> str:
    """Return a result as one JSON document."""
    head = {"schema": f"nanwatch.{type(result).__name__.lower()}", "version": VERSION, "equal": result.equal}
    return json.dumps({**head, **plain(result)}, allow_nan=False, indent=2)


def as_text(lines: list[str], remarks: Sequence[str]) -> str:
    """Return the lines of a result for people, and its remarks."""
    notes = [f"Note: {remark}" for remark in remarks]
    return "\n".join(map(visible, [*lines, *([""] if notes else []), *notes]))


def wrapped(head: str, text: str) -> list[str]:
    """Return lines of at most 100 columns with the head before the first, or none where there is no text."""
    line = f"{head:<{_INDENT}}{text}"
    indent = " " * _INDENT
    return textwrap.wrap(line, 100, subsequent_indent=indent, break_long_words=False) if text else []
