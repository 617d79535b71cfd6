"""Judges what a tool said of the forms of a case, and prints the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from silent.case import Case
from silent.tools.protocol import Finding

COLUMNS = ("found", "cause", "module", "line")


@dataclass
class Verdict:
    """How a tool did on a case.

    Attributes:
        found: it says something of the faulty form at or after the step from which the fault can be seen. What it
            says of a healthy form too does not count.
        step: the step at which it first says so.
        cause: a finding has the case's kind, or one of `also`.
        module: a finding with the right cause lies in what is to blame.
        line: a finding with the right cause has the marked line.
        alarms: the healthy forms of which it says something.
        said: its findings of the faulty form.
        error: what went wrong when it ran.
    """

    name: str
    kind: str
    found: bool = False
    step: int | None = None
    cause: bool = False
    module: bool = False
    line: bool = False
    alarms: tuple[str, ...] = ()
    said: tuple[dict[str, Any], ...] = ()
    seconds: float = 0.0
    error: str = ""


def lies_in(module: str | None, blamed: Iterable[str]) -> bool:
    """Return whether a name is one of those to blame, or a part of one. The empty name has every part."""
    return module is not None and any(
        module == name or not name or module.startswith(f"{name}.") for name in blamed
    )


def judge(case: Case, said: dict[str, list[Finding]]) -> Verdict:
    """Judge what a tool said of each form of a case."""
    alarms = tuple(form for form in ("mended", "twin") if said.get(form))
    noise = {(finding.kind, finding.module, finding.text) for form in alarms for finding in said[form]}
    new = [f for f in said["faulty"] if (f.kind, f.module, f.text) not in noise]
    timely = [f for f in new if f.step is None or f.step >= case.step]
    right = [f for f in timely if f.kind in (case.kind, *case.also)]
    steps = [f.step for f in right or timely if f.step is not None]
    return Verdict(
        case.name,
        case.kind,
        found=bool(timely),
        step=min(steps, default=None),
        cause=bool(right),
        module=any(lies_in(f.module, case.modules) for f in right),
        line=any(f.line == case.line for f in right),
        alarms=alarms,
        said=tuple(asdict(finding) for finding in new[:8]),
    )


def summary(verdicts: list[Verdict]) -> dict[str, Any]:
    """Return the numbers of the table for one tool."""
    return {
        "cases": len(verdicts),
        **{column: sum(getattr(verdict, column) for verdict in verdicts) for column in COLUMNS},
        "within 10 steps": sum(v.found and v.step is not None and v.step <= 10 for v in verdicts),
        "alarms": sum(len(v.alarms) for v in verdicts),
        "healthy": 2 * len(verdicts),
        "errors": sum(bool(v.error) for v in verdicts),
    }


def row(verdict: Verdict) -> str:
    """Return the line that the runner prints for a case."""
    marks = "".join("x" if getattr(verdict, column) else "." for column in COLUMNS)
    kinds = ", ".join(dict.fromkeys(str(said["kind"] or said["text"][:50]) for said in verdict.said))
    alarms = f"  FALSE ALARM: {', '.join(verdict.alarms)}" if verdict.alarms else ""
    error = f"  ERROR: {verdict.error.strip().splitlines()[-1][:90]}" if verdict.error else ""
    return (
        f"{verdict.name:<28} {verdict.kind:<22} {marks} {verdict.step or '-':>4}  {kinds[:70]}{alarms}{error}"
    )
