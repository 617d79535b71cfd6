"""Result of `nanwatch.compare`, and its text, JSON and page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..report.notebook import InNotebook
from ..report.page import NUMBER, TEXT, Chart, Section, Table, page
from ..util.reading import plain
from ..util.visible import module_name
from .results import as_json, as_text, wrapped

# Rows of the page's table.
_MOST_ROWS = 40


@dataclass(frozen=True, slots=True)
class ModuleError:
    """Relative errors of a module's input and output between the two models, and the noise floor of the output.

    `module_a` or `module_b` names several where the other is their fused projection. An error is None where the
    tensors could not be compared. `cosine` and `largest_difference` are those of the output. `tokens` are the errors by
    position in the sequence.
    """

    module_a: str
    module_b: str
    class_a: str
    class_b: str
    input_error: float | None
    error: float | None
    floor: float
    tokens: tuple[float, ...] = ()
    cosine: float | None = None
    largest_difference: float | None = None

    @property
    def name(self) -> str:
        """Both names in words."""
        a = f"{module_name(self.module_a)} ({self.class_a})"
        b = f"{module_name(self.module_b)} ({self.class_b})"
        return a if a == b else f"{a} | {b}"


@dataclass(frozen=True, slots=True)
class Comparison(InNotebook):
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
        return as_json(self)

    def to_text(self) -> str:
        """Return the result for people."""
        if self.equal:
            lines = [f"{self.headline}: {self._amount}."]
        elif self.first is None:
            lines = [f"{self.headline}: {self.why}.", "", f"Compared:   {self._amount}"]
        else:
            lines = [f"{self.headline}.", ""]
            lines += [f"Input:      {spell_error(self.first.input_error)}", f"Output:     {self._output}"]
            lines += wrapped("Where:", self.where)
            for words in self.likely:
                lines += wrapped("Looks like:", words)
            lines += [f"Compared:   {self._amount}"]
        return as_text([*lines, f"Noise:      {self.floor}"], self.remarks)

    def to_html(self) -> str:
        """Return a page that opens offline, with a chart of the error over depth.

        Needs `jinja2`; write it as UTF-8.
        """
        facts = []
        if self.first is not None:
            facts = [("Input", spell_error(self.first.input_error)), ("Output", self._output)]
        facts += [("Where", self.where), *(("Likely", words) for words in self.likely), ("Why", self.why)]
        facts += [("Noise", self.floor), *(("Note", remark) for remark in self.remarks)]
        shown = [(head, body) for head, body in facts if body]
        sections = self._sections() if self.modules else []
        return page(
            "Comparison.to_html()", self.headline, self._amount, shown, sections, is_bad=not self.equal
        )

    def _sections(self) -> list[Section]:
        rows = self.modules
        names = [row.name for row in rows]
        values = (
            ("error", "output", "", [row.error for row in rows]),
            ("error of the input", "input", "dotted", [row.input_error for row in rows]),
            ("limit", "near", "dashed", [self.factor * row.floor for row in rows]),
            ("noise floor", "quiet", "dashed", [row.floor for row in rows]),
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
        chart = Chart(
            "depth",
            "Error over depth",
            "Relative error of every compared module's output, in the order of the calls in A. A zero, and what is"
            " not finite, is a gap.",
            "relative error and noise floor of each module's output, on a logarithmic scale",
            "call of a module, in order",
            "relative error",
            lines,
        )
        above = [row for row in rows if row.error is not None and row.error > self.factor * row.floor]
        columns = {"in A": TEXT, "in B": TEXT, "input error": NUMBER, "output error": NUMBER, "floor": NUMBER}
        cells = [
            [
                *map(module_name, (row.module_a, row.module_b)),
                *map(spell_error, (row.input_error, row.error)),
                f"{row.floor:.2g}",
            ]
            for row in above[:_MOST_ROWS]
        ]
        hint = f"The first {len(cells)}, in the order of the calls in A."
        table = Table("above", "Modules above the floor", columns, cells, hint)
        return [chart, table] if cells else [chart]

    @property
    def _amount(self) -> str:
        pairs = f"{len(self.modules):,} pair{'' if len(self.modules) == 1 else 's'} of module calls"
        return f"{pairs} (A made {self.calls_a:,} calls, B {self.calls_b:,})"

    @property
    def _output(self) -> str:
        row = self.first
        if row is None or row.error is None:
            return spell_error(None)
        side = "above" if row.error > self.factor * row.floor else "within"
        return f"{spell_error(row.error)}, {side} {self.factor:g} x the floor of {row.floor:.2g}"

    @property
    def headline(self) -> str:
        """The result in a line."""
        if self.equal:
            return "Equal within the noise floor"
        if self.first is None:
            return "No module can be named"
        if self.equal_in:
            size = f", {spell_error(self.first.error)}"
            return f"Equal in {self.equal_in}; the float32 copies differ first in {self.first.name}{size}"
        return f"Differ first in {self.first.name}"


def spell_error(error: float | None) -> str:
    """Return a relative error in words."""
    return "not comparable" if error is None else f"{error:.2g}"
