"""Result of `nanwatch.twice`."""

from __future__ import annotations

from dataclasses import dataclass

from ..trace.result import Result, plural


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """First tensor that two runs do not have alike.

    `where` is the tensor in words. `kind`, `module`, `class_name`, `label` and `form` are those of TensorPrint.
    `equal_before` counts the tensors that were equal up to there. `other` is what the other run has in its place, ""
    for the same tensor with other bits. `cause` is what made the difference, in words.
    """

    batch: int
    kind: str
    module: str
    class_name: str
    label: str
    form: str
    where: str
    equal_before: int
    other: str
    cause: str


@dataclass(frozen=True, slots=True)
class Tried:
    """A change that was tried, and how the runs came out: "equal", "differ", or "failed" with the reason.

    `change` is code or words; `where` is the first difference that is left, or the error.
    """

    change: str
    outcome: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Repetition(Result):
    """Result of `nanwatch.twice`.

    `difference` has the first tensor that was not bit-equal in all runs, with its cause, and `tried`
    the changes that were tried; those that made the runs bit-equal have the outcome "equal". `tensors` counts the
    compared tensors and numbers of a run. `error` is the exception that ended the runs, in words.
    """

    what: str
    runs: int
    batches: int
    tensors: int
    difference: FirstDifference | None = None
    tried: tuple[Tried, ...] = ()
    remarks: tuple[str, ...] = ()
    error: str = ""

    @property
    def equal(self) -> bool:
        """True when all runs were bit-equal."""
        return self.difference is None

    @property
    def headline(self) -> str:
        """The result in a line."""
        if self.difference is None:
            return f"Repeatable: {self.runs} runs of {self.what} are bit-equal"
        return f"Not repeatable: the runs of {self.what} part in batch {self.difference.batch}"

    @property
    def amount(self) -> str:
        """The number of compared tensors."""
        return f"{plural(self.batches, 'batch', 'batches')}, {plural(self.tensors, 'tensor')} in each run"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The first difference, its cause, and what was tried."""
        first = self.difference
        if first is None:
            return []
        before = f"after {first.equal_before:,} equal ones" if first.equal_before else "the first of all"
        facts = [("First", f"{first.where}, {first.form}, {before}")]
        if first.other:
            facts.append(("", f"where the other run has {first.other}"))
        facts.append(("Cause", first.cause))
        outcomes = {"equal": "bit-equal with", "differ": "no help:", "failed": "failed:"}
        for trial in self.tried:
            why = f" ({trial.where})" if trial.outcome == "failed" else ""
            facts.append(("Tried", f"{outcomes[trial.outcome]} {trial.change}{why}"))
        return facts
