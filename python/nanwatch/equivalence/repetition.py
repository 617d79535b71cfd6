"""Result of running something twice: whether it is repeatable, else where, why, and which changes were tried."""

from __future__ import annotations

import json
import linecache
import os
import textwrap
from dataclasses import dataclass
from typing import Any

from ..util.reading import plain
from ..util.visible import module_name, visible
from .operations import OperationDifference
from .recording import Print

_AT = {
    "weight": "before the call of {}",
    "buffer": "before the call of {}",
    "input": "of {}",
    "output": "of {}",
    "gradient": "of {}, its gradient",
    "step": "of {}, after the optimizer's step",
    "result": "of the step",
}


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """First tensor that two runs do not have alike, and the operation and line that made it, where they are known.

    `kind` says when the tensor was read: "weight" or "buffer" (before the call of its module), "input", "output",
    "gradient", "step" (a weight after the optimizer's step), "result". `equal_before` counts the tensors that were
    equal up to there. `source` is "file:line", `code` its text.
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
    source: str = ""
    code: str = ""
    in_backward: bool = False
    cause: str = ""

    @classmethod
    def of(cls, place: int, one: Print, other: Print | None) -> FirstDifference:
        """Return the difference of two prints, without its operation."""
        theirs = "" if other is not None and other[:-1] == one[:-1] else _spell(other)
        return cls(one.batch, one.kind, one.module, one.class_name, one.label, one.form, place, theirs)

    @property
    def where(self) -> str:
        """The tensor in words, such as "`output` of fc1 (Linear)"."""
        return _where(self.kind, self.module, self.class_name, self.label)


def _spell(one: Print | None) -> str:
    return "nothing" if one is None else _where(one.kind, one.module, one.class_name, one.label)


def _where(kind: str, module: str, class_name: str, label: str) -> str:
    named = module_name(module)
    if class_name and class_name != module:
        named += f" ({visible(class_name)})"
    return f"`{visible(label)}` {_AT[kind].format(named)}"


def operation_fields(found: OperationDifference | None, cause: str) -> dict[str, Any]:
    """Return what an operation adds to a FirstDifference, for dataclasses.replace."""
    if found is None:
        return {"cause": cause}
    one = found.a
    file, _, line = one.source.rpartition(":")
    named = one.module or one.class_name
    return {
        "operation": one.name,
        "operation_module": named,
        "source": one.source,
        "code": linecache.getline(file, int(line or 0)).strip(),
        "in_backward": one.in_backward,
        "cause": cause,
    }


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
        """True when no difference was found."""
        return self.difference is None

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        return json.dumps({"equal": self.equal, **plain(self)}, indent=2)

    def to_text(self) -> str:
        """Return the result for people."""
        found = self.difference
        if found is None:
            amount = f"{self.batches:,} batch{'' if self.batches == 1 else 'es'}"
            lines = [
                f"Repeatable: {self.runs} runs of {self.what} are bit-equal over {amount}"
                f" ({self.tensors:,} tensors each)."
            ]
        else:
            lines = [f"Not repeatable: the runs of {self.what} part in batch {found.batch}.", ""]
            lines += self._of(found)
        if self.tried:
            lines += ["", "Tried, with runs of its own each:"]
            lines += [f"  {_OUTCOMES[one.outcome]:<9}  {one.change}{_left(one)}" for one in self.tried]
        lines += ["", *(f"Note: {remark}" for remark in self.remarks)] if self.remarks else []
        return "\n".join(map(visible, lines))

    @staticmethod
    def _of(found: FirstDifference) -> list[str]:
        before = f"after {found.equal_before:,} equal ones" if found.equal_before else "the first of all"
        lines = [f"First:      {found.where}, {found.form}, {before}"]
        if found.other:
            lines.append(f"            where the other run has {found.other}")
        if found.operation:
            where = f" of {found.operation_module}" if found.operation_module else ""
            side = "in the backward of" if found.in_backward else "at"
            lines.append(f"Operation:  {found.operation}{where}, {side} {_short(found.source)}")
            if found.code:
                lines.append(f"                {found.code}")
        if found.cause:
            indent = " " * 12
            lines += textwrap.wrap(
                f"Cause:      {found.cause}", 100, subsequent_indent=indent, break_long_words=False
            )
        return lines


_OUTCOMES = {"equal": "bit-equal", "differ": "differ", "failed": "failed"}


def _left(one: Tried) -> str:
    return f": {one.where}" if one.outcome == "failed" else ""


def _short(source: str) -> str:
    """Return a place with its file relative to the current folder, where it is below it."""
    file, _, line = source.rpartition(":")
    relative = os.path.relpath(file) if file else file
    return source if relative.startswith("..") or not file else f"{relative}:{line}"
