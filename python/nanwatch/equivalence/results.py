"""Results of `nanwatch.twice`, `nanwatch.bisect` and `nanwatch.compare`, and their text, JSON and page."""

from __future__ import annotations

import json
import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..report.page import ABSENT, GONE, NUMBER, TEXT, Chart, HeatMap, Section, Table, page
from ..util.place import Place
from ..util.reading import plain
from ..util.visible import module_name, visible

# Rows of the page's table, and rows and columns of its map of tokens.
_ABOVE, _ROWS, _COLUMNS = 40, 300, 200
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


@dataclass(frozen=True, slots=True)
class RunTensor:
    """Tensor or number of a run, and when it was read. `form` is its dtype and shape.

    `kind` is "weight" or "buffer" (before the call of its module), "input", "output", "gradient" (of an output, or of a
    weight before the step), "step" (a weight after the optimizer's step) or "result".
    """

    batch: int
    kind: str
    module: str
    class_name: str
    label: str
    form: str

    @property
    def where(self) -> str:
        """The tensor in words, such as "`output` of fc1 (Linear)"."""
        named = module_name(self.module)
        if self.class_name and self.class_name != self.module:
            named += f" ({visible(self.class_name)})"
        return f"`{visible(self.label)}` {_AT[self.kind].format(named)}"


@dataclass(frozen=True, slots=True)
class FirstDifference(RunTensor):
    """First tensor that two runs do not have alike, and the operation and line that made it, where they are known.

    `equal_before` counts the tensors that were equal up to there. `place` is the line, `code` its text.
    """

    equal_before: int
    other: str = ""
    operation: str = ""
    operation_module: str = ""
    place: Place | None = None
    code: str = ""
    in_backward: bool = False
    cause: str = ""


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
        return _json(self)

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
            before = f"after {found.equal_before:,} equal ones" if found.equal_before else "the first of all"
            lines.append(f"First:      {found.where}, {found.form}, {before}")
            if found.other:
                lines.append(f"            where the other run has {found.other}")
            if found.operation:
                where = f" of {found.operation_module}" if found.operation_module else ""
                side = "in the backward of" if found.in_backward else "at"
                lines.append(f"Operation:  {found.operation}{where}, {side} {_short(found.place)}")
                lines += [f"                {found.code}"] if found.code else []
            lines += _wrapped("Cause:", found.cause)
        if self.tried:
            lines += ["", "Tried, with runs of its own each:"]
            for one in self.tried:
                why = f": {one.where}" if one.outcome == "failed" else ""
                lines.append(f"  {_OUTCOMES[one.outcome]:<9}  {one.change}{why}")
        return _text(lines, self.remarks)


def _short(place: Place | None) -> str:
    """Return a place with its file relative to the current folder, where it is below it."""
    if place is None:
        return ""
    relative = os.path.relpath(place.file)
    return str(place if relative.startswith("..") else place._replace(file=relative))


