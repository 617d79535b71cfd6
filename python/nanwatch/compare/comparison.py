"""Result of `nanwatch.compare`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..report.page import Chart, Section
from ..trace.result import Result, plural
from ..util.reading import plain
from ..util.visible import module_name


@dataclass(frozen=True, slots=True)
class ModuleError:
    """Relative errors of a module's input and output between the two models, and the noise floor of the output.

    `module_a` or `module_b` names several where the other is their fused projection. An error is None where the
    tensors could not be compared. `cosine` and `largest_difference` are those of the output.
    """

    module_a: str
    module_b: str
    class_a: str
    class_b: str
    input_error: float | None
    error: float | None
    floor: float
    cosine: float | None = None
    largest_difference: float | None = None

    @property
    def name(self) -> str:
        """Both names in words."""
        a = f"{module_name(self.module_a)} ({self.class_a})"
        b = f"{module_name(self.module_b)} ({self.class_b})"
        return a if a == b else f"{a} | {b}"


@dataclass(frozen=True, slots=True)
class Comparison(Result):
    """Result of `nanwatch.compare`.

    `equal` is None when nothing could be said. `equal_in` is the 16-bit dtype whose rounding hides a difference that
    float32 copies show. `first` is the first module whose inputs agree and whose outputs do not, or None with the
    reason in `why`. `where` says where in it the difference begins, `likely` what it looks like. `modules` has all
    compared modules in the order of their calls in A. `floor` says how the noise was measured.
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

    @property
    def headline(self) -> str:
        """The result in a line."""
        if self.equal:
            return "Equal within the noise floor"
        if self.first is None:
            return f"No module can be named: {self.why}"
        if self.equal_in:
            size = f", {_spell_error(self.first.error)}"
            return f"Equal in {self.equal_in}; the float32 copies differ first in {self.first.name}{size}"
        return f"Differ first in {self.first.name}"

    @property
    def amount(self) -> str:
        """The number of compared calls."""
        pairs = plural(len(self.modules), "pair")
        return f"{pairs} of module calls (A made {self.calls_a:,} calls, B {self.calls_b:,})"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The errors of the first module, and what the difference looks like."""
        facts = []
        if self.first is not None:
            output = _spell_error(self.first.error)
            if self.first.error is not None:
                side = "above" if self.first.error > self.factor * self.first.floor else "within"
                output += f", {side} {self.factor:g} x the floor of {self.first.floor:.2g}"
            facts = [("Input", _spell_error(self.first.input_error)), ("Output", output)]
        facts += [("Where", self.where), *(("Looks like", words) for words in self.likely)]
        facts += [("Noise", self.floor)]
        return [(head, words) for head, words in facts if words]

    def sections(self) -> list[Section]:
        """Return a chart of the error over depth."""
        errors = self.modules
        names, x = [row.name for row in errors], list(range(len(errors)))
        values = (
            ("error", "output", "", [row.error for row in errors]),
            ("error of the input", "input", "dotted", [row.input_error for row in errors]),
            ("limit", "near", "dashed", [self.factor * row.floor for row in errors]),
        )
        lines: list[dict[str, Any]] = [
            {"name": name, "color": color, "dash": dash, "at": names, "x": x, "y": [plain(y) for y in line]}
            for name, color, dash, line in values
        ]
        if self.first in errors:
            i = errors.index(self.first)
            mark = {"name": "first", "color": "gone", "isMark": True, "at": names[i : i + 1]}
            lines.append({**mark, "x": [i], "y": [plain(self.first.error)]})
        hint = "Relative error of every compared module's output, in the order of the calls in A. Zeros are gaps."
        label = "relative error and limit of each module's output, on a logarithmic scale"
        across, high = "call of a module, in order", "relative error"
        return [Chart("depth", "Error over depth", hint, label, across, high, lines)] if errors else []


def _spell_error(error: float | None) -> str:
    return "not comparable" if error is None else f"{error:.2g}"