@dataclass(frozen=True, slots=True)
class Bisection:
    """Result of `nanwatch.bisect`.

    `changed_by` describes the switch that changes the numbers, or is "" when none does; `module` and `class_name` are
    of the module that it compiles. `label` is the tensor in which that shows, `error` its relative error with the
    switch and `floor` that without it, both against a run in `reference`. With the reference "bits", `error` is that
    against the run with all switches off. `raised` is the exception with which the run ended. `switches`, `runs` and
    `parts` (modules inside the module) are counts.
    """

    changed_by: str
    module: str
    class_name: str
    label: str
    error: float
    floor: float
    reference: str
    raised: str
    switches: int
    runs: int
    parts: int = 0
    remarks: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True when no switch changes the numbers."""
        return not self.changed_by

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        return _json(self)

    def to_text(self) -> str:
        """Return the result for people."""
        amount = f"{self.switches} switch{'' if self.switches == 1 else 'es'}, {self.runs} runs"
        if self.equal:
            beyond = "in any bit" if self.reference == "bits" else "beyond rounding"
            lines = [f"Nothing changes the numbers {beyond} ({amount})."]
        else:
            lines = [f"Changed by: {self.changed_by} ({amount})"]
            if self.raised:
                lines.append(f"            which ends the run by {self.raised}")
        if self.label and not self.raised:
            lines.append(f"Largest:    `{self.label}`, {self._errors}")
        if self.class_name:
            fused = "its own forward, and what is fused across its parts: each alone is right"
            alone = f"the operations in the forward of {self.class_name}, which calls no other module"
            lines.append(f"Look at:    {fused if self.parts else alone}.")
            lines.append("            Kept eager by torch.compiler.disable, it computes as before")
        return _text(lines, self.remarks)

    @property
    def _errors(self) -> str:
        if self.reference == "bits":
            return f"relative difference {self.error:.1e} from the run without any"
        return f"relative error {self.error:.1e} against a {self.reference} run, {self.floor:.1e} without any switch"


@dataclass(frozen=True, slots=True)
class ModuleError:
    """Relative errors of a module's input and output between the two models, and the noise floor of the output.

    `module_a` or `module_b` names several where the other is their fused projection. An error is None where the
    tensors could not be compared. `tokens` are the errors by position in the sequence.
    """

    module_a: str
    module_b: str
    class_a: str
    class_b: str
    input_error: float | None
    error: float | None
    floor: float
    tokens: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """Both names in words."""
        one, other = (
            f"{module_name(self.module_a)} ({self.class_a})",
            f"{module_name(self.module_b)} ({self.class_b})",
        )
        return one if one == other else f"{one} | {other}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of `nanwatch.compare`.

    `equal` is None when nothing could be said. `equal_in` is the 16-bit dtype whose rounding hides a difference that
    float32 copies show: then all errors are theirs. `first` is the first module whose inputs agree and whose outputs
    do not, or None with the reason in `why`. `where` says where in it the difference begins, `likely` what it looks
    like. `modules` has all compared modules in the order of their calls in A. `floor` says how the noise was measured.
    """

    equal: bool | None
    first: ModuleError | None
    where: str
    likely: tuple[str, ...]
    why: str
    floor: str
    factor: float
    calls_a: int
    calls_b: int
    modules: tuple[ModuleError, ...]
    remarks: tuple[str, ...] = ()
    equal_in: str = ""

    def to_json(self) -> str:
        """Return the result as one JSON document."""
        return _json(self)

    def to_text(self) -> str:
        """Return the result for people."""
        if self.equal:
            lines = [f"{self._headline}: {self._amount}."]
        elif self.first is None:
            lines = [f"{self._headline}: {self.why}.", "", f"Compared:   {self._amount}"]
        else:
            found = self.first
            lines = [
                f"{self._headline}.",
                "",
                f"Input:      {spell_error(found.input_error)}",
                f"Output:     {self._output}",
            ]
            lines += _wrapped("Where:", self.where)
            for one in self.likely:
                lines += _wrapped("Looks like:", one)
            lines += [f"Compared:   {self._amount}"]
        lines += [f"Noise:      {self.floor}"]
        return _text(lines, self.remarks)

    def to_html(self) -> str:
        """Return a page that opens offline, with charts of the error over depth and over tokens.

        Needs `jinja2`; write it as UTF-8.
        """
        first = self.first
        facts = (
            [("Input", spell_error(first.input_error)), ("Output", self._output)] if first is not None else []
        )
        facts += [("Where", self.where), *(("Likely", words) for words in self.likely), ("Why", self.why)]
        facts += [("Noise", self.floor), *(("Note", remark) for remark in self.remarks)]
        facts = [(head, body) for head, body in facts if body]
        is_bad = not self.equal
        return page(
            "Comparison.to_html()", self._headline, self._amount, facts, self._sections(), is_bad=is_bad
        )

    def _sections(self) -> list[Section]:
        rows = self.modules
        if not rows:
            return []
        names = [one.name for one in rows]
        values = (
            ("error", "output", "", [one.error for one in rows]),
            ("error of the input", "input", "dotted", [one.input_error for one in rows]),
            ("limit", "near", "dashed", [self.factor * one.floor for one in rows]),
            ("noise floor", "quiet", "dashed", [one.floor for one in rows]),
        )
        x = list(range(len(rows)))
        lines: list[dict[str, Any]] = [
            {"name": name, "color": color, "dash": dash, "at": names, "x": x, "y": [plain(y) for y in line]}
            for name, color, dash, line in values
        ]
        if self.first in rows:
            i = rows.index(self.first)
            mark = {"name": "first", "color": "gone", "isMark": True, "at": names[i : i + 1]}
            lines.append({**mark, "x": [i], "y": [plain(self.first.error)]})
        sections: list[Section] = [
            Chart(
                "depth",
                "Error over depth",
                "Relative error of every compared module's output, in the order of the calls in A. A zero, and what is"
                " not finite, is a gap.",
                "relative error and noise floor of each module's output, on a logarithmic scale",
                "call of a module, in order",
                "relative error",
                lines,
            )
        ]
        sections += _tokens(rows)
        above = [one for one in rows if one.error is not None and one.error > self.factor * one.floor][
            :_ABOVE
        ]
        if above:
            columns = {
                "in A": TEXT,
                "in B": TEXT,
                "input error": NUMBER,
                "output error": NUMBER,
                "floor": NUMBER,
            }
            cells = [
                [
                    *(module_name(one.module_a), module_name(one.module_b)),
                    *(spell_error(one.input_error), spell_error(one.error), f"{one.floor:.2g}"),
                ]
                for one in above
            ]
            hint = f"The first {len(above)}, in the order of the calls in A."
            sections.append(Table("above", "Modules above the floor", columns, cells, hint))
        return sections

    @property
    def _amount(self) -> str:
        pairs = f"{len(self.modules):,} pair{'' if len(self.modules) == 1 else 's'} of module calls"
        return f"{pairs} (A made {self.calls_a:,} calls, B {self.calls_b:,})"

    @property
    def _output(self) -> str:
        found = self.first
        if found is None or found.error is None:
            return spell_error(None)
        side = "above" if found.error > self.factor * found.floor else "within"
        return f"{spell_error(found.error)}, {side} {self.factor:g} x the floor of {found.floor:.2g}"

    @property
    def _headline(self) -> str:
        if self.equal:
            return "Equal within the noise floor"
        if self.first is None:
            return "No module can be named"
        if self.equal_in:
            size = f", {spell_error(self.first.error)}"
            return f"Equal in {self.equal_in}; the float32 copies differ first in {self.first.name}{size}"
        return f"Differ first in {self.first.name}"


def _tokens(modules: Sequence[ModuleError]) -> list[Section]:
    """Return the map of errors by module and token, if there are any.

    A cell is the largest error in it, so that no error is lost where there are more tokens than columns.
    """
    lengths = Counter(len(one.tokens) for one in modules if one.tokens)
    if not lengths:
        return []
    ((length, _),) = lengths.most_common(1)
    rows = [one for one in modules if len(one.tokens) == length]
    columns, lines = (range(0, n, -(-n // most)) for n, most in ((length, _COLUMNS), (len(rows), _ROWS)))
    errors = np.array([one.tokens for one in rows])
    errors = np.maximum.reduceat(np.maximum.reduceat(errors, columns, axis=1), lines, axis=0)
    # A line of several modules has the name of the worst.
    worst = [max(rows[i : i + lines.step], key=lambda one: max(one.tokens)) for i in lines]
    # The worst cell of a map is the least: hundredths of a decade, larger errors lower.
    is_known = np.isfinite(errors) & (errors > 0)
    decades = np.rint(-100 * np.log10(np.where(is_known, errors, 1.0))).astype(np.int64)
    cells = np.where(is_known, decades, np.where(errors == 0, ABSENT, GONE))
    low, high = (int(decades[is_known].min()), int(decades[is_known].max())) if is_known.any() else (0, 1)
    words = "a token" if columns.step == 1 else f"{columns.step} tokens, of which the largest error is shown"
    ends = [f"{10 ** (-end / 100):.1e}" for end in (low, high)]
    return [
        HeatMap(
            "Error over tokens",
            f"A row is a module, a column {words}. Where there is no colour, there is no difference.",
            "relative error by module and position in the sequence",
            rows=[one.name for one in worst],
            first=[*columns],
            last=[min(at + columns.step, length) - 1 for at in columns],
            columns=("token", "tokens"),
            cells=cells,
            stops=((low, "gone"), ((low + high) / 2, "low"), (high + 1, "low", 0.15)),
            key=(("gone", f"an error of {ends[0]}, or inf"), ("low", f"down to {ends[1]}, paler with less")),
            none="no difference",
            unit="",
            magnitudes=errors,
            measure="error",
        )
    ]


def spell_error(error: float | None) -> str:
    """Return a relative error in words."""
    return "not comparable" if error is None else f"{error:.2g}"


VERSION = 1


def _json(found: Any) -> str:
    head = {"schema": f"nanwatch.{type(found).__name__.lower()}", "version": VERSION, "equal": found.equal}
    return json.dumps({**head, **plain(found)}, allow_nan=False, indent=2)


def _text(lines: list[str], remarks: Sequence[str]) -> str:
    notes = [f"Note: {remark}" for remark in remarks]
    return "\n".join(map(visible, [*lines, *([""] if notes else []), *notes]))


def _wrapped(head: str, text: str) -> list[str]:
    """Return lines of at most 100 columns with the head before the first, or none where there is no text."""
    line = f"{head:<{_INDENT}}{text}"
    indent = " " * _INDENT
    return textwrap.wrap(line, 100, subsequent_indent=indent, break_long_words=False) if text else []
